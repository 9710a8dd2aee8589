"""Shards (tokens on disk), the manifest that lists them, and the folder that fineweb.py fills.

A shard is a one-dimensional uint16 .npy file. Each document in it is <|endoftext|> followed by the document's tokens;
a document may continue in the next shard. The layout is build-nanogpt's; the manifest, shards.json, is an addition.
"""

import json
import resource
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.cli import UserError
from common.files import atomic_write, digest, write_json
from data.tokenizer import END_OF_TEXT

MANIFEST = "shards.json"
UNFINISHED = "unfinished.json"  # fineweb.py's progress, in a folder that is not complete


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def open_shards(data_dir, split):
    """Memory-map every shard of `split`, "train" or "val", in data_dir: a list of (tokens,) uint16 in order of name.

    Raises UserError if there is none, if the folder is not complete, if a file is not a shard, or if the shards differ
    from the folder's manifest. A folder may have no manifest.
    """
    unfinished = Path(data_dir) / UNFINISHED
    if unfinished.exists():
        raise UserError(
            f"{data_dir} is not complete: run the same fineweb.py command again to finish it, or delete {unfinished} "
            "to train on the shards written so far"
        )
    paths = sorted(Path(data_dir).glob(f"*_{split}_*.npy"))
    if not paths:
        raise UserError(
            f"no {split} shards in {data_dir}: make them from FineWeb-Edu with `python fineweb.py`, "
            "or try everything on a small corpus with `python train_gpt2.py --demo`"
        )
    # a memory map holds a file descriptor; FineWeb-Edu 100BT has about as many shards as the usual limit, 1,024
    allow_open_files(len(paths) + 512)
    shards = [open_shard(path) for path in paths]
    if (Path(data_dir) / MANIFEST).exists():
        check_manifest(data_dir, split, {path.name: len(shard) for path, shard in zip(paths, shards)})
    return shards


def allow_open_files(count):
    """Raise this process's limit on open files to `count`, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_shard(path):
    """Memory-map one shard: (tokens,) uint16. Raises UserError if the file is not a shard."""
    try:
        shard = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, SyntaxError, tokenize.TokenError) as error:  # NumPy evaluates the header as a Python literal
        raise UserError(f"{path} is not a shard: {error}; delete it and make it again") from error
    if shard.dtype != np.uint16 or shard.ndim != 1 or shard.size == 0:
        raise UserError(
            f"{path} is not a shard: {shard.dtype} of shape {shard.shape}, but it must be uint16, one-dimensional and "
            "not empty; delete it and make it again"
        )
    # both ends only: a full check would read the file, so the loader checks the tokens it reads
    check_token_ids(shard[:65536], path)
    check_token_ids(shard[-65536:], path)
    return shard


def check_token_ids(tokens, path):
    """Raises UserError if a token is outside GPT-2's vocabulary. path: the file to name in the error."""
    if len(tokens) and tokens.max() > END_OF_TEXT:
        raise UserError(
            f"{path} has token {tokens.max()}, but GPT-2's vocabulary ends with {END_OF_TEXT}: make it again with "
            "fineweb.py, from text"
        )


# ----------------------------------------------------------------------------------------------------------------------
# The manifest


def manifest_entry(path):
    """The manifest's entry for one shard. A document counts in the shard in which it begins."""
    tokens = open_shard(path)
    return dict(
        name=Path(path).name,
        tokens=len(tokens),
        documents=int(np.count_nonzero(tokens == END_OF_TEXT)),
        sha256=digest(path),
    )


def read_manifest(path):
    """A manifest: {"source": where the documents come from, "shards": [manifest_entry of each]}.

    Raises UserError if the file is missing or is not a manifest.
    """
    try:
        manifest = json.loads(path.read_text())
        if all({"name", "tokens", "documents", "sha256"} <= shard.keys() for shard in manifest["shards"]):
            return manifest
        raise ValueError("an entry lacks a field")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, or make the shards again with fineweb.py") from error


def check_manifest(data_dir, split, found):
    """Raises UserError unless `found`, {file name: tokens}, is what the manifest lists for this split."""
    entries = read_manifest(Path(data_dir) / MANIFEST)["shards"]
    listed = {entry["name"]: entry["tokens"] for entry in entries if f"_{split}_" in entry["name"]}
    for name in sorted(listed | found):
        if name not in found:
            problem = f"{name} is missing"
        elif name not in listed:
            problem = f"{name} is not listed"
        elif found[name] != listed[name]:
            problem = f"{name} has {found[name]} tokens instead of {listed[name]}"
        else:
            continue
        raise UserError(
            f"{data_dir} does not match its {MANIFEST}: {problem}; make the shards again with fineweb.py, or delete "
            f"{MANIFEST} to train on the files as they are"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def write_shard(path, tokens):
    """Write tokens (uint16) as a shard, atomically."""
    with atomic_write(path) as file:
        np.save(file, tokens)


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

    def __init__(self, path, part=None):
        """part: (i, n) for part i of n. A part has no validation shard, and training does not open its files."""
        tag = f"part{part[0]}of{part[1]}" if part else None
        self.path = Path(path)
        self.splits = [tag] if part else ["val", "train"]
        self.unfinished = self.path / (f"{tag}.{UNFINISHED}" if part else UNFINISHED)
        self.manifest = self.path / (f"{tag}.json" if part else MANIFEST)

    def shard_path(self, index):
        """The path of a shard. Shard 0 is validation, all others are training."""
        return self.path / f"edufineweb_{self.splits[0] if index == 0 else self.splits[-1]}_{index:06d}.npy"

    def shard_paths(self):
        """The shards that exist, sorted by name."""
        return sorted(path for split in self.splits for path in self.path.glob(f"*_{split}_*.npy"))

    def read_progress(self):
        """The progress of an interrupted call, or None in a new folder. Raises UserError if the folder is complete."""
        try:
            if self.unfinished.exists():
                progress = json.loads(self.unfinished.read_text())
                if progress.keys() >= {"flags", "source", "shards", "state", "skip"}:
                    return progress
                raise ValueError
            if existing := self.shard_paths():
                raise UserError(
                    f"{self.path} already holds {len(existing)} shards: choose another --out, or delete them"
                )
            return None
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self.unfinished} is damaged: delete {self.path} and start again") from error
        except OSError as error:
            raise UserError(f"cannot read the folder {self.path}: {error.strerror}; choose another --out") from error

    def write_progress(self, progress):
        """Create the folder if needed and write progress, which marks the folder as not complete. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.unfinished, progress)

    def add_shard(self, tokens, progress):
        """Write the next shard, then the progress with its entry, which is returned. Raises OSError."""
        path = self.shard_path(len(progress["shards"]))
        write_shard(path, tokens)
        progress = progress | dict(shards=[*progress["shards"], manifest_entry(path)])
        self.write_progress(progress)
        return progress

    def finish(self, progress):
        """Write the manifest and remove the progress. Raises OSError."""
        write_json(self.manifest, dict(source=progress["source"], shards=progress["shards"]))
        self.unfinished.unlink()

    def delete_shards(self):
        """Delete all shards and the progress."""
        for path in [*self.shard_paths(), self.unfinished]:
            path.unlink(missing_ok=True)

    def verify(self):
        """Compare the SHA-256 of every file with the manifest, which is returned.

        Raises UserError for the first file that differs, is missing or is not listed.
        """
        manifest = read_manifest(self.manifest)
        entries = {entry["name"]: entry for entry in manifest["shards"]}
        if unlisted := [path for path in self.shard_paths() if path.name not in entries]:
            raise UserError(f"{unlisted[0]} is not in {self.manifest.name}: delete it")

        def check(name):
            try:
                sha256 = digest(self.path / name)
            except OSError as error:
                raise UserError(f"{self.path / name}: {error.strerror}; make the shards again") from error
            if sha256 != entries[name]["sha256"]:
                raise UserError(
                    f"{self.path / name} is damaged: its SHA-256 is not the one in {self.manifest.name}; make the "
                    "shards again"
                )
            return entries[name]["tokens"]

        total = sum(entry["tokens"] for entry in manifest["shards"])
        with ThreadPoolExecutor() as pool, tqdm(total=total, unit="tok", unit_scale=True, desc=str(self.path)) as bar:
            for tokens in pool.map(check, entries):
                bar.update(tokens)
        return manifest
