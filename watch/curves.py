"""Draw loss, HellaSwag accuracy, throughput and gradient norm of one or more runs over tokens.

    python -m watch.curves log/RUN [log/OTHER ...]

train_gpt2.py draws log/RUN/curves.png at the end of a run, or when it is stopped, if max_steps is MIN_STEPS or more.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from checkpoints.run_folder import facts_of
from common.cli import parse
from common.errors import UserError, run
from data.shards import FINEWEB_EDU

# Validation loss and HellaSwag acc_norm of OpenAI's GPT-2 124M, as build-nanogpt measured them
GPT2_VAL_LOSS, GPT2_HELLASWAG = 3.2924, 0.2955
CHANCE = 0.25  # of four endings
MIN_STEPS = 10  # a run with a smaller --max_steps gets no figure
INK, MUTED, RULE = "#1f2328", "#6a737d", "#d8dee4"
PALETTE = ("#2f6fbb", "#c77d2e", "#4f9d69", "#b5495b", "#7d5ba6", "#8a8f98", "#3aa6a6")
WITH_HELLASWAG = [["loss", "hellaswag"], ["speed", "norm"]]
WITHOUT = [["loss", "speed"], ["loss", "norm"]]


@dataclass
class Flags:
    """Draw the curves of runs."""

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUNS", help_behavior_hint="(required)")
    ]
    """Folders of runs."""
    out: str | None = None
    """File to write; by default log/RUN/curves.png, or for several runs log/curves-RUN-OTHER.png."""


def read(folder):
    """A run's metrics.jsonl as {name: (tokens, values)}, two lists of equal length per metric.

    Raises UserError for a folder without metrics.
    """
    path = folder / "metrics.jsonl"
    series = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give folders of runs, such as log/RUN") from error
    for line in lines:
        try:
            row = json.loads(line)
            tokens = row["tokens"]
        except (ValueError, KeyError, TypeError):
            continue  # an incomplete last line: the run is writing it
        for name, value in row.items():
            if isinstance(value, int | float):
                xs, ys = series.setdefault(name, ([], []))
                xs.append(tokens)
                ys.append(value)
    if "step" not in series:
        raise UserError(f"{path}: nothing is logged there yet")
    return series


def new_figure(width, height, columns=1, mosaic=None, **options):
    """(figure, axes): width × height inches; axes is a list of `columns` Axes, or {name: Axes} of a mosaic."""
    from matplotlib.figure import Figure  # takes half a second; most runs draw nothing until their end

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    axes = figure.subplot_mosaic(mosaic) if mosaic else figure.subplots(1, columns, squeeze=False, **options)[0]
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(RULE)
        ax.tick_params(which="both", colors=INK, length=0, labelsize=9)
    return figure, axes


def mark(ax, value, text):
    """A dashed line at a value of the y axis, with its text to the right of the axes, where no curve is."""
    ax.axhline(value, color=MUTED, linewidth=1, linestyle="--")
    ax.text(1.01, value, text, transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=MUTED)


def unit(most):
    """(scale, name) of the unit for an axis that ends at `most`: (1e6, "million ") for 3,000,000."""
    units = ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "), (1, ""))
    return next((scale, name) for scale, name in units if most >= scale or scale == 1)


def draw(folders, path):
    """Write the curves of the runs to path. Raises UserError for a run that cannot be read, OSError for a path that
    cannot be written, ValueError for a path whose suffix is not an image format."""
    runs = [read(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    scale, tokens_unit = unit(max(tokens for series in runs for tokens in series["step"][0]))
    rate_scale, rate_unit = unit(max(max(series.get("tokens_per_sec", ((), (0,)))[1]) for series in runs))
    has_hellaswag = any("hellaswag_acc_norm" in series for series in runs)
    figure, axes = new_figure(12, 7.5, mosaic=WITH_HELLASWAG if has_hellaswag else WITHOUT)

    def line(panel, series, name, color, scale_y=1, first=0, **style):
        xs, ys = series.get(name, ((), ()))
        if xs:
            axes[panel].plot([x / scale for x in xs[first:]], [y / scale_y for y in ys[first:]], color=color, **style)

    for name, series, color in zip(names, runs, itertools.cycle(PALETTE)):
        line("loss", series, "train_loss", color, linewidth=0.8, alpha=0.45)
        line("loss", series, "val_loss", color, linewidth=1.8, marker="o", markersize=3)
        line("hellaswag", series, "hellaswag_acc_norm", color, linewidth=1.8, marker="o", markersize=3)
        line("speed", series, "tokens_per_sec", color, rate_scale, first=1, linewidth=0.8)  # the first step compiles
        line("norm", series, "grad_norm", color, linewidth=0.8)
        axes["loss"].plot([], [], color=color, linewidth=1.8, label=name)  # for the legend: some runs never validate
    if all(facts_of(folder).get("dataset") == FINEWEB_EDU for folder in folders):
        mark(axes["loss"], GPT2_VAL_LOSS, f"GPT-2 124M\n{GPT2_VAL_LOSS}")
    if has_hellaswag:
        mark(axes["hellaswag"], GPT2_HELLASWAG, f"GPT-2 124M\n{GPT2_HELLASWAG}")
        mark(axes["hellaswag"], CHANCE, f"chance\n{CHANCE}")
    titles = dict(
        loss="loss (training thin, validation with dots)",
        hellaswag="HellaSwag, acc_norm",
        speed=f"{rate_unit}tokens/sec",
        norm="gradient norm, before clipping",
    )
    for panel, ax in axes.items():
        ax.set_title(titles[panel], loc="left", fontsize=10, color=MUTED)
        ax.set_xlabel(f"{tokens_unit}tokens", color=INK)
        ax.grid(axis="y", color=RULE, linewidth=0.6)
    axes["speed"].set_ylim(bottom=0)
    axes["norm"].set_yscale("log")
    if len(runs) > 1:
        handles = axes["loss"].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(names[0] if len(runs) == 1 else f"{len(runs)} runs", x=0.01, ha="left", color=INK)
    figure.savefig(path)


def draw_own(folder, max_steps):
    """Write curves.png, of all steps so far, to a run's folder: its path, or None for a run of few max_steps.

    An error is printed, since the run is complete.
    """
    if max_steps < MIN_STEPS:
        return None
    path = folder / "curves.png"
    try:
        draw([folder], path)
    except (OSError, UserError) as error:
        print(f"no curves.png: {error}")
        return None
    return path


def default_path(folders):
    """curves.png in the folder of one run; for several curves-RUN-OTHER.png beside the folder of the first."""
    if len(folders) == 1:
        return folders[0] / "curves.png"
    names = "-".join(folder.resolve().name for folder in folders)
    return folders[0].parent / f"curves-{names if len(folders) <= 3 else f'{len(folders)}-runs'}.png"


def main():
    flags = parse(Flags)
    folders = [Path(name) for name in flags.runs]
    path = Path(flags.out or default_path(folders))
    try:
        draw(folders, path)
    except (OSError, ValueError) as error:  # ValueError: --out has a suffix that matplotlib does not know
        reason = error.strerror if getattr(error, "filename", None) == str(path) else error
        raise UserError(f"cannot write {path}: {reason}") from error
    print(path)


if __name__ == "__main__":
    run(main)
