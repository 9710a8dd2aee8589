import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, expect_error

from common.cli import UserError
from data.shards import open_shards
from data.tokenizer import END_OF_TEXT, get_tokenizer

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


@pytest.fixture
def documents(tmp_path):
    """TEXTS in three files."""
    for i in range(3):
        write_parquet(tmp_path / f"docs{i}.parquet", TEXTS[i * 40 : (i + 1) * 40])


def contents(folder):
    """Every file in a folder: {name: bytes}."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_are_the_plain_tokens(command, documents, tmp_path, workers):
    """Byte for byte what np.save writes, for any number of workers; the last shard is shorter."""
    done = command("fineweb.py", "--input", "docs*.parquet", "--shard_size", 997, "--workers", workers)
    assert done.returncode == 0, done.stderr
    expected = plain_tokens(TEXTS)
    found = contents(tmp_path / "edu_fineweb10B")
    listed = json.loads(found.pop("shards.json"))
    assert len(found) == len(listed["shards"]) == -(-len(expected) // 997)
    for i, shard in enumerate(listed["shards"]):
        tokens = expected[i * 997 : (i + 1) * 997]
        np.save(tmp_path / "plain.npy", tokens)
        plain = (tmp_path / "plain.npy").read_bytes()
        name = f"edufineweb_{'train' if i else 'val'}_{i:06d}.npy"
        assert found[name] == plain
        digest = hashlib.sha256(plain).hexdigest()
        assert shard == dict(name=name, tokens=len(tokens), documents=sum(tokens == END_OF_TEXT), sha256=digest)
    assert sum(shard["documents"] for shard in listed["shards"]) == len(TEXTS)
    assert [file["name"] for file in listed["source"]["files"]] == [f"docs{i}.parquet" for i in range(3)]


def test_odd_documents(command, tmp_path):
    """Empty, missing, invalid UTF-8, longer than several shards, a single word of 200,000 letters."""
    texts = [
        b"fine",
        b"",
        None,
        "na\u00efve".encode()[:3],
        b"\xff\xfe<|endoftext|>",
        b"word " * 2000,
        b"a" * 200_000,
        b"end",
    ]
    column = pa.array(texts, pa.binary()).view(pa.string())
    pq.write_table(pa.table(dict(text=column)), tmp_path / "odd.parquet")
    done = command("fineweb.py", "--input", "odd.parquet", "--out", "odd", "--shard_size", 500)
    assert done.returncode == 0, done.stderr
    shards = [*open_shards(tmp_path / "odd", "val"), *open_shards(tmp_path / "odd", "train")]
    expected = ["fine", "", "", "na\ufffd", "\ufffd\ufffd<|endoftext|>", "word " * 2000, "a" * 200_000, "end"]
    assert np.array_equal(np.concatenate(shards), plain_tokens(expected))
    assert command("fineweb.py", "--out", "odd", "--verify").stdout == (
        f"odd: {len(shards)} files, 8 documents, {len(plain_tokens(expected)):,} tokens, all SHA-256 match\n"
    )


def test_changed_missing_and_additional_files(command, documents, tmp_path):
    assert command("fineweb.py", "--input", "docs*.parquet", "--out", "d", "--shard_size", 500).returncode == 0
    folder = tmp_path / "d"
    path = folder / "edufineweb_train_000002.npy"
    original = path.read_bytes()
    path.write_bytes(original[:-3] + bytes([original[-3] ^ 1]) + original[-2:])
    expect_error(command("fineweb.py", "--out", "d", "--verify"), "train_000002.npy is damaged")
    open_shards(folder, "train")  # does not compute hashes
    path.unlink()
    expect_error(command("fineweb.py", "--out", "d", "--verify"), "train_000002.npy", "No such file")
    with pytest.raises(UserError, match="train_000002.npy is missing"):
        open_shards(folder, "train")
    path.write_bytes(original)
    (folder / "other_train_000009.npy").write_bytes(original)
    expect_error(command("fineweb.py", "--out", "d", "--verify"), "other_train_000009.npy", "not in shards.json")
    with pytest.raises(UserError, match="other_train_000009.npy is not listed"):
        open_shards(folder, "train")
    (folder / "shards.json").write_text("{}")
    with pytest.raises(UserError, match="shards.json is damaged"):
        open_shards(folder, "train")
    (folder / "shards.json").unlink()
    open_shards(folder, "train")
    expect_error(command("fineweb.py", "--out", "d", "--verify"), "shards.json", "No such file")


def test_parts_join_to_the_shards_of_one_call(command, documents, tmp_path):
    arguments = ("--input", "docs*.parquet", "--shard_size", 333)
    assert command("fineweb.py", *arguments, "--out", "single").returncode == 0
    done = command("fineweb.py", *arguments, "--out", "parts", "--part", "1/2")
    assert "--input 'FOLDER/*.npy'" in done.stdout, done.stderr
    with pytest.raises(UserError, match="no train shards"):
        open_shards(tmp_path / "parts", "train")
    join = ("fineweb.py", "--input", "parts/*.npy", "--out", "joined", "--shard_size", 333)
    expect_error(command(*join), "part2of2.json", "No such file")
    assert command("fineweb.py", *arguments, "--out", "parts", "--part", "2/2", "--shard_size", 100).returncode == 0
    assert command("fineweb.py", "--out", "parts", "--part", "2/2", "--verify").returncode == 0
    assert command(*join).returncode == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "single")

    # shards can be cut again into another size
    again = command("fineweb.py", "--input", "single/*.npy", "--out", "larger", "--shard_size", 1000)
    assert again.returncode == 0, again.stderr
    tokens = [
        np.concatenate([*open_shards(tmp_path / name, "val"), *open_shards(tmp_path / name, "train")])
        for name in ("single", "larger")
    ]
    assert np.array_equal(*tokens) and len(open_shards(tmp_path / "larger", "val")[0]) == 1000

    path = tmp_path / "parts" / "edufineweb_part2of2_000001.npy"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    expect_error(command(*join[:-4], "--out", "other", "--shard_size", 333), f"{path.name} is damaged")
    path.unlink()
    expect_error(command(*join[:-4], "--out", "another", "--shard_size", 333), path.name)
    for part in ("0/2", "3/2", "1", "x/y"):
        expect_error(command("fineweb.py", *arguments, "--part", part), f"--part {part}")
    expect_error(command("fineweb.py", *arguments, "--out", "four", "--part", "1/4"), "at most 3 parts")


def test_the_command(command, documents, tmp_path):
    arguments = ("--input", "docs*.parquet", "--out", "few", "--shard_size", 100, "--max_tokens", 250)
    done = command("fineweb.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert "1 validation shard" in done.stdout and "train_gpt2.py --data_dir few" in done.stdout
    shards = [*open_shards(tmp_path / "few", "val"), *open_shards(tmp_path / "few", "train")]
    assert np.array_equal(np.concatenate(shards), plain_tokens(TEXTS)[:250])
    expect_error(command("fineweb.py", *arguments), "already holds", "--out")


def test_errors_are_one_line(command, tmp_path):
    write_parquet(tmp_path / "docs.parquet", TEXTS)
    pq.write_table(pa.table(dict(words=["a"])), tmp_path / "other.parquet")
    pq.write_table(pa.table(dict(text=[7])), tmp_path / "numbers.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"this is not parquet")
    total = len(plain_tokens(TEXTS))
    too_small = command("fineweb.py", "--input", "docs.parquet")
    expect_error(too_small, f"{total:,} tokens", f"--shard_size {total // 10}")
    exact = command("fineweb.py", "--input", "docs.parquet", "--shard_size", total)
    expect_error(exact, "--shard_size")
    assert not list(tmp_path.rglob("*.npy")) and not list(tmp_path.rglob("unfinished.json"))
    expect_error(command("fineweb.py", "--input", "nothing*.parquet"), "nothing*.parquet", "no such files")
    expect_error(command("fineweb.py", "--input", "other.parquet"), "no column named text", "words")
    expect_error(command("fineweb.py", "--input", "numbers.parquet"), "column named text holds int64")
    expect_error(command("fineweb.py", "--input", "broken.parquet"), "broken.parquet", "cannot read")
    expect_error(command("fineweb.py", "--input", "docs.parquet", "--shard_size", 0), "--shard_size 0")
    expect_error(
        command("fineweb.py", "--input", "docs.parquet", "--max_tokens", 50), "--max_tokens 50", "--shard_size"
    )
    expect_error(command("fineweb.py", "--input", "docs.parquet", "--out", "docs.parquet"), "docs.parquet", "--out")
    expect_error(command("fineweb.py"), "cannot read FineWeb-Edu", "--input")


@pytest.mark.parametrize("after", [1, 4, "end"])
def test_an_interrupted_call_continues(command, documents, tmp_path, after):
    """A call that is killed and then repeated writes the same files as one call."""
    arguments = ("--input", "docs*.parquet", "--shard_size", 333, "--workers", 2)
    assert command("fineweb.py", *arguments, "--out", "single").returncode == 0
    # exits while it writes a shard, or the manifest
    script = tmp_path / "killed.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import fineweb\n"
        "from common import cli\n"
        "from data import shards\n"
        "if __name__ == '__main__':\n"
        "    shard, manifest = shards.write_shard, shards.ShardFolder.finish\n"
        "    die = lambda *_: os._exit(9)\n"
        f"    shards.write_shard = lambda path, data: (die if '{after:0>6}' in path.name else shard)(path, data)\n"
        f"    shards.ShardFolder.finish = die if {after == 'end'} else manifest\n"
        "    cli.run(fineweb.main)\n"
    )
    assert command(script, *arguments, "--out", "parts").returncode == 9
    with pytest.raises(UserError, match="parts is not complete"):
        open_shards(tmp_path / "parts", "val")
    other = command("fineweb.py", *arguments, "--out", "parts", "--shard_size", 500)
    expect_error(other, "was started with", "--shard_size 333")
    (tmp_path / "docs9.parquet").write_bytes((tmp_path / "docs0.parquet").read_bytes())
    expect_error(command("fineweb.py", *arguments, "--out", "parts"), "other files")
    (tmp_path / "docs9.parquet").unlink()
    done = command("fineweb.py", *arguments, "--out", "parts")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "parts") == contents(tmp_path / "single")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_killed_call_ends_its_workers(command, tmp_path):
    """After SIGKILL to the command no worker remains, and the same command continues."""
    write_parquet(tmp_path / "docs.parquet", [f"{i} " * 500 for i in range(5_000)])
    arguments = ["--input", "docs.parquet", "--out", "d", "--shard_size", "100000", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "fineweb.py", *arguments], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    wait_until((tmp_path / "d" / "edufineweb_train_000001.npy").exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    assert process.wait() == -signal.SIGKILL and len(children) >= 2
    wait_until(lambda: not any(running(pid) for pid in children))
    assert command("fineweb.py", *arguments).returncode == 0
    assert command("fineweb.py", "--out", "d", "--verify").returncode == 0


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def running(pid):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
