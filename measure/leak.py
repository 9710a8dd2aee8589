"""Leak: the share of the validation text that also stands in the training text, for any folder of shards.

    python -m measure.leak --data_dir my_data

Units are sentences and lines of 40 or more ASCII letters and digits, compared as those in lower case. N-grams are 13
tokens in a row of one document (Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C). Both are
compared by 64-bit hashes. A document that goes on in the next shard counts as two.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import hashlib
import re
from dataclasses import dataclass

import numpy as np

from common.cli import flag, parse, progress
from common.errors import UserError, run
from data.shards import open_shards
from data.tokenizer import END_OF_TEXT, get_tokenizer

UNIT = 40  # letters and digits
N = 13  # tokens
BLOCK = 2**20  # tokens that are read at a time
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
TOKEN_HASHES = np.random.default_rng(0).integers(2**64, size=END_OF_TEXT + 1, dtype=np.uint64)

UNIT_END = re.compile(rb"(?<=[.!?])\s+|<\|endoftext\|>|\n")
LOWER_CASE = bytes(range(256)).lower()
OTHERS = bytes(byte for byte in range(256) if not bytes([byte]).isalnum() and byte != ord("\n"))


@dataclass
class Flags:
    """Measure the share of the validation text that also stands in the training text."""

    data_dir: str
    """Folder of shards."""
    val_tokens: int = flag(10_000_000, at_least=1)
    """Look up about this many validation tokens: every second, third, ... block of a larger split. 10M take 1 GB."""


# ----------------------------------------------------------------------------------------------------------------------
# Hashes


def letters(text):
    """The ASCII letters and digits of each sentence and line of a text (bytes), in lower case: a list of bytes."""
    return UNIT_END.sub(b"\n", text).translate(LOWER_CASE, OTHERS).split(b"\n")


def unit_hash(unit):
    return hashlib.blake2b(unit, digest_size=8).digest()


def unit_hashes(sentences):
    """Hashes of the sentences that are units: (units,) uint64."""
    return np.frombuffer(b"".join(unit_hash(each) for each in sentences if len(each) >= UNIT), np.uint64)


def ngram_hashes(tokens):
    """Hashes of the n-grams from each token on: (max(0, tokens - N + 1),) uint64."""
    values = TOKEN_HASHES[tokens]
    hashes = np.zeros(max(0, len(tokens) - N + 1), np.uint64)
    for i in range(N):  # a polynomial modulo 2^64
        hashes *= MULTIPLIER
        hashes += values[i : i + len(hashes)]
    return hashes


class Lookup:
    """Hashes to look for, (n,) uint64, and which of them have been found."""

    def __init__(self, hashes):
        self._sorted, self._index = np.unique(hashes, return_inverse=True)
        self._found = np.zeros(len(self._sorted), bool)

    def find(self, hashes):
        """Mark the hashes that are among these: (any,) uint64."""
        hashes = np.sort(hashes)  # then the searches stay in the cache
        first, end = (np.searchsorted(self._sorted, hashes, side) for side in ("left", "right"))
        self._found[first[first < end]] = True

    def found(self):
        """(n,) bool."""
        return self._found[self._index]


# ----------------------------------------------------------------------------------------------------------------------
# The measure


def measure_leak(train, val):
    """The shares of the validation's letters and digits that are in units of the training data, of its n-grams that
    are n-grams of the training data, and of its tokens that are in such n-grams: three floats; and which tokens are.

    train: an iterable of (tokens,) uint16. val: (tokens,) uint16. Returns also a (tokens,) bool. Raises UserError if
    the validation data has no n-gram, or no ASCII letter or digit.
    """
    sentences = letters(decode(val))
    lengths = np.array([len(each) for each in sentences])
    ends = np.cumsum(np.append(0, val == END_OF_TEXT))
    within = ends[N:] == ends[:-N]  # the n-grams that lie in one document
    if not within.any() or not lengths.sum():
        raise UserError(f"the validation data needs a document of {N} tokens, and ASCII letters or digits")
    units, ngrams = Lookup(unit_hashes(sentences)), Lookup(ngram_hashes(val)[within])
    for tokens in train:
        units.find(unit_hashes(letters(decode(tokens))))
        ngrams.find(ngram_hashes(tokens))
    found = np.zeros(len(within), bool)
    found[within] = ngrams.found()
    covered = np.zeros(len(val), bool)
    for i in range(N):
        covered[i : i + len(found)] |= found
    in_units = lengths[lengths >= UNIT][units.found()].sum()
    parts = (in_units, lengths.sum()), (found.sum(), within.sum()), (covered.sum(), len(val) - ends[-1])
    return *(float(part / total) for part, total in parts), covered


def decode(tokens):
    return get_tokenizer().decode_bytes(tokens.tolist())


def list_blocks(shards):
    """(shard, start, end) for blocks of BLOCK tokens or less: they end where a document does, if one does."""
    blocks = []
    for shard in shards:
        start = 0
        while start < len(shard):
            end = start + BLOCK
            starts = np.flatnonzero(shard[start + 1 : end + 1] == END_OF_TEXT) if end < len(shard) else ()
            end = start + 1 + int(starts[-1]) if len(starts) else min(end, len(shard))
            blocks.append((shard, start, end))
            start = end
    return blocks


def main():
    flags = parse(Flags)
    val, train = (open_shards(flags.data_dir, split) for split in ("val", "train"))
    step = -(-sum(map(len, val)) // flags.val_tokens)
    looked_up = np.concatenate([shard[start:end] for shard, start, end in list_blocks(val)[::step]])
    blocks = progress(list_blocks(train), "training data")
    units, ngrams, tokens, _ = measure_leak((shard[start:end] for shard, start, end in blocks), looked_up)
    print(f"{len(looked_up):,} validation tokens looked up in {sum(map(len, train)):,} training tokens")
    what = f"are in units (sentences, lines of {UNIT} or more) of the training data"
    print(f"{units:.4%} of ASCII letters and digits {what}")
    print(f"{ngrams:.3%} of {N}-token n-grams are in the training data; they cover {tokens:.3%} of the tokens")


if __name__ == "__main__":
    run(main)
