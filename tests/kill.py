"""Train again and again, killing it at random moments: python kill.py RUNS KILLS SEED FLAGS...

One process imports everything and forks the trainings, which saves each of them seconds of start-up. Prints a line for
each kill: how long the training had lived, and whether a checkpoint was being written. It ends when that many were
killed and the last run has finished undisturbed; runs are named killed-0, killed-1, ...
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import torch._dynamo
import tyro  # noqa: F401

import train_gpt2
from cli import run
from tokenizer import get_tokenizer


def start(log_dir, name, flags):
    """Fork a training; returns its process number."""
    child = os.fork()
    if child:
        return child
    output = os.open(log_dir / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["train_gpt2.py", "--log_dir", str(log_dir), "--run_name", name, *flags]
    code = 1
    try:
        run(train_gpt2.main)
        code = 0
    except SystemExit as stop:
        code = stop.code
    finally:
        os._exit(code)


def main():
    log_dir, kills, seed, *flags = sys.argv[1:]
    log_dir, kills, moments = Path(log_dir), int(kills), random.Random(int(seed))
    log_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    get_tokenizer()
    longest = 2.0  # seconds that a training lives at most
    runs = killed = 0
    while True:
        name = f"killed-{runs}"
        child = start(log_dir, name, flags)
        began = time.monotonic()
        lives = moments.uniform(0, longest) if killed < kills else 600
        ended = 0
        while time.monotonic() - began < lives and not ended:
            time.sleep(0.002)
            ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                sys.exit(f"{name} ended with {os.waitstatus_to_exitcode(status)}; see {log_dir / name}.txt")
            if killed >= kills:
                return
            runs += 1
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        writing = any((log_dir / name).glob("checkpoint_*.unfinished"))
        newest = max((path.name for path in (log_dir / name).glob("checkpoint_??????")), default="none")
        print(f"killed {name} after {lives:.3f} s, {'in a checkpoint' if writing else 'elsewhere'}; newest {newest}")


if __name__ == "__main__":
    main()
