"""Timed training runs, each in processes of its own; two can take turns on the same GPUs.

Runs that are timed one after the other also differ by what the machine does meanwhile: a GPU's clock, other programs.
In turn, round by round, they see the same. A process that waits for its turn holds its weights and optimizer states.
"""

from common.interrupt import StopSignal

import math
import statistics
from dataclasses import replace
from functools import partial

import torch

from checkpoints import resume
from common.errors import UserError
from common.files import json_digest
from config import chosen_flags, resolve
from data.loader import Loader, open_streams
from data.shards import dataset_name
from measure.child_run import OFF, ChildRun, explain, run_config, shown_command
from parallel import memory, process_group
from train_gpt2 import build, train_step
from watch.hardware import ask_nvidia_smi, environment, flops_per_token, gpu_facts, mfu, peak_flops, peak_memory

FIRST_STEPS = 3  # for compilation and the optimizer's states; training goes no further
ROUNDS = 5  # in turn
STUDENT_T = 2.776  # of a 95% interval, for ROUNDS - 1 degrees of freedom
# Of the untimed steps before a turn on a GPU, whose steps' times swing after a load has started. With half a second the
# means of turns were within 0.7% of the sustained speed, with a second within 1%: dev/records/clock_swing.json
SETTLING_SECONDS = 0.5


class TimedRun(ChildRun):
    """A training run that takes steps when it is asked to."""

    def __init__(self, config, ranks, output, accumulates=True, prepare=None):
        """Start a run of a Config in `ranks` processes, and take FIRST_STEPS steps. output: the file that gets what
        the processes print. accumulates: else a step is one micro-batch on every rank. prepare: a function that each
        process calls first. Raises as answer().
        """
        super().__init__(partial(take_turns, accumulates, prepare), config, ranks, output)
        self.rates, self.losses, self.seconds = [], [], None  # seconds: of a step
        try:
            self.facts = self.answer()
            self.train(FIRST_STEPS)
        except BaseException:
            self.close()
            raise
        self.rates.clear()

    def train(self, steps):
        """Take steps; returns their tokens/sec. From the second call on, untimed steps come before: SETTLING_SECONDS of
        them on a GPU, one on a CPU. Raises as answer()."""
        untimed = 0
        if self.seconds:
            untimed = math.ceil(SETTLING_SECONDS / self.seconds) if self.facts["cuda"] else 1
        self.ask((untimed, steps))
        seconds, losses, tokens, self.peak_gb = self.answer()
        self.losses += losses
        # A step's: of the first steps, which compile, the shortest; then the mean, since their times swing
        self.seconds = statistics.mean(seconds) if self.seconds else min(seconds)
        self.rates.append(tokens / self.seconds)
        return self.rates[-1]

    def ask_gpu(self):
        """Ask rank 0's GPU for its clock, power and temperature, as watch.hardware.ask_nvidia_smi()."""
        return ask_nvidia_smi(torch.device(self.facts["device"]))

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


def measure(config, ranks, results, name, seconds, steps, before=None, accumulates=True, prepare=None):
    """(TimedRun, result) of a Config, timed for `seconds` and `steps` steps or longer, see compare(), in turn with the
    TimedRun `before` if there is one. results: a Results; what the processes print is in NAME.txt in its folder.
    accumulates, prepare: as of TimedRun.

    status of the result is "done", "skipped" (this machine cannot run it) or "failed" (a bug). Done, it has
    TimedRun.result() and gain: compare() with `before`, None without; else a reason, and the run is None.
    Raises UserError if `before` has ended.
    """
    result, run, gain = dict(name=name, command=shown_command(config, ranks)), None, None
    try:
        output = results.folder / f"{name}.txt"
        run = TimedRun(run_config(config, **dict.fromkeys(OFF, 0)), ranks, output, accumulates, prepare)
        if before:
            gain = compare(before, run, seconds, steps)
        else:
            run.train(max(steps, math.ceil(seconds / run.seconds)))
    except (UserError, RuntimeError) as error:
        if run:
            run.close()
        if before and before.has_ended:
            raise UserError(f"the run before {name} has ended: {error}") from error
        return None, result | explain(error)
    if not accumulates:
        config = replace(config, total_batch_size=run.facts["total_batch_size"])
        result["command"] = shown_command(config, ranks)
    return run, result | dict(status="done", gain=gain) | run.result()


def compare(first, second, seconds, steps):
    """The gain of a TimedRun over another, in turn: dict(ratio=, low=, high=, is_clear=, rounds=, steps=, seconds=,
    gpu=).

    It is the geometric mean over ROUNDS rounds of the ratios of tokens/sec, its 95% interval, whether that does not
    hold 1, the two rates of each round, how many steps and seconds each of the two was timed, and
    watch.hardware.gpu_facts() at one moment of the rounds. Each is timed for about `seconds` and at least `steps`
    steps.
    """
    turn = max(seconds / ROUNDS, math.ceil(steps / ROUNDS) * max(first.seconds, second.seconds))
    turn = max(math.ceil(turn / run.seconds) * run.seconds for run in (first, second))
    shares = {run: round(turn / run.seconds) for run in (first, second)}  # steps; both turns last about equally long
    rounds, timed, asked = [], dict.fromkeys((first, second), 0.0), None
    for number in range(ROUNDS):  # B A, A B, ...: a drift of the clock cancels
        rates = {}
        for run in ((second, first), (first, second))[number % 2]:
            rates[run] = run.train(shares[run])
            timed[run] += shares[run] * run.seconds
        rounds.append((rates[first], rates[second]))
        asked = asked or second.ask_gpu()  # it answers while other rounds run
    logs = [math.log(own / before) for before, own in rounds]
    mean, margin = statistics.mean(logs), STUDENT_T * statistics.stdev(logs) / math.sqrt(ROUNDS)
    ratio, low, high = map(math.exp, (mean, mean - margin, mean + margin))
    gain = dict(ratio=ratio, low=low, high=high, is_clear=not low <= 1 <= high, rounds=rounds)
    gain |= dict(steps=[ROUNDS * share for share in shares.values()], seconds=[*timed.values()])
    return gain | dict(gpu=gpu_facts(asked))


def take_turns(accumulates, prepare, config, pipe):
    """The work of a TimedRun's processes: as many untimed and timed steps as the pipe asks for, until it is closed.

    An untimed step also takes back the memory that the other run had. After the first turn the learning rate is 0: the
    power that a GPU draws, and so its clock, depends on the numbers, and of two runs in turn one would have more steps
    behind it.
    """
    if prepare:
        prepare()
    distributed = process_group.start(config.device, config.tensor, config.context, config.pipeline)
    start = resume.find_start(config, distributed)
    config, _ = resolve(config, distributed, memory.free_memory(distributed), start, chosen_flags(config))
    if not accumulates:
        config = replace(config, total_batch_size=config.micro_batch_size * config.seq_len * distributed.data_size)
    stream, _, data = open_streams(config, distributed)
    loader = Loader(stream, config.micro_batch_size, config.seq_len, distributed)
    trainer = build(config, distributed, start.weights, start.sizes)
    device, stop, step = distributed.device, StopSignal(), 0
    if distributed.is_main:
        facts = dict(vars(config), world_size=distributed.world_size, dataset=dataset_name(config.data_dir))
        facts |= dict(data_sha256=json_digest(data), flops_per_token=flops_per_token(trainer.model, config.seq_len))
        facts |= dict(peak_flops=peak_flops(device) * distributed.world_size)
        pipe.send(facts | environment(device))
    while True:
        (untimed, steps), results = pipe.recv(), []
        for _ in range(untimed + steps):
            if pipe.poll():  # closed: the process that asks has ended
                raise EOFError
            results.append(train_step(trainer, step, loader.next_batch, stop))
            step += 1
        timed = results[untimed:]
        seconds, losses = [result.seconds for result in timed], [result.loss for result in timed]
        if device.type == "cuda":
            torch.cuda.synchronize()  # the last update, which the time of no step has: each has the update before it
            torch.cuda.empty_cache()
        for group in trainer.optimizer.param_groups:
            group["peak"] = 0.0
        if distributed.is_main:
            pipe.send((seconds, losses, results[0].tokens, peak_memory(device)))
