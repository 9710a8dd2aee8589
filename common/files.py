"""Atomic writes, SHA-256 digests and flushing to disk."""

import contextlib
import hashlib
import json
import os
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path):
    """Open a binary file for writing that replaces `path` when the block ends without an error.

    The file is flushed to disk and then renamed, so `path` always is the old file or the complete new one.
    """
    unfinished = Path(path).with_name(Path(path).name + ".unfinished")
    with open(unfinished, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def write_json(path, content):
    """Write `content` as indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def digest(path):
    """The SHA-256 of a file, in hexadecimal."""
    result = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**24):
            result.update(block)
    return result.hexdigest()


def flush_to_disk(path):
    """fsync a file, or a folder's list of names; on return it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
