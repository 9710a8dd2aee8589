"""Measure every combination of flags' values: short runs of train_gpt2.py, a table and a heat map.

python -m measure.sweep micro_batch_size=8,16,32,64 seq_len=512,1024   # the best of a grid of flags
python -m measure.sweep parallel=ddp,zero2,zero3 model=gpt2,gpt2-xl    # on all GPUs; or an axis gpus=1,2,4
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import tyro

from common.cli import check_bounds, complaints, flag, flags_with, given
from common.errors import UserError, run
from config import Config, read_command_line
from measure import figures
from measure.child_run import SPEED, begin, count_devices, finish, shown_command, speed
from measure.figures import describe
from measure.turns import FIRST_STEPS, SETTLING_SECONDS, measure
from optimizations import RUNGS

# Flags that have an effect on several GPUs only
SEVERAL_GPUS = {*RUNGS["ddp"].off, "overlap_gradients", "bf16_gradients"}


@dataclass
class Sweep:
    """The grid."""

    TITLE = "sweep"

    axes: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="FLAG=VALUE,VALUE [...]", help_behavior_hint="(required)"),
    ] = flag((), sweep=False)
    """Flags of train_gpt2.py with their values, such as micro_batch_size=8,16 compile=on,off; also gpus=1,2."""
    gpus: int | None = flag(None, at_least=1)
    """GPUs of each cell; by default one, or all if an axis needs several."""
    steps: int = flag(20, at_least=1, sweep=False)
    """Steps measured in each cell, after a few warm-up steps; evaluations and checkpoints are off."""


@dataclass
class SweepConfig(Config, Sweep):
    """Measure every combination of flags' values.

    Takes every flag of train_gpt2.py.
    """


def main():
    sweep(*read_command_line(SweepConfig))


def sweep(config, typed=()):
    """Measure every combination of the axes' values: sweep.json, sweep.md and the heat map sweep.png.

    config: a SweepConfig; typed: the flags of the command line. Raises UserError for an axis that is not a flag, if no
    combination ran, or if one failed.
    """
    if not config.axes:
        raise UserError("a sweep needs at least one flag and its values, as micro_batch_size=8,16")
    axes = dict(map(read_axis, config.axes))
    if len(axes) < len(config.axes):
        raise UserError("the sweep names a flag twice")
    gpus = config.gpus or (count_devices(config) if SEVERAL_GPUS & axes.keys() else 1)
    results = begin(config, "sweep", ("flags", *SPEED), typed)
    for index, values in enumerate(itertools.product(*axes.values())):
        cell = dict(zip(axes, values))
        changed = replace(config, **dict(gpus=gpus) | cell)
        row = measure_cell(changed, results, f"{index:02d}") | dict(cell=cell)
        draw = partial(figures.heat_map, axes, results.rows)
        note = f"Means of {config.steps} steps, after {FIRST_STEPS} and, on a GPU, another {SETTLING_SECONDS} s."
        results.add(row, [describe(cell), *speed(row)], note, draw)
    done = sorted(results.done, key=lambda row: row["tokens_per_sec"])
    if not done:
        raise UserError(f"none of the {len(results.rows)} combinations ran: {results.rows[0]['reason']}")
    ratio = done[-1]["tokens_per_sec"] / done[0]["tokens_per_sec"]
    print(f"{describe(done[-1]['cell'])} wins: {ratio:.2f} × the slowest")
    finish(results)


def read_axis(text):
    """ "micro_batch_size=8,16" as ("micro_batch_size", [8, 16]). Raises UserError for a bad flag or bad values."""
    name, _, values = text.partition("=")
    fields = SweepConfig.__dataclass_fields__
    if name in flags_with(SweepConfig, sweep=False) | flags_with(SweepConfig, sweep="recipe"):
        raise UserError(f"{text}: {name} is the same in all runs, or has no effect")
    if values and name not in fields:
        raise UserError(f"{text}: {next(complaints([f'--{name}'], fields))}")
    if not values:
        raise UserError(f"{text}: it takes a flag of train_gpt2.py, or gpus, and values, as gpus=1,2")
    try:
        values = [given(SweepConfig, [f"--{name}={value}"])[name] for value in values.split(",")]
        for value in values:
            check_bounds(SweepConfig(**{name: value}))
    except UserError as error:
        raise UserError(f"{text}: {error}") from error
    if len(set(values)) < len(values):
        raise UserError(f"{text} names a value twice")
    return name, values


def measure_cell(config, results, name):
    """The result of a cell's SweepConfig, of turns.measure() or kept from an earlier start."""
    if before := results.kept(name, config, command=shown_command(config, config.gpus), steps=config.steps):
        return before
    timed, row = measure(config, config.gpus, results, name, 0, config.steps)
    if not timed:
        return row
    timed.close()
    return results.keep(row | dict(loss=timed.losses[-1], steps=config.steps))


if __name__ == "__main__":
    run(main)
