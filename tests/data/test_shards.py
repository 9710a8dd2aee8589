import json
import os

import numpy as np
import pytest
from conftest import logged
from texts import write_corpus

from common.errors import UserError
from common.files import atomic_write
from data.shard_folder import ShardFolder, split_into_shards
from data.shards import FINEWEB, FINEWEB_EDU, dataset_name, manifest_entry, open_shards, write_shard
from data.tokenizer import END_OF_TEXT


def npy(shape, descr="'<u2'", tokens=100):
    """The bytes of a .npy file with such a header."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(2 * tokens)


def invalid_shards(folder):
    """(words of the error, function that writes the file) for each way in which a file is not a shard."""
    valid = np.arange(100, dtype=np.uint16)
    path = folder / "x_train_000001.npy"
    yield "no train shards", lambda: None
    yield "int64", lambda: np.save(path, valid.astype(np.int64))
    yield "(10, 10)", lambda: np.save(path, valid.reshape(10, 10))
    yield "shape (0,)", lambda: np.save(path, valid[:0])
    yield "cannot read", lambda: path.mkdir()
    yield "magic string", lambda: path.write_bytes(b"hello")
    yield "magic string", lambda: np.savez(path.open("wb"), valid)
    yield "object", lambda: np.save(path, np.array([{}]))
    yield "not a shard", lambda: path.write_bytes(b"")
    yield "token 50257", lambda: np.save(path, valid + np.uint16(50158))
    yield "not a shard", lambda: (np.save(path, valid), path.write_bytes(path.read_bytes()[:150]))
    yield "not a shard", lambda: path.write_bytes(npy("(-5,)"))
    yield "not a shard", lambda: path.write_bytes(npy("(101,)"))
    yield "not a shard", lambda: path.write_bytes(npy(f"({10**30},)"))
    yield "not a shard", lambda: path.write_bytes(npy("(1.5,)"))
    yield "shape ()", lambda: path.write_bytes(npy("()"))
    yield "('a', '<u2')", lambda: path.write_bytes(npy("(100,)", "[('a', '<u2')]"))
    yield "not a shard", lambda: path.write_bytes(npy("(100,)", "()"))
    yield ">u2", lambda: path.write_bytes(npy("(100,)", "'>u2'"))
    yield "not a shard", lambda: path.write_bytes(npy("-" * 9000 + "1"))
    yield "not a shard", lambda: path.write_bytes(npy("{[]: 1}"))
    yield "not a shard", lambda: path.write_bytes(npy("(100,("))
    yield "large", lambda: path.write_bytes(npy("(100,)" + " " * 20_000))
    yield "No such file", lambda: path.symlink_to("nothing")
    yield "not a regular file", lambda: path.symlink_to("/dev/zero")
    yield "not a regular file", lambda: os.mkfifo(path)


@pytest.mark.parametrize("case", range(26))
def test_invalid_shards_are_rejected(tmp_path, case):
    words, write = list(invalid_shards(tmp_path))[case]
    write()
    with pytest.raises(UserError) as error:
        open_shards(tmp_path, "train")
    assert words in str(error.value) and "\n" not in str(error.value)


def bin_content(tokens, magic=20240520, version=1, length=None):
    """The bytes of a .bin file of llm.c and modded-nanogpt."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if length is None else length
    return header.tobytes() + tokens.tobytes()


def write_bin_corpus(corpus, folder, name):
    """The shards of a folder as .bin files."""
    folder.mkdir()
    for path in corpus.glob("*.npy"):
        new = folder / path.name.replace("edufineweb", name)
        new.with_suffix(".bin").write_bytes(bin_content(np.load(path)))
    return folder


def test_shards_of_peers_by_name(tmp_path):
    """llm.c's TinyStories_train.bin, and nanoGPT's train.bin, which has no header."""
    tokens = np.arange(3000, dtype=np.uint16)
    for name, header in (("TinyStories", True), ("tiny_shakespeare", True), ("", False)):
        folder = tmp_path / f"of_{name}"
        folder.mkdir()
        for split in ("train", "val"):
            path = folder / f"{name}{'_' if name else ''}{split}.bin"
            path.write_bytes(bin_content(tokens) if header else tokens.tobytes())
            (shard,) = open_shards(folder, split)
            assert shard.path == path and np.array_equal(shard[:], tokens)
    (folder / "meta.pkl").touch()
    with pytest.raises(UserError, match="its tokens are characters"):
        open_shards(folder, "train")
    (folder / "meta.pkl").unlink()
    path.write_bytes(b"odd")
    with pytest.raises(UserError, match="val.bin is not a shard"):
        open_shards(folder, "val")


def test_bin_shards_train_like_npy_shards(train, corpus, tmp_path):
    other = write_bin_corpus(corpus, tmp_path / "bin", "fineweb")
    for split in ("train", "val"):
        npy, bins = (open_shards(folder, split) for folder in (corpus, other))
        assert all(np.array_equal(one[:], another[:]) for one, another in zip(npy, bins, strict=True))
    runs = train("npy"), train("bin", "--data_dir", other, "--checkpoint_every", 3)
    assert logged(runs[0]) == logged(runs[1])
    assert [json.loads((run / "config.json").read_text())["dataset"] for run in runs] == [FINEWEB_EDU, FINEWEB]
    training = json.loads((runs[1] / "checkpoint_000003" / "training.json").read_text())
    assert training["shards"]["fineweb_train_000001.bin"] == 2000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin with 20240520"),
        (bytes(9), "does not begin with 20240520"),
        (npy("(100,)"), "does not begin"),
        (bin_content(np.zeros(9, np.uint32), magic=20240801, version=7), "does not begin"),
        (bin_content(np.zeros(9, np.uint16), version=0), "does not begin"),
        (bin_content(np.zeros(9, np.uint16), length=10), "not a shard"),
        (bin_content(np.zeros(9, np.uint16), length=-1), "not a shard"),
        (bin_content(np.zeros(0, np.uint16)), "not a shard"),
        (bin_content(np.zeros(9, np.uint16))[:1000], "not a shard"),
        (bin_content(np.full(9, 50257, np.uint16)), "token 50257"),
    ],
)
def test_invalid_bin_shards_are_rejected(tmp_path, content, words):
    (tmp_path / "fineweb_train_000001.bin").write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        open_shards(tmp_path, "train")
    assert "fineweb_train_000001.bin" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("edufineweb_train_000001.npy", FINEWEB_EDU),
        ("edu_fineweb_train_000001.bin", FINEWEB_EDU),
        ("fineweb_train_000001.bin", FINEWEB),
        ("text_train_000001.npy", None),
        ("demo_train_000001.npy", None),
        ("my_fineweb_train_000001.npy", None),
    ],
)
def test_the_name_of_the_dataset(tmp_path, name, dataset):
    assert dataset_name(tmp_path) is None
    (tmp_path / name).touch()
    assert dataset_name(tmp_path) == dataset
    (tmp_path / "text_val_000000.npy").touch()
    assert dataset_name(tmp_path) is None  # shards of several datasets


def test_a_shard_is_an_array_on_disk(tmp_path):
    path, tokens = tmp_path / "x_train_000001.npy", np.arange(50_000, dtype=np.uint16)
    np.save(path, tokens)
    (shard,) = open_shards(tmp_path, "train")
    assert len(shard) == 50_000
    for part in (slice(None), slice(7, 9), slice(-5, None), slice(49_990, 60_000), slice(9, 7)):
        assert np.array_equal(shard[part], tokens[part])
    path.unlink()  # a mapped file stays readable
    assert np.array_equal(shard[:], tokens)


def test_document_starts_in_blocks(tmp_path, monkeypatch):
    tokens = np.random.default_rng(0).choice(np.array([7, END_OF_TEXT], dtype=np.uint16), 1000)
    write_shard(tmp_path / "x_train_000001.npy", tokens)
    (shard,) = open_shards(tmp_path, "train")
    for block in (1, 64, 999, 1000, 5000):
        monkeypatch.setattr("data.shards.BLOCK", block)
        assert np.array_equal(shard.document_starts(), np.flatnonzero(tokens == END_OF_TEXT))


@pytest.mark.parametrize("sizes", [[45], [10, 10, 25], [4, 0, 9, 32], [1] * 45])
@pytest.mark.parametrize(("span", "period"), [(10, None), (2, 20), (2, 7)])
def test_state_and_skip_continue_with_the_next_shard(sizes, span, period):
    tokens = np.arange(45, dtype=np.uint16)
    chunks = list(enumerate(np.split(tokens, np.cumsum(sizes)[:-1])))
    shards = list(split_into_shards(chunks, 10, span, period))
    offset = tokens % (period or 100)
    if period:
        tokens = np.where((offset == 0) | (offset == span), END_OF_TEXT, tokens)
    train = tokens[offset >= span]
    assert np.array_equal(np.concatenate([val for val, *_ in shards]), tokens[offset < span])
    assert [shard[1].tolist() for shard in shards] == [train[i : i + 10].tolist() for i in range(0, len(train), 10)]
    assert shards[-1][2:] == (None, 0)
    for i, (_, _, state, skip) in enumerate(shards[:-1]):
        rest = split_into_shards(chunks[state:], 10, span, period, sum(sizes[:state]), skip)
        for shard, expected in zip(rest, shards[i + 1 :], strict=True):
            assert all(map(np.array_equal, shard, expected))


def test_shards_must_match_the_manifest(tmp_path):
    write_corpus(tmp_path, sizes=(50, 60, 70))
    entries = [manifest_entry(path) for path in sorted(tmp_path.glob("*.npy"))]
    (tmp_path / "shards.json").write_text(json.dumps(dict(source={}, shards=entries)))
    assert [len(shard) for shard in open_shards(tmp_path, "train")] == [60, 70]
    path = tmp_path / "edufineweb_train_000002.npy"
    write_shard(path, np.zeros(9, dtype=np.uint16))
    with pytest.raises(UserError, match="train_000002.npy has 9 tokens instead of 70"):
        open_shards(tmp_path, "train")
    path.unlink()
    with pytest.raises(UserError, match="train_000002.npy is missing"):
        open_shards(tmp_path, "train")
    open_shards(tmp_path, "val")


WRONG_ENTRIES = [7, None, [], "abcd", dict(tokens=-1), dict(tokens="9")]
WRONG_ENTRIES += [dict(documents=None), dict(sha256=7), dict(name=None), dict(name=["x"])]


def test_a_manifest_of_something_else(tmp_path):
    write_corpus(tmp_path, sizes=(50, 60))
    path = tmp_path / "edufineweb_train_000001.npy"
    entry = manifest_entry(path)
    entries = [[entry | wrong if isinstance(wrong, dict) else wrong] for wrong in WRONG_ENTRIES]
    contents = [dict(source={}, shards=shards) for shards in (7, None, {}, "x", *entries)]
    contents += [dict(source=7, shards=[entry]), dict(shards=[entry]), [entry], None]
    for content in contents:
        (tmp_path / "shards.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="shards.json") as error:
            open_shards(tmp_path, "train")
        assert "\n" not in str(error.value)
    (tmp_path / "shards.json").write_text(json.dumps(dict(source={}, shards=[entry])))
    open_shards(tmp_path, "train")


def test_progress_of_something_else(tmp_path):
    write_corpus(tmp_path, sizes=(50, 60))
    entry = manifest_entry(tmp_path / "edufineweb_train_000001.npy")
    valid = dict(flags={}, source={}, shards=[entry], state=[0, 5], skip=3)
    contents = [valid | {name: value} for name in valid for value in (7.5, "x")]
    contents += [valid | dict(shards=[entry | wrong if isinstance(wrong, dict) else wrong]) for wrong in WRONG_ENTRIES]
    contents += [{name: valid[name] for name in valid if name != "state"}, [valid], None]
    folder = ShardFolder(tmp_path)
    for content in contents:
        folder.unfinished.write_text(json.dumps(content))
        with pytest.raises(UserError, match="unfinished.json is damaged") as error:
            folder.read_progress()
        assert "\n" not in str(error.value)
    folder.unfinished.write_text(json.dumps(valid))
    assert folder.read_progress() == valid
    (tmp_path / entry["name"]).unlink()
    with pytest.raises(UserError, match=f"{entry['name']}: No such file"):
        folder.read_progress()


def test_a_failed_write_leaves_the_previous_file(tmp_path):
    path = tmp_path / "x_train_000001.npy"
    write_shard(path, np.ones(3, dtype=np.uint16))
    with pytest.raises(OSError), atomic_write(path) as file:
        file.write(b"half of a shard")
        raise OSError("no space left on device")
    assert np.load(path).tolist() == [1, 1, 1]
