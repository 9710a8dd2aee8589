"""The folder that fineweb.py fills with shards: file names, progress, manifest; an interrupted call continues."""

import sys
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import lock, write_json
from data import shards
from data.tokenizer import END_OF_TEXT


def split_into_shards(chunks, shard_size, span, period, position=0, skip=0):
    """Divide chunks of tokens into validation and training: yields (val, train, state, skip) for each training shard.

    chunks: an iterable of (state, tokens), where `state` says how to read the same chunk again.
    span: every `period` tokens begin with `span` tokens for validation, and the first token after each cut becomes
    <|endoftext|>. Without a period the first `span` tokens of all are for validation.
    position: tokens before the first chunk. skip: leave out so many tokens of the first chunk.
    val: (n,) uint16, the validation tokens since the last yield. train: (shard_size,) uint16; the last one is shorter,
    possibly empty. The yielded state and skip are where the next shard begins; after the last one the state is None.
    """
    nothing = np.empty(0, dtype=np.uint16)
    val, train, filled = [nothing], np.empty(shard_size, dtype=np.uint16), 0
    for state, chunk in chunks:
        while skip < len(chunk):
            offset = (position + skip) % (period or sys.maxsize)
            in_val = offset < span
            n = span - offset if in_val else min((period or sys.maxsize) - offset, shard_size - filled)
            n = min(n, len(chunk) - skip)
            part = chunk[skip : skip + n].copy()
            if period and offset in (0, span):
                part[0] = END_OF_TEXT
            skip += n
            if in_val:
                val.append(part)
                continue
            train[filled : filled + n] = part
            filled += n
            if filled == shard_size:
                yield np.concatenate(val), train, state, skip
                val, train, filled = [nothing], np.empty(shard_size, dtype=np.uint16), 0
        position += len(chunk)
        skip -= len(chunk)
    yield np.concatenate(val), train[:filled], None, 0


class ShardFolder:
    """The folder that fineweb.py fills: file names, progress, manifest.

    Progress is a dictionary: the flags and the source of the documents, which a continued call must share; the
    manifest's entries of the shards so far; and the state and skip (see split_into_shards) of the next shard.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.unfinished, self._lock = self.path / shards.UNFINISHED, self.path / "lock"

    def lock(self):
        """Create the folder if needed and lock it: returns a file that holds the lock until closed.

        Raises UserError if another process holds the lock; OSError.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return lock(self._lock, f"{self.path} is being written by another process: wait for it or choose another --out")

    def read_progress(self):
        """The progress of an interrupted call, or None before its first shard. Raises UserError if the folder is
        complete."""
        if not self.unfinished.exists():
            if existing := [*shards.list_shards(self.path, "val"), *shards.list_shards(self.path, "train")]:
                raise UserError(
                    f"{self.path} already holds {len(existing)} shards: choose another --out, or delete them"
                )
            return None
        try:
            progress = shards.read_with_entries(self.unfinished, flags=dict, source=dict, state=list | None, skip=int)
            for entry in progress["shards"]:
                if not 0 < entry["tokens"] <= len(shards.open_shard(self.path / entry["name"])):
                    raise ValueError(f"{entry['name']} does not have {entry['tokens']} tokens")
            return progress if progress["shards"] else None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.unfinished} is damaged ({error}): delete {self.path} and start again") from error

    def add(self, val, train, progress):
        """Write the next training shard, add to the validation shard, and write the progress; after the last shard
        write the manifest instead. Returns the progress with the shards' entries. Raises OSError."""
        entries, dataset = list(progress["shards"]), progress["source"].get("dataset")
        name = {shards.FINEWEB_EDU: "edufineweb", shards.FINEWEB: "fineweb"}.get(dataset, "text")
        if not entries:
            write_json(self.unfinished, progress)  # marks the folder as not complete
        for index, tokens in ((0, val), (max(1, len(entries)), train)):
            path = self.path / f"{name}_{'train' if index else 'val'}_{index:06d}.npy"
            if index < len(entries):  # an interrupted call may have added more than the entry counts
                tokens = np.concatenate((shards.open_shard(path)[: entries[index]["tokens"]], tokens))
            if len(tokens):
                shards.write_shard(path, tokens)
                entries[index : index + 1] = [shards.manifest_entry(path)]
        progress = progress | dict(shards=entries)
        if progress["state"] is None:
            write_json(self.path / shards.MANIFEST, dict(source=progress["source"], shards=entries))
            self.unfinished.unlink()
            self._lock.unlink()  # a process that has opened it finds a complete folder
        else:
            write_json(self.unfinished, progress)
        return progress
