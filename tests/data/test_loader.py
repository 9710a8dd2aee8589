from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ALONE
from texts import write_corpus

from common.errors import UserError
from data.loader import Loader, TokenStream
from data.shards import open_shards
from data.tokenizer import END_OF_TEXT
from parallel.process_group import Distributed

CPU = torch.device("cpu")


def split_documents(tokens):
    starts = np.flatnonzero(tokens == END_OF_TEXT)
    starts = starts if len(starts) and starts[0] == 0 else np.append(0, starts)
    return [tuple(part) for part in np.split(tokens, starts[1:])]


def test_without_shuffle_the_shards_are_read_in_order(corpus):
    shards = open_shards(corpus, "train")
    stream = TokenStream(shards)
    plain = np.concatenate([shard[:] for shard in shards])
    assert stream.total == len(plain) == 4200
    twice = np.concatenate([plain, plain])
    for position, count in [(0, 4200), (1990, 40), (4190, 20), (0, 8400), (4199, 1), (4200, 3)]:
        assert np.array_equal(stream.read(position, count), twice[position : position + count])


@pytest.mark.parametrize("window", [1, 2, 8])
def test_shuffle_reads_every_document_once_an_epoch(corpus, monkeypatch, window):
    monkeypatch.setattr("data.loader.SHUFFLE_WINDOW", window)
    shards = open_shards(corpus, "train")
    expected = Counter(document for shard in shards for document in split_documents(shard[:]))
    stream = TokenStream(shards, seed=3, shuffle=True)
    epochs = [stream.read(epoch * stream.total, stream.total) for epoch in range(2)]
    # the rest of a document at the start of a shard has no <|endoftext|> and so joins the document read before it:
    # compare all tokens, and those documents that begin with <|endoftext|>
    complete = {document for document in expected if document[0] == END_OF_TEXT}
    for epoch in epochs:
        assert Counter(epoch.tolist()) == Counter(token for document in expected.elements() for token in document)
        assert len(complete - set(split_documents(epoch))) <= len(shards)
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], np.concatenate([shard[:] for shard in shards]))
    if window > 1:  # documents of different shards mix
        position = {document: i for i, document in enumerate(split_documents(epochs[0]))}
        spans = [np.ptp([position[d] for d in split_documents(shard[:]) if d in position]) for shard in shards]
        assert sum(spans) > 1.3 * len(position)


def test_random_reads_equal_one_sequential_read(corpus):
    shards = open_shards(corpus, "train")
    sequential = TokenStream(shards, seed=5, shuffle=True).read(0, 9000)
    stream = TokenStream(shards, seed=5, shuffle=True)
    rng = np.random.default_rng(0)
    for _ in range(200):
        position = int(rng.integers(0, 8900))
        count = int(rng.integers(1, 9000 - position))
        assert np.array_equal(stream.read(position, count), sequential[position : position + count])
    assert not np.array_equal(TokenStream(shards, seed=6, shuffle=True).read(0, 9000), sequential)


def test_every_window_is_read(tmp_path):
    write_corpus(tmp_path, sizes=(50, *[40 + i for i in range(19)]))
    shards = open_shards(tmp_path, "train")
    stream = TokenStream(shards, seed=2, shuffle=True)
    assert Counter(stream.read(0, stream.total).tolist()) == Counter(
        np.concatenate([shard[:] for shard in shards]).tolist()
    )


def test_a_token_outside_the_vocabulary_is_an_error(tmp_path):
    """In the middle of a shard, which open_shards does not check."""
    tokens = np.full(200_000, 7, dtype=np.uint16)
    tokens[100_000] = 60_000
    np.save(tmp_path / "x_train_000001.npy", tokens)
    stream = TokenStream(open_shards(tmp_path, "train"))
    assert (stream.read(0, 100_000) == 7).all()
    with pytest.raises(UserError, match="x_train_000001.npy has token 60000"):
        stream.read(99_000, 2_000)


def collect(corpus, micro_batch_size, world_size, steps, start=0):
    """Inputs and targets of some steps of 24 sequences, in global order over all ranks, and the position after them."""
    stream = TokenStream(open_shards(corpus, "train"), seed=1, shuffle=True)
    ranks = [Distributed(rank, world_size, CPU) for rank in range(world_size)]
    loaders = [Loader(stream, micro_batch_size, 16, rank, start) for rank in ranks]
    xs, ys = [], []
    for _ in range(steps * 24 // (micro_batch_size * world_size)):
        for loader in loaders:
            x, y, _ = loader.next_batch()
            assert x.shape == y.shape == (micro_batch_size, 16) and x.dtype == y.dtype == torch.int64
            xs.append(x)
            ys.append(y)
    assert len({loader.position for loader in loaders}) == 1
    return torch.cat(xs), torch.cat(ys), loaders[0].position


def test_a_step_has_the_same_tokens_for_every_division(corpus):
    x, y, position = collect(corpus, 24, 1, 3)
    stream = TokenStream(open_shards(corpus, "train"), seed=1, shuffle=True)
    expected = stream.read(0, 3 * 24 * 16 + 1).astype(np.int64)
    assert np.array_equal(x.flatten(), expected[:-1]) and np.array_equal(y.flatten(), expected[1:])
    for micro_batch_size, world_size in [(4, 1), (4, 2), (2, 3), (1, 8), (12, 2)]:
        other = collect(corpus, micro_batch_size, world_size, 3)
        assert torch.equal(other[0], x) and torch.equal(other[1], y) and other[2] == position


def test_a_loader_begins_at_any_position(corpus):
    """Also with another micro-batch size and number of ranks, and into the next epoch."""
    x, _, end = collect(corpus, 4, 2, 9)  # 3456 tokens of an epoch's 4200
    _, _, position = collect(corpus, 4, 2, 4)
    rest, _, position = collect(corpus, 2, 3, 5, start=position)
    assert torch.equal(rest, x[4 * 24 :]) and position == end
    beyond, _, _ = collect(corpus, 4, 1, 2, start=position)
    assert not torch.equal(beyond, x[: 2 * 24])


def test_micro_batches_may_grow(corpus):
    x, _, _ = collect(corpus, 24, 1, 1)
    loader = Loader(TokenStream(open_shards(corpus, "train"), seed=1, shuffle=True), 2, 16, ALONE)
    sizes = (2, 2, 4, 4, 12)
    batches = [loader.next_batch(size).inputs for size in sizes]
    assert [len(batch) for batch in batches] == list(sizes) and torch.equal(torch.cat(batches), x)


def test_an_error_in_the_thread_reaches_next_batch(corpus, monkeypatch):
    loader = Loader(TokenStream(open_shards(corpus, "train")), 2, 16, ALONE)
    monkeypatch.setattr(loader.stream, "read", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        loader.next_batch()


def test_offsets_of_the_documents_in_each_micro_batch(corpus):
    loader = Loader(TokenStream(open_shards(corpus, "train"), seed=1, shuffle=True), 4, 16, ALONE)
    for _ in range(3):
        x, _, offsets = loader.next_batch()
        starts = [i for i, token in enumerate(x.flatten().tolist()) if token == END_OF_TEXT or i % 16 == 0]
        assert offsets.tolist()[: len(starts) + 1] == [*starts, 64] and len(starts) > 4
