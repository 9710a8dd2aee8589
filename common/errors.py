"""Errors that a person can fix, as one-line messages; notes about flags; and run(), around every command."""

import contextlib
import errno
import gc
import os
import re
import signal
import sys
import time
from dataclasses import dataclass

from common import interrupt


class UserError(Exception):
    """An error a person can fix. Its text says what is wrong and what to do."""


def first_line(error):
    """The first line of an error's text, or its type."""
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)


def word(value):
    """A flag's value as text."""
    return "on" if value is True else "off" if value is False or value is None else str(value)


@dataclass(frozen=True)
class Note:
    """A flag whose value was chosen or changed, and why: printed with the plan."""

    flag: str
    value: object
    reason: str

    def __str__(self):
        return f"{self.flag} is {word(self.value)}: {self.reason}"


@contextlib.contextmanager
def out_of_memory(hint):
    """Turns an out-of-memory error inside this context into a UserError that ends with `hint`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory ({first_line(error)}): {hint}") from error


def is_out_of_memory(error):
    import torch  # slow to import, and fineweb.py's workers do not need it

    # the libraries under PyTorch have no exception type of their own
    signs = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


# Control characters that could command a terminal: all but newline, tab and what progress bars write around a line
CONTROL = re.compile(r"(?!\A\r|\r\Z)(?<!\A\r(?=\x1b\[K))[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Console:
    """Standard output or error that may go away: a closed terminal, a pipe without a reader, a full disk.

    Output from then on is dropped, and the program goes on. A terminal gets control characters, as in a file's name or
    a model's text, as escapes.
    """

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        if self.stream.isatty():
            text = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
        return self._try(self.stream.write, text)

    def flush(self):
        self._try(self.stream.flush)

    def _try(self, function, *arguments):
        try:
            return function(*arguments)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())  # the stream's buffer is dropped too
            os.close(null)

    def __getattr__(self, name):
        return getattr(self.stream, name)


# What gloo and NCCL say on the ranks that are left
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def run(main):
    """Call main(). A UserError, a disk that is full or read-only, a useless compile cache or another rank's end prints
    one line on standard error and ends with exit code 1, Ctrl-C with 130."""
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # the caller closed a standard stream, as >&- does: no other file may get its number
    os.close(spare)
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.set_blocking(number, True)  # a full pipe waits for its reader; else EAGAIN would end all output
        stream = getattr(sys, name) or open(os.devnull, "w")
        if hasattr(stream, "reconfigure"):  # not in a notebook
            # flush every line, also into a pipe; escape characters that the encoding lacks
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        setattr(sys, name, Console(stream))
    if signal.getsignal(signal.SIGINT) == interrupt.end:  # the imports are over
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():
        gc.freeze()  # no collection visits the modules, neither in training nor at exit
        gc.enable()
    several_ranks = os.environ.get("WORLD_SIZE", "1") != "1"
    try:
        main()
    except (UserError, OSError, RuntimeError) as error:
        cause = getattr(error, "inner_exception", error)  # of an error in torch.compile
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch.compile sets its default
        if isinstance(cause, OSError) and cache and cache in str(cause):  # unwritable, or mounted with noexec
            error = f"torch.compile cannot use its cache ({first_line(cause)}); TORCHINDUCTOR_CACHE_DIR=FOLDER moves it"
        elif isinstance(error, RuntimeError):
            sign = next((sign for sign in PEER_IS_GONE if sign in str(error)), None)
            if sign is None or not several_ranks:
                raise
            error = f"another rank has ended ({sign}): its own output, or torchrun's summary, says why"
        elif isinstance(error, OSError):
            if error.errno not in (errno.EACCES, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOSPC, errno.EROFS):
                raise
            error = f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(5)  # rank 0 usually prints the same error, and torchrun then ends this rank
        line = str(error).replace("\n", "\\n")  # as in a file's name
        print(f"error{f' (rank {rank})' if rank != '0' else ''}: {line}", file=sys.stderr, flush=True)
        if several_ranks:
            # let gloo's thread release its tensors: during interpreter shutdown that ends with SIGABRT.
            # Destroying the group could wait for ranks that never answer.
            time.sleep(0.2)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT
