"""What each optimization buys, on the machine at hand: short runs of train_gpt2.py, compared.

    python train_gpt2.py --ladder                                           # turn the optimizations on, one by one
    python ladder.py --sweep micro_batch_size=8,16,32,64 seq_len=512,1024   # the best of a grid of flags

Every rung of the ladder and every cell of the grid runs the real training loop on the same data from the same seed.
"""

import dataclasses
import itertools
import os
import sys
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from common.cli import UserError, parse, run
from common.device import choose_micro_batch_size, fit_device
from config import EVALUATIONS, SETTLING_STEPS, Config, defaults
from observe import figures
from observe.figures import describe, word
from observe.measure import OUT_OF_MEMORY, measure, prepare, report_failures, save
from parallel.distributed import Distributed, choose_device_type

FIRST_MICRO_BATCH = 16  # on a GPU, and less where that does not fit: what an 80 GB A100 takes with everything off

# What a measurement sets itself, or has no use for
NOT_SWEPT = (
    "demo ladder rungs ladder_steps profile max_steps batch_warmup_steps log_dir run_name wandb wandb_group".split()
)
NOT_SWEPT += ["wandb_project", "peak_tflops", "val_steps", "hellaswag_data", *EVALUATIONS]
NOT_SWEPT += ["parallel", "shard_ranks", "overlap_gradients", "bf16_gradients"]  # of several processes

# A rung's name: its label, and what its flags are without it. With it they are what the command line says.
RUNGS = {
    "tf32": ("tf32", dict(tf32=False)),
    "bf16": ("autocast {autocast}", dict(autocast="off")),
    "compile": ("compile", dict(compile=False)),
    "flash": ("flash", dict(flash=False)),
    "pad_vocab": ("pad_vocab", dict(pad_vocab=False)),
    "fused_adamw": ("fused_adamw", dict(fused_adamw=False)),
    # without GPT-3's recipe: the defaults of torch.optim.AdamW, at the 3e-4 that suits any Transformer
    "recipe": (
        "GPT-3's recipe",
        dict(lr=3e-4, lr_schedule="constant", warmup_steps=0, weight_decay=0.01, beta2=0.999, grad_clip=0.0),
    ),
    "accumulation": ("{total_batch_size:,} tokens a step", dict(total_batch_size=None)),  # None: one micro-batch
    "micro_batch": ("micro-batch of {micro_batch_size}", dict(micro_batch_size=None)),  # None: the first rung's
    "bf16_residual": ("bf16_residual", dict(bf16_residual=False)),
    "fused_loss": ("fused_loss", dict(fused_cross_entropy=False)),
    "fused_gelu": ("fused_gelu", dict(fused_gelu=False)),
    "packed_attention": ("packed_attention", dict(packed_qkv=False)),
    "autotune": ("autotune", dict(autotune=False)),
    "fp8": ("fp8", dict(fp8=False)),
    "ddp": ("{mode} × {world_size}", {}),
}


@dataclass
class SweepConfig(Config):
    """Measure a grid of flags (--sweep), or without --sweep the ladder, as train_gpt2.py --ladder does.

    Takes every flag of train_gpt2.py.
    """

    sweep: tuple[str, ...] = ()
    """The grid: for each axis a flag of train_gpt2.py and its values, as micro_batch_size=8,16 compile=on,off."""


def main():
    ladder = not any(argument.split("=")[0] == "--sweep" for argument in sys.argv)
    base = defaults([*sys.argv, "--ladder"] if ladder else sys.argv)
    config = parse(SweepConfig, default=SweepConfig(**vars(base)))
    climb(config) if ladder else sweep(config)


# ----------------------------------------------------------------------------------------------------------------------
# The ladder

COLUMNS = ("rung", "ms a step", "tokens/sec", "× before", "× first", "MFU", "peak GB", "loss")
MEASURES = (1, 2, 5, 6)  # the columns that a sweep has too
WIDTHS = (28, 10, 11, 8, 8, 6, 8, 8)


def climb(config):
    """Run the ladder: the table on the terminal, and ladder.json, ladder.md and ladder.png in the run's folder.

    Raises UserError for rungs that do not exist, or when a rung failed.
    """
    if int(os.environ.get("RANK", 0)):
        return  # the first of torchrun's processes starts all others itself
    if config.fp8 and config.parallel != "ddp":
        raise UserError(f"--fp8 goes with --parallel ddp, not {config.parallel}")
    rungs = [("baseline",), *choose_rungs(config.rungs, count_devices(config), config.fp8)]
    folder = prepare(config, "ladder")
    print(
        f"results: {folder}/" + (", of the demo's small model (GPT-2's needs a GPU, and data)" if config.demo else "")
    )
    # the whole schedule of the learning rate within these few steps
    squeezed = min(config.warmup_steps, (SETTLING_STEPS + config.ladder_steps) // 4)
    config = dataclasses.replace(config, warmup_steps=squeezed)
    device = torch.device(choose_device_type(config.device))
    first = first_micro_batch(config, device)

    on = []  # names of the rungs that are climbed
    before = None  # the config of the last rung that ran
    results = []
    print("  ".join(title.ljust(w) if i == 0 else title.rjust(w) for i, (title, w) in enumerate(zip(COLUMNS, WIDTHS))))
    steps = SETTLING_STEPS + config.ladder_steps

    def show(result):
        results.append(result)
        bar.write(row(result, results))
        bar.write(doubt(result), end="")
        save(folder, "ladder", config, results, markdown(results), partial(figures.ladder, results))

    with tqdm(total=len(rungs) * steps, unit="step", leave=False, disable=None) as bar:
        for index, names in enumerate(rungs):
            bar.set_description(" + ".join(map(str, names)))
            ranks = names[1] if names[0] == "ddp" else 1
            rung, idle = fit_rung(config, on, names, first, device, before)
            for name, reason in idle.items():
                show(dict(rung=f"+ {name}", name=name, status="skipped", reason=reason))
            names = tuple(name for name in names if name not in idle)
            if names in ((), (1,)):
                bar.update(steps)
                continue
            folder_name = f"{index:02d}_{'+'.join(map(str, names))}"
            result = measure(rung, folder, folder_name, ranks, bar)
            while index == 0 and result.get("reason") == OUT_OF_MEMORY and first > 1:
                first //= 2  # the first rung's micro-batch is the largest that fits
                bar.update(-steps)
                rung, _ = fit_rung(config, on, names, first, device, None)
                result = measure(rung, folder, f"{folder_name}_B{first}", ranks, bar)
            if index == 0 and result["status"] == "skipped" and result["reason"] != OUT_OF_MEMORY:
                raise UserError(result["reason"])  # a mistake in the flags is one in every rung
            if result["status"] == "done":
                on += names
                before = rung
            show(result | dict(rung=label(names, result, rung.parallel)))
    done = [result for result in results if result["status"] == "done"]
    if done:
        print(f"{done[-1]['tokens_per_sec'] / done[0]['tokens_per_sec']:.1f} × from {done[0]['rung']} to the last rung")
    print(f"{folder}/ has ladder.md, ladder.json, ladder.png and every run")
    report_failures(results)


def doubt(result):
    """A line about a measurement that cannot be trusted, or nothing."""
    if result.get("spread", 0) < 0.3:
        return ""
    return (
        f"    (its steps are uneven, the middle half spans {result['spread']:.0%}: is something else running here?)\n"
    )


def count_devices(config):
    """Processes that the largest DDP rung may have: torchrun's own, or one for every GPU here."""
    if "WORLD_SIZE" in os.environ:
        if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
            raise UserError("the ladder runs on one machine: start it with torchrun --standalone, or without torchrun")
        return int(os.environ["WORLD_SIZE"])
    return max(1, torch.cuda.device_count()) if config.device in ("auto", "cuda") else 1


def choose_rungs(text, devices, fp8=False):
    """Tuples of names out of --rungs; DDP's rungs are ("ddp", 2), ("ddp", 4), … up to all devices. "all" has fp8's only
    with --fp8.

    Raises UserError for a name that does not exist or comes twice, and an order that makes no sense.
    """
    every = ",".join(name for name in RUNGS if name != "fp8" or fp8)
    text = every if text.strip() == "all" else text.replace(" ", "")
    chosen = [tuple(part.split("+")) for part in text.split(",")]
    names = list(itertools.chain(*chosen))
    for name in names:
        if name not in RUNGS:
            raise UserError(f"--rungs: there is no {name!r}; there are {', '.join(RUNGS)}")
        if names.count(name) > 1:
            raise UserError(f"--rungs names {name} twice")
    if "micro_batch" in names and "accumulation" not in names[: names.index("micro_batch")]:
        raise UserError("--rungs: micro_batch needs accumulation before it, since a micro-batch is a part of a batch")
    if "ddp" in names and "accumulation" not in names:
        raise UserError("--rungs: ddp needs accumulation before it, since the GPUs divide one batch")
    if "ddp" in names:
        if chosen[-1] != ("ddp",):
            raise UserError("--rungs: ddp comes last, and alone")
        counts = {2**i for i in range(1, devices.bit_length()) if 2**i <= devices} | {devices}
        chosen[-1:] = [("ddp", count) for count in sorted(counts)]
    return chosen


def first_micro_batch(config, device):
    """The micro-batch of the first rungs: 16 on a GPU, or what is asked for if that is less, and divides the batch."""
    size = min(FIRST_MICRO_BATCH, config.micro_batch_size or FIRST_MICRO_BATCH) if device.type == "cuda" else 1
    while size > 1 and config.total_batch_size % (size * config.seq_len):
        size //= 2
    return size


def fit_rung(config, on, names, first, device, before):
    """A rung's config, with `on` and `names` turned on, as the device can run it; and a reason for each of `names` that
    changes nothing against `before`, the config of the rung before (None for the first)."""
    rung = with_rungs(config, [*on, *names], first)
    notes = []
    fit_device(rung, device, notes)
    if device.type != "cuda" and rung.micro_batch_size is None:
        rung.micro_batch_size, reason = choose_micro_batch_size(rung, Distributed(0, 1, device))
        notes.append(reason)
    idle = {}
    for name in names if before else ():
        fields = RUNGS[name][1] if name in RUNGS else {}
        if fields and all(getattr(rung, field) == getattr(before, field) for field in fields):
            reasons = [note for note in notes if note.split()[0] in fields]
            idle[name] = "; ".join(reasons) or "off on the command line"
    if names == ("ddp", 1):
        alone = "one GPU here" if device.type == "cuda" else "no GPUs here: torchrun starts more processes"
        idle = {"ddp": alone}
    return rung, idle


def with_rungs(config, on, first):
    """config with every rung off that is not in `on`; `first` is the micro-batch without its rung."""
    changes = {}
    for name, (_, off) in RUNGS.items():
        if name not in on:
            changes |= off
    if "micro_batch" not in on:
        changes["micro_batch_size"] = first
    if "ddp" not in on:
        changes |= dict(parallel="ddp", shard_ranks=None, bf16_gradients=False, overlap_gradients="auto")
    if "accumulation" not in on:
        changes["total_batch_size"] = first * config.seq_len
    return dataclasses.replace(config, **changes)


def label(names, result, mode):
    """A rung's name in the table; mode: its --parallel."""
    if names[0] == "baseline":
        return "baseline"
    if result["status"] != "done":
        return "+ " + " + ".join(map(str, names)).replace("ddp + ", f"{mode.upper()} × ")
    facts = result["facts"] | dict(mode=mode.upper())
    return "+ " + " + ".join(RUNGS[name][0].format(**facts) for name in names if name in RUNGS)


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
        "–" if result["loss"] is None else f"{result['loss']:.4f}",
    ]


def row(result, results):
    texts = cells(result, results)
    if len(texts) == 2:
        return f"{texts[0]:{WIDTHS[0]}}  {texts[1]}"
    return "  ".join(text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(texts, WIDTHS)))


def markdown(results):
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    for index, result in enumerate(results):
        texts = cells(result, results[: index + 1])
        lines.append(f"| {' | '.join(texts + [''] * (len(COLUMNS) - len(texts)))} |")
    lines += [
        "",
        "Losses are those of the last step: compare them where the recipe and the tokens a step are the same.",
    ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# Sweeps


def sweep(config):
    """Measure every combination of the axes' values; sweep.json, sweep.md and the heat map sweep.png.

    Raises UserError for an axis that is not a flag, or when no combination or not all of them ran.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("a sweep measures one process at a time: start it with python, not with torchrun")
    if not config.sweep:
        raise UserError("--sweep needs at least one flag and its values, as micro_batch_size=8,16")
    axes = dict(read_axis(text) for text in config.sweep)
    if len(axes) < len(config.sweep):
        raise UserError("--sweep names a flag twice")
    folder = prepare(config, "sweep")
    results = []
    grid = list(itertools.product(*axes.values()))
    width = max(len(describe(dict(zip(axes, values)))) for values in grid)
    with tqdm(total=len(grid) * (SETTLING_STEPS + config.ladder_steps), unit="step", leave=False, disable=None) as bar:
        for index, values in enumerate(grid):
            cell = dict(zip(axes, values))
            bar.set_description(describe(cell))
            result = measure(dataclasses.replace(config, **cell), folder, f"{index:02d}", 1, bar) | dict(cell=cell)
            results.append(result)
            if result["status"] == "done":
                text = (
                    f"{result['tokens_per_sec']:>11,.0f} tok/s  {result['ms']:>9.2f} ms  {result['peak_gb']:>7.2f} GB"
                )
            else:
                text = f"{result['status']}: {result['reason']}"
            bar.write(f"{describe(cell):{width}}  {text}")
            bar.write(doubt(result), end="")
            draw = partial(figures.heat_map, axes, results)
            save(folder, "sweep", config, results, sweep_markdown(axes, results), draw)
    done = sorted((r for r in results if r["status"] == "done"), key=lambda r: r["tokens_per_sec"], reverse=True)
    if not done:
        raise UserError(f"none of the {len(grid)} combinations ran: {results[0]['reason']}")
    print(winner(done))
    print(f"{folder}/ has sweep.md, sweep.json, sweep.png and every run")
    report_failures(results)


def read_axis(text):
    """ "micro_batch_size=8,16" as ("micro_batch_size", [8, 16]). Raises UserError for what is no flag or no value."""
    name, _, values = text.partition("=")
    fields = {field.name: field for field in dataclasses.fields(Config)}
    if name in NOT_SWEPT:
        raise UserError(f"--sweep {text}: {name} makes no difference in a sweep, which measures one process")
    if name not in fields or not values:
        raise UserError(f"--sweep {text}: it takes a flag of train_gpt2.py and its values, as micro_batch_size=8,16")
    kind = fields[name].type
    convert = next((t for t in (bool, int, float) if kind in (t, t | None)), str)
    if convert is bool:
        words = dict(on=True, true=True, off=False, false=False)
        convert = lambda value: words[value.lower()]  # noqa: E731
    try:
        converted = [convert(value) for value in values.split(",")]
    except (ValueError, KeyError) as error:
        raise UserError(f"--sweep {text}: not all of {values} are values of --{name}") from error
    if len(set(converted)) < len(converted):
        raise UserError(f"--sweep {text} names a value twice")
    return name, converted


def winner(done):
    """One line: which combination is the fastest, and by how much."""
    best = done[0]
    text = f"{describe(best['cell'])} wins: {best['tokens_per_sec']:,.0f} tok/s"
    if len(done) > 1:
        next_ratio, last_ratio = (best["tokens_per_sec"] / r["tokens_per_sec"] for r in (done[1], done[-1]))
        text += f", {next_ratio:.3f} × the next ({describe(done[1]['cell'])}), {last_ratio:.2f} × the slowest"
    return text


def sweep_markdown(axes, results):
    lines = [f"| {' | '.join(axes)} | {' | '.join(COLUMNS[i] for i in MEASURES)} |"]
    lines.append("| --- " * len(axes) + "|" + " ---: |" * len(MEASURES))
    for result in results:
        texts = cells(result | dict(rung=""), [result])
        texts = [texts[i] for i in MEASURES] if len(texts) > 2 else [texts[1], "", "", ""]
        lines.append(f"| {' | '.join([*map(word, result['cell'].values()), *texts])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
