"""Tokenize FineWeb-Edu, FineWeb or your own text into shards: documents -> GPT-2 tokens -> .npy files.

    python fineweb.py                                  # FineWeb-Edu sample-10BT from the hub into edu_fineweb10B/
    python fineweb.py --dataset fineweb                # FineWeb sample-10BT into fineweb10B/
    python fineweb.py --input book.txt                 # your own text into my_data/

On the same documents the files equal build-nanogpt's, byte for byte.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import contextlib
import glob
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.cli import flag, parse, python_command
from common.cli import progress as progress_bar
from common.errors import UserError, first_line, run
from common.files import regular_file
from common.hub import answered, check_hub
from data.documents import FORMATS, reading, suffix, tokenize_files
from data.shard_folder import ShardFolder, split_into_shards
from data.shards import FINEWEB, FINEWEB_EDU
from data.tokenizer import get_tokenizer

REPOSITORIES = {"fineweb-edu": FINEWEB_EDU, "fineweb": FINEWEB}
FOLDERS = {"fineweb-edu": "edu_fineweb10B", "fineweb": "fineweb10B", "auto": "my_data"}
SHARD_SIZE = 100_000_000  # tokens; build-nanogpt's
MIN_SPAN, MAX_SPAN = 1025, 100_000  # tokens, see validation_spans(): at least a sequence of 1,024 and its last target
SUBSET_TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9}  # total of the progress bar


@dataclass
class Flags:
    """Tokenize FineWeb-Edu, FineWeb or your own text with GPT-2's vocabulary into shards that train_gpt2.py reads.

    Shard 0 is for validation, all others for training; shards.json lists them with their SHA-256. Of your own text a
    tenth is for validation, about 10M tokens at most, in pieces spread over it.

    Shards take 2 bytes a token, 20 GB for sample-10BT. The documents themselves are not stored.

    After an interruption, run the same command again: it continues after the last complete shard.
    """

    input: str | None = None
    """A file, folder or quoted pattern: .txt, .md, .jsonl, .json (also .gz, .zst) or .parquet. See docs/running.md."""
    dataset: Literal["auto", "fineweb-edu", "fineweb"] = "auto"
    """Dataset on the hub, or what the files of --input hold. auto: fineweb-edu, or with --input your own text."""
    subset: str = "sample-10BT"
    """sample-10BT, sample-100BT, sample-350BT, default (the whole dataset), or the name of one crawl."""
    revision: str = "main"
    """Version of the dataset on the hub: a branch, a tag or a commit."""
    out: str | None = None
    """Folder for the shards; by default edu_fineweb10B, fineweb10B or, for your own text, my_data."""
    shard_size: int = flag(SHARD_SIZE, at_least=1)
    """Tokens in a training shard; of FineWeb-Edu and FineWeb also in the validation shard."""
    workers: int | None = flag(None, at_least=1)
    """Processes that tokenize; by default one for each core. The shards do not depend on it."""
    max_tokens: int | None = flag(None, at_least=1)
    """Stop after this many tokens."""
    max_document_mb: int = flag(32, at_least=1)
    """The largest document in MB; in a file of text, the largest part without white space. A larger one is an error."""


# ----------------------------------------------------------------------------------------------------------------------
# The source: which files to read


def find_source(flags, revision=None):
    """The files to read, in order, and their description for the manifest. Raises UserError if there are none.

    revision: the commit that an interrupted call has read; by default the current commit of --revision.
    """
    if flags.input is None:
        repository = REPOSITORIES[flags.dataset]
        urls = find_on_hub(repository, flags.subset, revision or flags.revision)
        commit = urls[0].partition("@")[2].partition("/")[0]
        return urls, dict(dataset=repository, subset=flags.subset, revision=commit)
    paths = sorted(map(Path, find_input(flags.input)))
    if unknown := [path for path in paths if suffix(path) not in FORMATS]:
        raise UserError(
            f"{unknown[0]}: --input takes .txt, .md, .jsonl and .json (also with .gz or .zst), and .parquet"
        )
    files = []
    for path in paths:
        with reading(path):
            files.append(dict(name=path.name, bytes=regular_file(path).stat().st_size))
    if flags.dataset == "auto":
        return paths, dict(files=files)
    return paths, dict(dataset=REPOSITORIES[flags.dataset], files=files)


def find_input(pattern):
    """The files that --input names: of a folder, those of known formats. A name with brackets may be no pattern."""
    if os.path.isdir(pattern):
        inside = glob.glob(os.path.join(glob.escape(pattern), "**"), recursive=True)
        return [path for path in inside if suffix(path) in FORMATS and os.path.isfile(path)]
    return [pattern] if os.path.exists(pattern) else glob.glob(pattern)


def find_on_hub(repository, subset, revision):
    """The URLs of a dataset's files, hf://datasets/NAME@COMMIT/PATH, in the dataset's order."""
    check_hub()
    from datasets import load_dataset_builder  # reads HF_HUB_OFFLINE

    try:
        with answered():
            return list(load_dataset_builder(repository, subset, revision=revision).config.data_files["train"])
    except OSError as error:
        raise UserError(
            f"cannot read {repository} {subset} from the hub: {first_line(error)}; --input takes local files"
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# The command


def main():
    flags = parse(Flags)
    if flags.input is None:
        flags.dataset = flags.dataset.replace("auto", "fineweb-edu")
    elif not find_input(flags.input):  # before a folder is made
        raise UserError(f"--input {flags.input}: no such files")
    elif (flags.subset, flags.revision) != (Flags.subset, Flags.revision):
        raise UserError("--subset and --revision choose files on the hub: leave them out with --input")
    flags.out = flags.out or FOLDERS[flags.dataset]
    folder = ShardFolder(flags.out)
    try:
        with folder.lock():
            shards = fill(folder, flags)
    except OSError as error:
        raise UserError(
            f"cannot write {flags.out}: {error.strerror or first_line(error)}; when it can be written, run the same "
            "command again, or choose another --out"
        ) from error
    val, *train = (shard["tokens"] for shard in shards)
    tokens = val + sum(train)
    print(f"{tokens:,} tokens in {flags.out}: {val:,} for validation, {sum(train):,} for training")
    model = ["--model", "tiny"] if tokens < SHARD_SIZE else []
    data = [] if flags.out == "edu_fineweb10B" else ["--data_dir", flags.out]
    print(f"Next: {python_command('train_gpt2.py', *model, *data)}")


def fill(folder, flags):
    """Write all shards that remain, and the manifest. Returns the manifest's entries; raises OSError.

    Raises UserError if there is nothing to train on.
    """
    paths, progress = start_or_continue(folder, flags)
    get_tokenizer()  # fails here with a clear error, not in every worker
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chunks = tokenize_files(paths, progress["state"], flags.workers or cores, flags.max_document_mb * 2**20)
    start = sum(shard["tokens"] for shard in progress["shards"]) - progress["skip"]  # tokens before the first chunk
    total = flags.max_tokens or (None if flags.input else SUBSET_TOKENS.get(flags.subset))
    bar = progress_bar(None, flags.out, total, initial=start, unit="tok", unit_scale=True, delay=0, leave=True)
    limited = first_tokens(chunks, (flags.max_tokens or sys.maxsize) - start, bar)
    validation = validation_spans(flags, progress["source"])
    shards = split_into_shards(limited, flags.shard_size, *validation, start, progress["skip"])
    with bar, ThreadPoolExecutor(1) as disk, contextlib.closing(chunks):
        writing = None
        for val, train, state, skip in shards:
            if not (len(train) or writing or progress["shards"]):
                more = "a larger --max_tokens" if flags.max_tokens else "more text"
                smaller = " or a smaller --shard_size" if flags.dataset != "auto" else ""
                raise UserError(f"only {len(val):,} tokens were read, and all are for validation: give {more}{smaller}")
            progress = (writing.result() if writing else progress) | dict(state=state, skip=skip)
            writing = disk.submit(folder.add, val, train, progress)  # while the next shard is filled
        return writing.result()["shards"]


def start_or_continue(folder, flags):
    """The files to read, and the progress (see ShardFolder) of an interrupted call or of a new one.

    Raises UserError if the folder holds anything else.
    """
    progress = folder.read_progress()
    names = ("input", "dataset", "subset", "revision", "shard_size", "max_tokens")
    own = {name: getattr(flags, name) for name in names}
    if progress and own | progress["flags"] != own:
        old = " ".join(f"--{name} {value}" for name, value in progress["flags"].items() if value)
        raise UserError(f"{folder.path} was started with {old}: use these flags or another --out, or delete it")
    paths, source = find_source(flags, progress and progress["source"].get("revision"))
    if progress and progress["source"] != source:
        raise UserError(f"--input {flags.input} has other files than when {folder.path} was begun: use another --out")
    return paths, progress or dict(flags=own, source=source, shards=[], state=None, skip=0)


def first_tokens(chunks, count, bar):
    """Yield the chunks (state, tokens) up to `count` tokens in all, and advance the bar."""
    for state, tokens in chunks:
        tokens = tokens[:count]
        count -= len(tokens)
        bar.update(len(tokens))
        yield state, tokens
        if not count:
            return


def validation_spans(flags, source):
    """(span, period) of split_into_shards. Of FineWeb-Edu and FineWeb the first shard is for validation, as in
    build-nanogpt; of your own text a tenth, in spans all over it, and some 10M tokens at most: of compressed files
    more, since their size in tokens is not known."""
    if flags.dataset != "auto":
        return flags.shard_size, None
    tokens = sum(file["bytes"] for file in source["files"]) // 4  # about
    tokens = min(tokens, flags.max_tokens or tokens)
    span = max(MIN_SPAN, min(tokens // 100, MAX_SPAN))
    return span, max(10 * span, tokens // 100)


if __name__ == "__main__":
    run(main)
