"""FineWeb-Edu documents -> GPT-2 tokens -> shards on disk.

    python fineweb.py                                  # sample-10BT from the hub into edu_fineweb10B/
    python fineweb.py --input 'docs/*.parquet'         # local files with FineWeb's columns
    python fineweb.py --verify                         # is edu_fineweb10B/ what was written?

Shard 0 is validation, the others are training. On the same documents the files are byte for byte build-nanogpt's.
Interrupted, the same command goes on after the last whole shard. Several machines share the work by parts:

    python fineweb.py --part 1/4 --out parts           # on the first of four; then, where all parts are in one folder
    python fineweb.py --input 'parts/*.npy'            # the shards that one machine would have written
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
from data.shards import MANIFEST, Folder, fill_shards, open_shard, read_manifest
from data.tokenizer import get_tokenizer, tokenize

REPOSITORY = "HuggingFaceFW/fineweb-edu"
DOCUMENTS_PER_TASK = 4096  # or a row group, where it has fewer
TASKS_AHEAD = 4  # for each worker
# What the dataset's card says each subset holds, for the progress bar
SUBSET_TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9}


@dataclass
class Flags:
    """Tokenize FineWeb-Edu with GPT-2's vocabulary into shards that train_gpt2.py reads."""

    input: str | None = None
    """Local files, as a quoted pattern, instead of FineWeb-Edu from the hub: parquet with a text column, or .npy with
    tokens (parts, or shards of another size), which are put together anew."""
    subset: str = "sample-10BT"
    """Which FineWeb-Edu: sample-10BT, sample-100BT, sample-350BT, default (all of it), or one crawl's name."""
    revision: str = "main"
    """Which state of the dataset on the hub: a branch, a tag or a commit."""
    out: str = "edu_fineweb10B"
    """The folder for the shards."""
    shard_size: int = 100_000_000
    """Tokens in a shard."""
    workers: int | None = None
    """Processes that tokenize; by default one a core. The shards are the same whatever their number."""
    max_tokens: int | None = None
    """Stop after this many tokens."""
    part: str | None = None
    """i/n: only the i-th of n parts of the source's files. The n folders' files, in one folder and given to --input,
    become the shards that a single call would have written."""
    verify: bool = False
    """Compare the files in --out with its shards.json, by SHA-256, and write nothing."""


# ----------------------------------------------------------------------------------------------------------------------
# Where tokens come from: pieces of them in order, each with the state (JSON-able) from which it can be read again


def find_source(flags, revision=None):
    """The files to read, in order, and what they are, as the manifest says it. Raises UserError when there are none.

    revision: a commit of the dataset, for a call that goes on; by default what --revision stands for now.
    """
    if flags.input is None:
        urls = find_on_hub(flags.subset, revision or flags.revision)
        return urls, dict(dataset=REPOSITORY, subset=flags.subset, revision=re.search("@([^/]+)/", urls[0])[1])
    paths = sorted(map(Path, glob.glob(flags.input)), key=lambda path: (numbers(path), path))
    if not paths:
        raise UserError(f"--input {flags.input}: no such files")
    if manifests := read_manifests(paths):
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


def numbers(path):
    """Files of tokens are in the order of the numbers in their names."""
    return [int(digits) for digits in re.findall(r"\d+", path.name)] if path.suffix == ".npy" else []


def read_manifests(paths):
    """The manifests of the token files at paths: one a part, or the only one of shards; [] of files that have none.

    Raises UserError when a part is missing or unfinished, or when they are of different sources.
    """
    folder = paths[0].parent
    if part := re.search(r"_part\d+of(\d+)_\d+.npy$", str(paths[0])):
        manifests = [read_manifest(folder / f"part{i}of{part[1]}.json") for i in range(1, int(part[1]) + 1)]
    elif (folder / MANIFEST).exists() and paths[0].suffix == ".npy":
        manifests = [read_manifest(folder / MANIFEST)]
    else:
        return []
    listed = {shard["name"] for manifest in manifests for shard in manifest["shards"]}
    if wrong := listed ^ {path.name for path in paths}:
        raise UserError(f"{folder}: {min(wrong)} is either not in --input or not in the .json that lists the files")
    if any(manifest["source"] != manifests[0]["source"] for manifest in manifests):
        raise UserError(f"{folder}: its parts are of different documents; make them with the same flags")
    return manifests


@functools.lru_cache(maxsize=4)
def open_parquet(path):
    """A local file, or one on the hub, of which only what is asked for is downloaded. Raises UserError for others."""
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    with explained(path):
        files, name = fsspec.core.url_to_fs(str(path))
        # a row group's text in one request: fsspec would read ahead 5 MB beyond each
        file = pq.ParquetFile(files.open(name, "rb", cache_type="none"), buffer_size=2**23)
        kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types))
    if "text" not in kinds:
        raise UserError(f"{path}: there is no column named text, only {', '.join(kinds)}")
    if not (pa.types.is_string(kinds["text"]) or pa.types.is_large_string(kinds["text"])):
        raise UserError(f"{path}: the column named text holds {kinds['text']}")
    return file


@contextlib.contextmanager
def explained(path):
    """Errors of reading a file, as a UserError (others do not all come whole out of a worker)."""
    try:
        yield
    except hub_errors() as error:
        raise UserError(
            f"cannot read {path}: {first_line(error)}; the same command goes on after the last whole shard"
        ) from error


def tokenize_rows(path, group, batch):
    """The tokens of a row group's documents, DOCUMENTS_PER_TASK from batch * DOCUMENTS_PER_TASK on.

    A document that is missing counts as empty; bytes that are not UTF-8 become U+FFFD.
    """
    file = open_parquet(path)
    with explained(path):
        batches = file.iter_batches(DOCUMENTS_PER_TASK, [group], columns=["text"], use_threads=False)
        column = next(itertools.islice(batches, batch, None)).column(0)
    return tokenize([(text or b"").decode(errors="replace") for text in column.cast("large_binary").to_pylist()])


def start_worker(_):
    """Ctrl-C is for the parent; a parent that is killed takes its workers along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tasks(paths, state):
    """Yield (file, row group, batch) for all documents, in order, from `state` on."""
    for i, path in enumerate(paths[state[0] :], state[0]):
        groups = open_parquet(path).metadata
        for group in range(groups.num_row_groups):
            for batch in range(-(-groups.row_group(group).num_rows // DOCUMENTS_PER_TASK)):
                if (i, group, batch) >= tuple(state):
                    yield i, group, batch


def pieces_of_text(paths, state, workers):
    """Yield (state, tokens) of parquet files, in order. Each process reads for itself, so that no text is passed on
    (and threads would hold each other up). Raises UserError when a file cannot be read."""
    import fsspec

    files = fsspec.core.url_to_fs(str(paths[0]))[0]  # comes with what it knows of the hub, so that no worker asks again
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, (files,))
    ahead = collections.deque()
    try:
        for task in tasks(paths, state or (0, 0, 0)):
            i, group, batch = task
            ahead.append((task, pool.submit(tokenize_rows, paths[i], group, batch)))
            if len(ahead) > TASKS_AHEAD * workers:
                task, tokens = ahead.popleft()
                yield task, tokens.result()
        for task, tokens in ahead:
            yield task, tokens.result()
    except BrokenProcessPool as error:
        raise UserError("a worker was killed, for want of memory as a rule: use fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def pieces_of_tokens(paths, state, size=2**20):
    """Yield (state, tokens) of token files, in order, after a look at their manifests.

    Raises UserError for a file that is not what was written.
    """
    expected = {shard["name"]: shard["sha256"] for each in read_manifests(paths) for shard in each["shards"]}
    first, offset = state or (0, 0)
    for i, path in enumerate(paths):
        if i < first:
            continue
        if path.name in expected and digest(path) != expected[path.name]:
            raise UserError(f"{path} is not what was written: copy it, or make its part, again")
        tokens = open_shard(path)
        for start in range(offset if i == first else 0, len(tokens), size):
            yield (i, start), tokens[start : start + size]


# ----------------------------------------------------------------------------------------------------------------------
# The command


def begin(folder, flags):
    """The files to read, and the progress of an earlier call with these flags, or of a new one.

    Raises UserError when the folder holds something else.
    """
    progress = folder.read_progress()
    wanted = {name: getattr(flags, name) for name in ("input", "subset", "revision", "shard_size", "max_tokens")}
    if progress and progress["flags"] != wanted:
        if progress["shards"]:
            was = " ".join(f"--{name} {value}" for name, value in progress["flags"].items() if value)
            raise UserError(f"{folder.path} was begun with {was}: go on with these, choose another --out, or delete it")
        progress = None
    paths, source = find_source(flags, progress and progress["source"].get("revision"))
    if progress and progress["source"] != source:
        raise UserError(f"--input {flags.input} has other files than when {folder.path} was begun: delete it")
    return paths, progress or dict(flags=wanted, source=source, shards=[], state=None, skip=0)


def main():
    flags = parse(Flags)
    for name in ("shard_size", "max_tokens", "workers"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: it must be at least 1")
    part = read_part(flags.part)
    if flags.max_tokens is not None and not part and flags.max_tokens <= flags.shard_size:
        raise UserError(
            f"--max_tokens {flags.max_tokens}: the validation shard would take them all; use a --shard_size below, "
            f"such as {max(1, flags.max_tokens // 10)}"
        )
    folder = Folder(flags.out, part)
    if flags.verify:
        shards = folder.verify()["shards"]
        counts = [sum(shard[what] for shard in shards) for what in ("documents", "tokens")]
        return print("{}: {} files, {:,} documents, {:,} tokens, as written".format(flags.out, len(shards), *counts))

    paths, progress = begin(folder, flags)
    start = sum(shard["tokens"] for shard in progress["shards"]) - progress["skip"]  # where the first piece begins
    if progress["shards"] and progress["state"] is None:  # all are there, only the manifest is not
        pieces, expected = (nothing for nothing in ()), start
    elif str(paths[0]).endswith(".npy"):
        pieces, expected = pieces_of_tokens(paths, progress["state"]), sum(path.stat().st_size for path in paths) // 2
    else:
        get_tokenizer()  # here, where it can say what it lacks
        expected = None if flags.input else SUBSET_TOKENS.get(flags.subset)
        if part:
            i, n = part
            if n > len(paths):
                raise UserError(f"--part {flags.part}: there are {len(paths)} files, and none is divided")
            paths = paths[len(paths) * (i - 1) // n : len(paths) * i // n]
            expected = expected and expected / n
        pieces = pieces_of_text(paths, progress["state"], flags.workers or available_cores())

    def up_to_max_tokens():
        for state, tokens in pieces:
            if bar.n == start:
                folder.write_progress(progress)  # now that there is something to read
            tokens = tokens[: flags.max_tokens and flags.max_tokens - bar.n]
            bar.update(len(tokens))
            yield state, tokens
            if bar.n == flags.max_tokens:
                return

    bar = tqdm(total=flags.max_tokens or expected, initial=start, unit="tok", unit_scale=True, desc=flags.out)
    with bar, ThreadPoolExecutor(1) as disk, contextlib.closing(pieces):  # disk writes while the next shard is filled
        try:
            writing = None
            for tokens, state, skip in fill_shards(up_to_max_tokens(), flags.shard_size, progress["skip"]):
                progress = (writing.result() if writing else progress) | dict(state=state, skip=skip)
                writing = disk.submit(folder.add, tokens, progress)
            progress = writing.result() if writing else progress
            if not part and len(progress["shards"]) < 2:
                folder.remove()
                raise UserError(
                    f"only {bar.n:,} tokens: the validation shard takes them all and leaves nothing to train on; use "
                    f"--shard_size {max(1, bar.n // 10)} for a tenth of them each"
                )
            folder.finish(progress)
        except OSError as error:
            raise UserError(
                f"cannot write {flags.out}: {error.strerror}; make room or choose another --out, and run it again"
            ) from error
    if part:
        print(f"{bar.n:,} tokens in {flags.out}: part {flags.part}")
        print("Next, with all parts in one folder: python fineweb.py --input 'FOLDER/*.npy'")
        return
    print(f"{bar.n:,} tokens in {flags.out}: 1 validation shard, {len(progress['shards']) - 1} training shards")
    print(f"Next: python train_gpt2.py{'' if flags.out == 'edu_fineweb10B' else f' --data_dir {flags.out}'}")


def read_part(text):
    """--part's (i, n), or None. Raises UserError when it is not one of 1/n to n/n."""
    if text is None:
        return None
    i, n = map(int, text.split("/")) if re.fullmatch(r"\d+/\d+", text) else (0, 0)
    if not 1 <= i <= n:
        raise UserError(f"--part {text}: the parts of four are 1/4, 2/4, 3/4 and 4/4")
    return i, n


def available_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


if __name__ == "__main__":
    run(main)
