"""Figures of the ladders and sweeps, each a PNG. results: the rows of a Results."""

import statistics
from itertools import cycle, product
from pathlib import Path
from textwrap import fill

from common.errors import word
from watch.curves import INK, MUTED, PALETTE, RULE, mark, new_figure

SPEED, MEMORY = "#2f6fbb", "#c77d2e"
MODEL_FLAGS = ("model", "n_layer", "n_head", "n_embd")


def describe(cell):
    """{flag: value} as text."""
    return ", ".join(f"{name} {word(value)}" for name, value in cell.items())


def save(figure, path, title, results, axes=()):
    """Write a figure with a title: what it shows, the model, the data, the hardware and the PyTorch version.

    axes: flags that a sweep changes.
    """
    facts = next(result["facts"] for result in results if result["status"] == "done")
    sizes = {} if set(MODEL_FLAGS) & set(axes) else {name: facts[name] for name in ("n_layer", "n_embd")}
    model = ", ".join(["GPT-2", *filter(None, [describe(sizes)])])
    data = facts["dataset"] or Path(facts["data_dir"]).name
    devices = facts["hardware"] if "gpus" in axes else f"{facts['world_size']} × {facts['hardware']}"
    text = f"{title}\n{model}; data: {data}\n{devices}, PyTorch {facts['torch']}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=10, color=INK)
    figure.savefig(path)


def ladder(results, path):
    """Tokens/sec and peak memory of each rung, the first on top; without the baseline's second measurement."""
    results = [result for result in results if result["status"] == "done" and result["rung"] != "baseline again"]
    height = 1.8 + 0.42 * len(results)
    figure, axes = new_figure(11, height, columns=2, sharey=True, gridspec_kw=dict(width_ratios=(2.2, 1)))
    titles = "tokens/sec, and × the rung before, with its 95% interval", "peak memory, GB"
    for ax, name, color, text in zip(axes, ("tokens_per_sec", "peak_gb"), (SPEED, MEMORY), titles):
        values = [result[name] for result in results]
        texts = [f" {value:.1f}" for value in values]
        if name == "tokens_per_sec":
            texts = [f" {value:,.0f}   {describe_gain(result)}" for value, result in zip(values, results)]
        bars = ax.barh([fill(result["rung"], 48) for result in results], values, height=0.68, color=color)
        ax.bar_label(bars, texts, fontsize=9, color=INK)
        ax.margins(x=0.25)
        ax.set_xticks([])
        ax.spines["bottom"].set_visible(False)
        ax.set_title(text, loc="left", fontsize=10, color=MUTED)
    axes[0].invert_yaxis()
    save(figure, path, "What each optimization buys", results)


def describe_gain(result):
    """A rung's gain over the rung before as text."""
    gain = result["gain"]
    if not gain:
        return ""
    text = f"{gain['ratio']:.3f} ({gain['low']:.3f}–{gain['high']:.3f})"
    return text if gain["is_clear"] else f"{text}: not significant"


def time_to_loss(curves, target, results, path):
    """Validation loss against training time: for each rung the mean over its seeds, and a thin line for each seed.

    curves: {rung: to_loss.Curve of each seed}, those of a rung with validations at the same steps. target: the loss to
    reach.
    """
    figure, (ax,) = new_figure(9, 5.2)
    for (name, seeds), color in zip(curves.items(), cycle(PALETTE)):
        for curve in seeds:
            ax.plot(curve.seconds[1:], curve.losses[1:], color=color, linewidth=0.7, alpha=0.4)
        seconds = [statistics.mean(each) for each in zip(*(curve.seconds[1:] for curve in seeds))]
        losses = [statistics.mean(each) for each in zip(*(curve.losses[1:] for curve in seeds))]
        ax.plot(seconds, losses, color=color, linewidth=2, marker="o", markersize=3, label=name)
    mark(ax, target, f"target\n{target:.3f}")
    ax.set_xlabel("seconds of training steps", color=INK)
    ax.set_ylabel("validation loss, nats per token", color=INK)
    ax.set_xlim(left=0)
    ax.grid(axis="y", color=RULE, linewidth=0.6)
    ax.legend(frameon=False, fontsize=9, labelcolor=INK)
    save(figure, path, "Time to a loss", results)


def heat_map(axes, results, path):
    """Tokens/sec over the grid of a sweep. The first flag is the x axis; all combinations of the others are the y axis.
    Colors compare cells whose model has the same sizes. A cell without a result shows the reason.

    axes: {flag: values}; results: those so far, each with "cell": {flag: value}.
    """
    (across, columns), *others = axes.items()
    rows = [dict(zip((name for name, _ in others), values)) for values in product(*(values for _, values in others))]
    best = {}  # tokens/sec by model

    def model_of(result):
        return tuple(result["cell"].get(name) for name in MODEL_FLAGS)

    for result in (result for result in results if result["status"] == "done"):
        best[model_of(result)] = max(best.get(model_of(result), 0), result["tokens_per_sec"])
    figure, (ax,) = new_figure(max(7, 3 + 1.5 * len(columns)), 2.1 + 0.75 * len(rows))
    grid = [[float("nan")] * len(columns) for _ in rows]
    for result in results:
        cell = dict(result["cell"])
        x, y = columns.index(cell.pop(across)), rows.index(cell)
        text, style = result["status"], dict(color=MUTED)
        if result["status"] == "done":
            ratio = grid[y][x] = result["tokens_per_sec"] / best[model_of(result)]
            share = f"MFU {result['mfu']:.1%}" if result["mfu"] else f"{ratio:.2f} × the best"
            text = f"{result['tokens_per_sec']:,.0f}\n{share}\n{result['peak_gb']:.1f} GB"
            style = dict(color=INK, fontweight="bold" if ratio == 1 else "normal")
        elif len(result["reason"]) < 20:
            text = result["reason"]
        ax.text(x, y, text, ha="center", va="center", fontsize=10, **style)
    spread = 1 - min(ratio for ratios in grid for ratio in ratios if ratio == ratio) + 1e-3  # without NaN
    # the middle of the colors: dark text is readable on all of them
    ax.imshow(grid, cmap="Blues", vmin=1 - 1.2 * spread, vmax=1 + 0.8 * spread, aspect="auto")
    ax.set_xticks(range(len(columns)), [word(value) for value in columns])
    ax.set_xlabel(across, color=INK)
    ax.set_yticks(range(len(rows)), [describe(row) for row in rows])
    ax.spines[:].set_visible(False)
    save(figure, path, "Tokens/sec and peak memory", results, axes)
