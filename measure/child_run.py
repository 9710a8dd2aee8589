"""A training run in processes of its own, and what the commands that start several runs share.

A run inherits no memory, compiled graphs or settings from the run before it.
"""

from common.interrupt import StopSignal

import contextlib
import multiprocessing
import os
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import fields
from multiprocessing import connection
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoints.run_folder import facts_of, folder_of
from common.device import choose_device_type
from common.errors import UserError, out_of_memory
from config import INTERVALS, Config, chosen_flags, command_line
from data.shards import open_shards
from measure.results import Results, data_sha256
from parallel import memory, process_group
from train_gpt2 import train

OFF = (*INTERVALS, "batch_warmup_ratio")  # in short runs
OUT_OF_MEMORY = "out of memory"
# Imported once, by the process that the others are forked from; none touches the GPU
PRELOAD = ["torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.tensor"]
SPEED = ("ms a step", "tokens/sec", "MFU", "peak GB")  # columns of speed()


def begin(config, kind, columns, typed=(), goes_on=True):
    """The Results of a command that starts several runs. typed: the flags of the command line that short runs may not
    use. goes_on: as of Results. Raises UserError if every run would fail."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("a measurement starts the processes of its runs: start it with python, not with torchrun")
    if config.profile or config.memory_snapshot:
        raise UserError("--profile and --memory_snapshot are for a single run: both slow down what is measured here")
    if config.resume not in ("auto", "never"):
        raise UserError("--resume is for train_gpt2.py; --config RUN/flags.yaml measures with the flags of a run")
    if not config.demo:
        open_shards(config.data_dir, "train")
    if unused := sorted({"max_steps", *OFF}.intersection(typed)):
        print(f"not used: --{', --'.join(unused)}; runs are short, and nothing is evaluated or saved")
    return Results(config, kind, torch.device(choose_device_type(config.device)), columns, goes_on)


def count_devices(config):
    """Processes of the largest run: one for each GPU."""
    return max(1, torch.cuda.device_count()) if config.device in ("auto", "cuda") else 1


def run_config(config, **changes):
    """The Config of a run that a measurement starts: of `config`, which may have other flags too, with changes."""
    own = {field.name: getattr(config, field.name) for field in fields(Config)}
    of_one_start = dict(ladder=False, log_dir=Config.log_dir, run_name=None, config=None, resume=Config.resume)
    return Config(**own | of_one_start | dict(max_minutes=None) | changes)


def speed(row):
    """The texts of SPEED for a result of turns.measure(); none if it is not done."""
    if row["status"] != "done":
        return []
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else "–"
    return [f"{row['ms']:.2f}", f"{row['tokens_per_sec']:,.0f}", mfu, f"{row['peak_gb']:.2f}"]


def gain_texts(gain):
    """The texts of "× before" and "95%" for a gain of turns.compare(); none without one."""
    return [f"{gain['ratio']:.3f}{mark(gain)}", f"{gain['low']:.3f}–{gain['high']:.3f}"] if gain else []


def mark(gain):
    """What follows a gain: ≈ if its interval holds 1."""
    return "" if gain["is_clear"] else " ≈"


def shown_command(config, ranks):
    """The command line of a run with the flags of run_config(config)."""
    program = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else ["python"]
    return shlex.join([*program, "train_gpt2.py", *command_line(run_config(config))])


def finish(results):
    """Say where the results are. Raises UserError if a run failed because of a bug; skipped runs do not count."""
    print(f"{results}, and what each run printed")
    if failed := [row["name"] for row in results.rows if row["status"] == "failed"]:
        raise UserError(f"{len(failed)} of {len(results.rows)} runs failed: {', '.join(failed)}; the reasons are above")


# ----------------------------------------------------------------------------------------------------------------------
# The processes of a run


class ChildRun:
    """Processes that train, one for each rank, with a pipe to each."""

    def __init__(self, work, config, ranks, output):
        """Start work(config, pipe) in `ranks` processes. output: the file that gets what they print."""
        self.output = output
        # Else a minute after a compilation PyTorch ends its workers, and a step takes a second longer. The process that
        # the others are forked from imports torch._inductor, which reads this
        os.environ.setdefault("TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL", "0")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with contextlib.closing(socket.socket()) as unused:
            unused.bind(("localhost", 0))
            port = unused.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            pipe, other = context.Pipe()
            arguments = work, config, rank, ranks, port, other, str(output)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            other.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def ask(self, message):
        """Send a message to all ranks."""
        with contextlib.suppress(BrokenPipeError):  # answer() says how the process has ended
            for pipe in self._pipes:
                pipe.send(message)

    def answer(self):
        """What rank 0 sends. Raises UserError with that of a rank, or if memory runs out, and RuntimeError if a rank
        ends by a bug."""
        pipe = connection.wait(self._pipes)[0]
        try:
            answer = pipe.recv()
        except EOFError:
            process = self._processes[self._pipes.index(pipe)]
            process.join()
            code = process.exitcode
            if code == -signal.SIGKILL:  # Linux kills a process when host memory runs out
                raise UserError(OUT_OF_MEMORY) from None
            raise RuntimeError(f"exit code {code}, see {self.output}") from None
        if isinstance(answer, str):
            raise UserError(answer)
        return answer

    @property
    def has_ended(self):
        return not all(process.is_alive() for process in self._processes)

    def close(self, seconds=10):
        """End the processes: they have these seconds to end by themselves."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()  # one that is still at work
            process.join()  # its memory is free then


def serve(work, config, rank, ranks, port, pipe, output):
    """A process of a ChildRun."""
    sys.stdout = sys.stderr = file = open(output, "a", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that asks
    tqdm.set_lock(threading.RLock())  # its default has a semaphore, which a killed process leaks
    if ranks > 1:
        names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        names |= dict(MASTER_ADDR="localhost", MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in names.items()})
    try:
        with out_of_memory(memory.less_memory()):
            work(config, pipe)
    except UserError as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send(str(error))
    except EOFError:
        process_group.stop()


def explain(error):
    """{status, reason} of a run, for an error of ChildRun.answer(): "skipped" (this machine cannot run it) or "failed"
    (a bug). All errors that say that memory ran out have the same reason."""
    reason = OUT_OF_MEMORY if str(error).startswith(OUT_OF_MEMORY) else str(error)
    return dict(status="skipped" if isinstance(error, UserError) else "failed", reason=reason)


def train_to_end(config, results, name, ranks):
    """Train with the flags of a Config in `ranks` processes; returns a dictionary with name, command and status.

    results: a Results; the run's folder is NAME in its folder. A run that is done has facts, those of its config.json
    and data_sha256, and is not run again; the others have a reason, see explain(). Raises UserError as Results.kept().
    """
    result = dict(name=name, command=shown_command(config, ranks))
    if before := results.kept(name, config, command=result["command"]):
        return before
    shutil.rmtree(results.folder / name, ignore_errors=True)  # of a measurement that was stopped
    own = run_config(config, log_dir=str(results.folder), run_name=name)
    run = ChildRun(train_whole, own, ranks, results.folder / f"{name}.txt")
    try:
        facts = run.answer()
        run.close()
        return results.keep(result | dict(status="done", facts=facts))
    except (UserError, RuntimeError) as error:
        return result | explain(error)
    finally:
        run.close(seconds=0)  # Ctrl-C does not wait for it


def train_whole(config, pipe):
    """The work of train_to_end()'s processes."""
    os.environ.setdefault("WANDB_RUN_GROUP", Path(config.log_dir).name)  # read by wandb
    distributed = process_group.start(config.device, config.tensor, config.context, config.pipeline)
    data = distributed.on_main(lambda: data_sha256(config))
    train(config, distributed, chosen_flags(config), StopSignal())
    process_group.stop()
    if distributed.is_main:
        facts = facts_of(folder_of(config.log_dir, config.run_name))
        if not facts["finished"]:
            raise UserError("a signal ended it")
        pipe.send(facts | dict(data_sha256=data))
    pipe.recv()  # until it is closed
