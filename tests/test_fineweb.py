import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, expect_error, wait_until
from fork_server import running

import fineweb
from common.errors import UserError
from common.files import digest, lock
from data.documents import batches_of, list_tasks, open_parquet
from data.shards import open_shards
from data.tokenizer import END_OF_TEXT, get_tokenizer

TEXTS = [
    "The mitochondria is the powerhouse of the cell.",
    "",
    "Text that says <|endoftext|> is text.",
    "naïve 日本語 🙂 " * 20,
    "a" * 5000,
    *(f"Document {i} has its own length. " * (i % 7 + 1) for i in range(300)),
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
    """TEXTS in three files of different formats."""
    write_parquet(tmp_path / "docs0.parquet", TEXTS[:40])
    with gzip.open(tmp_path / "docs1.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(dict(text=text)) + "\n" for text in TEXTS[40:80])
    (tmp_path / "docs2.txt").write_text("\n<|endoftext|>\n".join(TEXTS[80:]))


def read_all(folder):
    """All tokens of a folder's shards, in order."""
    return np.concatenate([shard[:] for split in ("val", "train") for shard in open_shards(folder, split)])


def contents(folder):
    """Every file in a folder: {name: bytes}."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_are_the_plain_tokens(command, documents, tmp_path, workers):
    """Byte for byte what np.save writes, for any number of workers; the last shard is shorter."""
    arguments = ("--input", "docs*", "--dataset", "fineweb", "--out", "my_data", "--shard_size", 997)
    done = command("fineweb.py", *arguments, "--workers", workers)
    assert done.returncode == 0, done.stderr
    expected = plain_tokens(TEXTS)
    found = contents(tmp_path / "my_data")
    listed = json.loads(found.pop("shards.json"))
    assert len(found) == len(listed["shards"]) == -(-len(expected) // 997)
    for i, shard in enumerate(listed["shards"]):
        tokens = expected[i * 997 : (i + 1) * 997]
        np.save(tmp_path / "plain.npy", tokens)
        plain = (tmp_path / "plain.npy").read_bytes()
        name = f"fineweb_{'train' if i else 'val'}_{i:06d}.npy"
        assert found[name] == plain
        digest = hashlib.sha256(plain).hexdigest()
        assert shard == dict(name=name, tokens=len(tokens), documents=sum(tokens == END_OF_TEXT), sha256=digest)
    assert sum(shard["documents"] for shard in listed["shards"]) == len(TEXTS)
    names = [file["name"] for file in listed["source"]["files"]]
    assert names == ["docs0.parquet", "docs1.jsonl.gz", "docs2.txt"]


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
    done = command("fineweb.py", "--input", "odd.parquet", "--dataset", "fineweb", "--out", "odd", "--shard_size", 500)
    assert done.returncode == 0, done.stderr
    expected = ["fine", "", "", "na\ufffd", "\ufffd\ufffd<|endoftext|>", "word " * 2000, "a" * 200_000, "end"]
    tokens = plain_tokens(expected)
    assert np.array_equal(read_all(tmp_path / "odd"), tokens)
    entries = json.loads((tmp_path / "odd" / "shards.json").read_text())["shards"]
    assert sum(entry["documents"] for entry in entries) == 8
    assert all(digest(tmp_path / "odd" / entry["name"]) == entry["sha256"] for entry in entries)


def test_a_folder(call_main, tmp_path):
    """Its files of known formats, also in folders below; what a person should know of them is counted."""
    (tmp_path / "books" / "old").mkdir(parents=True)
    (tmp_path / "books" / "a.TXT").write_bytes(b"caf\xe9 " * 3)
    (tmp_path / "books" / "cover.png").write_bytes(b"\x89PNG")
    (tmp_path / "books" / "old" / "b.md").write_text("old " * 60)
    (tmp_path / "books" / "old" / "c.jsonl").write_text('{"text": null}\n' * 5)
    done = call_main("fineweb.py", "--input", "books", "--dataset", "fineweb", "--shard_size", 50, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "3 times bytes that are not UTF-8 became U+FFFD" in done.stdout and "first in books/a.TXT" in done.stdout
    assert np.array_equal(read_all(tmp_path / "out"), plain_tokens(["caf\ufffd " * 3, "old " * 60, *[""] * 5]))


def test_missing_and_additional_files(command, documents, tmp_path):
    assert command("fineweb.py", "--input", "docs*", "--out", "d", "--shard_size", 500).returncode == 0
    folder = tmp_path / "d"
    path = folder / "text_train_000002.npy"
    original = path.read_bytes()
    path.unlink()
    with pytest.raises(UserError, match="train_000002.npy is missing"):
        open_shards(folder, "train")
    path.write_bytes(original)
    (folder / "other_train_000009.npy").write_bytes(original)
    with pytest.raises(UserError, match="other_train_000009.npy is an additional shard"):
        open_shards(folder, "train")
    (folder / "shards.json").write_text("{}")
    with pytest.raises(UserError, match="cannot read .*shards.json"):
        open_shards(folder, "train")
    (folder / "shards.json").unlink()
    open_shards(folder, "train")


def test_the_command(command, call_main, documents, tmp_path):
    arguments = ("--input", "docs*", "--dataset", "fineweb", "--out", "few", "--shard_size", 100, "--max_tokens", 250)
    done = command("fineweb.py", *arguments, env=dict(TQDM_DISABLE="1"))  # --max_tokens does not need the bar
    assert done.returncode == 0, done.stderr
    assert "250 tokens in few: 100 for validation, 150 for training" in done.stdout
    assert "train_gpt2.py --model tiny --data_dir few" in done.stdout
    assert np.array_equal(read_all(tmp_path / "few"), plain_tokens(TEXTS)[:250])
    expect_error(call_main("fineweb.py", *arguments), "already holds", "--out")
    with lock(tmp_path / "few" / "lock"):  # another call is writing this folder
        expect_error(call_main("fineweb.py", *arguments), "few is being written by another process", "--out")


def test_errors_are_one_line(call_main, tmp_path):
    write_parquet(tmp_path / "docs.parquet", TEXTS)
    pq.write_table(pa.table(dict(words=["a"])), tmp_path / "other.parquet")
    pq.write_table(pa.table(dict(text=[7])), tmp_path / "numbers.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"this is not parquet")
    total = len(plain_tokens(TEXTS))
    (tmp_path / "empty.txt").write_text("\n<|endoftext|>\n")
    expect_error(call_main("fineweb.py", "--input", "empty.txt"), "only 0 tokens", "validation: give more text")
    exact = ("--input", "docs.parquet", "--dataset", "fineweb", "--shard_size", total)
    expect_error(call_main("fineweb.py", *exact), f"only {total:,} tokens", "smaller --shard_size")
    assert not list(tmp_path.rglob("*.npy")) and not list(tmp_path.rglob("unfinished.json"))
    expect_error(call_main("fineweb.py", "--input", "nothing*.parquet"), "nothing*.parquet", "no such files")
    expect_error(call_main("fineweb.py", "--input", "other.parquet"), "no column of strings named text", "words")
    expect_error(call_main("fineweb.py", "--input", "numbers.parquet"), "only text (int64)")
    expect_error(call_main("fineweb.py", "--input", "broken.parquet"), "broken.parquet", "cannot read")
    expect_error(call_main("fineweb.py", "--input", "docs.parquet", "--shard_size", 0), "--shard_size 0")
    limited = ("--input", "docs.parquet", "--max_tokens", 50)
    expect_error(call_main("fineweb.py", *limited), "only 50 tokens", "a larger --max_tokens")
    expect_error(call_main("fineweb.py", "--input", "docs.parquet", "--subset", "x"), "leave them out with --input")
    (tmp_path / "docs.csv").write_text("text")
    expect_error(call_main("fineweb.py", "--input", "docs.csv"), "docs.csv: --input takes .txt")
    (tmp_path / "docs[1].csv").write_text("a name with brackets")
    expect_error(call_main("fineweb.py", "--input", "docs[1].csv"), "docs[1].csv: --input takes .txt")
    expect_error(call_main("fineweb.py", "--input", "docs.parquet", "--out", "docs.parquet"), "docs.parquet", "--out")
    for dataset in ("fineweb", "fineweb-edu"):
        done = call_main("fineweb.py", "--dataset", dataset)
        expect_error(done, f"cannot read HuggingFaceFW/{dataset} sample-10BT from the hub", "--input")


def test_unreadable_sources(tmp_path):
    path = tmp_path / "docs.parquet"
    write_parquet(path, TEXTS)
    content = path.read_bytes()

    def read():
        paths, _ = fineweb.find_source(fineweb.Flags(input=str(path)))
        return [function(*arguments)[0] for _, function, *arguments in list_tasks(paths, (0, 0), 2**25)]

    assert np.array_equal(np.concatenate(read()), plain_tokens(TEXTS))
    damaged = content[:50] + bytes(100) + content[150:]
    for wrong in (b"", content[:3], content[: len(content) // 2], content[:-1], content[:-9], damaged):
        path.write_bytes(wrong)
        open_parquet.cache_clear()
        batches_of.cache_clear()
        with pytest.raises(UserError, match="cannot read .*docs.parquet") as error:
            read()
        assert "\n" not in str(error.value)
    path.unlink()
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("nothing")):
        make()
        with pytest.raises(UserError, match="cannot read .*docs.parquet"):
            read()
        path.unlink()


@pytest.mark.parametrize("total", [1200, 20_000, 400_000])
def test_the_validation_of_own_text_is_spread_over_it(command, tmp_path, total):
    """A tenth, in pieces that begin with <|endoftext|>, as what follows them does."""
    text = "word" + " word" * (total - 2)
    (tmp_path / "book.txt").write_text(text)  # 5 bytes a token
    done = command("fineweb.py", "--input", "book.txt", "--workers", 1)
    assert done.returncode == 0 and "--data_dir my_data" in done.stdout, done.stderr
    expected, span = plain_tokens([text]), max(1025, len(text) // 400)
    offset = np.arange(len(expected)) % (10 * span)
    expected[(offset == 0) | (offset == span)] = END_OF_TEXT
    for split, own in (("val", offset < span), ("train", offset >= span)):
        (shard,) = open_shards(tmp_path / "my_data", split)
        assert np.array_equal(shard[:], expected[own])
    source = dict(files=[dict(bytes=4_000_000_000)])
    assert fineweb.validation_spans(fineweb.Flags(), source) == (100_000, 10_000_000)  # of 1B tokens: 10M in all
    assert fineweb.validation_spans(fineweb.Flags(max_tokens=10_000_000), source) == (100_000, 1_000_000)


@pytest.mark.parametrize(
    ("shard_size", "after"), [(2000, "000001"), (2000, "000005"), (2000, "shards.json"), (100_000_000, "shards.json")]
)
def test_an_interrupted_call_continues(command, documents, tmp_path, shard_size, after, call_main):
    """A call that is killed and then repeated writes the same files as one call."""
    arguments = ("--input", "docs*", "--workers", 2, "--shard_size", shard_size)
    assert command("fineweb.py", *arguments, "--out", "single").returncode == 0
    # exits while it writes a shard, or the manifest
    script = tmp_path / "killed.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import fineweb\n"
        "from common import errors\n"
        "from data import shard_folder, shards\n"
        "if __name__ == '__main__':\n"
        "    for module, name in ((shards, 'write_shard'), (shard_folder, 'write_json')):\n"
        "        def write(path, content, write=getattr(module, name)):\n"
        f"            os._exit(9) if '{after}' in path.name else write(path, content)\n"
        "        setattr(module, name, write)\n"
        "    errors.run(fineweb.main)\n"
    )
    assert command(script, *arguments, "--out", "parts").returncode == 9
    with pytest.raises(UserError, match="parts is not complete"):
        open_shards(tmp_path / "parts", "val")
    if after == "000005":  # else it begins again
        other = call_main("fineweb.py", *arguments, "--out", "parts", "--shard_size", 500)
        expect_error(other, "was started with", "--shard_size 2000")
        (tmp_path / "docs9.parquet").write_bytes((tmp_path / "docs0.parquet").read_bytes())
        expect_error(call_main("fineweb.py", *arguments, "--out", "parts"), "other files")
        (tmp_path / "docs9.parquet").unlink()
    done = command("fineweb.py", *arguments, "--out", "parts")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "parts") == contents(tmp_path / "single")


def test_it_starts_without_pytorch():
    """The import takes a second, in every worker."""
    code = "import sys, fineweb; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_killed_call_ends_its_workers(command, tmp_path):
    """After SIGKILL to the command no worker remains, and the same command continues."""
    write_parquet(tmp_path / "docs.parquet", [f"{i} " * 500 for i in range(5_000)])
    arguments = ["--input", "docs.parquet", "--out", "d", "--shard_size", "100000", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "fineweb.py", *arguments], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    wait_until((tmp_path / "d" / "text_train_000001.npy").exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    assert process.wait() == -signal.SIGKILL and len(children) >= 2
    wait_until(lambda: not any(running(pid) for pid in children))
    assert command("fineweb.py", *arguments).returncode == 0
    entries = json.loads((tmp_path / "d" / "shards.json").read_text())["shards"]
    assert all(digest(tmp_path / "d" / entry["name"]) == entry["sha256"] for entry in entries)
