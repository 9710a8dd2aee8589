"""Measure every combination of flags' values: short runs of train_gpt2.py, a table and a heat map.

python -m measure.sweep micro_batch_size=8,16,32,64 seq_len=512,1024   # the best of a grid of flags
python -m measure.sweep parallel=ddp,zero2,zero3 model=gpt2,gpt2-xl    # on all GPUs; or an axis gpus=1,2,4
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

from common.cli import flag
from common.device import choose_device_type
from common.errors import UserError, run, word
from config import GROUPS, SETTLING_STEPS, Config, read_command_line
from measure import child_run, figures
from measure.axes import read_axis
from measure.child_run import count_devices, measure, medians, short_run, uneven_warning
from measure.figures import describe
from measure.results import Results
from optimizations import RUNGS

COLUMNS = ("ms a step", "tokens/sec", "MFU", "peak GB")
# Flags that have an effect on several GPUs only
SEVERAL_GPUS = {*RUNGS["ddp"].off, "overlap_gradients", "bf16_gradients"}


@dataclass
class Sweep:
    """The grid."""

    TITLE = "sweep"

    axes: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="FLAG=VALUE,VALUE", help_behavior_hint="(required)"),
    ] = ()
    """Flags of train_gpt2.py with their values, such as micro_batch_size=8,16 compile=on,off; also gpus=1,2."""
    gpus: int | None = flag(None, at_least=1)
    """GPUs of each cell; by default one, or all if an axis needs several."""
    steps: int = flag(20, at_least=1)
    """Steps measured in each cell, after a few warm-up steps; evaluations and checkpoints are off."""


@dataclass
class SweepConfig(Sweep, Config):
    """Measure every combination of flags' values.

    Takes every flag of train_gpt2.py.
    """

    GROUPS = (Sweep, *GROUPS)


def main():
    sweep(*read_command_line(SweepConfig))


def sweep(config, typed=()):
    """Measure every combination of the axes' values: sweep.json, sweep.md and the heat map sweep.png.

    config: a SweepConfig; typed: the flags of the command line. Raises UserError for an axis that is not a flag, if no
    combination ran, or if one failed.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("a sweep starts the processes of its cells: start it with python, not with torchrun")
    if not config.axes:
        raise UserError("a sweep needs at least one flag and its values, as micro_batch_size=8,16")
    axes = dict(map(read_axis, config.axes))
    if len(axes) < len(config.axes):
        raise UserError("the sweep names a flag twice")
    child_run.check(config)
    child_run.print_unused(typed)
    gpus = config.gpus or (count_devices(config) if SEVERAL_GPUS & axes.keys() else 1)
    results = Results(
        config.log_dir, config.run_name, "sweep", torch.device(choose_device_type(config.device)), goes_on=True
    )
    rows, grid = [], list(itertools.product(*axes.values()))
    width = max(len(describe(dict(zip(axes, values)))) for values in grid)
    steps = SETTLING_STEPS + config.steps
    with tqdm(total=len(grid) * steps, unit="step", leave=False, disable=None) as bar:
        for index, values in enumerate(grid):
            cell = dict(zip(axes, values))
            bar.set_description(describe(cell))
            ranks = cell.get("gpus", gpus)
            changed = replace(config, **cell)
            row = measure(short_run(changed, config.steps), results, f"{index:02d}", ranks, steps, bar)
            rows.append(row | dict(cell=cell))
            if row["status"] == "done":
                text = f"{row['tokens_per_sec']:>11,.0f} tok/s  {row['ms']:>9.2f} ms  {row['peak_gb']:>7.2f} GB"
            else:
                text = f"{row['status']}: {row['reason']}"
            bar.write(f"{describe(cell):{width}}  {text}")
            for line in uneven_warning(row):
                bar.write(f"    ({line})")
            note, draw = medians(rows, config.steps), partial(figures.heat_map, axes, rows)
            results.save(rows, [*axes, *COLUMNS], [cells(row) for row in rows], note, draw)
    done = sorted((row for row in rows if row["status"] == "done"), key=lambda row: row["tokens_per_sec"], reverse=True)
    if not done:
        raise UserError(f"none of the {len(grid)} combinations ran: {rows[0]['reason']}")
    best, rate = done[0], done[0]["tokens_per_sec"]
    print(f"{describe(best['cell'])} wins: {rate:,.0f} tok/s, {rate / done[-1]['tokens_per_sec']:.2f} × the slowest")
    child_run.finish(results, rows)


def cells(row):
    """A cell of the grid as a row of the table."""
    texts = [word(value) for value in row["cell"].values()]
    if row["status"] != "done":
        return [*texts, f"{row['status']}: {row['reason']}"]
    return [
        *texts,
        f"{row['ms']:.2f}",
        f"{row['tokens_per_sec']:,.0f}",
        f"{row['mfu']:.1%}" if row["mfu"] else "–",
        f"{row['peak_gb']:.2f}",
    ]


if __name__ == "__main__":
    run(main)
