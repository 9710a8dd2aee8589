"""The folder that fineweb.py fills with shards: file names, progress, manifest; an interrupted call continues."""

from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import lock, write_json
from data.shards import (
    BLOCK,
    FINEWEB,
    FINEWEB_EDU,
    MANIFEST,
    UNFINISHED,
    list_shards,
    manifest_entry,
    open_shard,
    read_with_entries,
    write_shard,
)


def split_into_shards(chunks, shard_size, skip=0):
    """Cut chunks of tokens into shards; yields (tokens, state, skip) for each shard. The last shard may be shorter.

    chunks: an iterable of (state, tokens), where `state` says how to read the same chunk again.
    skip: leave out so many tokens of the first chunk.
    The yielded state and skip are the arguments that continue with the next shard: the next shard begins `skip` tokens
    into the chunk of that state. After the last shard the state is None.
    """
    shard, filled = np.empty(shard_size, dtype=np.uint16), 0
    for state, chunk in chunks:
        while skip < len(chunk):
            n = min(shard_size - filled, len(chunk) - skip)
            shard[filled : filled + n] = chunk[skip : skip + n]
            skip += n
            filled += n
            if filled == shard_size:
                yield shard, state, skip
                shard, filled = np.empty(shard_size, dtype=np.uint16), 0
        skip -= len(chunk)
    if filled:
        yield shard[:filled], None, 0


class ShardFolder:
    """The folder that fineweb.py fills: file names, progress, manifest.

    Progress is a dictionary: the flags and the source of the documents, which a continued call must share; the
    manifest's entries of the shards so far; and the state and skip (see split_into_shards) of the next shard.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.unfinished, self.manifest, self._lock = self.path / UNFINISHED, self.path / MANIFEST, self.path / "lock"

    def shard_path(self, index, source):
        """The path of shard `index`. source: the manifest's. Shard 0 is for validation, all others for training."""
        name = {FINEWEB_EDU: "edufineweb", FINEWEB: "fineweb"}.get(source.get("dataset"), "text")
        return self.path / f"{name}_{'train' if index else 'val'}_{index:06d}.npy"

    def shard_paths(self):
        """The shards that exist, sorted by name."""
        return sorted(path for split in ("val", "train") for path in list_shards(self.path, split))

    def lock(self):
        """Create the folder if needed and lock it: returns a file that holds the lock until closed.

        Raises UserError if another process holds the lock; OSError.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return lock(self._lock, f"{self.path} is being written by another process: wait for it or choose another --out")

    def read_progress(self):
        """The progress of an interrupted call, or None in a new folder. Raises UserError if the folder is complete."""
        if not self.unfinished.exists():
            if existing := self.shard_paths():
                raise UserError(
                    f"{self.path} already holds {len(existing)} shards: choose another --out, or delete them"
                )
            return None
        try:
            progress = read_with_entries(self.unfinished, flags=dict, source=dict, state=list | None, skip=int)
            for entry in progress["shards"]:
                if len(open_shard(self.path / entry["name"])) != entry["tokens"]:
                    raise ValueError(f"{entry['name']} does not have {entry['tokens']} tokens")
            return progress
        except ValueError as error:
            raise UserError(f"{self.unfinished} is damaged ({error}): delete {self.path} and start again") from error
        except OSError as error:
            raise UserError(f"cannot read {self.unfinished}: {error.strerror}; choose another --out") from error

    def write_progress(self, progress):
        """Write progress, which marks the folder as not complete. Raises OSError."""
        write_json(self.unfinished, progress)

    def add_shard(self, tokens, progress):
        """Write the next shard, then the progress with its entry, which is returned. Raises OSError."""
        path = self.shard_path(len(progress["shards"]), progress["source"])
        write_shard(path, tokens)
        progress = progress | dict(shards=[*progress["shards"], manifest_entry(path)])
        self.write_progress(progress)
        return progress

    def cut_again(self, progress, shard_size):
        """Replace all shards by others of `shard_size` tokens; returns the progress with their entries. Raises OSError.

        A call that is interrupted meanwhile starts over.
        """
        shards = [open_shard(self.path / entry["name"]) for entry in progress["shards"]]  # readable once replaced
        self.write_progress(progress | dict(shards=[], state=None, skip=0))
        chunks = ((None, shard[start : start + BLOCK]) for shard in shards for start in range(0, len(shard), BLOCK))
        entries = []
        for tokens, _, _ in split_into_shards(chunks, shard_size):
            path = self.shard_path(len(entries), progress["source"])
            write_shard(path, tokens)
            entries.append(manifest_entry(path))
        return progress | dict(shards=entries)

    def finish(self, progress):
        """Write the manifest, remove the progress and the lock's file. Raises OSError."""
        write_json(self.manifest, dict(source=progress["source"], shards=progress["shards"]))
        self.unfinished.unlink()
        self._lock.unlink()  # a process that has opened it finds a complete folder

    def delete_shards(self):
        """Delete all shards, the progress and the lock's file."""
        for path in [*self.shard_paths(), self.unfinished, self._lock]:
            path.unlink(missing_ok=True)
