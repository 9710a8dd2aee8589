"""Shards (tokens on disk) and the manifest that lists them.

A shard is a one-dimensional uint16 .npy file, or a .bin file of llm.c and modded-nanogpt. Each document in it is
<|endoftext|> followed by the document's tokens; a document may continue in the next shard. The layout is
build-nanogpt's; the manifest, shards.json, is an addition.
"""

import os
import re
import resource
import tokenize
from pathlib import Path

import numpy as np

from common.cli import python_command
from common.errors import UserError, first_line
from common.files import atomic_write, check_fields, digest, open_regular, read_json
from data.tokenizer import END_OF_TEXT

MANIFEST = "shards.json"
UNFINISHED = "unfinished.json"  # fineweb.py's progress, in a folder that is not complete
BLOCK = 2**18  # tokens that a pass over a shard reads at a time
SUFFIXES = (".npy", ".bin")
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
    if Path(data_dir).is_file():
        make = python_command("fineweb.py", "--input", data_dir)
        raise UserError(f"{data_dir} is a file: `{make}` makes a folder of shards")
    paths = list_shards(data_dir, split)
    if not paths:
        raise UserError(
            f"no {split} shards in {data_dir}: make them from FineWeb-Edu with `{python_command('fineweb.py')}`, from "
            f"your own text with `{python_command('fineweb.py', '--input', 'FILE.txt')}`, or try a small corpus with "
            f"`{python_command('train_gpt2.py', '--demo')}`"
        )
    if len({path.suffix for each in ("val", "train") for path in list_shards(data_dir, each)}) > 1:
        raise UserError(f"{data_dir} has .npy and .bin shards: move one kind to a folder of its own")
    # FineWeb-Edu 100BT has about as many shards as the usual limit on open files, 1,024
    allow_open_files(len(paths) + 512)
    shards = [open_shard(path) for path in paths]
    if os.path.lexists(Path(data_dir) / MANIFEST):
        check_manifest(data_dir, split, {path.name: len(shard) for path, shard in zip(paths, shards)})
    return shards


def list_shards(data_dir, split):
    """The paths of the shards of `split`, sorted by name."""
    return sorted(path for path in Path(data_dir).glob(f"*_{split}_*") if path.suffix in SUFFIXES)


def allow_open_files(count):
    """Raise this process's limit on open files to `count`, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Shard:
    """The tokens of an open file; shard[a:b] reads (b - a,) uint16.

    Not a memory map: there a file that is truncated meanwhile ends the process with SIGBUS.
    """

    def __init__(self, file, offset, length):
        """offset: of the first token in the file, in bytes. length: in tokens."""
        self.path = file.name
        self._file = file
        self._offset = offset
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, tokens):
        """Raises UserError if the file ends early, or if a token is outside GPT-2's vocabulary."""
        span = range(self._length)[tokens]
        try:
            content = os.pread(self._file.fileno(), 2 * len(span), self._offset + 2 * span.start)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        if len(content) < 2 * len(span):
            raise UserError(f"{self.path} was truncated after it was opened: make it again")
        tokens = np.frombuffer(content, dtype=np.uint16)
        if len(tokens) and tokens.max() > END_OF_TEXT:
            raise UserError(
                f"{self.path} has token {tokens.max()}, but GPT-2's vocabulary ends with {END_OF_TEXT}: make it again "
                "with fineweb.py, from text"
            )
        return tokens

    def document_starts(self):
        """The positions of <|endoftext|>: (documents,) int64."""
        blocks = range(0, self._length, BLOCK)
        return np.concatenate([start + np.flatnonzero(self[start : start + BLOCK] == END_OF_TEXT) for start in blocks])


def open_shard(path):
    """The Shard in a .npy or .bin file. Raises UserError if the file is something else."""
    try:
        file = open_regular(path)
        shape, dtype = read_bin_header(file) if Path(path).suffix == ".bin" else read_npy_header(file)
        size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a shard: {first_line(error)}; delete it and make it again") from error
    if dtype != np.uint16 or len(shape) != 1 or not 0 < 2 * shape[0] <= size - file.tell():
        raise UserError(
            f"{path} is not a shard: {dtype} of shape {shape} in a file of {size} bytes, but it must be "
            "uint16, one-dimensional, not empty and complete; delete it and make it again"
        )
    shard = Shard(file, file.tell(), shape[0])
    shard[:65536], shard[-65536:]  # checks the tokens at both ends; the others are checked when they are read
    return shard


def read_npy_header(file):
    """(shape, dtype) from the start of a .npy file. Raises ValueError if it is something else."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = read[version](file)
        return shape, dtype
    except (TypeError, LookupError, SyntaxError, tokenize.TokenError, MemoryError, RecursionError) as error:
        # NumPy evaluates the header by ast.literal_eval, which raises these for malformed input
        raise ValueError(f"its header is malformed ({type(error).__name__})") from error


def read_bin_header(file):
    """(shape, dtype) from the start of a .bin file. Raises ValueError if it is something else."""
    header = np.frombuffer(file.read(4 * BIN_HEADER).ljust(12, b"\0"), dtype="<i4", count=3)
    if tuple(header[:2]) != (BIN_MAGIC, BIN_VERSION):
        raise ValueError(
            f"its magic number and version are {header[0]} and {header[1]}, for GPT-2's tokens llm.c writes "
            f"{BIN_MAGIC} and {BIN_VERSION}"
        )
    return (int(header[2]),), np.dtype(np.uint16)


# ----------------------------------------------------------------------------------------------------------------------
# The manifest


def manifest_entry(path):
    """The manifest's entry for one shard. A document counts in the shard in which it begins."""
    shard = open_shard(path)
    return dict(
        name=Path(path).name,
        tokens=len(shard),
        documents=len(shard.document_starts()),
        sha256=digest(path),
    )


def read_manifest(path):
    """A manifest: {"source": where the documents come from, "shards": [manifest_entry of each]}.

    Raises UserError if the file is missing or is not a manifest.
    """
    try:
        return read_with_entries(path, source=dict)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): delete it, or make the shards again with fineweb.py") from error


def read_with_entries(path, **fields):
    """read_json() of a file with a list `shards` of manifest entries. Raises ValueError also for a malformed entry."""
    content = read_json(path, shards=list, **fields)
    for entry in content["shards"]:
        check_fields(entry, name=str, tokens=int, documents=int, sha256=str)
        if not re.fullmatch(r"[\w.-]+", entry["name"]) or entry["tokens"] < 1 or entry["documents"] < 0:
            raise ValueError(f"an entry has an impossible name or count: {entry!r:.200}")
    return content


def check_manifest(data_dir, split, found):
    """Raises UserError unless `found`, {file name: tokens}, is what the manifest lists for this split."""
    entries = read_manifest(Path(data_dir) / MANIFEST)["shards"]
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
    """What a checkpoint keeps to recognize its data: {file name: tokens} of the shards, and the manifest's SHA-256."""
    manifest = Path(data_dir) / MANIFEST
    sizes = {Path(shard.path).name: len(shard) for shard in shards}
    return dict(shards=sizes, manifest=digest(manifest) if manifest.exists() else None)


def dataset_name(data_dir):
    """The hub's name of the dataset in a folder of shards, from its manifest or else from file names; None if unknown.

    Raises UserError for a damaged manifest.
    """
    manifest = Path(data_dir) / MANIFEST
    if manifest.exists():
        return read_manifest(manifest)["source"].get("dataset")
    paths = [path for split in ("val", "train") for path in list_shards(data_dir, split)]
    names = {re.sub("edu_?", "edu", path.name).partition("_")[0] for path in paths}
    return {"edufineweb": FINEWEB_EDU, "fineweb": FINEWEB}.get(names.pop()) if len(names) == 1 else None


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def write_shard(path, tokens):
    """Write tokens (uint16) as a shard, atomically."""
    with atomic_write(path) as file:
        np.save(file, tokens)
