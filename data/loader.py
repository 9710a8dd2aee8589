"""The one order in which training reads the tokens of its shards, and the loader that feeds a rank."""

import collections
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from common.cli import UserError
from data.shards import check_ids
from data.tokenizer import END_OF_TEXT

# Shards whose documents are shuffled together. A window of the usual 100M-token shards is indexed in about a second
# and lies in 1.6 GB of page cache; all of FineWeb-Edu 10BT at once would take 20 GB and a full read before step 0.
SHUFFLE_WINDOW = 8


class TokenStream:
    """The tokens of some shards as one endless sequence, epoch after epoch, that can be read from any position.

    With shuffle, each epoch takes the shards in an order drawn from the seed, SHUFFLE_WINDOW of them at a time, and
    the documents of such a window in an order drawn from the seed. Every token comes once an epoch. (The pieces of a
    document that a shard's end cuts in two count as two documents.) Without shuffle: the shards as they lie.
    """

    def __init__(self, shards, seed=0, shuffle=False):
        self.shards = shards
        self.seed = seed
        self.shuffle = shuffle
        self.total = sum(len(shard) for shard in shards)  # tokens in an epoch
        self._index = (None, None)  # the window last read, and its documents

    def read(self, position, count):
        """`count` tokens from `position` on, both in tokens since the start of the first epoch: (count,) uint16."""
        tokens = np.empty(count, dtype=np.uint16)
        filled = 0
        while filled < count:
            filled += self._read_some(position + filled, tokens[filled:])
        return tokens

    def _read_some(self, position, out):
        """Fill the start of `out` with what the window at `position` still has; returns how many tokens that was."""
        epoch, offset = divmod(position, self.total)
        shards, offset = self._find_window(epoch, offset)
        key = (epoch, tuple(shards))
        if self._index[0] != key:
            self._index = (key, self._order_documents(epoch, shards))
        shard_of, start, ends = self._index[1]
        filled = 0
        document = int(np.searchsorted(ends, offset, side="right"))
        while filled < len(out) and document < len(ends):
            skip = offset + filled - (ends[document - 1] if document else 0)  # tokens of this document already read
            n = min(int(ends[document] - offset - filled), len(out) - filled)
            first = start[document] + skip
            shard = self.shards[shard_of[document]]
            out[filled : filled + n] = shard[first : first + n]
            check_ids(out[filled : filled + n], getattr(shard, "filename", "a shard"))
            filled += n
            document += 1
        return filled

    def _find_window(self, epoch, offset):
        """The shards (indices) of the window that holds token `offset` of the epoch, and the offset within it."""
        order = np.arange(len(self.shards))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        windows = [order[i : i + SHUFFLE_WINDOW].tolist() for i in range(0, len(order), SHUFFLE_WINDOW)]
        ends = np.cumsum([sum(len(self.shards[shard]) for shard in window) for window in windows])
        w = int(np.searchsorted(ends, offset, side="right"))
        return windows[w], offset - (int(ends[w - 1]) if w else 0)

    def _order_documents(self, epoch, window):
        """A window's documents in reading order: each one's shard, first token there, running total of tokens."""
        shard_of, start, length = [], [], []
        for shard in window:
            tokens = self.shards[shard]
            first = np.flatnonzero(np.asarray(tokens) == END_OF_TEXT) if self.shuffle else np.array([0])
            if len(first) == 0 or first[0] != 0:  # the shard opens with the rest of a document
                first = np.concatenate(([0], first))
            start.append(first)
            length.append(np.diff(first, append=len(tokens)))
            shard_of.append(np.full(len(first), shard))
        shard_of, start, length = (np.concatenate(parts) for parts in (shard_of, start, length))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch, *window]).permutation(len(start))
            shard_of, start, length = shard_of[order], start[order], length[order]
        return shard_of, start, np.cumsum(length)


class Loader:
    """Feeds one rank its micro-batches, read ahead by a thread.

    A step trains on the next tokens of the stream; ranks and micro-batches only divide them: micro-batch m of rank r
    holds sequences (m * world_size + r) * B to that + B, so that the same tokens make a step whatever B and the number
    of ranks are. Sequences overlap by one token, the last one's target.
    """

    AHEAD = 4  # micro-batches

    def __init__(self, stream, micro_batch_size, seq_len, device, rank=0, world_size=1):
        self.stream = stream
        self.shape = (micro_batch_size, seq_len)
        self.device = torch.device(device)
        self.rank = rank
        self.world_size = world_size
        self.position = 0  # tokens of the stream that all ranks together have been given
        # pinned memory belongs to the thread's GPU, which must be this rank's and not GPU 0
        on_gpu = dict(initializer=torch.cuda.set_device, initargs=(device,)) if self.device.type == "cuda" else {}
        self._reader = ThreadPoolExecutor(1, **on_gpu)
        self._ahead = collections.deque()

    def state(self):
        """Where the loader stands, as a plain dictionary; the same on every rank."""
        return dict(position=self.position, total=self.stream.total, seed=self.stream.seed, shuffle=self.stream.shuffle)

    def restore(self, state):
        """Go on from a state(), also with another micro-batch size or number of ranks. Call before next_batch().

        Raises UserError when the state belongs to other data or another order.
        """
        own = self.state()
        for what in ("total", "seed", "shuffle"):
            if state[what] != own[what]:
                raise UserError(
                    f"the checkpoint read its data with {what} {state[what]}, this run has {own[what]}: go on with the "
                    "same data, --seed and --shuffle, or start a new run with --init_from"
                )
        self.position = state["position"]

    def next_batch(self):
        """The next inputs and targets, each (B, T) int64 on the device."""
        size = self.shape[0] * self.shape[1]
        while len(self._ahead) < self.AHEAD:
            start = self.position + (len(self._ahead) * self.world_size + self.rank) * size
            self._ahead.append(self._reader.submit(self._read, start, size + 1))
        # uint16 crosses to the GPU, a quarter of int64's bytes, from pinned memory and so without waiting for it
        tokens = self._ahead.popleft().result().to(self.device, non_blocking=True)
        self.position += self.world_size * size
        return tokens[:-1].long().view(self.shape), tokens[1:].long().view(self.shape)

    def _read(self, start, count):
        tokens = torch.from_numpy(self.stream.read(start, count))
        return tokens.pin_memory() if self.device.type == "cuda" else tokens
