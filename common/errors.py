"""Errors that a person can fix, as one-line messages, and notes about flags."""

import contextlib
from dataclasses import dataclass


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
