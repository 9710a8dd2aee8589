from collections import Counter

import numpy as np
import pytest
import torch
from conftest import write_corpus
from loader.loader import Loader, TokenStream
from loader.shards import open_shards
from loader.tokenizer import END_OF_TEXT

from common.cli import UserError
from data import loader


def split_documents(tokens):
    starts = np.flatnonzero(tokens == END_OF_TEXT)
    starts = starts if len(starts) and starts[0] == 0 else np.append(0, starts)
    return [tuple(part) for part in np.split(tokens, starts[1:])]


def test_in_order_it_reads_the_shards_as_they_lie(corpus):
    shards = open_shards(corpus, "train")
    stream = TokenStream(shards)
    plain = np.concatenate(shards)
    assert stream.total == len(plain) == 4200
    twice = np.concatenate([plain, plain])
    for position, count in [(0, 4200), (1990, 40), (4190, 20), (0, 8400), (4199, 1), (4200, 3)]:
        assert np.array_equal(stream.read(position, count), twice[position : position + count])


@pytest.mark.parametrize("window", [1, 2, 8])
def test_shuffled_every_document_comes_once_an_epoch(corpus, monkeypatch, window):
    monkeypatch.setattr(loader, "SHUFFLE_WINDOW", window)
    shards = open_shards(corpus, "train")
    expected = Counter(document for shard in shards for document in split_documents(np.asarray(shard)))
    stream = TokenStream(shards, seed=3, shuffle=True)
    epochs = [stream.read(epoch * stream.total, stream.total) for epoch in range(2)]
    # a shard's first piece opens without <|endoftext|> and so joins the document before it: compare tokens for all,
    # and documents for those that are whole
    whole = {document for document in expected if document[0] == END_OF_TEXT}
    for epoch in epochs:
        assert Counter(epoch.tolist()) == Counter(token for document in expected.elements() for token in document)
        assert len(whole - set(split_documents(epoch))) <= len(shards)
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], np.concatenate(shards))
    if window > 1:  # and documents of different shards mix
        position = {document: i for i, document in enumerate(split_documents(epochs[0]))}
        spans = [np.ptp([position[d] for d in split_documents(np.asarray(shard)) if d in position]) for shard in shards]
        assert sum(spans) > 1.3 * len(position)


def test_shuffled_reads_do_not_depend_on_how_they_are_cut(corpus):
    shards = open_shards(corpus, "train")
    whole = TokenStream(shards, seed=5, shuffle=True).read(0, 9000)
    pieces = TokenStream(shards, seed=5, shuffle=True)
    rng = np.random.default_rng(0)
    for _ in range(200):
        position = int(rng.integers(0, 8900))
        count = int(rng.integers(1, 9000 - position))
        assert np.array_equal(pieces.read(position, count), whole[position : position + count])
    assert not np.array_equal(TokenStream(shards, seed=6, shuffle=True).read(0, 9000), whole)


def collect(corpus, micro_batch_size, world_size, steps, start=None):
    """What all ranks together see: the steps' inputs and targets, sequences in global order."""
    stream = TokenStream(open_shards(corpus, "train"), seed=1, shuffle=True)
    loaders = [Loader(stream, micro_batch_size, 16, "cpu", rank, world_size) for rank in range(world_size)]
    for loader in loaders:
        if start:
            loader.restore(start)
    xs, ys = [], []
    for _ in range(steps * 24 // (micro_batch_size * world_size)):
        for loader in loaders:
            x, y = loader.next_batch()
            assert x.shape == y.shape == (micro_batch_size, 16) and x.dtype == y.dtype == torch.int64
            xs.append(x)
            ys.append(y)
    assert len({loader.position for loader in loaders}) == 1
    return torch.cat(xs), torch.cat(ys), loaders[0].state()


def test_ranks_and_micro_batches_only_divide_the_step(corpus):
    x, y, state = collect(corpus, 24, 1, 3)
    stream = TokenStream(open_shards(corpus, "train"), seed=1, shuffle=True)
    expected = stream.read(0, 3 * 24 * 16 + 1).astype(np.int64)
    assert np.array_equal(x.flatten(), expected[:-1]) and np.array_equal(y.flatten(), expected[1:])
    for micro_batch_size, world_size in [(4, 1), (4, 2), (2, 3), (1, 8), (12, 2)]:
        other = collect(corpus, micro_batch_size, world_size, 3)
        assert torch.equal(other[0], x) and torch.equal(other[1], y) and other[2] == state


def test_restored_it_goes_on_where_it_was(corpus):
    x, _, end = collect(corpus, 4, 2, 9)  # 3456 tokens, nearly an epoch of 4200
    _, _, state = collect(corpus, 4, 2, 4)
    rest, _, state = collect(corpus, 2, 3, 5, start=state)
    assert torch.equal(rest, x[4 * 24 :]) and state == end
    beyond, _, _ = collect(corpus, 4, 1, 2, start=state)
    assert not torch.equal(beyond, x[: 2 * 24])


def test_state_of_other_data_is_refused(corpus, tmp_path):
    loader = Loader(TokenStream(open_shards(corpus, "train"), seed=1, shuffle=True), 2, 16, "cpu")
    for change in (dict(total=1), dict(seed=2), dict(shuffle=False)):
        with pytest.raises(UserError):
            loader.restore(loader.state() | change)


def test_a_failing_read_stops_training(corpus, monkeypatch):
    loader = Loader(TokenStream(open_shards(corpus, "train")), 2, 16, "cpu")
    monkeypatch.setattr(loader.stream, "read", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        loader.next_batch()


def test_a_token_beyond_the_vocabulary_stops_training(tmp_path):
    """Also where it stands too deep in a shard to be seen at the start."""
    tokens = np.full(200_000, 7, dtype=np.uint16)
    tokens[100_000] = 60_000
    np.save(tmp_path / "x_train_000001.npy", tokens)
    stream = TokenStream(open_shards(tmp_path, "train"))
    assert (stream.read(0, 100_000) == 7).all()
    with pytest.raises(UserError, match="x_train_000001.npy has token 60000"):
        stream.read(99_000, 2_000)


def test_every_window_of_many_shards_is_reached(tmp_path):
    write_corpus(tmp_path, sizes=(50, *[40 + i for i in range(19)]))
    shards = open_shards(tmp_path, "train")
    stream = TokenStream(shards, seed=2, shuffle=True)
    assert Counter(stream.read(0, stream.total).tolist()) == Counter(np.concatenate(shards).tolist())


def bad_shards(folder):
    good = np.arange(100, dtype=np.uint16)
    path = folder / "x_train_000001.npy"
    yield "no train shards", lambda: None
    yield "int64", lambda: np.save(path, good.astype(np.int64))
    yield "(10, 10)", lambda: np.save(path, good.reshape(10, 10))
    yield "not empty", lambda: np.save(path, good[:0])
    yield "cannot read", lambda: path.mkdir()
    yield "magic string", lambda: path.write_bytes(b"hello")
    yield "magic string", lambda: np.savez(path.open("wb"), good)
    yield "Python objects", lambda: np.save(path, np.array([{}]))
    yield "not a shard", lambda: path.write_bytes(b"")
    yield "token 50257", lambda: np.save(path, good + np.uint16(50158))
    yield "not a shard", lambda: (np.save(path, good), path.write_bytes(path.read_bytes()[:150]))


@pytest.mark.parametrize("case", range(11))
def test_bad_shards_are_named(tmp_path, case):
    words, make = list(bad_shards(tmp_path))[case]
    make()
    with pytest.raises(UserError) as error:
        open_shards(tmp_path, "train")
    assert words in str(error.value) and "\n" not in str(error.value)
