"""Ctrl-C during imports and compilation: one line and exit code 130. Every command imports this module first.

A KeyboardInterrupt there may abort the process (pybind11) or get lost. After the imports common.errors.run() restores
Python's own handler, and the garbage collection that is off during imports.
"""

import gc
import os
import signal
import sys
from pathlib import Path


def end(*_):
    os.write(2, b"interrupted\n")
    os._exit(130)  # 128 + SIGINT


def end_at_once():
    """From now on Ctrl-C ends the process without clean-up, unless nohup or a shell made it ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)


# only in a process that runs a command, not in one that imports it
root, script = Path(__file__).resolve().parent.parent, getattr(sys.modules["__main__"], "__file__", None)
if script and Path(script).resolve().parent in (root, root / "measure", root / "watch"):
    end_at_once()
    gc.disable()  # garbage collection takes a quarter of the imports' time, and finds nothing
