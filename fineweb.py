"""FineWeb-Edu documents -> GPT-2 tokens -> shards on disk.

    python fineweb.py                                  # sample-10BT from the hub into edu_fineweb10B/
    python fineweb.py --input 'docs/*.parquet'         # local files with FineWeb's columns

Shard 0 is validation, the others are training. On the same documents the files are byte for byte build-nanogpt's.
"""

import collections
import glob
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cli import UserError, parse, run
from data import write_shard
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


def read_documents(flags):
    """Yield lists of texts, in the dataset's order. Raises UserError when the data cannot be had."""
    from datasets import load_dataset

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
        for batch in dataset.select_columns(["text"]).iter(batch_size=DOCUMENTS_PER_TASK):
            yield batch["text"]
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = f"--input {flags.input}" if flags.input else f"FineWeb-Edu {flags.subset} from the hub"
        hint = "" if flags.input else "; local parquet files go in with --input"
        raise UserError(f"cannot read {where}: {reason}{hint}") from error


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


def write_shards(pieces, out, shard_size):
    """Write pieces (uint16 arrays) one after another as edufineweb_{val,train}_{index:06d}.npy; yields their sizes.

    Raises UserError when there is nothing left for a training shard.
    """
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}; choose another --out") from error
    shard = np.empty(shard_size, dtype=np.uint16)
    index = filled = 0

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
        yield size
    if index == 0 or (index == 1 and filled == 0):
        for path in out.glob("edufineweb_val_*.npy"):
            path.unlink()
        raise UserError(
            f"only {index * shard_size + filled:,} tokens: the validation shard takes them all and leaves nothing to "
            f"train on; use --shard_size {max(1, (index * shard_size + filled) // 10)} for a tenth of them each"
        )
    if filled:
        write()


def limit(pieces, max_tokens):
    """The pieces up to max_tokens tokens."""
    for piece in pieces:
        yield piece[:max_tokens]
        max_tokens -= len(piece)
        if max_tokens <= 0:
            return


def main():
    flags = parse(Flags)
    workers = flags.workers or os.cpu_count()
    for name in ("shard_size", "max_tokens", "workers"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: it must be at least 1")
    if old := sorted(Path(flags.out).glob("*.npy")):
        raise UserError(
            f"{flags.out} already holds {len(old)} shards, perhaps of a run that did not finish: "
            "choose another --out, or delete them"
        )
    if flags.max_tokens is not None and flags.max_tokens <= flags.shard_size:
        raise UserError(
            f"--max_tokens {flags.max_tokens}: the validation shard would take them all; use a --shard_size below, "
            f"such as {max(1, flags.max_tokens // 10)}"
        )
    get_tokenizer()
    pieces = tokenize_in_parallel(read_documents(flags), workers)
    expected = flags.max_tokens
    if expected:
        pieces = limit(pieces, flags.max_tokens)
    elif flags.input is None:
        expected = SUBSET_TOKENS.get(flags.subset)
    with tqdm(total=expected, unit="tok", unit_scale=True, desc=flags.out, mininterval=0.5) as bar:
        for size in write_shards(pieces, flags.out, flags.shard_size):
            bar.update(size)
    shards = len(list(Path(flags.out).glob("*.npy")))
    print(f"{bar.n:,} tokens in {flags.out}: 1 validation shard, {shards - 1} training shards")
    print(f"Next: python train_gpt2.py{'' if flags.out == 'edu_fineweb10B' else f' --data_dir {flags.out}'}")


if __name__ == "__main__":
    run(main)
