"""Figures of the ladders and sweeps. A function with a `path` writes one PNG."""

import statistics
from itertools import cycle, product

from common.errors import word
from watch.curves import INK, MUTED, PALETTE, RULE, mark, new_figure

SPEED, MEMORY = "#2f6fbb", "#c77d2e"
HEAT = "Blues"
MODEL_FLAGS = {"model", "n_layer", "n_head", "n_embd"}


def rate_text(rate, least):
    """A rate in thousands, or in ones if `least`, the lowest rate of the figure, is below 1,000: 44.3k, 1,167k, 812."""
    if least < 1e3:
        return f"{rate:,.0f}"
    return f"{rate / 1e3:,.{1 if rate < 1e5 else 0}f}k"


def describe(cell):
    """{flag: value} as text."""
    return ", ".join(f"{name} {word(value)}" for name, value in cell.items())


def about(facts, axes=()):
    """One line on model, hardware and PyTorch version; facts: a run's config.json. axes: flags that a sweep changes."""
    sizes = "GPT-2" if MODEL_FLAGS & set(axes) else f"GPT-2 of {facts['n_layer']} layers, {facts['n_embd']} wide"
    ranks = 1 if "gpus" in axes else facts["world_size"]
    devices = f"{ranks} × {facts['hardware']}" if ranks > 1 else facts["hardware"]
    return f"{sizes}; {devices}, PyTorch {facts['torch']}"


def model_of(cell):
    """The flags of a sweep's cell that set the model's sizes: tokens/sec compare within one model only."""
    return tuple((name, value) for name, value in cell.items() if name in MODEL_FLAGS)


def ladder(results, path):
    """Tokens/sec and peak memory of each rung, the first on top.

    results: one dictionary per rung, as from measure.measure; only those with status "done" are drawn.
    """
    results = [result for result in results if result["status"] == "done"]
    names = [result["rung"] for result in results]
    figure, (speed, memory) = new_figure(
        11, 1.5 + 0.42 * len(names), columns=2, sharey=True, gridspec_kw=dict(width_ratios=(2.2, 1))
    )
    positions = range(len(names))
    rates = [result["tokens_per_sec"] for result in results]
    peaks = [result["peak_gb"] for result in results]
    for ax, values, color, title in (
        (speed, rates, SPEED, "tokens/sec, and × the first rung"),
        (memory, peaks, MEMORY, "peak memory of a device, GB"),
    ):
        ax.barh(positions, values, height=0.68, color=color)
        ax.set_xlim(0, 1.22 * max(values))
        ax.set_xticks([])
        ax.spines["bottom"].set_visible(False)
        ax.set_title(title, loc="left", fontsize=10, color=MUTED)
        for position, value in enumerate(values):
            ratio = value / values[0]
            rate = f"{rate_text(value, min(rates))}   {ratio:.{2 if ratio < 10 else 1}f} ×"
            text = rate if ax is speed else f"{value:.1f}"
            ax.text(value + 0.012 * max(values), position, text, va="center", fontsize=9, color=INK)
    speed.set_yticks(positions, names)
    speed.invert_yaxis()
    figure.suptitle(
        f"What each optimization buys: {about(results[0]['facts'])}", x=0.01, ha="left", fontsize=12, color=INK
    )
    figure.savefig(path)


def time_to_loss(curves, target, facts, path):
    """Validation loss against training time: for each rung the mean over its seeds, and a thin line for each seed.

    curves: {rung: time_to_loss.Curve of each seed}, all with validations at the same steps. target: the loss to reach.
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
    ax.set_title(f"Time to a loss: {about(facts)}", loc="left", fontsize=11, color=INK)
    figure.savefig(path)


def heat_map(axes, results, path):
    """Tokens/sec over the grid of a sweep. The first flag is the x axis; all combinations of the others are the y axis.
    Colors compare cells whose model has the same sizes.

    axes: {flag: values}; results: one dictionary per cell so far, as from measure.measure, plus "cell": {flag: value}.
    A cell without a result shows the reason.
    """
    (across, columns), *others = axes.items()
    rows = [dict(zip((name for name, _ in others), values)) for values in product(*(values for _, values in others))]
    by_position = {}  # (y, x): result
    for result in results:
        row = {name: value for name, value in result["cell"].items() if name != across}
        by_position[rows.index(row), columns.index(result["cell"][across])] = result
    done = [result for result in results if result["status"] == "done"]
    worst = min(result["tokens_per_sec"] for result in done)
    best = {}  # tokens/sec by model
    for result in done:
        model = model_of(result["cell"])
        best[model] = max(best.get(model, 0), result["tokens_per_sec"])
    ratios = {
        position: result["tokens_per_sec"] / best[model_of(result["cell"])]
        for position, result in by_position.items()
        if result["status"] == "done"
    }
    least = min(ratios.values())

    figure, (ax,) = new_figure(max(7, 3 + 1.5 * len(columns)), 1.8 + 0.75 * len(rows))
    grid = [[ratios.get((y, x), float("nan")) for x in range(len(columns))] for y in range(len(rows))]
    ax.imshow(grid, cmap=HEAT, vmin=least - 0.4 * (1 - least) - 1e-3, vmax=1 + 1e-3, aspect="auto")
    ax.set_facecolor("#f3f4f6")
    for y, x in product(range(len(rows)), range(len(columns))):
        result = by_position.get((y, x), dict(status="not run", reason="not run"))
        if result["status"] == "done":
            ratio = ratios[y, x]
            share = f"MFU {result['mfu']:.1%}" if result["mfu"] else f"{ratio:.2f} × the best"
            text = f"{rate_text(result['tokens_per_sec'], worst)}\n{share}\n{result['peak_gb']:.1f} GB"
            ax.text(
                x, y, text, ha="center", va="center", fontsize=10, color="white" if ratio > (1 + least) / 2 else INK,
                fontweight="bold" if ratio == 1 else "normal",
            )  # fmt: skip
        else:
            reason = result["reason"] if len(result["reason"]) < 20 else result["status"]
            ax.text(x, y, reason.replace("of ", "of\n"), ha="center", va="center", fontsize=9, color=MUTED)
    ax.set_xticks(range(len(columns)), [word(value) for value in columns])
    ax.set_xlabel(across, color=INK)
    ax.set_yticks(range(len(rows)), [describe(row) for row in rows])
    ax.spines[:].set_visible(False)
    ax.set_title(f"Tokens/sec and peak memory\n{about(done[0]['facts'], axes)}", loc="left", fontsize=11, color=INK)
    figure.savefig(path)
