"""Timed training runs, each in processes of its own; two can take turns on the same GPUs.

Runs that are timed one after the other also differ by what the machine does meanwhile: a GPU's clock, other programs.
In turn, round by round, they see the same. A process that waits for its turn holds its weights and optimizer states.
"""

from common.interrupt import StopSignal

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import statistics
from dataclasses import dataclass
from multiprocessing import connection

import torch

from checkpoints import resume
from common.errors import UserError, out_of_memory
from config import SETTLING_STEPS, chosen_flags, resolve
from data.loader import Loader, open_streams
from data.shards import dataset_name
from measure.child_run import OFF, OUT_OF_MEMORY, plain, run_config, shown_command
from parallel import memory, process_group
from train_gpt2 import build, train_step
from watch.hardware import environment, flops_per_token, mfu, peak_flops, peak_memory

ROUNDS = 5
STUDENT_T = 2.776  # two-sided 95% for ROUNDS - 1 degrees of freedom
# Imported once, by the process that the others are forked from; none touches the GPU
PRELOAD = ["torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.tensor"]


@dataclass
class Gain:
    """The speed of a run over that of another, from rounds in turn."""

    ratio: float  # of tokens/sec, the geometric mean over the rounds
    low: float  # the ends of its 95% interval
    high: float

    @property
    def is_clear(self):
        """Whether the interval does not hold 1."""
        return not self.low <= 1 <= self.high

    def facts(self):
        return vars(self) | dict(is_clear=self.is_clear)


class TimedRun:
    """A training run that takes steps when it is asked to."""

    def __init__(self, config, ranks, output):
        """Start a run of a Config in `ranks` processes, and take SETTLING_STEPS steps. output: the file that gets what
        the processes print.

        Raises UserError if the run cannot start or does not fit into memory, RuntimeError if it ends by a bug.
        """
        self.output, self.rates, self.losses = output, [], []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with contextlib.closing(socket.socket()) as unused:
            unused.bind(("localhost", 0))
            port = unused.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            pipe, other = context.Pipe()
            process = context.Process(target=serve, args=(config, rank, ranks, port, other, str(output)), daemon=True)
            process.start()
            other.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        try:
            self.facts = self._answer()
            self.train(SETTLING_STEPS)
        except BaseException:
            self.close()
            raise
        self.rates.clear()

    def _answer(self):
        """What rank 0 sends, or the first rank that ends."""
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

    def train(self, steps):
        """Take steps; returns their median tokens/sec. Raises as __init__ does."""
        with contextlib.suppress(BrokenPipeError):  # _answer() says how the process has ended
            for pipe in self._pipes:
                pipe.send(steps)
        seconds, losses, tokens, self.peak_gb = self._answer()
        self.losses += losses
        self.seconds = statistics.median(seconds)  # of a step
        self.rates.append(tokens / self.seconds)
        return self.rates[-1]

    def close(self):
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        connection.wait([process.sentinel for process in self._processes], timeout=10)
        for process in self._processes:
            process.kill()  # one that is still at work
            process.join()  # its memory is free then

    def result(self):
        """{ms, tokens_per_sec, mfu, peak_gb, facts}: medians over all turns so far."""
        rate = statistics.median(self.rates)
        return dict(
            ms=1000 * self.facts["total_batch_size"] / rate,
            tokens_per_sec=rate,
            mfu=mfu(rate, self.facts["flops_per_token"], self.facts["peak_flops"]),
            peak_gb=self.peak_gb,
            facts=self.facts,
        )


def measure(config, ranks, results, name, seconds, steps, before=None):
    """(TimedRun, result) of a Config, timed for `seconds` and `steps` steps or longer, in turn with the TimedRun
    `before` if there is one. results: a Results; what the processes print is in NAME.txt in its folder.

    status of the result is "done", "skipped" (this machine cannot run it) or "failed" (a bug). Done, it has
    TimedRun.result() and gain: Gain.facts() over `before`, None without; else a reason, and the run is None.
    Raises UserError if `before` has ended.
    """
    result, run, gain = dict(name=name, command=shown_command(config, ranks)), None, None
    try:
        run = TimedRun(run_config(config, **dict.fromkeys(OFF, 0)), ranks, results.folder / f"{name}.txt")
        if before:
            gain = compare(before, run, seconds, steps).facts()
        else:
            run.train(max(steps, math.ceil(seconds / run.seconds)))
    except (UserError, RuntimeError) as error:
        if run:
            run.close()
        reason = plain(str(error))
        if before and before.has_ended:
            raise UserError(f"the run before {name} has ended: {reason}") from error
        return None, result | dict(status="skipped" if isinstance(error, UserError) else "failed", reason=reason)
    return run, result | dict(status="done", gain=gain) | run.result()


def compare(first, second, seconds, steps):
    """The Gain of a TimedRun over another, in turn. Each is timed for `seconds` and `steps` steps, or longer."""
    logs, shares = [], {run: turn(run, seconds, steps) for run in (first, second)}
    for number in range(ROUNDS):  # A B, B A, A B, ...: a drift of the clock cancels
        rates = {run: run.train(shares[run]) for run in ((first, second), (second, first))[number % 2]}
        logs.append(math.log(rates[second] / rates[first]))
    mean, margin = statistics.mean(logs), STUDENT_T * statistics.stdev(logs) / math.sqrt(ROUNDS)
    return Gain(*map(math.exp, (mean, mean - margin, mean + margin)))


def turn(run, seconds, steps):
    """Steps in each of ROUNDS turns."""
    return max(math.ceil(steps / ROUNDS), math.ceil(seconds / ROUNDS / run.seconds))


# ----------------------------------------------------------------------------------------------------------------------
# The processes of a run


def serve(config, rank, ranks, port, pipe, output):
    """A process of a TimedRun: take as many steps as the pipe asks for, until it is closed."""
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that asks
    if ranks > 1:
        names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        names |= dict(MASTER_ADDR="localhost", MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in names.items()})
    try:
        with out_of_memory(memory.less_memory()):
            take_turns(config, pipe)
    except UserError as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send(str(error))
    except EOFError:
        process_group.stop()


def take_turns(config, pipe):
    distributed = process_group.start(config.device, config.tensor, config.context, config.pipeline)
    start = resume.find_start(config, distributed)
    config, _ = resolve(config, distributed, memory.free_memory(distributed), start, chosen_flags(config))
    stream, _, _ = open_streams(config, distributed)
    loader = Loader(stream, config.micro_batch_size, config.seq_len, distributed)
    trainer = build(config, distributed, start.weights, start.sizes)
    device, stop, step = distributed.device, StopSignal(), 0
    if distributed.is_main:
        facts = dict(vars(config), world_size=distributed.world_size, dataset=dataset_name(config.data_dir))
        facts |= dict(flops_per_token=flops_per_token(trainer.model, config.seq_len))
        facts |= dict(peak_flops=peak_flops(device) * distributed.world_size)
        pipe.send(facts | environment(device))
    while True:
        results = []
        # the first step of a turn takes back the memory that the other run had, and is not timed
        for _ in range(pipe.recv() + 1):
            if pipe.poll():  # closed: the process that asks has ended
                raise EOFError
            results.append(train_step(trainer, step, loader.next_batch, stop))
            step += 1
        if device.type == "cuda":
            torch.cuda.empty_cache()
        seconds, losses = [result.seconds for result in results[1:]], [result.loss for result in results]
        if distributed.is_main:
            pipe.send((seconds, losses, results[0].tokens, peak_memory(device)))
