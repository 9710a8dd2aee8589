"""Tokenize FineWeb-Edu into shards: documents -> GPT-2 tokens -> .npy files. --help explains the details.

    python fineweb.py                                  # sample-10BT from the hub into edu_fineweb10B/
    python fineweb.py --input 'docs/*.parquet'         # local files with a text column
    python fineweb.py --verify                         # compare edu_fineweb10B/ with its shards.json

On the same documents the files equal build-nanogpt's, byte for byte.
"""

import collections
import contextlib
import functools
import glob
import itertools
import multiprocessing
import os
import re
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common.cli import UserError, first_line, hub_errors, parse, run
from common.files import digest
from data.shards import MANIFEST, ShardFolder, open_shard, read_manifest, split_into_shards
from data.tokenizer import get_tokenizer, tokenize

REPOSITORY = "HuggingFaceFW/fineweb-edu"
DOCUMENTS_PER_TASK = 4096  # at most: a task stays within one row group of a parquet file
TASKS_PER_WORKER = 4  # in the queue
SUBSET_TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9}  # total of the progress bar


@dataclass
class Flags:
    """Tokenize FineWeb-Edu with GPT-2's vocabulary into shards that train_gpt2.py reads.

    Shard 0 is for validation, all others for training; shards.json lists them with their SHA-256.

    Shards take 2 bytes a token, 20 GB for sample-10BT. The documents themselves are not stored.

    After an interruption, run the same command again: it continues after the last complete shard.

    Several machines can share the work; the shards are those of a single machine:
      python fineweb.py --part 1/4 --out parts      # on the first of four machines
      python fineweb.py --input 'parts/*.npy'       # with the files of all parts in one folder
    """

    input: str | None = None
    """Local files instead of FineWeb-Edu, as a quoted pattern: .parquet with a text column, or .npy of tokens."""
    subset: str = "sample-10BT"
    """sample-10BT, sample-100BT, sample-350BT, default (all of FineWeb-Edu), or the name of one crawl."""
    revision: str = "main"
    """Version of the dataset on the hub: a branch, a tag or a commit."""
    out: str = "edu_fineweb10B"
    """Folder for the shards."""
    shard_size: int = 100_000_000
    """Tokens in a shard."""
    workers: int | None = None
    """Processes that tokenize; by default one for each core. The shards do not depend on it."""
    max_tokens: int | None = None
    """Stop after this many tokens."""
    part: str | None = None
    """i/n: tokenize only the i-th of n parts of the source's files."""
    verify: bool = False
    """Write nothing; compare the SHA-256 of each file in --out with shards.json."""


# ----------------------------------------------------------------------------------------------------------------------
# The source: which files to read


def find_source(flags, revision=None):
    """The files to read, in order, and their description for the manifest. Raises UserError if there are none.

    revision: the commit that an interrupted call has read; by default the current commit of --revision.
    """
    if flags.input is None:
        urls = find_on_hub(flags.subset, revision or flags.revision)
        commit = urls[0].partition("@")[2].partition("/")[0]
        return urls, dict(dataset=REPOSITORY, subset=flags.subset, revision=commit)
    paths = sorted(map(Path, glob.glob(flags.input)), key=lambda path: (shard_order(path), path))
    if not paths:
        raise UserError(f"--input {flags.input}: no such files")
    if manifests := read_input_manifests(paths):
        return paths, manifests[0]["source"]
    return paths, dict(files=[dict(name=path.name, bytes=path.stat().st_size) for path in paths])


def find_on_hub(subset, revision):
    """The URLs of FineWeb-Edu's files, hf://datasets/NAME@COMMIT/PATH, in the dataset's order."""
    from datasets import load_dataset_builder

    try:
        return list(load_dataset_builder(REPOSITORY, subset, revision=revision).config.data_files["train"])
    except hub_errors() as error:
        raise UserError(
            f"cannot read FineWeb-Edu {subset} from the hub: {first_line(error)}; --input takes local parquet files"
        ) from error


def shard_order(path):
    """Sort key of a token file: all numbers in its name. Other files sort by name alone."""
    return [int(digits) for digits in re.findall(r"\d+", path.name)] if path.suffix == ".npy" else []


def read_input_manifests(paths):
    """The manifests of the token files `paths`: one for each part, one for a folder of shards, or [] without manifest.

    Raises UserError if a part is missing or incomplete, or if parts have different sources.
    """
    folder = paths[0].parent
    if part := re.search(r"_part\d+of(\d+)_\d+\.npy$", paths[0].name):
        manifests = [read_manifest(folder / f"part{i}of{part[1]}.json") for i in range(1, int(part[1]) + 1)]
    elif (folder / MANIFEST).exists() and paths[0].suffix == ".npy":
        manifests = [read_manifest(folder / MANIFEST)]
    else:
        return []
    listed = {shard["name"] for manifest in manifests for shard in manifest["shards"]}
    if wrong := listed ^ {path.name for path in paths}:
        raise UserError(f"{folder}: {min(wrong)} is missing from --input, or from the .json that lists the files")
    if any(manifest["source"] != manifests[0]["source"] for manifest in manifests):
        raise UserError(f"{folder}: its parts are of different documents; make them with the same flags")
    return manifests


# ----------------------------------------------------------------------------------------------------------------------
# Chunks: (state, tokens) in order; `state` is JSON-serializable and says where to read the chunk again


def tokenize_files(paths, state, workers):
    """Yield chunks of parquet files from `state` on. Raises UserError if a file cannot be read.

    Every worker process reads its own documents, so that no text passes between processes.
    """
    import fsspec

    # the file system caches its queries to the hub; workers receive it so that they do not repeat the queries
    file_system = fsspec.core.url_to_fs(str(paths[0]))[0]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, (file_system,))
    queue = collections.deque()
    try:
        for task in list_tasks(paths, state or (0, 0, 0)):
            file, group, batch = task
            queue.append((task, pool.submit(tokenize_batch, paths[file], group, batch)))
            if len(queue) > TASKS_PER_WORKER * workers:
                task, tokens = queue.popleft()
                yield task, tokens.result()
        for task, tokens in queue:
            yield task, tokens.result()
    except BrokenProcessPool as error:
        raise UserError("a worker process was killed, probably for lack of memory: use fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def list_tasks(paths, state):
    """Yield (file, row group, batch), three indices, for all documents in order from `state` on."""
    for file, path in enumerate(paths[state[0] :], state[0]):
        metadata = open_parquet(path).metadata
        for group in range(metadata.num_row_groups):
            for batch in range(-(-metadata.row_group(group).num_rows // DOCUMENTS_PER_TASK)):
                if (file, group, batch) >= tuple(state):
                    yield file, group, batch


def start_worker(_):
    """Ignore Ctrl-C, which the parent handles, and exit if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tokenize_batch(path, group, batch):
    """The tokens of documents [batch * DOCUMENTS_PER_TASK, (batch + 1) * DOCUMENTS_PER_TASK) of a row group.

    A missing document counts as an empty one. Bytes that are not UTF-8 become U+FFFD.
    """
    file = open_parquet(path)
    with reading(path):
        batches = file.iter_batches(DOCUMENTS_PER_TASK, [group], columns=["text"], use_threads=False)
        column = next(itertools.islice(batches, batch, None)).column(0)
    return tokenize([(text or b"").decode(errors="replace") for text in column.cast("large_binary").to_pylist()])


@functools.lru_cache(maxsize=4)
def open_parquet(path):
    """Open a local parquet file, or one on the hub by byte ranges. Raises UserError without a text column."""
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(path):
        files, name = fsspec.core.url_to_fs(str(path))
        # no read-ahead, which would fetch 5 MB beyond each range; the buffer holds the text of one row group
        file = pq.ParquetFile(files.open(name, "rb", cache_type="none"), buffer_size=2**23)
        types = dict(zip(file.schema_arrow.names, file.schema_arrow.types))
    if "text" not in types:
        raise UserError(f"{path}: there is no column named text, only {', '.join(types)}")
    if not (pa.types.is_string(types["text"]) or pa.types.is_large_string(types["text"])):
        raise UserError(f"{path}: the column named text holds {types['text']}, it must hold strings")
    return file


@contextlib.contextmanager
def reading(path):
    """Turn errors of reading `path` into a UserError, which unlike some of the hub's can leave a worker process."""
    try:
        yield
    except hub_errors() as error:
        raise UserError(
            f"cannot read {path}: {first_line(error)}; the same command continues after the last complete shard"
        ) from error


def read_token_files(paths, state, size=2**20):
    """Yield chunks of at most `size` tokens of .npy files from `state` on. Raises UserError for a damaged file."""
    expected = {shard["name"]: shard["sha256"] for each in read_input_manifests(paths) for shard in each["shards"]}
    first, offset = state or (0, 0)
    for i, path in enumerate(paths[first:], first):
        if path.name in expected and digest(path) != expected[path.name]:
            raise UserError(f"{path} is damaged: its SHA-256 is not the one in its manifest; copy or make it again")
        tokens = open_shard(path)
        for start in range(offset if i == first else 0, len(tokens), size):
            yield (i, start), tokens[start : start + size]


# ----------------------------------------------------------------------------------------------------------------------
# The command


def main():
    flags = parse(Flags)
    part = check_flags(flags)
    folder = ShardFolder(flags.out, part)
    if flags.verify:
        shards = folder.verify()["shards"]
        documents, tokens = (sum(shard[name] for shard in shards) for name in ("documents", "tokens"))
        print(f"{flags.out}: {len(shards)} files, {documents:,} documents, {tokens:,} tokens, all SHA-256 match")
        return
    paths, progress = start_or_continue(folder, flags)
    try:
        if not progress["shards"] or progress["state"] is not None:  # else only the manifest is missing
            progress = write_shards(folder, progress, *open_chunks(paths, progress["state"], flags, part), flags)
        tokens = sum(shard["tokens"] for shard in progress["shards"])
        if not part and len(progress["shards"]) < 2:
            folder.delete_shards()
            raise UserError(
                f"the source has only {tokens:,} tokens, so the validation shard leaves none to train on: use "
                f"--shard_size {max(1, tokens // 10)} for ten shards"
            )
        folder.finish(progress)
    except OSError as error:
        raise UserError(
            f"cannot write {flags.out}: {error.strerror}; make room or choose another --out, and run it again"
        ) from error
    if part:
        print(f"{tokens:,} tokens in {flags.out}: part {flags.part}")
        print("Next: collect the files of all parts in one FOLDER, then python fineweb.py --input 'FOLDER/*.npy'")
    else:
        print(f"{tokens:,} tokens in {flags.out}: 1 validation shard, {len(progress['shards']) - 1} training shards")
        print(f"Next: python train_gpt2.py{'' if flags.out == 'edu_fineweb10B' else f' --data_dir {flags.out}'}")


def check_flags(flags):
    """--part as (i, n), or None. Raises UserError for a value that does not work."""
    for name in ("shard_size", "max_tokens", "workers"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: it must be at least 1")
    if flags.part is not None:
        i, n = map(int, flags.part.split("/")) if re.fullmatch(r"\d+/\d+", flags.part) else (0, 0)
        if not 1 <= i <= n:
            raise UserError(f"--part {flags.part}: it must be i/n; four parts are 1/4, 2/4, 3/4 and 4/4")
        return i, n
    if flags.max_tokens is not None and flags.max_tokens <= flags.shard_size:
        raise UserError(
            f"--max_tokens {flags.max_tokens}: the validation shard would take all of them; use a smaller "
            f"--shard_size, such as {max(1, flags.max_tokens // 10)}"
        )
    return None


def start_or_continue(folder, flags):
    """The files to read, and the progress (see ShardFolder) of an interrupted call or of a new one.

    Raises UserError if the folder holds anything else.
    """
    progress = folder.read_progress()
    own = {name: getattr(flags, name) for name in ("input", "subset", "revision", "shard_size", "max_tokens")}
    if progress and progress["flags"] != own:
        if progress["shards"]:
            old = " ".join(f"--{name} {value}" for name, value in progress["flags"].items() if value)
            raise UserError(f"{folder.path} was started with {old}: use these flags or another --out, or delete it")
        progress = None
    paths, source = find_source(flags, progress and progress["source"].get("revision"))
    if progress and progress["source"] != source:
        raise UserError(f"--input {flags.input} has other files than when {folder.path} was begun: use another --out")
    return paths, progress or dict(flags=own, source=source, shards=[], state=None, skip=0)


def open_chunks(paths, state, flags, part):
    """A generator of chunks from `state` on, and the total number of tokens, None if unknown."""
    if str(paths[0]).endswith(".npy"):
        return read_token_files(paths, state), sum(path.stat().st_size for path in paths) // 2
    get_tokenizer()  # fails here with a clear error, not in every worker
    total = None if flags.input else SUBSET_TOKENS.get(flags.subset)
    if part:
        i, n = part
        if n > len(paths):
            raise UserError(f"--part {flags.part}: at most {len(paths)} parts, since a file of the source is not split")
        paths = paths[len(paths) * (i - 1) // n : len(paths) * i // n]
        total = total and total / n
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return tokenize_files(paths, state, flags.workers or cores), total


def write_shards(folder, progress, chunks, total, flags):
    """Write all shards that remain, while the next one is filled. Returns the final progress; raises OSError."""
    start = sum(shard["tokens"] for shard in progress["shards"]) - progress["skip"]  # tokens before the first chunk

    def limited():
        for state, tokens in chunks:
            if bar.n == start:
                folder.write_progress(progress)  # the source is readable: create the folder
            tokens = tokens[: flags.max_tokens and flags.max_tokens - bar.n]
            bar.update(len(tokens))
            yield state, tokens
            if bar.n == flags.max_tokens:
                return

    bar = tqdm(total=flags.max_tokens or total, initial=start, unit="tok", unit_scale=True, desc=flags.out)
    with bar, ThreadPoolExecutor(1) as disk, contextlib.closing(chunks):
        writing = None
        for tokens, state, skip in split_into_shards(limited(), flags.shard_size, progress["skip"]):
            progress = (writing.result() if writing else progress) | dict(state=state, skip=skip)
            writing = disk.submit(folder.add_shard, tokens, progress)
        return writing.result() if writing else progress


if __name__ == "__main__":
    run(main)
