"""The command line: flags out of a dataclass, and a person's mistake as one line instead of a traceback."""

import contextlib
import errno
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
out_of_memory_hint = "use a smaller --micro_batch_size"


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
    text = re.sub(r"For full helptext.*", "", text)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    raise UserError(" ".join(lines[1:]) + "; see --help")  # without the box's title


def run(main):
    """Call main(). A UserError ends the program with one line on standard error and exit code 1; Ctrl-C with 130."""
    sys.stdout.reconfigure(line_buffering=True)  # a line is seen when it is printed, also through a pipe
    try:
        main()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError | RuntimeError) and re.search("MemoryError|" + OUT_OF_MEMORY_SIGNS, text):
            error = UserError(f"out of memory: {out_of_memory_hint} ({str(error).split('.')[0]})")
        if (
            isinstance(error, OSError)
            and error.filename is None
            and error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO)
        ):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in it is not tried again at the end
            error = UserError(f"cannot write to standard output: {error.strerror}")
        if not isinstance(error, UserError):
            raise
        rank = int(os.environ.get("RANK", 0))
        if rank > 0:
            # Rank 0 met the same error as a rule, and torchrun ends this rank before it can repeat it.
            time.sleep(5)
        print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as shells count
