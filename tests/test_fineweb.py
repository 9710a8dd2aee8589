import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, expect_error

from cli import UserError
from data import open_shards
from fineweb import tokenize, tokenize_in_parallel, write_shards
from tokenizer import END_OF_TEXT, get_tokenizer

TEXTS = [
    "The mitochondria is the powerhouse of the cell.",
    "",
    "Text that says <|endoftext|> is text.",
    "naïve 日本語 🙂 " * 20,
    "a" * 5000,
    *(f"Document {i} has its own length. " * (i % 7 + 1) for i in range(90)),
]


def plain_tokens(texts):
    """The reference: one document after another with tiktoken's plainest call."""
    tokens = []
    for text in texts:
        tokens += [END_OF_TEXT, *get_tokenizer().encode_ordinary(text)]
    return np.array(tokens, dtype=np.uint16)


def write_parquet(path, texts):
    columns = dict(text=texts, id=[str(i) for i in range(len(texts))], token_count=[len(text) for text in texts])
    pq.write_table(pa.table(columns), path)


def test_special_tokens_in_a_text_are_text():
    tokens = tokenize(["<|endoftext|>"])
    assert tokens[0] == END_OF_TEXT and END_OF_TEXT not in tokens[1:]
    assert get_tokenizer().decode(tokens[1:].tolist()) == "<|endoftext|>"


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shard_size", [100, 997, 2000])
def test_shards_are_the_plain_tokens(tmp_path, workers, shard_size):
    batches = [TEXTS[i : i + 7] for i in range(0, len(TEXTS), 7)]
    sizes = list(write_shards(tokenize_in_parallel(batches, workers), tmp_path, shard_size))
    expected = plain_tokens(TEXTS)
    assert sum(sizes) == len(expected)
    paths = sorted(tmp_path.iterdir(), key=lambda path: path.name[-10:])
    assert [path.name for path in paths] == [
        f"edufineweb_{'train' if i else 'val'}_{i:06d}.npy" for i in range(-(-len(expected) // shard_size))
    ]
    for i, path in enumerate(paths):
        plain = tmp_path.parent / "plain.npy"
        np.save(plain, expected[i * shard_size : (i + 1) * shard_size])
        assert path.read_bytes() == plain.read_bytes()


def test_a_document_may_span_several_shards(tmp_path):
    pieces = [np.arange(25, dtype=np.uint16)]
    assert list(write_shards(pieces, tmp_path, 10)) == [25]
    assert [len(shard) for shard in open_shards(tmp_path, "train")] == [10, 5]


def test_the_command(command, tmp_path):
    for i in range(3):
        write_parquet(tmp_path / f"part{i}.parquet", TEXTS[i * 40 : (i + 1) * 40])
    done = command("fineweb.py", "--input", "part*.parquet", "--out", "shards", "--shard_size", 1000)
    assert done.returncode == 0, done.stderr
    assert "1 validation shard" in done.stdout and "train_gpt2.py --data_dir shards" in done.stdout
    shards = [*open_shards(tmp_path / "shards", "val"), *open_shards(tmp_path / "shards", "train")]
    assert np.array_equal(np.concatenate(shards), plain_tokens(TEXTS))
    again = command("fineweb.py", "--input", "part*.parquet", "--out", "shards", "--shard_size", 1000)
    expect_error(again, "already holds", "--out")

    done = command("fineweb.py", "--input", "part*.parquet", "--out", "few", "--shard_size", 100, "--max_tokens", 250)
    assert done.returncode == 0, done.stderr
    shards = [*open_shards(tmp_path / "few", "val"), *open_shards(tmp_path / "few", "train")]
    assert np.array_equal(np.concatenate(shards), plain_tokens(TEXTS)[:250])


def test_what_goes_wrong_is_said_in_one_line(command, tmp_path):
    write_parquet(tmp_path / "docs.parquet", TEXTS)
    pq.write_table(pa.table(dict(words=["a"])), tmp_path / "other.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"this is not parquet")
    total = len(plain_tokens(TEXTS))
    too_small = command("fineweb.py", "--input", "docs.parquet")
    expect_error(too_small, f"{total:,} tokens", f"--shard_size {total // 10}")
    exact = command("fineweb.py", "--input", "docs.parquet", "--shard_size", total)
    expect_error(exact, "--shard_size")
    assert not list(tmp_path.rglob("*.npy")) and not list(tmp_path.rglob("unfinished.json"))
    expect_error(command("fineweb.py", "--input", "nothing*.parquet"), "nothing*.parquet", "no such files")
    expect_error(command("fineweb.py", "--input", "other.parquet"), "no column named text", "words")
    expect_error(command("fineweb.py", "--input", "broken.parquet"), "broken.parquet", "cannot read")
    expect_error(command("fineweb.py", "--input", "docs.parquet", "--shard_size", 0), "--shard_size 0")
    expect_error(
        command("fineweb.py", "--input", "docs.parquet", "--max_tokens", 50), "--max_tokens 50", "--shard_size"
    )
    expect_error(command("fineweb.py", "--input", "docs.parquet", "--out", "docs.parquet"), "docs.parquet", "--out")
    expect_error(command("fineweb.py"), "cannot read FineWeb-Edu", "--input")


@pytest.mark.parametrize("after", [1, 4])
def test_interrupted_it_goes_on_where_it_was(command, tmp_path, after):
    """The shards of a call that is killed after some of them, and of the same call again, are those of one call."""
    for i in range(3):
        write_parquet(tmp_path / f"part{i}.parquet", TEXTS[i * 40 : (i + 1) * 40])
    arguments = ("--input", "part*.parquet", "--shard_size", 333, "--workers", 2)
    assert command("fineweb.py", *arguments, "--out", "whole").returncode == 0
    # stops for good in the middle of writing a shard
    script = tmp_path / "killed.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import cli, fineweb\n"
        "real = fineweb.write_shard\n"
        f"fineweb.write_shard = lambda path, data: os._exit(9) if '{after:06d}' in path.name else real(path, data)\n"
        "cli.run(fineweb.main)\n"
    )
    assert command(script, *arguments, "--out", "parts").returncode == 9
    with pytest.raises(UserError, match="parts is not finished"):
        open_shards(tmp_path / "parts", "val")
    other = command("fineweb.py", *arguments, "--out", "parts", "--shard_size", 500)
    expect_error(other, "was begun with", "--shard_size 333")
    done = command("fineweb.py", *arguments, "--out", "parts")
    assert done.returncode == 0, done.stderr
    folders = [sorted((tmp_path / name).iterdir()) for name in ("whole", "parts")]
    assert [path.name for path in folders[0]] == [path.name for path in folders[1]]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*folders))
