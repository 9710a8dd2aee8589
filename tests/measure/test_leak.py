"""The leak from training into validation shards, with known overlaps."""

import sys

import numpy as np
import pytest

from common.errors import UserError
from data.shards import write_shard
from data.tokenizer import tokenize
from measure import leak

COMMON = "The quick brown fox jumps over the lazy dog, and nobody in the old village minds it at all."
OWN = "Seven other sentences of this validation text are not to be found in what the model reads."


def leak_of(val, train):
    return leak.measure_leak([tokenize(train)], tokenize(val))


def test_units_are_letters_and_digits_of_sentences():
    # in the training text with other white space, case and punctuation, and in another line
    train = [f"Something else. **{COMMON.upper()}** is what it says:\n- “{COMMON}”\nand so on"]
    val = [f"{OWN}\n{COMMON} Yes."]
    own, common = (sum(map(str.isalnum, text)) for text in (OWN, COMMON))
    assert leak_of(val, train)[0] == pytest.approx(common / (own + common + 3))
    assert leak_of(val, [COMMON.replace("dog", "cat")])[0] == 0
    assert leak_of(["A short one. " * 9], ["A short one. " * 9])[0] == 0


def test_ngrams_and_the_tokens_that_they_cover():
    a = np.random.default_rng(1).integers(1000, 50000, 100, dtype=np.uint16)
    end = np.array([leak.END_OF_TEXT], np.uint16)
    val = np.concatenate([end, a[:40], end, a[60:80]])  # 28 + 8 n-grams
    train = np.concatenate([end, a[10:30], a[90:], end, a[28:41], a[60:72], end])  # 8 n-grams, no 13 of a[28:40]
    _, ngrams, tokens, covered = leak.measure_leak([train], val)
    assert ngrams == 8 / 36
    assert tokens == 20 / 60
    assert np.flatnonzero(covered).tolist() == [*range(11, 31)]
    for nothing in (val[:5], tokenize(["Всё смешалось в доме Облонских. " * 9])):
        with pytest.raises(UserError, match="13 tokens, and ASCII"):
            leak.measure_leak([train], nothing)


def test_the_command_reads_shards_in_blocks_of_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leak, "BLOCK", 64)
    documents = [f"{COMMON} {number}" for number in range(20)] + ["1 2 " * 50]
    write_shard(tmp_path / "text_train_000001.npy", tokenize(documents))
    write_shard(tmp_path / "text_val_000000.npy", tokenize([COMMON, OWN, COMMON.lower()]))
    shards = leak.open_shards(tmp_path, "train")
    blocks = leak.list_blocks(shards)
    parts = [shard[start:end] for shard, start, end in blocks]
    assert np.array_equal(np.concatenate(parts), shards[0][:])
    assert [int(part[0]) == leak.END_OF_TEXT for part in parts] == [True] * (len(parts) - 1) + [False]  # a long one
    assert max(map(len, parts)) <= 64
    monkeypatch.setattr(sys, "argv", ["leak.py", "--data_dir", str(tmp_path)])
    leak.main()
    assert capsys.readouterr().out == (
        "63 validation tokens looked up in 562 training tokens\n"
        "66.0465% of ASCII letters and digits are in units (sentences, lines of 40 or more) of the training data\n"
        "70.833% of 13-token n-grams are in the training data; they cover 68.333% of the tokens\n"
    )
