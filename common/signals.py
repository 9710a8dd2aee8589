"""Ctrl-C, SIGTERM, SIGUSR1, a terminal that goes away: a request to stop soon, with everything saved."""

import contextlib
import os
import signal
import sys
import time


class StopSignal:
    """Notes the first signal for training to see; a second Ctrl-C ends it at once.

    SIGTERM is what spot machines and SLURM send before they take the machine away, SIGUSR1 what people have SLURM send
    (--signal). torchrun passes Ctrl-C on to processes that the terminal has told already: that is one, not two.
    """

    def __init__(self):
        self.name = None  # of the signal that came
        self._when = 0.0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's wish
                signal.signal(number, self._note)

    def _note(self, number, _):
        if self.name and number == signal.SIGINT and time.monotonic() - self._when > 1:
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(130)  # 128 + SIGINT; without waiting for a checkpoint that is being written
        if not self.name:
            self.name, self._when = signal.Signals(number).name, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                # under torchrun Ctrl-C does not come here, and the second one makes torchrun send SIGTERM
                torchrun = "TORCHELASTIC_RUN_ID" in os.environ
                hint = "" if torchrun else "; Ctrl-C again ends at once, and saves nothing"
                # not print, which may be what was interrupted; and whoever reads it may have got the signal, too
                with contextlib.suppress(OSError):
                    os.write(2, f"{self.name}: stopping{hint}\n".encode())
