"""The command line: flags out of a dataclass, and a person's mistake as one line instead of a traceback."""

import contextlib
import io
import os
import re
import sys
import time


class UserError(Exception):
    """Something a person can put right. Its text says what is wrong and what to do."""


def hub_errors():
    """What reading from the Hugging Face hub raises: its own errors, and those of whichever HTTP library it uses."""
    from huggingface_hub.errors import HTTPError

    return OSError, ValueError, HTTPError


def first_line(error):
    """What an error says, in one line, without the hub's request numbers."""
    text = re.sub(r"\(?Request ID:[^)\n]*\)?", "", str(error))
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), type(error).__name__)


OUT_OF_MEMORY_SIGNS = r"OutOfMemoryError|out of memory|can't allocate memory|STATUS_ALLOC_FAILED|exitcode *: -9"
# what Gloo and NCCL say when a process at the other end is no more
PEER_GONE = r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited"
out_of_memory_hint = "use a smaller model, or a machine with more"  # programs that know better set it


class Console:
    """Standard output or error, which may go away: a terminal that closes, a pipe that nobody reads, a full disk.

    What is written from then on is dropped, and the program goes on.
    """

    def __init__(self, stream):
        self._stream = stream

    def write(self, text):
        return self._try(self._stream.write, text)

    def flush(self):
        self._try(self._stream.flush)

    def _try(self, function, *arguments):
        try:
            return function(*arguments)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also for what it still holds
            os.close(nowhere)

    def __getattr__(self, name):
        return getattr(self._stream, name)


def parse(config_type, default=None):
    """Read the command line into the dataclass `config_type`; fields become flags, `--no_NAME` turns one off.

    Raises UserError for a flag or value that does not exist, naming the nearest that does.
    """
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(config_type, default=default, use_underscores=True)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
    text = re.sub(r"[─│╭╮╰╯]+", " ", complaint.getvalue())
    text = re.sub(r"For full helptext.*|\(required\).*|\S+\.py --help", "", text)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    text = re.split(r"\.? Got errors:|\.? Argument helptext:", " ".join(lines[1:]))[0]  # without the box's title
    raise UserError(text.rstrip(". ") + "; see --help")


def run(main):
    """Call main(). A UserError ends the program with one line on standard error and exit code 1; Ctrl-C with 130."""
    # a line is seen when it is printed, also through a pipe, and in any encoding
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    try:
        main()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError | RuntimeError) and re.search("MemoryError|" + OUT_OF_MEMORY_SIGNS, text):
            size = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
            error = UserError(f"out of memory{f' (tried to allocate {size[1]})' if size else ''}: {out_of_memory_hint}")
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if isinstance(error, RuntimeError) and world_size > 1 and re.search(PEER_GONE, text):
            error = UserError(f"another rank has ended, and says why ({first_line(error).split('. ')[0]})")
        if not isinstance(error, UserError):
            raise
        rank = int(os.environ.get("RANK", 0))
        if rank > 0:
            # Rank 0 met the same error as a rule, and torchrun ends this rank before it can repeat it.
            time.sleep(5)
        print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr, flush=True)
        if world_size > 1:
            # gloo's thread may still hold a collective: to let go of it while Python is ending would be SIGABRT. And to
            # leave the group first, as parallel.stop() does, could mean to wait for ranks that never answer.
            time.sleep(0.2)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as shells count
