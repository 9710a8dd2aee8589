"""Measure what each optimization buys on this machine: turn them on one by one, in short runs of train_gpt2.py.

    python train_gpt2.py --ladder                                     # all of them, in the order of optimizations.py
    python ladder.py --rungs tf32,bf16,compile+flash,fp8              # these; compile and flash in one rung

Every rung runs the real training step, on the same data from the same seed, in turn with the rung before.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import tyro

from common.cli import flag
from common.device import choose_device_type
from common.errors import UserError, run
from config import SETTLING_STEPS, Config, read_command_line
from measure import figures
from measure.child_run import OUT_OF_MEMORY, SPEED, begin, count_devices, finish, gain_texts, mark, speed
from measure.turns import FIRST_STEPS, ROUNDS, measure
from optimizations import RUNGS, turn_off_unavailable
from parallel.memory import bytes_of_states, params_of_rank
from parallel.process_group import Distributed

COLUMNS = ("rung", *SPEED, "× before", "95%", "× first", "loss")
NOTE = (
    f"A rung is timed in turn with the rung before, in {ROUNDS} rounds: × before is the mean of their ratios, with its "
    "95% interval; ≈: the interval holds 1. × first is tokens/sec over the baseline's. Losses are those of step "
    f"{FIRST_STEPS}: compare only rows with the same recipe and tokens a step."
)
FIRST_MICRO_BATCH = 32  # of the first rungs on a GPU, halved until it fits: with all off it needs 56 GB
DRIFT = 0.1  # change of the baseline's speed, by other programs or the clock, that is reported
FULL = 0.92  # of a GPU's memory; the rest is for two processes' contexts and fragments


@dataclass
class Ladder:
    """The rungs."""

    TITLE = "ladder"

    rungs: Annotated[
        str,
        tyro.conf.arg(
            help="The rungs, comma-separated, in the order to climb; a+b turns on both in one rung. A rung that is not "
            f"named stays off. Rungs: {', '.join(RUNGS)}. all: every rung that is on, or on by default."
        ),
    ] = "all"
    ladder_seconds: float = flag(5.0, at_least=0)
    """About how many seconds each rung is timed, in turn with the rung before."""
    ladder_steps: int = flag(10, at_least=ROUNDS)
    """Steps that each rung is timed, at least, in turn with the rung before, and again with the next."""


@dataclass
class LadderConfig(Config, Ladder):
    """Measure what each optimization buys: a short run with all off, then one run for each optimization added, timed in
    turn with the run before.

    Takes every flag of train_gpt2.py.
    """


def main():
    climb(*read_command_line(LadderConfig, ladder=True))


def climb(config, typed=()):
    """Run the ladder: print its table, and write ladder.json, ladder.md and ladder.png to the run's folder.

    config: a LadderConfig; typed: the flags of the command line. Raises UserError for rungs that do not exist, or if a
    rung failed.
    """
    rungs = choose_rungs(config.rungs, count_devices(config), config)
    named = {name for names, _ in rungs for name in names}  # also those that are off by default
    config = replace(config, **{RUNGS[name].flag: True for name in named if not RUNGS[name].default})
    if config.demo:
        print("the demo's small model: GPT-2 needs a GPU, and data")
    results = begin(config, "ladder", COLUMNS, typed, goes_on=False)
    config = replace(config, warmup_steps=min(config.warmup_steps, SETTLING_STEPS))

    def add(row, rung, own=None):
        if own:
            rates = [each["tokens_per_sec"] for each in [*results.done[:1], row]]
            row |= dict(times_first=rates[-1] / rates[0], loss=own.losses[FIRST_STEPS - 1])
        results.add(row | dict(rung=rung), cells(row, rung), NOTE, partial(figures.ladder, results.rows))

    device = torch.device(choose_device_type(config.device))
    baseline, timed, row = measure_baseline(config, device, results)
    add(row, "baseline", timed)
    on, before, first = [], baseline, baseline.micro_batch_size
    time = config.ladder_seconds, config.ladder_steps
    for index, (names, ranks) in enumerate(rungs, 1):
        before = replace(before, total_batch_size=results.done[-1]["facts"]["total_batch_size"])
        rung, idle = fit_rung(config, [*on, *names], names, first, Distributed(0, ranks, device), before)
        for name, reason in idle.items():
            add(dict(name=name, status="skipped", reason=reason), f"+ {name}")
        if names := [name for name in names if name not in idle]:
            name = f"{index:02d}_{'+'.join(names)}{ranks if ranks > 1 else ''}"
            own, row = measure(rung, ranks, results, name, *time, timed, "accumulation" in [*on, *names])
            add(row, label(names, row, results.done), own)
            if own:
                timed.close()
                on, before, timed = [*on, *names], rung, own
    if on:  # the product of the gains has the errors of all of them
        own, row = measure(baseline, 1, results, "baseline", *time, timed, accumulates=False)
        add(row, "baseline again", own)
        if own:
            own.close()
            high, ratio, low = (1 / row["gain"][name] for name in ("low", "ratio", "high"))
            print(f"{ratio:.1f} ×{mark(row['gain'])} (95%: {low:.2f} to {high:.2f}) from baseline to the last rung")
            if abs(row["times_first"] - 1) > DRIFT:
                print(f"the baseline is now {row['times_first']:.2f} × as fast as at first: compare × before alone")
    timed.close()
    finish(results)


def choose_rungs(text, devices, config):
    """The rungs of --rungs: (names, ranks) of each. DDP has 2, 4, ... ranks up to all devices. "all" contains what is
    off by default only if it is on in `config`.

    Raises UserError for a name that does not exist or comes twice, and for an invalid order.
    """
    every = ",".join(name for name, row in RUNGS.items() if row.default or row.is_on(config))
    text = every if text.strip() == "all" else text.replace(" ", "")
    rungs = [(part.split("+"), 1) for part in text.split(",")]
    names = list(itertools.chain(*(rung for rung, _ in rungs)))
    for name in names:
        if name not in RUNGS:
            raise UserError(f"--rungs: there is no {name!r}; there are {', '.join(RUNGS)}")
        if names.count(name) > 1:
            raise UserError(f"--rungs names {name} twice")
    if "ddp" in names:
        if "accumulation" not in names[: names.index("ddp")]:
            raise UserError("--rungs: ddp needs accumulation before it; until then a batch is one micro-batch")
        if rungs[-1] != (["ddp"], 1):
            raise UserError("--rungs: ddp comes last, and alone")
        counts = {2**i for i in range(1, devices.bit_length())} | {devices}
        rungs[-1:] = [(["ddp"], count) for count in sorted(counts)]
    return rungs


def measure_baseline(config, device, results):
    """(Config, TimedRun, result) of the first rung, with all optimizations off.

    Its micro-batch is halved until it fits into memory, also while the rung before waits. Raises UserError if it cannot
    run for another reason.
    """
    B = first_micro_batch(config, device)
    while True:
        rung, _ = turn_off_unavailable(with_rungs(config, [], B), Distributed(0, 1, device))
        name = f"00_baseline_B{B}"
        timed, row = measure(rung, 1, results, name, config.ladder_seconds, ROUNDS, accumulates=False)
        if timed and (B == 1 or leaves_room(rung, row, device)):
            return rung, timed, row
        if timed:
            timed.close()
        elif row["reason"] != OUT_OF_MEMORY or B == 1:
            raise UserError(f"the first rung does not run: {row['reason']}")  # a mistake in the flags fails every rung
        B //= 2


def leaves_room(rung, row, device):
    """Whether a GPU has room for a rung's peak and for the weights and optimizer states of one that waits. row: the
    rung's result."""
    if device.type != "cuda":
        return True
    sized = replace(rung, **{name: row["facts"][name] for name in ("n_layer", "n_embd", "seq_len")})
    waiting = 4 * params_of_rank(sized) + bytes_of_states(sized)
    return row["peak_gb"] * 2**30 + waiting < FULL * torch.cuda.get_device_properties(device).total_memory


def first_micro_batch(config, device):
    """Micro-batch size of the first rungs: FIRST_MICRO_BATCH or less on a GPU, 1 elsewhere; it divides the batch."""
    size = min(FIRST_MICRO_BATCH, config.micro_batch_size or FIRST_MICRO_BATCH) if device.type == "cuda" else 1
    while size > 1 and config.total_batch_size % (size * config.seq_len):
        size //= 2
    return size


def fit_rung(config, on, names, first, distributed, before):
    """(Config, {name: why it changes nothing}) of the rung on which the optimizations in `on` are on, `names` among
    them for the first time. before: the Config of the rung before."""
    rung, notes = turn_off_unavailable(with_rungs(config, on, first), distributed)
    idle = {}
    for name in names:
        flags = RUNGS[name].off
        if name == "ddp":
            if distributed.world_size == 1:
                idle[name] = "one GPU here" if distributed.device.type == "cuda" else "no GPUs here"
        elif all(getattr(rung, flag) == getattr(before, flag) for flag in flags):
            same = "off on the command line" if RUNGS[name].is_switch else "its value is that of the rung before"
            idle[name] = "; ".join(str(note) for note in notes if note.flag in flags) or same
    return rung, idle


def with_rungs(config, on, first):
    """config with only the rungs in `on`; first: the micro-batch size before the micro_batch rung."""
    changes = dict(cuda_graphs=False)  # a run that waits would keep their memory
    for row in reversed(RUNGS.values()):  # where two rows share a flag, the first that is off decides
        if row.name not in on and row.is_on(config):
            changes |= row.off
    if "micro_batch" not in on:
        changes["micro_batch_size"] = first
    changes["total_batch_size"] = config.total_batch_size  # without accumulation take_turns() has one micro-batch
    if "ddp" not in on:
        changes |= dict(bf16_gradients=False, overlap_gradients=False)
    return replace(config, **changes)


def label(names, row, before):
    """A rung's name in the table. row: its result; before: those of the rungs before."""
    if row["status"] != "done":
        return "+ " + " + ".join(names)
    facts = row["facts"] | dict(parallel=row["facts"]["parallel"].upper())
    text = "+ " + " + ".join(RUNGS[name].rung.format(**facts) for name in names)
    B = facts["micro_batch_size"]
    if before and before[-1]["facts"]["micro_batch_size"] != B and "micro_batch" not in names:
        text += f" (micro-batch {B})"  # what fits has changed
    return text


def cells(row, rung):
    """A rung's row of the table as text."""
    if row["status"] != "done":
        return [rung]
    ratios = [*gain_texts(row["gain"]), f"{row['times_first']:.2f}"] if row["gain"] else ["", "", ""]
    return [rung, *speed(row), *ratios, f"{row['loss']:.4f}"]


if __name__ == "__main__":
    run(main)
