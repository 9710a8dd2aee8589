import json

import numpy as np
import pytest
from conftest import write_corpus

from common.cli import UserError
from common.files import atomic_write
from data.shards import ShardFolder, manifest_entry, open_shards, split_into_shards, write_shard


def invalid_shards(folder):
    """(words of the error, function that writes the file) for each way in which a file is not a shard."""
    valid = np.arange(100, dtype=np.uint16)
    path = folder / "x_train_000001.npy"
    yield "no train shards", lambda: None
    yield "int64", lambda: np.save(path, valid.astype(np.int64))
    yield "(10, 10)", lambda: np.save(path, valid.reshape(10, 10))
    yield "not empty", lambda: np.save(path, valid[:0])
    yield "cannot read", lambda: path.mkdir()
    yield "magic string", lambda: path.write_bytes(b"hello")
    yield "magic string", lambda: np.savez(path.open("wb"), valid)
    yield "Python objects", lambda: np.save(path, np.array([{}]))
    yield "not a shard", lambda: path.write_bytes(b"")
    yield "token 50257", lambda: np.save(path, valid + np.uint16(50158))
    yield "not a shard", lambda: (np.save(path, valid), path.write_bytes(path.read_bytes()[:150]))


@pytest.mark.parametrize("case", range(11))
def test_invalid_shards_are_rejected(tmp_path, case):
    words, write = list(invalid_shards(tmp_path))[case]
    write()
    with pytest.raises(UserError) as error:
        open_shards(tmp_path, "train")
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("sizes", [[25], [10, 10, 5], [4, 0, 9, 12], [1] * 25])
def test_state_and_skip_continue_with_the_next_shard(sizes):
    tokens = np.arange(25, dtype=np.uint16)
    chunks = list(enumerate(np.split(tokens, np.cumsum(sizes)[:-1])))
    shards = list(split_into_shards(chunks, 10))
    assert [shard[0].tolist() for shard in shards] == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert shards[2][1:] == (None, 0)
    for i in range(2):
        _, state, skip = shards[i]
        rest = list(split_into_shards(chunks[state:], 10, skip))
        assert [shard[0].tolist() for shard in rest] == [shard[0].tolist() for shard in shards[i + 1 :]]


def test_shards_must_match_the_manifest(tmp_path):
    write_corpus(tmp_path, sizes=(50, 60, 70))
    entries = [manifest_entry(path) for path in ShardFolder(tmp_path).shard_paths()]
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


def test_a_failed_write_leaves_the_previous_file(tmp_path):
    path = tmp_path / "x_train_000001.npy"
    write_shard(path, np.ones(3, dtype=np.uint16))
    with pytest.raises(OSError), atomic_write(path) as file:
        file.write(b"half of a shard")
        raise OSError("no space left on device")
    assert np.load(path).tolist() == [1, 1, 1]
