"""Files that are there whole or not at all, and their hashes."""

import contextlib
import hashlib
import json
import os
from pathlib import Path


@contextlib.contextmanager
def whole(path):
    """A binary file to write, which appears at path when it is complete and on disk."""
    unfinished = Path(path).with_name(Path(path).name + ".unfinished")
    with open(unfinished, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def write_json(path, content):
    with whole(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def digest(path):
    """A file's SHA-256."""
    result = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**24):
            result.update(block)
    return result.hexdigest()


def flush_to_disk(path):
    """Return when the file, or the folder's list of names, would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
