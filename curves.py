"""Draw loss, HellaSwag accuracy, throughput and gradient norm of one or more runs over tokens.

    python curves.py log/RUN [log/OTHER ...]

train_gpt2.py draws the curves of each run of MIN_STEPS steps or more to log/RUN/curves.png.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from common.cli import UserError, parse, run
from observe import figures

# Validation loss and HellaSwag acc_norm of OpenAI's GPT-2 124M, as build-nanogpt measured them
GPT2_VAL_LOSS, GPT2_HELLASWAG = 3.2924, 0.2955
MIN_STEPS = 20  # shorter runs get no figure


@dataclass
class Flags:
    """Draw the curves of runs."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs."""
    out: str | None = None
    """File to write; by default curves.png in the folder of the first run."""


def read(folder):
    """A run's metrics.jsonl as {name: (tokens, values)}, two lists of equal length per metric.

    Raises UserError for a folder without metrics.
    """
    path = Path(folder) / "metrics.jsonl"
    series = {}
    try:
        lines = path.read_text().splitlines()
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
    if not series:
        raise UserError(f"{path}: nothing is logged there yet")
    return series


def draw(folders, path):
    """Write the curves of the runs to path. Raises UserError for a run that cannot be read, OSError for a path that
    cannot be written, ValueError for a path whose suffix is not an image format."""
    runs = {Path(folder).resolve().name: read(folder) for folder in folders}
    most = max(tokens for series in runs.values() for tokens in series["step"][0])
    scale, unit = next(
        (s, u) for s, u in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "), (1, "")) if most >= s or s == 1
    )
    figure, ((loss, hellaswag), (speed, norm)) = figures.new_figure(12, 7.5, columns=2, rows=2)

    def line(ax, series, name, color, **style):
        xs, ys = series.get(name, ((), ()))
        if xs:
            ax.plot([x / scale for x in xs], ys, color=color, **style)

    for (name, series), color in zip(runs.items(), itertools.cycle(figures.PALETTE)):
        line(loss, series, "train_loss", color, linewidth=0.8, alpha=0.45)
        line(loss, series, "val_loss", color, linewidth=1.8, marker="o", markersize=3, label=name)
        line(hellaswag, series, "hellaswag_acc_norm", color, linewidth=1.8, marker="o", markersize=3)
        without_first = {key: (xs[1:], ys[1:]) for key, (xs, ys) in series.items()}  # the first step compiles
        line(speed, without_first, "tokens_per_sec", color, linewidth=0.8)
        line(norm, series, "grad_norm", color, linewidth=0.8)
    marks = ((loss, GPT2_VAL_LOSS, "GPT-2 124M on FineWeb-Edu"), (hellaswag, GPT2_HELLASWAG, "GPT-2 124M"))
    for ax, mark, text in marks:
        ax.set_visible(bool(ax.lines))  # HellaSwag may be off
        ax.axhline(mark, color=figures.MUTED, linewidth=1, linestyle="--")
        ax.text(1, mark, f"{text} {mark} ", transform=ax.get_yaxis_transform(), ha="right", va="bottom", fontsize=9)
    titles = (
        "loss (training thin, validation with dots)",
        "HellaSwag, acc_norm",
        "tokens/sec",
        "gradient norm, before clipping",
    )
    for ax, title in zip((loss, hellaswag, speed, norm), titles):
        ax.set_title(title, loc="left", fontsize=10, color=figures.MUTED)
        ax.set_xlabel(f"{unit}tokens", color=figures.INK)
        ax.grid(axis="y", color=figures.RULE, linewidth=0.6)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(lambda value, _: figures.thousands(value))
    norm.set_yscale("log")
    if len(runs) > 1:
        figure.legend(*loss.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(", ".join(runs) if len(runs) == 1 else f"{len(runs)} runs", x=0.01, ha="left", color=figures.INK)
    figure.savefig(path)


def draw_own(folder):
    """Write curves.png to a run's folder, if the run is long enough. An error is printed, since the run is complete."""
    try:
        if len(read(folder).get("train_loss", ((), ()))[0]) >= MIN_STEPS:
            draw([folder], Path(folder) / "curves.png")
    except (OSError, UserError) as error:
        print(f"no curves.png: {error}")


def main():
    flags = parse(Flags)
    path = Path(flags.out or Path(flags.runs[0]) / "curves.png")
    try:
        draw(flags.runs, path)
    except (OSError, ValueError) as error:  # ValueError: --out has a suffix that matplotlib does not know
        raise UserError(f"cannot write {path}: {error}") from error
    print(path)


if __name__ == "__main__":
    run(main)
