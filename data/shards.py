"""Shards (tokens on disk) and the manifest that lists them.

A shard is a one-dimensional uint16 .npy file, or a .bin file of llm.c, modded-nanogpt or nanoGPT. Each document in it
is <|endoftext|> followed by the document's tokens; a document may continue in the next shard. The layout is
build-nanogpt's; the manifest, shards.json, is an addition.
"""

import hashlib
import os
import re
from pathlib import Path

import numpy as np

from common.cli import python_command
from common.errors import UserError, first_line
from common.files import atomic_write, check_fields, digest, read_json, regular_file
from data.tokenizer import END_OF_TEXT

MANIFEST = "shards.json"
UNFINISHED = "unfinished.json"  # fineweb.py's progress, in a folder that is not complete
BLOCK = 2**18  # tokens that a pass over a shard reads at a time
BIN_HEADER = 256  # int32: magic number, version, number of tokens, zeros
BIN_MAGIC, BIN_VERSION = 20240520, 1

# Names of datasets on the Hugging Face hub, as in the manifest's source
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB = "HuggingFaceFW/fineweb"


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def open_shards(data_dir, split):
    """Open every shard of `split`, "train" or "val", in data_dir: a list of Shard in order of name.

    Raises UserError if there is none, if the folder is not complete, if a file is not a shard, or if the shards differ
    from the folder's manifest. A folder may have no manifest.
    """
    unfinished = Path(data_dir) / UNFINISHED
    if os.path.lexists(unfinished):
        raise UserError(
            f"{data_dir} is not complete: run the same fineweb.py command again to finish it, or delete {unfinished} "
            "to train on the shards written so far"
        )
    paths = list_shards(data_dir, split)
    if not paths:
        raise UserError(
            f"no {split} shards in {data_dir}: make them from FineWeb-Edu with `{python_command('fineweb.py')}`, from "
            f"your own text with `{python_command('fineweb.py', '--input', 'FILE.txt')}`, or try a small corpus with "
            f"`{python_command('train_gpt2.py', '--demo')}`"
        )
    shards = [open_shard(path) for path in paths]
    if os.path.lexists(Path(data_dir) / MANIFEST):
        check_manifest(data_dir, split, {path.name: len(shard) for path, shard in zip(paths, shards)})
    return shards


def list_shards(data_dir, split):
    """The paths of the shards of `split`, sorted by name: NAME_train_000001.npy or .bin, NAME_train.bin, train.bin."""
    names = re.compile(rf"(.+_)?{split}(_.+)?\.(npy|bin)")
    return sorted(path for path in Path(data_dir).glob("*") if names.fullmatch(path.name))


class Shard:
    """The tokens of a file; shard[a:b] reads (b - a,) uint16."""

    def __init__(self, path, tokens):
        """tokens: (length,) uint16, a memory map of the file."""
        self.path = path
        self._tokens = tokens

    def __len__(self):
        return len(self._tokens)

    def __getitem__(self, span):
        """Raises UserError if a token is outside GPT-2's vocabulary."""
        tokens = np.array(self._tokens[span])
        if len(tokens) and tokens.max() > END_OF_TEXT:
            raise UserError(
                f"{self.path} has token {tokens.max()}, but GPT-2's vocabulary ends with {END_OF_TEXT}: make it again "
                "with fineweb.py, from text"
            )
        return tokens

    def document_starts(self):
        """The positions of <|endoftext|>: (documents,) int64."""
        blocks = range(0, len(self), BLOCK)
        return np.concatenate([start + np.flatnonzero(self[start : start + BLOCK] == END_OF_TEXT) for start in blocks])


def open_shard(path):
    """The Shard in a .npy or .bin file. Raises UserError if the file is something else."""
    try:
        path = regular_file(path)
        tokens = map_bin(path) if path.suffix == ".bin" else np.lib.format.open_memmap(path, mode="r")
        if tokens.dtype != np.uint16 or tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"{tokens.dtype} of shape {tokens.shape}, it must be uint16 and one-dimensional")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged header raises any
        raise UserError(f"{path} is not a shard: {first_line(error)}; make it again with fineweb.py") from error
    shard = Shard(path, np.asarray(tokens))
    shard[:65536], shard[-65536:]  # checks the tokens at both ends; the others are checked when they are read
    return shard


def map_bin(path):
    """The tokens of a .bin file as a memory map; nanoGPT's train.bin and val.bin have no header. Raises ValueError."""
    header = np.fromfile(path, dtype="<i4", count=3)
    if tuple(header[:2]) == (BIN_MAGIC, BIN_VERSION):
        return np.memmap(path, dtype=np.uint16, mode="r", offset=4 * BIN_HEADER, shape=max(0, int(header[2])))
    if path.name not in ("train.bin", "val.bin"):
        raise ValueError(f"it does not begin with {BIN_MAGIC} and {BIN_VERSION}, as llm.c's files of GPT-2's tokens do")
    if path.with_name("meta.pkl").exists():
        raise ValueError("by meta.pkl beside it, its tokens are characters and not GPT-2's")
    return np.memmap(path, dtype=np.uint16, mode="r")


# ----------------------------------------------------------------------------------------------------------------------
# The manifest


def manifest_entry(path):
    """The manifest's entry for one shard. A document counts in the shard in which it begins."""
    shard = open_shard(path)
    documents = len(shard.document_starts())
    return dict(name=Path(path).name, tokens=len(shard), documents=documents, sha256=digest(path))


def read_with_entries(path, **fields):
    """read_json() of a file with a list `shards` of manifest entries. Raises ValueError also for a malformed entry."""
    content = read_json(path, shards=list, **fields)
    for entry in content["shards"]:
        check_fields(entry, name=str, tokens=int, documents=int, sha256=str)
    return content


def check_manifest(data_dir, split, found):
    """Raises UserError unless `found`, {file name: tokens}, is what the manifest lists for this split."""
    path = Path(data_dir) / MANIFEST
    try:
        entries = read_with_entries(path, source=dict)["shards"]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): delete it, or make the shards again with fineweb.py") from error
    listed = {entry["name"]: entry["tokens"] for entry in entries if f"_{split}_" in entry["name"]}
    if problem := first_difference(listed, found):
        raise UserError(
            f"{data_dir} does not match its {MANIFEST}: {problem}; make the shards again with fineweb.py, or delete "
            f"{MANIFEST} to train on the files as they are"
        )


def first_difference(listed, found):
    """The first shard in which two sets, {file name: tokens} each, differ, in words; None if they are equal."""
    for name in sorted(listed | found):
        if name not in found:
            return f"{name} is missing"
        if name not in listed:
            return f"{name} is an additional shard"
        if found[name] != listed[name]:
            return f"{name} has {found[name]} tokens instead of {listed[name]}"
    return None


def identity(data_dir, shards):
    """What a checkpoint keeps to recognize its data: {file name: tokens} of the shards, the manifest's SHA-256, and the
    SHA-256 of 4 KB at five places of each shard."""
    manifest = Path(data_dir) / MANIFEST
    sample = hashlib.sha256()
    for shard in shards:
        for start in np.linspace(0, max(0, len(shard) - 2048), 5, dtype=int):
            sample.update(shard[start : start + 2048])
    return dict(
        shards={shard.path.name: len(shard) for shard in shards},
        manifest=digest(manifest) if manifest.exists() else None,
        sample=sample.hexdigest(),
    )


def dataset_name(data_dir):
    """The hub's name of the dataset in a folder of shards, from their names; None if unknown."""
    paths = [*list_shards(data_dir, "val"), *list_shards(data_dir, "train")]
    names = {re.sub("edu_?", "edu", path.name).partition("_")[0] for path in paths}
    return {"edufineweb": FINEWEB_EDU, "fineweb": FINEWEB}.get(names.pop()) if len(names) == 1 else None


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def write_shard(path, tokens):
    """Write tokens (uint16) as a shard, atomically."""
    with atomic_write(path) as file:
        np.save(file, tokens)
