"""Measure each optimization's gain on this machine, by short runs of train_gpt2.py.

    python train_gpt2.py --ladder                                           # turn the optimizations on, one by one
    python ladder.py --to_loss --max_steps 90                               # what each training recipe buys, in time
    python ladder.py --to_loss --max_steps 90 --recipes mask_documents=on   # what these flags change, in loss and time
    python ladder.py --sweep micro_batch_size=8,16,32,64 seq_len=512,1024   # the best of a grid of flags
    python ladder.py --sweep parallel=ddp,zero2,zero3 model=gpt2,gpt2-xl    # on all GPUs; or an axis gpus=1,2,4
    python ladder.py --plan --model gpt2-xl --gpus 16 --memory 80           # how to use several GPUs: an estimate

Every rung and every cell runs the real training loop, on the same data from the same seed (--to_loss: several seeds).
"""

import common.interrupt  # first: Ctrl-C during the other imports

import dataclasses
import itertools
import os
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from common.cli import check_bounds, given, parse
from common.device import choose_device_type
from common.errors import Note, UserError, run
from common.peer_flags import HINTS
from config import GROUPS, SETTLING_STEPS, Config, command_line, defaults
from data.shards import open_shards
from measure import figures, plan, to_loss
from measure.child_run import OUT_OF_MEMORY, measure, plain, prepare, report_failures, save
from measure.figures import describe
from measure.sweep_axes import OFF, print_unused, read_axis
from measure.tables import COLUMNS, WIDTHS, align, cells, markdown, sweep_markdown, uneven_warning, winners
from measure.wandb_table import publish
from optim import schedules
from optimizations import RUNGS, turn_off_unavailable
from parallel.fsdp import is_sharded
from parallel.memory import LARGEST_IN_WARMUP, choose_micro_batch_size
from parallel.process_group import Distributed
from parallel.rendezvous import launched

FIRST_MICRO_BATCH = 16  # of the first rungs on a GPU, halved until it fits; an 80 GB A100 can hold it
# Flags that have an effect on several GPUs only
SEVERAL_GPUS = {*RUNGS["ddp"].off, "overlap_gradients", "bf16_gradients"}


@dataclass
class Sweep:
    """A grid of flags to measure."""

    TITLE = "sweep"

    sweep: tuple[str, ...] = ()
    """Axes: flags of train_gpt2.py with their values, such as micro_batch_size=8,16 compile=on,off; also gpus=1,2."""
    gpus: int | None = None
    """GPUs of --plan (default 8), or of each cell of a sweep (default one; all if an axis needs several)."""


@dataclass
class LadderConfig(Sweep, to_loss.ToLoss, plan.Plan, Config):
    """Measure a grid of flags (--sweep), training recipes (--to_loss), or else the ladder, as train_gpt2.py --ladder.
    With --plan, estimate how to use several GPUs. Takes every flag of train_gpt2.py.
    """

    GROUPS = (Sweep, to_loss.ToLoss, plan.Plan, *GROUPS)


def main():
    own = given(LadderConfig, HINTS)
    is_sweep = "sweep" in own
    base = defaults(own if is_sweep or own.get("plan") else own | dict(ladder=True))
    # flags of a file or a run go before the demo's
    is_demo = base.demo and own.get("to_loss") and not {"config", "resume"} & own.keys()
    default = LadderConfig(**vars(base) | (to_loss.TO_LOSS_DEMO if is_demo else {}))
    config = parse(LadderConfig, default=default)
    if config.gpus is not None and not (is_sweep or config.plan):
        raise UserError(f"--gpus {config.gpus} is for --sweep and --plan: leave it out")
    modes = dict(plan=config.plan, sweep=is_sweep, to_loss=config.to_loss)
    if sum(modes.values()) > 1:
        raise UserError("--plan, --sweep and --to_loss exclude each other: use one of them")
    for mode, group in (("to_loss", to_loss.ToLoss), ("plan", plan.Plan)):
        alone = [field.name for field in dataclasses.fields(group) if field.name in own.keys() - {mode}]
        if alone and not modes[mode]:
            raise UserError(f"--{alone[0]} is for --{mode}: add --{mode}, or leave --{alone[0]} out")
    if "rungs" in own and any(modes.values()):
        raise UserError("--rungs is for the ladder of optimizations: leave it out")
    if config.plan:
        plan.plan(config, own)
    elif is_sweep:
        sweep(config, own)
    elif config.to_loss:
        climb_to_loss(config)
    else:
        climb(config, own)


def check(config):
    """Raises UserError if every run would fail."""
    check_bounds(config)
    if config.profile or config.memory_snapshot:
        raise UserError("--profile and --memory_snapshot are for a single run: both slow down what is measured here")
    if not config.demo:
        open_shards(config.data_dir, "train")


def short_run(config):
    """The arguments of train_gpt2.py for a measurement."""
    return command_line(dataclasses.replace(plain(config), **OFF, max_steps=SETTLING_STEPS + config.ladder_steps))


def finish(config, folder, kind, results):
    """Say where the results are, and log them to wandb. Raises UserError if a run failed."""
    print(f"{folder}/ has {kind}.md, {kind}.json, {kind}.png and every run")
    publish(config, folder, kind, results)
    report_failures(results)


# ----------------------------------------------------------------------------------------------------------------------
# The ladder


def climb(config, typed):
    """Run the ladder: print its table, and write ladder.json, ladder.md and ladder.png to the run's folder.

    typed: the flags on the command line.

    Raises UserError for rungs that do not exist, or if a rung failed.
    """
    if launched()[0]:
        return  # torchrun's rank 0 starts the processes of every rung
    if config.fp8 and is_sharded(config):
        raise UserError("--fp8 needs --parallel ddp, without --tensor and --pipeline")
    rungs = choose_rungs(config.rungs, count_devices(config), config)
    check(config)
    print_unused(typed)
    folder = prepare(config.log_dir, config.run_name, "ladder")
    print(f"results: {folder}/" + (", of the demo's small model (GPT-2 needs a GPU, and data)" if config.demo else ""))
    device, steps = torch.device(choose_device_type(config.device)), SETTLING_STEPS + config.ladder_steps
    config = dataclasses.replace(config, warmup_steps=min(config.warmup_steps, steps // 4))  # it fits into the run
    on, results = [], []  # on: rungs done
    print(align(COLUMNS, WIDTHS))

    def show(result):
        results.append(result)
        bar.write(align(cells(result, results), WIDTHS))
        bar.write(uneven_warning(result), end="")
        save(folder, "ladder", results, markdown(results), partial(figures.ladder, results), config.ladder_steps)

    with tqdm(total=(1 + len(rungs)) * steps, unit="step", leave=False, disable=None) as bar:
        baseline, result = measure_baseline(config, device, folder, bar)
        show(result | dict(rung="baseline"))
        before = baseline if result["status"] == "done" else None  # the config of the last rung that ran
        for index, names in enumerate(rungs, 1):
            bar.set_description(" + ".join(map(str, names)))
            ranks = names[1] if names[0] == "ddp" else 1
            rung, idle = fit_rung(config, on, names, baseline.micro_batch_size, Distributed(0, ranks, device), before)
            for name, reason in idle.items():
                show(dict(rung=f"+ {name}", name=name, status="skipped", reason=reason))
            names = tuple(name for name in names if name not in idle)
            if names in ((), (1,)):
                bar.update(steps)
                continue
            result = measure(short_run(rung), folder, f"{index:02d}_{'+'.join(map(str, names))}", ranks, steps, bar)
            if result["status"] == "done":
                on += names
                before = rung
            show(result | dict(rung=label(names, result, rung.parallel, results)))
    done = [result for result in results if result["status"] == "done"]
    if done:
        print(f"{done[-1]['tokens_per_sec'] / done[0]['tokens_per_sec']:.1f} × from {done[0]['rung']} to the last rung")
    finish(config, folder, "ladder", results)


def measure_baseline(config, device, folder, bar):
    """(Config, result of measure()) of the first rung, with all optimizations off, in the run folder/00_baseline.

    Its micro-batch is halved until it fits into memory. Raises UserError if it cannot run for another reason.
    """
    B, name, steps = first_micro_batch(config, device), "00_baseline", SETTLING_STEPS + config.ladder_steps
    bar.set_description("baseline")
    while True:
        rung, _ = fit_rung(config, [], (), B, Distributed(0, 1, device), None)
        result = measure(short_run(rung), folder, name, 1, steps, bar)
        if result.get("reason") != OUT_OF_MEMORY or B == 1:
            break
        B //= 2
        name = f"00_baseline_B{B}"
        bar.update(-steps)
    if result["status"] == "skipped" and result["reason"] != OUT_OF_MEMORY:
        raise UserError(result["reason"])  # a mistake in the flags fails every rung
    return rung, result


def count_devices(config):
    """Processes of the largest DDP rung: as many as torchrun started, or one for each GPU."""
    if "WORLD_SIZE" in os.environ:
        if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
            raise UserError("the ladder runs on one machine: start it with torchrun --standalone, or without torchrun")
        return int(os.environ["WORLD_SIZE"])
    return max(1, torch.cuda.device_count()) if config.device in ("auto", "cuda") else 1


def choose_rungs(text, devices, config):
    """Tuples of names from --rungs. DDP's are ("ddp", 2), ("ddp", 4), ... up to all devices; "all" contains what is off
    by default only if it is on in `config`.

    Raises UserError for a name that does not exist or comes twice, and for an invalid order.
    """
    every = ",".join(name for name, row in RUNGS.items() if row.default or getattr(config, name))
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


def first_micro_batch(config, device):
    """Micro-batch size of the first rungs: at most 16 on a GPU and 1 elsewhere, halved until it divides the batch."""
    size = min(FIRST_MICRO_BATCH, config.micro_batch_size or FIRST_MICRO_BATCH) if device.type == "cuda" else 1
    while size > 1 and config.total_batch_size % (size * config.seq_len):
        size //= 2
    return size


def fit_rung(config, on, names, first, distributed, before):
    """(a rung's Config, {name: why it changes nothing}), for the rung that adds `names` to those in `on`.

    The Config is what this machine can run. before: the Config of the rung before, None for the first.
    """
    rung, notes = turn_off_unavailable(with_rungs(config, [*on, *names], first), distributed)
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
    return rung, idle


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
    return dataclasses.replace(config, **changes)


def label(names, result, mode, earlier=()):
    """A rung's name in the table; mode: its --parallel; earlier: the results of the rungs before."""
    if result["status"] != "done":
        return "+ " + " + ".join(map(str, names)).replace("ddp + ", f"{mode.upper()} × ")
    facts = result["facts"] | dict(parallel=mode.upper())
    text = "+ " + " + ".join(RUNGS[name].rung.format(**facts) for name in names if name in RUNGS)
    sizes = [other["facts"]["micro_batch_size"] for other in [*earlier, result] if other["status"] == "done"]
    if len(sizes) > 1 and sizes[-1] != sizes[-2] and "micro_batch" not in names:
        text += f" (micro-batch {sizes[-1]})"  # what fits has changed
    return text


# ----------------------------------------------------------------------------------------------------------------------
# The ladder of recipes


def climb_to_loss(config):
    """Train with one recipe after the other, from several seeds: to_loss.json, to_loss.md and the figure to_loss.png.

    The baseline of the ladder of optimizations is timed first: how long the first recipe takes without them.
    Raises UserError if the first recipe cannot run, or if a run failed.
    """
    if launched()[0]:
        return  # torchrun's rank 0 starts the processes of every run
    if config.seeds < 1:
        raise UserError(f"--seeds {config.seeds}: it must be at least 1")
    if config.max_steps <= SETTLING_STEPS:
        raise UserError(f"--max_steps {config.max_steps}: the first {SETTLING_STEPS} steps only warm up; use more")
    recipes = to_loss.choose_recipes(config.recipes, Config)
    if config.batch_warmup_steps:
        raise UserError("--to_loss has the batch warm-up in its own rungs: leave out --batch_warmup_steps")
    if not config.recipes and (config.optimizer != Config.optimizer or config.fp8):
        raise UserError("--to_loss turns Muon and fp8 on itself: leave out --optimizer and --fp8, or use --recipes")
    check(config)
    folder = prepare(config.log_dir, config.run_name, "to_loss")
    print(f"results: {folder}/\n{align(to_loss.COLUMNS, to_loss.widths(recipes))}")
    steps, ranks = config.max_steps, count_devices(config)
    device = torch.device(choose_device_type(config.device))
    splits = (config.tensor, config.context, config.pipeline) if ranks > 1 else ()  # one rank: they are turned off
    distributed = Distributed(0, ranks, device, *splits)
    results, curves, changes, target = [], {}, {}, config.target_loss
    with tqdm(total=len(recipes) * config.seeds * steps, unit="step", leave=False, disable=None) as bar:
        _, baseline = measure_baseline(config, device, folder, bar)
        if baseline["status"] in ("failed", "stopped"):
            raise UserError(baseline["reason"])
        bar.reset()
        for index, (name, recipe) in enumerate(recipes.items(), 1):
            rung, notes = turn_off_unavailable(to_loss.recipe_run(config, changes | recipe), distributed)
            if rung.batch_warmup_steps:
                size = min(results[0]["facts"]["micro_batch_size"], LARGEST_IN_WARMUP)
                rung = schedules.match_tokens(rung, size, distributed.data_size)
                schedules.check_flags(rung, distributed, notes)
            idle = "; ".join(str(note) for note in notes if note.flag in recipe)
            runs = [dict(status="skipped", reason=idle)] if idle else []
            for seed in () if idle else range(config.seed, config.seed + config.seeds):
                bar.set_description(f"{name}, seed {seed}")
                arguments = command_line(dataclasses.replace(rung, seed=seed))
                runs.append(measure(arguments, folder, f"{index:02d}_seed{seed}", ranks, rung.max_steps, bar))
                if runs[-1]["status"] != "done":
                    break  # the other seeds would fail too
            result = next((run for run in runs if run["status"] != "done"), None)
            if not result:
                of_seeds = [to_loss.read_curve(folder / run["name"]) for run in runs]
                result = to_loss.summarize(name, of_seeds, target)
            if result["status"] == "done":
                changes |= recipe
                curves[name] = of_seeds
                target = target or result["loss"]
                result |= dict(facts=runs[0]["facts"], commands=[run["command"] for run in runs])
            elif not results:
                raise UserError(result["reason"])
            results.append(dict(result, rung=name))
            bar.update(index * config.seeds * steps - bar.n)
            bar.write(align(to_loss.cells(results), to_loss.widths(recipes)))
            draw = partial(figures.time_to_loss, curves, target, results[0]["facts"])
            save(folder, "to_loss", results, to_loss.markdown(results, config, baseline), draw)
    print(to_loss.sooner(results, baseline))
    finish(config, folder, "to_loss", results)


# ----------------------------------------------------------------------------------------------------------------------
# Sweeps


def sweep(config, typed):
    """Measure every combination of the axes' values: sweep.json, sweep.md and the heat map sweep.png.

    Raises UserError for an axis that is not a flag, if no combination ran, or if one failed.
    """
    if launched()[1] > 1:
        raise UserError("a sweep starts the processes of its cells: start it with python, not with torchrun")
    if not config.sweep:
        raise UserError("--sweep needs at least one flag and its values, as micro_batch_size=8,16")
    axes = dict(read_axis(text, Config) for text in config.sweep)
    if len(axes) < len(config.sweep):
        raise UserError("--sweep names a flag twice")
    check(config)
    print_unused(typed)
    if config.gpus is not None and config.gpus < 1:
        raise UserError(f"--gpus {config.gpus}: it must be at least 1")
    if config.gpus is None:
        config.gpus = count_devices(config) if SEVERAL_GPUS & axes.keys() else 1
    folder = prepare(config.log_dir, config.run_name, "sweep")
    results, grid = [], list(itertools.product(*axes.values()))
    width = max(len(describe(dict(zip(axes, values)))) for values in grid)
    steps = SETTLING_STEPS + config.ladder_steps
    with tqdm(total=len(grid) * steps, unit="step", leave=False, disable=None) as bar:
        for index, values in enumerate(grid):
            cell = dict(zip(axes, values))
            bar.set_description(describe(cell))
            changed = dataclasses.replace(config, **cell)
            result = measure(short_run(changed), folder, f"{index:02d}", changed.gpus, steps, bar)
            results.append(result | dict(cell=cell))
            rate = "{tokens_per_sec:>11,.0f} tok/s  {ms:>9.2f} ms  {peak_gb:>7.2f} GB"
            text = rate if result["status"] == "done" else "{status}: {reason}"
            bar.write(f"{describe(cell):{width}}  {text.format(**result)}")
            bar.write(uneven_warning(result), end="")
            draw = partial(figures.heat_map, axes, results)
            save(folder, "sweep", results, sweep_markdown(axes, results), draw, config.ladder_steps)
    done = sorted((r for r in results if r["status"] == "done"), key=lambda r: r["tokens_per_sec"], reverse=True)
    if not done:
        raise UserError(f"none of the {len(grid)} combinations ran: {results[0]['reason']}")
    print(*winners(done), sep="\n")
    finish(config, folder, "sweep", results)


if __name__ == "__main__":
    run(main)
