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
import glob
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

from cli import UserError, parse, run
from files import digest
from shards import MANIFEST, Folder, fill_shards, open_shard, read_manifest
from tokenizer import get_tokenizer, tokenize

REPOSITORY = "HuggingFaceFW/fineweb-edu"
DOCUMENTS_PER_TASK = 128
TASKS_AHEAD = 8  # for each worker
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


def find_source(flags):
    """What is to become shards, as the manifest says it. Raises UserError when there is nothing."""
    if flags.input is None:
        return dict(dataset=REPOSITORY, subset=flags.subset, revision=newest_commit(flags.revision))
    paths = find_files(flags.input)
    if manifests := read_manifests(paths):
        return manifests[0]["source"]
    return dict(files=[dict(name=path.name, bytes=path.stat().st_size) for path in paths])


def newest_commit(name):
    """The commit of the dataset that `name` stands for now. A call that goes on reads the one that it began with."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(REPOSITORY, revision=name).sha
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(
            f"cannot read FineWeb-Edu from the hub: {first_line(error)}; local parquet files go in with --input"
        ) from error


def find_files(pattern):
    """The files of --input: by their names, those of tokens by the numbers in them."""
    paths = sorted(map(Path, glob.glob(pattern)), key=lambda path: (numbers(path), path))
    if not paths:
        raise UserError(f"--input {pattern}: no such files")
    return paths


def numbers(path):
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


def read_documents(flags, source, part, state):
    """Yield (state, texts): DOCUMENTS_PER_TASK texts as bytes, None where there is none, in the source's order, from
    `state` on (None: the start). Raises UserError when they cannot be had."""
    import pyarrow as pa
    from datasets import load_dataset
    from httpx import HTTPError

    if flags.input is not None:
        which = dict(path="parquet", data_files=[str(path) for path in find_files(flags.input)])
    else:
        which = dict(path=REPOSITORY, name=flags.subset, revision=source["revision"])
    try:
        dataset = load_dataset(**which, split="train", streaming=True)
        if dataset.column_names is not None and "text" not in dataset.column_names:
            raise UserError(f"{where(flags)}: there is no column named text, only {', '.join(dataset.column_names)}")
        if part:
            i, n = part
            if n > dataset.num_shards:
                raise UserError(f"--part {i}/{n}: there are {dataset.num_shards} files, and none is divided")
            dataset = dataset.shard(num_shards=n, index=i - 1, contiguous=True)
        dataset = dataset.select_columns(["text"]).with_format("arrow")
        if state:
            dataset.load_state_dict(state)
        batches = dataset.iter(batch_size=DOCUMENTS_PER_TASK)
        while True:
            state = dataset.state_dict()
            try:
                column = next(batches).column("text")
            except StopIteration:
                return
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                raise UserError(f"{where(flags)}: the column named text holds {column.type}")
            yield state, column.cast(pa.large_binary()).to_pylist()
    except (OSError, ValueError, HTTPError) as error:
        hint = "" if flags.input else "; local parquet files go in with --input"
        raise UserError(
            f"cannot read {where(flags)}: {first_line(error)}{hint}; the same command goes on after the last whole "
            "shard"
        ) from error


def where(flags):
    return f"--input {flags.input}" if flags.input else f"FineWeb-Edu {flags.subset} from the hub"


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tokenize_bytes(texts):
    """tokenize() of UTF-8, each byte that is none becoming U+FFFD."""
    return tokenize([(text or b"").decode(errors="replace") for text in texts])


def start_worker():
    """Ctrl-C is for the parent; a parent that is killed takes its workers along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def pieces_of_text(documents, workers):
    """Yield (state, tokens) of (state, texts), in order, by so many processes (threads hold each other up)."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker)
    ahead = collections.deque()
    try:
        for state, texts in documents:
            ahead.append((state, pool.submit(tokenize_bytes, texts)))
            if len(ahead) > TASKS_AHEAD * workers:
                state, tokens = ahead.popleft()
                yield state, tokens.result()
        for state, tokens in ahead:
            yield state, tokens.result()
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
    """The progress of an earlier call with these flags, or of a new one. Raises UserError when they do not fit."""
    progress = folder.read_progress()
    wanted = {name: getattr(flags, name) for name in ("input", "subset", "revision", "shard_size", "max_tokens")}
    if progress and progress["flags"] != wanted and progress["shards"]:
        was = " ".join(f"--{name} {value}" for name, value in progress["flags"].items() if value)
        raise UserError(f"{folder.path} was begun with {was}: go on with these, choose another --out, or delete it")
    if not progress or progress["flags"] != wanted:
        return dict(flags=wanted, source=find_source(flags), shards=[], state=None, skip=0)
    if flags.input and progress["source"] != find_source(flags):
        raise UserError(f"--input {flags.input} has other files than when {folder.path} was begun: delete it")
    return progress


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

    progress = begin(folder, flags)
    start = sum(shard["tokens"] for shard in progress["shards"]) - progress["skip"]  # where the first piece begins
    if progress["shards"] and progress["state"] is None:  # all are there, only the manifest is not
        pieces, expected = (nothing for nothing in ()), start
    elif flags.input and flags.input.endswith(".npy"):
        paths = find_files(flags.input)
        expected = sum(path.stat().st_size for path in paths) // 2
        pieces = pieces_of_tokens(paths, progress["state"])
    else:
        get_tokenizer()  # here, where it can say what it lacks
        expected = None if flags.input else SUBSET_TOKENS.get(flags.subset)
        expected = expected and expected / (part[1] if part else 1)
        documents = read_documents(flags, progress["source"], part, progress["state"])
        pieces = pieces_of_text(documents, flags.workers or available_cores())

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
