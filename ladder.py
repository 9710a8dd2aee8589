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
from common.errors import Note, UserError, run
from config import GROUPS, SETTLING_STEPS, Config, read_command_line
from measure import child_run, figures
from measure.child_run import OUT_OF_MEMORY, count_devices, measure, medians, short_run, uneven_warning
from measure.results import Results, align
from optimizations import RUNGS, is_off, turn_off_unavailable
from parallel.memory import choose_micro_batch_size
from parallel.process_group import Distributed

COLUMNS = ("rung", "ms a step", "tokens/sec", "× before", "× first", "MFU", "peak GB", "mJ/token", "loss")
WIDTHS = (28, 10, 11, 8, 8, 6, 8, 8, 8)
NOTE = "Losses are those of the last step: compare only rows with the same recipe and tokens a step."
FIRST_MICRO_BATCH = 16  # of the first rungs on a GPU, halved until it fits; an 80 GB A100 can hold it


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
    on, rows, texts = [], [], []  # on: rungs done
    print(align(COLUMNS, WIDTHS))

    def show(row, notes=()):
        rows.append(row)
        texts.append(cells(row, rows))
        bar.write(align(texts[-1], WIDTHS))
        for line in (*map(str, notes), *uneven_warning(row)):
            bar.write(f"    ({line})")
        note = f"{NOTE} {medians(rows, config.ladder_steps)}"
        results.save(rows, COLUMNS, texts, note, partial(figures.ladder, rows))

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


def measure_baseline(config, timed, device, results, bar):
    """(Config, result of measure()) of the first rung, with all optimizations off, in the folder 00_baseline.

    timed: steps to measure. Its micro-batch is halved until it fits into memory. Raises UserError if it cannot run for
    another reason.
    """
    B, name, steps = first_micro_batch(config, device), "00_baseline", SETTLING_STEPS + timed
    bar.set_description("baseline")
    while True:
        rung, *_ = fit_rung(config, [], (), B, Distributed(0, 1, device), None)
        row = measure(short_run(rung, timed), results, name, 1, steps, bar)
        if row.get("reason") != OUT_OF_MEMORY or B == 1:
            break
        B //= 2
        name = f"00_baseline_B{B}"
        bar.update(-steps)
    if row["status"] == "skipped" and row["reason"] != OUT_OF_MEMORY:
        raise UserError(row["reason"])  # a mistake in the flags fails every rung
    return rung, row


def first_micro_batch(config, device):
    """Micro-batch size of the first rungs: at most 16 on a GPU and 1 elsewhere, halved until it divides the batch."""
    size = min(FIRST_MICRO_BATCH, config.micro_batch_size or FIRST_MICRO_BATCH) if device.type == "cuda" else 1
    while size > 1 and config.total_batch_size % (size * config.seq_len):
        size //= 2
    return size


def fit_rung(config, on, names, first, distributed, before):
    """(Config, {name: why it changes nothing}, Notes of what the rung before had and this one cannot have) of the rung
    that adds `names` to those in `on`.

    The Config is what this machine can run. before: that of the rung before, None for the first.
    """
    rung, notes = turn_off_unavailable(with_rungs(config, [*on, *names], first), distributed)
    lost = [note for note in notes if before and is_off(note) and getattr(before, note.flag) != note.value]
    if distributed.device.type != "cuda" and rung.micro_batch_size is None:
        rung.micro_batch_size, reason = choose_micro_batch_size(rung, Distributed(0, 1, distributed.device), None)
        notes.append(Note("micro_batch_size", rung.micro_batch_size, reason))
    idle = {}
    for name in names if before and names[0] != "ddp" else ():
        flags = RUNGS[name].off
        if all(getattr(rung, flag) == getattr(before, flag) for flag in flags):
            same = "off on the command line" if RUNGS[name].is_switch else "its value is that of the rung before"
            idle[name] = "; ".join(str(note) for note in notes if note.flag in flags) or same
    if names == ("ddp", 1):
        alone = "one GPU here" if distributed.device.type == "cuda" else "no GPUs here: torchrun starts more processes"
        idle = {"ddp": alone}
    return rung, idle, lost


def with_rungs(config, on, first):
    """config with only the rungs in `on`; first: the micro-batch size before the micro_batch rung."""
    changes = {}
    for row in reversed(RUNGS.values()):  # where two rows share a flag, the first that is off decides
        if row.name not in on and row.is_on(config):
            changes |= row.off
    if "micro_batch" not in on:
        changes["micro_batch_size"] = first
    if "ddp" not in on:
        changes |= dict(bf16_gradients=False, overlap_gradients=False)
    if "accumulation" not in on:
        changes["total_batch_size"] = first * config.seq_len
    return replace(config, **changes)


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


def cells(result, results):
    """A rung's row of the table as text."""
    if result["status"] != "done":
        return [result["rung"], f"{result['status']}: {result['reason']}"]
    done = [r for r in results if r["status"] == "done"]
    rate = result["tokens_per_sec"]
    return [
        result["rung"],
        f"{result['ms']:.2f}",
        f"{rate:,.0f}",
        f"{rate / done[-2]['tokens_per_sec']:.2f}" if len(done) > 1 else "",
        f"{rate / done[0]['tokens_per_sec']:.2f}",
        f"{result['mfu']:.1%}" if result["mfu"] else "–",
        f"{result['peak_gb']:.2f}",
        "–" if result["mj_per_token"] is None else f"{result['mj_per_token']:.3g}",
        "–" if result["loss"] is None else f"{result['loss']:.4f}",
    ]


if __name__ == "__main__":
    run(main)
