"""A progress bar, and lines that a thread prints meanwhile."""

import os
import sys

from tqdm import tqdm


def progress(iterable, title, total=None):
    """Iterate with a progress bar on standard error, which appears after two seconds and is erased at the end.

    Only rank 0 shows it, and only on a terminal.
    """
    disable = None if os.environ.get("RANK", "0") == "0" else True  # None: unless it is a terminal
    return tqdm(iterable, title, total, leave=False, delay=2, disable=disable)


def print_over_bar(line):
    """Print a line in one write, so that it does not mix with another thread's, in the place of a progress bar."""
    erase = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{erase}{line}\n", end="")
