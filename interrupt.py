"""Ctrl-C, SIGTERM, SIGUSR1: a request to stop soon, with everything saved."""

import os
import signal
import sys
import time


class Interrupt:
    """Notes the first signal for training to see; a second Ctrl-C ends it at once.

    SIGTERM is what spot machines and SLURM send before they take the machine away, SIGUSR1 what people have SLURM send
    (--signal). torchrun passes Ctrl-C on to processes that the terminal has told already: that is one, not two.
    """

    def __init__(self):
        self.name = None  # of the signal that came
        self._when = 0.0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number, _):
        if self.name and number == signal.SIGINT and time.monotonic() - self._when > 1:
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(130)  # 128 + SIGINT; without waiting for a checkpoint that is being written
        if not self.name:
            self.name, self._when = signal.Signals(number).name, time.monotonic()
