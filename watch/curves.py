"""Draw loss, HellaSwag accuracy, throughput and gradient norm of one or more runs over tokens, and of one run with
several ranks how far each rank is behind the others.

    python -m watch.curves log/RUN [log/OTHER ...]

It writes curves.png in the folder of one run, or curves-RUN-OTHER.png beside the folder of the first of several.
train_gpt2.py draws a run's own at its end, or when it is stopped.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import contextlib
import itertools
import json
import math
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
METRICS = "metrics.jsonl"  # in a run's folder
CHANCE = 0.25  # of four endings
COLUMNS = 1000  # of the heat map, at most: fewer than the figure has pixels
INK, MUTED, RULE = "#1f2328", "#6a737d", "#d8dee4"
PALETTE = ("#2f6fbb", "#c77d2e", "#4f9d69", "#b5495b", "#7d5ba6", "#8a8f98", "#3aa6a6")
WITH_HELLASWAG = [["loss", "hellaswag"], ["speed", "norm"]]
WITHOUT = [["loss", "speed"], ["loss", "norm"]]
TITLES = dict(
    loss="loss, nats per token (training thin, validation with dots)",
    hellaswag="HellaSwag, acc_norm with its 95% interval",
    speed="tokens/sec",
    norm="gradient norm, before clipping",
    ranks="each rank's own time in a step, before it waits: % above the others' median",
)


@dataclass
class Flags:
    """Draw the curves of runs."""

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")
    ]
    """Folders of runs."""


def read_rows(folder):
    """The lines of a run's metrics.jsonl: a list of dict(step=, tokens=, ...). Raises UserError if there are none."""
    path, rows = folder / METRICS, []
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give folders of runs, such as log/RUN") from error
    for line in lines:
        with contextlib.suppress(ValueError):  # an incomplete last line: the run is writing it
            row = json.loads(line)
            if isinstance(row, dict) and {"step", "tokens"} <= row.keys():
                rows.append(row)
    if not rows:
        raise UserError(f"{path}: nothing is logged there yet")
    return rows


def read(folder):
    """A run's metrics.jsonl as {name: (tokens, values)}, two lists of equal length per metric.

    Raises UserError for a folder without metrics.
    """
    series = {}
    for row in read_rows(folder):
        for name, value in row.items():
            if isinstance(value, int | float):
                xs, ys = series.setdefault(name, ([], []))
                xs.append(row["tokens"])
                ys.append(value)
    return series


def new_figure(width, height, columns=1, mosaic=None, **options):
    """(figure, axes): width × height inches; axes is a list of `columns` Axes, or {name: Axes} of a mosaic."""
    import matplotlib  # takes half a second; most runs draw nothing until their end
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False  # a name may have dollar signs
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


def draw_ranks(figure, ax, rows):
    """A heat map of ranks × tokens, of rows with own_ms or without. Where a rank was not measured, it is empty."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    from watch.ranks import BEHIND, behind  # imports PyTorch: other curves are drawn in less time

    times, tokens = [row.get("own_ms", []) for row in rows], [row["tokens"] for row in rows]
    percent = np.full((max(map(len, times)), len(rows)), np.nan)
    for column, own in enumerate(times):
        if own:
            percent[: len(own), column] = 100 * np.array(behind(own))
    together = math.ceil(len(rows) / COLUMNS)  # steps: of those that share a column of pixels the slowest is seen
    percent = np.fmax.reduceat(percent, range(0, len(rows), together), axis=1)
    edges = [max(0, 2 * tokens[0] - tokens[1]), *tokens[together - 1 : -1 : together], tokens[-1]]
    limit = max(100 * BEHIND, np.nanpercentile(percent, 99))  # one slow step does not take the colors of all others
    image = ax.pcolormesh(edges, np.arange(len(percent) + 1) - 0.5, percent, cmap="Blues", vmin=0, vmax=limit)
    ax.invert_yaxis()
    ax.set_ylabel("rank", color=INK)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=ax, extend="max", format="{x:g}%", pad=0.01).outline.set_visible(False)


def draw(folders):
    """Write the curves of the runs: the figure's path. Raises UserError for a run that cannot be read, OSError."""
    from matplotlib.ticker import AutoLocator, EngFormatter, LogLocator

    runs, facts = [read(folder) for folder in folders], [facts_of(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    data = sorted({str(fact.get("dataset") or fact.get("data_dir")) for fact in facts})
    has_hellaswag = any("hellaswag_acc_norm" in series for series in runs)
    steps = [row for row in read_rows(folders[0]) if "train_loss" in row]
    has_ranks = len(runs) == 1 and len(steps) > 1 and any("own_ms" in row for row in steps)
    mosaic = (WITH_HELLASWAG if has_hellaswag else WITHOUT) + [["ranks", "ranks"]] * has_ranks
    figure, axes = new_figure(12, 2.5 + 2.5 * len(mosaic), mosaic=mosaic)

    def line(panel, series, metric, color, first=0, **style):
        xs, ys = series.get(metric, ((), ()))
        axes[panel].plot(xs[first:], ys[first:], color=color, **style)

    for name, series, color in zip(names, runs, itertools.cycle(PALETTE)):
        line("loss", series, "train_loss", color, linewidth=0.8, alpha=0.45)
        line("loss", series, "val_loss", color, linewidth=1.8, marker="o", markersize=3, label=name)
        line("speed", series, "tokens_per_sec", color, first=1, linewidth=0.8)  # the first step compiles
        line("norm", series, "grad_norm", color, linewidth=0.8)
        if "hellaswag_acc_norm" in series:
            xs, accuracies = series["hellaswag_acc_norm"]
            items = series["hellaswag_items"][1]
            errors = [1.96 * math.sqrt(p * (1 - p) / n) for p, n in zip(accuracies, items)]
            style = dict(linewidth=1.8, marker="o", markersize=3, elinewidth=0.8)
            axes["hellaswag"].errorbar(xs, accuracies, errors, color=color, **style)
    if data == [FINEWEB_EDU]:
        mark(axes["loss"], GPT2_VAL_LOSS, f"GPT-2 124M\n{GPT2_VAL_LOSS}")
    if has_hellaswag:
        mark(axes["hellaswag"], GPT2_HELLASWAG, f"GPT-2 124M\n{GPT2_HELLASWAG}")
        mark(axes["hellaswag"], CHANCE, f"chance\n{CHANCE}")
    for panel, ax in axes.items():
        ax.set_title(TITLES[panel], loc="left", fontsize=10, color=MUTED)
        ax.set_xlabel("tokens", color=INK)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))  # 2M, 5G
        ax.grid(axis="y", color=RULE, linewidth=0.6)
    if "ranks" in axes:
        draw_ranks(figure, axes["ranks"], steps)
        axes["ranks"].grid(False)
    axes["speed"].yaxis.set_major_formatter(EngFormatter(sep=""))
    axes["speed"].set_ylim(bottom=0)
    axes["norm"].set_yscale("log")
    low, high = axes["norm"].get_ylim()
    axes["norm"].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else AutoLocator())
    axes["norm"].yaxis.set_major_formatter("{x:g}")
    axes["norm"].yaxis.set_minor_formatter("")
    if len(runs) > 1:
        handles = axes["loss"].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(f"{title}, on {', '.join(data)}", x=0.01, ha="left", color=INK)
    path = folders[0] / "curves.png"
    if len(runs) > 1:
        others = "-".join(names) if len(names) <= 3 else f"{len(names)}-runs"
        path = folders[0].parent / f"curves-{others}.png"
    figure.savefig(path)
    return path


def main():
    print(draw([Path(name) for name in parse(Flags).runs]))


if __name__ == "__main__":
    run(main)
