"""Shards, the form in which tokens lie on disk, and the manifest that says what they should be.

A shard is a one-dimensional uint16 .npy; every document in it is <|endoftext|> followed by its tokens, and documents
run on from one shard to the next. This is build-nanogpt's layout, to which shards.json is added.
"""

import json
import resource
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.cli import UserError
from common.files import digest, whole, write_json
from data.tokenizer import END_OF_TEXT

MANIFEST = "shards.json"
UNFINISHED = "unfinished.json"  # where fineweb.py stands, in the folder that it is filling


def open_shards(data_dir, split):
    """Memory-map every shard of split "train" or "val" in data_dir, in the order of their names.

    Raises UserError when there are none, when more are to come, when a file is not a shard, or when they are not those
    that the folder's manifest lists (if it has one).
    """
    if (Path(data_dir) / UNFINISHED).exists():
        raise UserError(
            f"{data_dir} is not finished: run the same fineweb.py command again, it goes on where it was (or delete "
            f"{Path(data_dir) / UNFINISHED} to train on what is there)"
        )
    paths = sorted(Path(data_dir).glob(f"*_{split}_*.npy"))
    if not paths:
        raise UserError(
            f"no {split} shards in {data_dir}: make them from FineWeb-Edu with `python fineweb.py`, "
            "or try everything on a small corpus with `python train_gpt2.py --demo`"
        )
    # a mapped file is an open file: FineWeb-Edu 100BT has as many as the usual limit of 1,024
    needed = len(paths) + 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed and soft != resource.RLIM_INFINITY:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    shards = [open_shard(path) for path in paths]
    manifest = Path(data_dir) / MANIFEST
    if manifest.exists():
        expected = {each["name"]: each["tokens"] for each in read_manifest(manifest)["shards"]}
        found = {path.name: len(shard) for path, shard in zip(paths, shards)}
        expected = {name: tokens for name, tokens in expected.items() if f"_{split}_" in name}
        if wrong := [name for name in sorted(expected | found) if expected.get(name) != found.get(name)]:
            raise UserError(
                f"{data_dir} does not hold what its {MANIFEST} lists: {wrong[0]} has {found.get(wrong[0], 'no')} "
                f"tokens there, {expected.get(wrong[0], 'none')} in the list; make it again with fineweb.py, or delete "
                f"{MANIFEST} to train on what is there"
            )
    return shards


def open_shard(path):
    """Memory-map one shard: (tokens,) uint16. Raises UserError when it is none."""
    try:
        shard = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, SyntaxError, tokenize.TokenError) as error:  # the last two of a header that is text
        raise UserError(f"{path} is not a shard: {error}; delete it and make it again") from error
    if shard.dtype != np.uint16 or shard.ndim != 1 or shard.size == 0:
        raise UserError(
            f"{path} is not a shard: {shard.dtype} of shape {shard.shape}, but it must be uint16, one-dimensional and "
            "not empty; delete it and make it again"
        )
    check_ids(shard[:65536], path)
    check_ids(shard[-65536:], path)
    return shard


def check_ids(tokens, path):
    """Raises UserError for a token that GPT-2's vocabulary does not have."""
    if len(tokens) and tokens.max() > END_OF_TEXT:
        raise UserError(
            f"{path} has token {tokens.max()}, but GPT-2's vocabulary ends with {END_OF_TEXT}: make it again with "
            "fineweb.py, from text"
        )


def write_shard(path, tokens):
    """Write tokens (uint16) as a shard, which appears at path whole or not at all."""
    with whole(path) as file:
        np.save(file, tokens)


def describe(path):
    """A shard's line in the manifest. Documents are counted where they begin."""
    tokens = open_shard(path)
    return dict(
        name=Path(path).name,
        tokens=len(tokens),
        documents=int(np.count_nonzero(tokens == END_OF_TEXT)),
        sha256=digest(path),
    )


def read_manifest(path):
    """{"source": where the documents are from, "shards": [what describe() says of each]}.

    Raises UserError when there is none, or another file by its name.
    """
    try:
        manifest = json.loads(path.read_text())
        if all({"name", "tokens", "documents", "sha256"} <= each.keys() for each in manifest["shards"]):
            return manifest
        raise ValueError("an entry lacks a field")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, or make the shards again with fineweb.py") from error


# ----------------------------------------------------------------------------------------------------------------------
# A folder that is being filled


def fill_shards(pieces, shard_size, skip=0):
    """Yield (tokens, state, skip): a shard's tokens, and where the next shard begins, `skip` tokens into the piece of
    that state. The last may be shorter, and has no next: state None. The first `skip` tokens are left out."""
    shard, filled = np.empty(shard_size, dtype=np.uint16), 0
    for state, piece in pieces:
        while skip < len(piece):
            n = min(shard_size - filled, len(piece) - skip)
            shard[filled : filled + n] = piece[skip : skip + n]
            skip += n
            filled += n
            if filled == shard_size:
                yield shard, state, skip
                shard, filled = np.empty(shard_size, dtype=np.uint16), 0
        skip -= len(piece)
    if filled:
        yield shard[:filled], None, 0


class Folder:
    """The shards that fineweb.py writes: their names, how far they are, and in the end which they are."""

    def __init__(self, path, part=None):
        """part: (i, n) for the i-th of n parts, which have no validation shard, and are no shards to train on."""
        tag = f"part{part[0]}of{part[1]}" if part else None
        self.path = Path(path)
        self.splits = [tag] if part else ["val", "train"]
        self.unfinished = self.path / (f"{tag}.{UNFINISHED}" if part else UNFINISHED)
        self.manifest = self.path / (f"{tag}.json" if part else MANIFEST)

    def shard(self, index):
        return self.path / f"edufineweb_{self.splits[0] if index == 0 else self.splits[-1]}_{index:06d}.npy"

    def shards(self):
        return sorted(path for split in self.splits for path in self.path.glob(f"*_{split}_*.npy"))

    def read_progress(self):
        """What write_progress wrote, or None in a new folder. Raises UserError for a folder that is finished."""
        try:
            if self.unfinished.exists():
                progress = json.loads(self.unfinished.read_text())
                if progress.keys() >= {"flags", "source", "shards", "state", "skip"}:
                    return progress
                raise ValueError
            if old := self.shards():
                raise UserError(f"{self.path} already holds {len(old)} shards: choose another --out, or delete them")
            return None
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self.unfinished} is damaged: delete {self.path} and start again") from error
        except OSError as error:
            raise UserError(f"cannot read the folder {self.path}: {error.strerror}; choose another --out") from error

    def write_progress(self, progress):
        """Begin the folder, or go on with it; while this file is there it counts as unfinished.

        progress: a dictionary with flags and source, which must be the same when it goes on, with the shards so far as
        describe() has them, and with the state and skip of fill_shards from which the next one can be filled.
        Raises OSError.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.unfinished, progress)

    def add(self, tokens, progress):
        """Write the next shard, and then that it is there. Returns the new progress; raises OSError."""
        path = self.shard(len(progress["shards"]))
        write_shard(path, tokens)
        progress = progress | dict(shards=[*progress["shards"], describe(path)])
        self.write_progress(progress)
        return progress

    def finish(self, progress):
        """Write the manifest. Raises OSError."""
        write_json(self.manifest, dict(source=progress["source"], shards=progress["shards"]))
        self.unfinished.unlink()

    def remove(self):
        """Delete what was written."""
        for path in [*self.shards(), self.unfinished]:
            path.unlink(missing_ok=True)

    def verify(self):
        """Compare every file with the manifest, which is returned.

        Raises UserError for the first that is not what was written.
        """
        manifest = read_manifest(self.manifest)
        expected = {shard["name"]: shard for shard in manifest["shards"]}
        if others := [path for path in self.shards() if path.name not in expected]:
            raise UserError(f"{others[0]} is not in {self.manifest.name}: delete it")

        def check(name):
            try:
                found = digest(self.path / name)
            except OSError as error:
                raise UserError(f"{self.path / name}: {error.strerror}; make the shards again") from error
            if found != expected[name]["sha256"]:
                raise UserError(f"{self.path / name} is not what was written: make the shards again")
            return expected[name]["tokens"]

        total = sum(shard["tokens"] for shard in manifest["shards"])
        with ThreadPoolExecutor() as pool, tqdm(total=total, unit="tok", unit_scale=True, desc=str(self.path)) as bar:
            for tokens in pool.map(check, expected):
                bar.update(tokens)
        return manifest
