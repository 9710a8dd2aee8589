"""The order in which training reads tokens, and the loader that gives each rank its micro-batches."""

import collections
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from common.errors import UserError
from data.shards import identity, open_shards
from data.tokenizer import END_OF_TEXT, vocabulary_folder
from kernels.documents import find_offsets, move_offsets

# Shards that are shuffled together. Indexing 8 shards of 100M tokens takes about a second and 1.6 GB of page cache; all
# of FineWeb-Edu 10BT at once would need 20 GB and a full read before the first step.
SHUFFLE_WINDOW = 8


class Batch(NamedTuple):
    """Sequences to train on or to evaluate, on a device. GPT.forward takes the three in this order."""

    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64; -1: no target
    offsets: torch.Tensor  # of the documents in the inputs, see kernels.documents.find_offsets


def make_batch(inputs, targets, device):
    """A Batch on a device from integer tensors in host memory."""
    offsets = move_offsets(find_offsets(inputs, END_OF_TEXT), device)
    inputs, targets = (tensor.to(device, non_blocking=True).long() for tensor in (inputs, targets))
    return Batch(inputs, targets, offsets)


class TokenStream:
    """The tokens of a list of shards as one endless sequence, epoch after epoch, readable from any position.

    With shuffle, each epoch draws an order of the shards from the seed, takes SHUFFLE_WINDOW shards at a time, and
    shuffles the documents of each window. Every token appears once an epoch. A document that continues in the next
    shard counts as two documents. Without shuffle, the shards are read in order.
    """

    def __init__(self, shards, seed=0, shuffle=False):
        self.shards = shards
        self.seed = seed
        self.shuffle = shuffle
        self.total = sum(len(shard) for shard in shards)  # tokens in an epoch
        self._window = range(0), None  # of the last read; one object, since two threads may read: see _open_window()

    def sequences(self, tokens, seq_len):
        """Number of whole sequences, with a target for every token, in the first `tokens` tokens; at least one."""
        return max(1, min(tokens, self.total - 1) // seq_len)

    def read(self, position, count):
        """Tokens [position, position + count) of the stream: (count,) uint16. Position 0 is the first epoch's start.

        Raises UserError as Shard does.
        """
        tokens = np.empty(count, dtype=np.uint16)
        filled = 0
        while filled < count:
            begin = position + filled
            positions, documents = self._window
            if begin not in positions:
                positions, documents = self._window = self._open_window(begin)
            shard, stop, end = documents[:, np.searchsorted(documents[2], begin, side="right")].tolist()
            n = min(end - begin, count - filled)
            first = stop - (end - begin)
            tokens[filled : filled + n] = self.shards[shard][first : first + n]
            filled += n
        return tokens

    def _open_window(self, position):
        """(positions, documents) of the window with this position: a range, and (3, documents) int64, in reading order:
        the index of the shard, the document's end within it, and its end in the stream. Without shuffle, each shard
        counts as one document."""
        epoch, offset = divmod(position, self.total)
        order = np.arange(len(self.shards))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        windows = [order[i : i + SHUFFLE_WINDOW].tolist() for i in range(0, len(order), SHUFFLE_WINDOW)]
        ends = np.cumsum([sum(len(self.shards[shard]) for shard in window) for window in windows])
        w = int(np.searchsorted(ends, offset, side="right"))
        parts = []
        for index in windows[w]:
            # 0 too: a shard may begin with the rest of a document
            starts = np.union1d([0], self.shards[index].document_starts() if self.shuffle else [0])
            stops = np.append(starts[1:], len(self.shards[index]))
            parts.append(np.stack((np.full_like(stops, index), stops, stops - starts)))
        shard, stop, length = np.concatenate(parts, axis=1)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch, *windows[w]]).permutation(len(stop))
            shard, stop, length = shard[order], stop[order], length[order]
        end = epoch * self.total + int(ends[w])
        begin = end - int(length.sum())
        return range(begin, end), np.stack((shard, stop, begin + np.cumsum(length)))


def open_streams(config, distributed):
    """The (training, validation) TokenStreams of config.data_dir, and the identity() of their shards. A collective:
    with --demo rank 0 makes the data.

    Raises UserError if it has too few tokens for one step, or for one validation sequence.
    """
    if config.demo:
        from data.demo import make_data

        distributed.on_main(lambda: make_data(config.data_dir))
    vocabulary_folder()  # checkpoints have its files: one that is missing is an error now
    train = TokenStream(open_shards(config.data_dir, "train"), config.seed, config.shuffle)
    val = TokenStream(open_shards(config.data_dir, "val"))
    if train.total < config.total_batch_size:
        raise UserError(
            f"{config.data_dir} has {train.total:,} training tokens, a step takes {config.total_batch_size:,}: "
            "use more data, or a smaller --total_batch_size"
        )
    if val.total <= config.seq_len:
        raise UserError(
            f"{config.data_dir} has {val.total} validation tokens, seq_len + 1 = {config.seq_len + 1} are needed: "
            "use more data, or a smaller --seq_len"
        )
    return train, val, identity(config.data_dir, [*train.shards, *val.shards])


class Loader:
    """Gives one rank its micro-batches; a thread reads ahead.

    A step trains on the next tokens of the stream. Micro-batch m of data-parallel rank r holds the B sequences from
    (m * data_size + r) * B on, so a step has the same tokens for every B and every number of ranks. Consecutive
    sequences share one token: the last target of one is the first input of the next. Ranks that split a model or a
    sequence (--tensor, --context, --pipeline) have the same r.
    """

    PREFETCH = 4  # micro-batches

    def __init__(self, stream, micro_batch_size, seq_len, distributed, position=0):
        """distributed: parallel.process_group.Distributed. position: the first token of the stream to read."""
        self.stream = stream
        self.shape = (micro_batch_size, seq_len)
        self.device = device = distributed.device
        self.rank, self.data_size = distributed.data_rank, distributed.data_size
        self.position = position  # in the stream, of the next batch; the same on every rank
        # the thread allocates pinned memory, which belongs to the thread's current GPU: this rank's, not GPU 0
        on_gpu = dict(initializer=torch.cuda.set_device, initargs=(device,)) if self.device.type == "cuda" else {}
        self._thread = ThreadPoolExecutor(1, **on_gpu)
        self._prefetched = collections.deque()

    def next_batch(self, sequences=None):
        """The next Batch, of so many sequences; None: of as many as before. Raises UserError as TokenStream.read."""
        if sequences not in (None, self.shape[0]):
            self.shape = (sequences, self.shape[1])
            self._prefetched.clear()
        size = self.shape[0] * self.shape[1]
        while len(self._prefetched) < self.PREFETCH:
            start = self.position + (len(self._prefetched) * self.data_size + self.rank) * size
            self._prefetched.append(self._thread.submit(self._read, start, size + 1))
        tokens, offsets = self._prefetched.popleft().result()
        # uint16 from pinned memory: a quarter of int64's bytes, and the copy does not block the host
        tokens = tokens.to(self.device, non_blocking=True)
        self.position += self.data_size * size
        inputs, targets = tokens[:-1].long().view(self.shape), tokens[1:].long().view(self.shape)
        return Batch(inputs, targets, move_offsets(offsets, self.device))

    def _read(self, start, count):
        tokens = torch.from_numpy(self.stream.read(start, count))
        offsets = find_offsets(tokens[:-1].view(self.shape), END_OF_TEXT)
        return (tokens.pin_memory(), offsets.pin_memory()) if self.device.type == "cuda" else (tokens, offsets)
