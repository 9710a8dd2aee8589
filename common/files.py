"""Files: reading regular ones and JSON, atomic writes, SHA-256 digests, flushing to disk, locks."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from pathlib import Path

from common.errors import UserError, first_line


def regular_file(path):
    """The path of a regular file. Raises OSError for anything else: opening a FIFO would wait for a writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(path)


def read_json(path, **fields):
    """The JSON of a regular file, a dictionary with these fields, {name: type}. Raises OSError or ValueError."""
    try:
        content = json.loads(regular_file(path).read_bytes())
    except RecursionError as error:  # it is nested a thousand levels deep
        raise ValueError(first_line(error)) from error
    check_fields(content, **fields)
    return content


def check_fields(content, **fields):
    """Raises ValueError unless `content` is a dictionary with these fields, {name: type}."""
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    for name, kind in fields.items():
        if name not in content or not isinstance(content[name], kind):
            raise ValueError(f"{name} is missing or of the wrong type")


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
    with regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(content):
    """The SHA-256 of what a JSON file says, whatever its layout, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def flush_to_disk(path):
    """fsync a file, or a folder's list of names; on return it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path, busy=None):
    """Lock a file, which is created if needed, for this process: returns a file that holds the lock until it is closed.

    If another process holds the lock: raises UserError(busy), or without `busy` waits. Where the file system has no
    locks, the file is not locked.
    """
    file = open(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
    except BlockingIOError as error:
        raise UserError(busy) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
            raise
    return file


def is_disk_full(error):
    """Whether an error of writing says that a disk or a quota is full."""
    # errors of safetensors and of other ranks have the number in their text alone
    numbers = errno.ENOSPC, errno.EDQUOT
    return any(f"[Errno {number}]" in str(error) or f"(os error {number})" in str(error) for number in numbers)
