"""FineWeb-Edu documents -> GPT-2 tokens -> shards on disk.

    python fineweb.py                                  # sample-10BT from the hub into edu_fineweb10B/
    python fineweb.py --input 'docs/*.parquet'         # local files with FineWeb's columns

Shard 0 is validation, the others are training. On the same documents the files are byte for byte build-nanogpt's.
Interrupted, the same command goes on after the last whole shard.
"""

import collections
import glob
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cli import UserError, parse, run
from data import UNFINISHED, write_shard
from tokenizer import END_OF_TEXT, get_tokenizer

DOCUMENTS_PER_TASK = 32
# What the dataset's card says each subset holds, for the progress bar
SUBSET_TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9}


@dataclass
class Flags:
    """Tokenize FineWeb-Edu with GPT-2's vocabulary into shards that train_gpt2.py reads."""

    input: str | None = None
    """Local parquet files with a text column, as a quoted pattern; by default FineWeb-Edu is streamed from the hub."""
    subset: str = "sample-10BT"
    """Which FineWeb-Edu: sample-10BT, sample-100BT, sample-350BT, default (all of it), or one crawl's name."""
    out: str = "edu_fineweb10B"
    """The folder for the shards."""
    shard_size: int = 100_000_000
    """Tokens in a shard."""
    workers: int | None = None
    """Threads that tokenize; by default one a core. The shards are the same whatever their number."""
    max_tokens: int | None = None
    """Stop after this many tokens."""


def read_documents(flags, state, states):
    """Yield lists of texts, in the dataset's order, from `state` on (None: the start). Before each list the state that
    leads to it is appended to `states`. Raises UserError when the data cannot be had."""
    from datasets import load_dataset
    from httpx import HTTPError

    if flags.input is not None:
        files = sorted(glob.glob(flags.input))
        if not files:
            raise UserError(f"--input {flags.input}: no such files")
        source = dict(path="parquet", data_files=files)
    else:
        source = dict(path="HuggingFaceFW/fineweb-edu", name=flags.subset)
    try:
        dataset = load_dataset(**source, split="train", streaming=True)
        if dataset.column_names is not None and "text" not in dataset.column_names:
            raise UserError(
                f"--input {flags.input}: there is no column named text, only {', '.join(dataset.column_names)}"
            )
        dataset = dataset.select_columns(["text"])
        if state:
            dataset.load_state_dict(state)
        batches = dataset.iter(batch_size=DOCUMENTS_PER_TASK)
        while True:
            before = dataset.state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                return
            states.append(before)
            yield batch["text"]
    except (OSError, ValueError, HTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = f"--input {flags.input}" if flags.input else f"FineWeb-Edu {flags.subset} from the hub"
        hint = "" if flags.input else "; local parquet files go in with --input"
        raise UserError(
            f"cannot read {where}: {reason}{hint}; the same command goes on after the last whole shard"
        ) from error


def tokenize(texts):
    """<|endoftext|> and its tokens for each text, one after another: uint16. Special tokens in a text are text."""
    encode = get_tokenizer().encode_to_numpy
    parts = []
    for text in texts:
        parts += [np.array([END_OF_TEXT]), encode(text or "", disallowed_special=())]
    return np.concatenate(parts).astype(np.uint16)


def tokenize_in_parallel(batches, workers):
    """tokenize() of each batch, in order, on `workers` threads (tiktoken releases the interpreter's lock)."""
    with ThreadPoolExecutor(workers) as pool:
        ahead = collections.deque()
        for texts in batches:
            ahead.append(pool.submit(tokenize, texts))
            if len(ahead) > 4 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def write_shards(pieces, out, shard_size, index=0, whole=lambda index, left: None):
    """Write pieces (uint16 arrays) one after another as edufineweb_{val,train}_{index:06d}.npy; yields their sizes.

    After each whole shard, calls whole(the next one's index, tokens of the present piece that are still to be written).
    Raises UserError when there is nothing left for a training shard.
    """
    out = Path(out)
    shard = np.empty(shard_size, dtype=np.uint16)
    filled = 0

    def write():
        write_shard(out / f"edufineweb_{'train' if index else 'val'}_{index:06d}.npy", shard[:filled])

    for piece in pieces:
        size = len(piece)
        while len(piece):
            n = min(shard_size - filled, len(piece))
            shard[filled : filled + n] = piece[:n]
            piece = piece[n:]
            filled += n
            if filled == shard_size:
                write()
                index, filled = index + 1, 0
                whole(index, len(piece))
        yield size
    if index == 0 or (index == 1 and filled == 0):
        for path in [*out.glob("edufineweb_val_*.npy"), out / UNFINISHED]:
            path.unlink(missing_ok=True)
        raise UserError(
            f"only {index * shard_size + filled:,} tokens: the validation shard takes them all and leaves nothing to "
            f"train on; use --shard_size {max(1, (index * shard_size + filled) // 10)} for a tenth of them each"
        )
    if filled:
        write()


def read_progress(out, source):
    """Where an earlier call of the same command stopped, or the start.

    Raises UserError for a folder that has other shards.
    """
    path = Path(out) / UNFINISHED
    start = dict(source=source, index=0, state=None, skip=0)
    try:
        if path.exists():
            progress = json.loads(path.read_text())
            if progress["source"] == source:
                return progress
            if progress["index"] == 0:
                return start
            was = ", ".join(f"--{name} {value}" for name, value in progress["source"].items() if value is not None)
            raise UserError(f"{out} was begun with {was}: go on with these, choose another --out, or delete it")
        if old := sorted(Path(out).glob("*.npy")):
            raise UserError(f"{out} already holds {len(old)} shards: choose another --out, or delete them")
        return start
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged: delete {out} and start again") from error
    except OSError as error:
        raise UserError(f"cannot read the folder {out}: {error.strerror}; choose another --out") from error


def write_progress(out, progress):
    """While this file is there, the folder counts as unfinished. Raises UserError when it cannot be written."""
    unfinished = Path(out) / (UNFINISHED + ".new")
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(progress))
        unfinished.rename(Path(out) / UNFINISHED)
    except OSError as error:
        raise UserError(f"cannot write the folder {out}: {error.strerror}; choose another --out") from error


def main():
    flags = parse(Flags)
    workers = flags.workers or os.cpu_count()
    for name in ("shard_size", "max_tokens", "workers"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: it must be at least 1")
    source = {name: getattr(flags, name) for name in ("input", "subset", "shard_size", "max_tokens")}
    progress = read_progress(flags.out, source)
    if flags.max_tokens is not None and flags.max_tokens <= flags.shard_size:
        raise UserError(
            f"--max_tokens {flags.max_tokens}: the validation shard would take them all; use a --shard_size below, "
            f"such as {max(1, flags.max_tokens // 10)}"
        )
    get_tokenizer()
    before = progress["index"] * flags.shard_size  # tokens that are in shards already
    states = collections.deque()  # of the pieces that are being tokenized, in order
    present = None  # that of the piece that is being written

    def pieces():
        nonlocal present
        skip = progress["skip"]
        room = (flags.max_tokens or float("inf")) - before
        for tokens in tokenize_in_parallel(read_documents(flags, progress["state"], states), workers):
            if present is None:
                write_progress(flags.out, progress)
            tokens = tokens[skip : int(min(len(tokens), skip + room))]
            present = dict(state=states.popleft(), end=skip + len(tokens))
            yield tokens
            skip, room = 0, room - len(tokens)
            if room <= 0:
                return

    def whole(index, left):
        state, skip = present["state"], present["end"] - left
        write_progress(flags.out, dict(source=source, index=index, state=state, skip=skip))

    expected = flags.max_tokens or (SUBSET_TOKENS.get(flags.subset) if flags.input is None else None)
    bar = tqdm(total=expected, initial=before, unit="tok", unit_scale=True, desc=flags.out, mininterval=0.5)
    with bar:
        try:
            for size in write_shards(pieces(), flags.out, flags.shard_size, progress["index"], whole):
                bar.update(size)
            (Path(flags.out) / UNFINISHED).unlink()
        except OSError as error:
            raise UserError(
                f"cannot write {flags.out}: {error.strerror}; make room, and give the same command"
            ) from error
    shards = len(list(Path(flags.out).glob("*.npy")))
    print(f"{bar.n:,} tokens in {flags.out}: 1 validation shard, {shards - 1} training shards")
    print(f"Next: python train_gpt2.py{'' if flags.out == 'edu_fineweb10B' else f' --data_dir {flags.out}'}")


if __name__ == "__main__":
    run(main)
