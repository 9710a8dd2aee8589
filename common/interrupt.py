"""Ctrl-C during imports, which take seconds: one line and exit code 130. Every command imports this module first.

A KeyboardInterrupt there may abort the process (pybind11) or get lost. common.cli.run() restores it after the imports.
"""

import os
import signal
import sys
from pathlib import Path


def end(*_):
    os.write(2, b"interrupted\n")
    os._exit(130)  # 128 + SIGINT


# only in a process that runs a command, not in one that imports it; nohup and shells may ignore Ctrl-C
script = Path(getattr(sys.modules["__main__"], "__file__", "")).resolve()
if script.parent == Path(__file__).resolve().parent.parent and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, end)
