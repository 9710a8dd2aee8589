"""Measure what each optimization buys on this machine: turn them on one by one, in short runs of train_gpt2.py.

    python train_gpt2.py --ladder                                     # all of them, in the order of optimizations.py
    python ladder.py --rungs tf32,bf16,compile+flash,fp8              # these; compile and flash in one rung

Every rung runs the real training loop, on the same data from the same seed.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

from common.cli import flag
from common.device import choose_device_type
from common.errors import UserError, run
from config import GROUPS, SETTLING_STEPS, Config, read_command_line
from measure import child_run, figures
from measure.child_run import count_devices, measure, short_run
from measure.results import Results
from measure.rungs import fit_rung, measure_baseline
from measure.tables import COLUMNS, WIDTHS, align, cells, markdown, uneven_warning
from optimizations import RUNGS
from parallel.process_group import Distributed


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
    ladder_steps: int = flag(20, at_least=1)
    """Steps measured on each rung, after a few warm-up steps; evaluations and checkpoints are off."""


@dataclass
class LadderConfig(Ladder, Config):
    """Measure what each optimization buys: a short run with all off, then one run for each optimization added.

    Takes every flag of train_gpt2.py.
    """

    GROUPS = (Ladder, *GROUPS)


def main():
    climb(*read_command_line(LadderConfig, ladder=True))


def climb(config, typed=()):
    """Run the ladder: print its table, and write ladder.json, ladder.md and ladder.png to the run's folder.

    config: a LadderConfig; typed: the flags of the command line. Raises UserError for rungs that do not exist, or if a
    rung failed.
    """
    if child_run.is_other_rank():
        return
    rungs = choose_rungs(config.rungs, count_devices(config), config)
    config = turn_on_named(config)
    child_run.check(config)
    child_run.print_unused(typed)
    device, steps = torch.device(choose_device_type(config.device)), SETTLING_STEPS + config.ladder_steps
    results = Results(config.log_dir, config.run_name, "ladder", device, goes_on=True)
    small = ", of the demo's small model (GPT-2 needs a GPU, and data)" if config.demo else ""
    print(f"results: {results.folder}/{small}")
    config = replace(config, warmup_steps=min(config.warmup_steps, steps // 4))  # it fits into the run
    on, rows = [], []  # on: rungs done
    print(align(COLUMNS, WIDTHS))

    def show(row, notes=()):
        rows.append(row)
        bar.write(align(cells(row, rows), WIDTHS))
        for line in (*map(str, notes), *uneven_warning(row)):
            bar.write(f"    ({line})")
        results.save(rows, markdown(rows), partial(figures.ladder, rows), config.ladder_steps)

    with tqdm(total=(1 + len(rungs)) * steps, unit="step", leave=False, disable=None) as bar:
        baseline, row = measure_baseline(config, config.ladder_steps, device, results, bar)
        show(row | dict(rung="baseline"))
        before = baseline if row["status"] == "done" else None  # the config of the last rung that ran
        for index, names in enumerate(rungs, 1):
            bar.set_description(" + ".join(map(str, names)))
            ranks = names[1] if names[0] == "ddp" else 1
            splits = (config.tensor, config.context, config.pipeline) if ranks > 1 else ()
            place = Distributed(0, ranks, device, *splits)
            rung, idle, lost = fit_rung(config, on, names, baseline.micro_batch_size, place, before)
            for name, reason in idle.items():
                show(dict(rung=f"+ {name}", name=name, status="skipped", reason=reason))
            names = tuple(name for name in names if name not in idle)
            if names in ((), (1,)):
                bar.update(steps)
                continue
            name = f"{index:02d}_{'+'.join(map(str, names))}"
            row = measure(short_run(rung, config.ladder_steps), results, name, ranks, steps, bar)
            if row["status"] == "done":
                on += names
                before = rung
            show(row | dict(rung=label(names, row, rung, rows)), lost)
    done = [row for row in rows if row["status"] == "done"]
    if done:
        print(f"{done[-1]['tokens_per_sec'] / done[0]['tokens_per_sec']:.1f} × from {done[0]['rung']} to the last rung")
    child_run.finish(results, rows)


def choose_rungs(text, devices, config):
    """Tuples of names from --rungs. DDP's are ("ddp", 2), ("ddp", 4), ... up to all devices; "all" contains what is off
    by default only if it is on in `config`.

    Raises UserError for a name that does not exist or comes twice, and for an invalid order.
    """
    every = ",".join(name for name, row in RUNGS.items() if row.default or row.is_on(config))
    text = every if text.strip() == "all" else text.replace(" ", "")
    chosen = [tuple(part.split("+")) for part in text.split(",")]
    names = list(itertools.chain(*chosen))
    for name in names:
        if name not in RUNGS:
            raise UserError(f"--rungs: there is no {name!r}; there are {', '.join(RUNGS)}")
        if names.count(name) > 1:
            raise UserError(f"--rungs names {name} twice")
    if "micro_batch" in names and "accumulation" not in names[: names.index("micro_batch")]:
        raise UserError("--rungs: micro_batch needs accumulation before it; until then a batch is one micro-batch")
    if "ddp" in names and "accumulation" not in names:
        raise UserError("--rungs: ddp needs accumulation before it, since the GPUs divide one batch")
    if "ddp" in names:
        if chosen[-1] != ("ddp",):
            raise UserError("--rungs: ddp comes last, and alone")
        counts = {2**i for i in range(1, devices.bit_length())} | {devices}
        chosen[-1:] = [("ddp", count) for count in sorted(counts)]
    return chosen


def turn_on_named(config):
    """config with the switches on that --rungs names and that are off by default."""
    named = config.rungs.replace(" ", "").replace("+", ",").split(",")
    return replace(config, **{row.flag: True for name, row in RUNGS.items() if name in named and not row.default})


def label(names, row, config, earlier=()):
    """A rung's name in the table. row: its result; config: its Config; earlier: the results of the rungs before."""
    mode = config.parallel.upper()
    sizes = {name: getattr(config, name) for name in ("tensor", "context", "pipeline")}
    splits = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    splits = splits and f" ({splits})"
    if row["status"] != "done":
        return "+ " + " + ".join(map(str, names)).replace("ddp + ", f"{mode} × ") + splits
    facts = row["facts"] | dict(parallel=mode)
    text = "+ " + " + ".join(RUNGS[name].rung.format(**facts) for name in names if name in RUNGS) + splits
    sizes = [other["facts"]["micro_batch_size"] for other in [*earlier, row] if other["status"] == "done"]
    if len(sizes) > 1 and sizes[-1] != sizes[-2] and "micro_batch" not in names:
        text += f" (micro-batch {sizes[-1]})"  # what fits has changed
    return text


if __name__ == "__main__":
    run(main)
