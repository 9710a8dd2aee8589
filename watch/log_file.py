"""A file that grows by lines, on a disk that may be full or gone for a while."""

import errno
import os


class LogFile:
    """Lines that cannot be written wait in memory, in order. Every line is written once, and at once if possible."""

    def __init__(self, path):
        self.path = path
        self._waiting = b""
        self.reopen()

    def reopen(self):
        self._file = open(self.path, "ab", buffering=0)  # no buffer: a crash loses no line, an error no part of one

    def is_in_place(self):
        """Whether the path still leads to the open file: a deleted file accepts writes without an error."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
            return False

    def add(self, text):
        self._waiting += text.encode()

    def write(self, sync=False):
        """Write what waits; with sync=True return when it is on disk. Raises OSError, and the rest waits."""
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]  # a disk may have room for half a line
        if sync:
            os.fsync(self._file.fileno())

    def close(self):
        self._file.close()
