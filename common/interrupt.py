"""Signals: Ctrl-C during imports and compilation, and what asks training to stop. Every command imports this first.

Ctrl-C during imports prints one line and ends with exit code 130: a KeyboardInterrupt there may abort the process
(pybind11) or get lost. After the imports common.errors.run() restores Python's own handler, and the garbage collection
that is off during imports.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path


def end(*_):
    os.write(2, b"interrupted\n")
    os._exit(130)  # 128 + SIGINT


def end_at_once():
    """From now on Ctrl-C ends the process without clean-up; not where it is ignored, or StopSignal's."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


class Stopped(Exception):
    """A stop signal has ended a step or an evaluation early: nothing of it is kept."""


class StopSignal:
    """Whether a signal has asked this process to stop (`requested`, `name`), and whether all ranks know (`agreed`).

    SLURM and spot machines send SIGTERM before they end a job; SIGUSR1 is the usual choice for SLURM's --signal; SIGHUP
    comes from a closed terminal. A second Ctrl-C ends the process at once. Two within one second count as one, because
    a launcher may forward the Ctrl-C that the terminal has already delivered.
    """

    def __init__(self):
        self.name = None  # of the first signal, such as "SIGTERM"
        self.agreed = False  # set by the training loop: it saves and stops
        self._time = 0.0

    @property
    def requested(self):
        return self.name is not None

    def listen(self):
        """From now on signals are recorded; before, they end the process."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._handle)

    def _handle(self, number, _):
        if self.name:
            if number == signal.SIGINT and time.monotonic() - self._time > 1:
                print("interrupted", file=sys.stderr, flush=True)
                os._exit(130)  # 128 + SIGINT; does not wait for a checkpoint that is being written
            return
        self.name, self._time = signal.Signals(number).name, time.monotonic()
        if os.environ.get("RANK", "0") == "0":
            # torchrun turns a second Ctrl-C into SIGTERM, so the hint would be wrong there
            torchrun = "TORCHELASTIC_RUN_ID" in os.environ
            hint = "" if torchrun else "; Ctrl-C again ends at once, and saves nothing"
            # print() is not reentrant; the reader of the pipe may be gone
            with contextlib.suppress(OSError):
                os.write(2, f"{self.name}: stopping{hint}\n".encode())


# only in a process that runs a command, not in one that imports it
root, script = Path(__file__).resolve().parent.parent, getattr(sys.modules["__main__"], "__file__", None)
if script and Path(script).resolve().parent in (root, root / "dev", root / "measure", root / "watch"):
    end_at_once()
    gc.disable()  # garbage collection takes a quarter of the imports' time, and finds nothing
