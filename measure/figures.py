"""Figures: the ladders, sweeps, attention, links, kernels, the roofline. A function with a `path` writes one PNG."""

import statistics
from itertools import cycle, product

from common.errors import word
from watch.curves import INK, MUTED, PALETTE, RULE, mark, new_figure

SPEED, MEMORY = "#2f6fbb", "#c77d2e"
STYLES = ("-", "--", "-.")
HEAT = "Blues"
LABEL = dict(facecolor="white", edgecolor="none", pad=1)  # behind a text that a line may cross
MODEL_FLAGS = {"model", "n_layer", "n_head", "n_embd"}
UNEVEN = 0.3  # steps are marked as uneven from this ratio of their times' interquartile range to the median


def rate_text(rate, least):
    """A rate in thousands, or in ones if `least`, the lowest rate of the figure, is below 1,000: 44.3k, 1,167k, 812."""
    if least < 1e3:
        return f"{rate:,.0f}"
    return f"{rate / 1e3:,.{1 if rate < 1e5 else 0}f}k"


def uneven(result):
    """The interquartile range of a measurement's step times, over their median, as text; empty for even steps."""
    spread = result.get("spread", 0)
    return f"{spread:.0%}" if spread >= UNEVEN else ""


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
    names = [result["rung"] + (uneven(result) and f"\nuneven steps: {uneven(result)}") for result in results]
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
            text += uneven(result) and f"\nuneven: {uneven(result)}"
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


def attention(results, path):
    """Time and memory of each attention kernel against the sequence length; a cross where memory ran out.

    results: of measure/attention.py. Lines are solid for the first width of a head, dashed for the second, dash-dotted
    for the third.
    """
    done = [result for result in results if result["status"] == "done"]
    measures = dict(ms="forward and backward, ms", peak_gb="peak memory, GB")
    points = [dict(result, ms=result["forward_ms"] + result["backward_ms"]) for result in done]
    shown = [key for key in measures if any(point[key] for point in points)]
    figure, axes = new_figure(1 + 5.5 * len(shown), 5, columns=len(shown))
    names, widths = (list(dict.fromkeys(result[key] for result in results)) for key in ("name", "D"))
    for ax, key in zip(axes, shown):
        for (name, color), (D, style) in product(zip(names, PALETTE), zip(widths, cycle(STYLES))):
            line = [point for point in points if (point["name"], point["D"]) == (name, D)]
            if not line:
                continue
            T, values = [point["T"] for point in line], [point[key] for point in line]
            ax.plot(T, values, style, color=color, marker="o", markersize=3)
            for result in results:
                if (result["name"], result["D"], result.get("reason")) == (name, D, "out of memory"):
                    growth = result["T"] / T[-1]  # at the same number of tokens the T × T matrices grow with T
                    ax.plot([T[-1], result["T"]], [values[-1], values[-1] * growth], ":", color=color, linewidth=1)
                    ax.plot(result["T"], values[-1] * growth, "x", color=color)
                    place = result["T"], values[-1] * growth
                    ax.text(*place, "out of\nmemory\n", fontsize=7, color=MUTED, ha="center", va="baseline")
                    break
        lengths = sorted({result["T"] for result in results})
        ax.set(xscale="log", yscale="log")
        ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_xlabel("sequence length T", color=INK)
        ax.set_ylabel(measures[key], color=INK)
        ax.grid(axis="y", color=RULE, linewidth=0.6)
    for name, color in zip(names, PALETTE):
        if any(point["name"] == name for point in points):
            axes[-1].plot([], [], color=color, label=name)
    for D, style in zip(widths, cycle(STYLES)):
        axes[-1].plot([], [], style, color=INK, label=f"D = {D}")
    axes[-1].legend(frameon=False, fontsize=8, labelcolor=INK)
    facts = done[0]["facts"]
    figure.suptitle(
        f"Attention: {facts['hardware']}, PyTorch {facts['torch']}", x=0.01, ha="left", fontsize=11, color=INK
    )
    figure.savefig(path)


def links(results, path):
    """Time and bus bandwidth of each collective against its size. results: of measure/links.py."""
    figure, axes = new_figure(12, 5, columns=2)
    names = list(dict.fromkeys(result["name"] for result in results))
    for ax, key, label in zip(axes, ("ms", "bus_gb_per_s"), ("ms", "bus bandwidth, GB/s")):
        for name, color in zip(names, PALETTE):
            line = [result for result in results if result["name"] == name]
            sizes, values = [result["bytes"] for result in line], [result[key] for result in line]
            ax.plot(sizes, values, color=color, marker="o", markersize=3, label=name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks = ((2**10, "1 KB"), (2**15, "32 KB"), (2**20, "1 MB"), (2**25, "32 MB"), (2**30, "1 GB"))
        largest = 1.01 * max(result["bytes"] for result in results)  # a size may be rounded down to equal parts
        ax.set_xticks(*zip(*(tick for tick in ticks if tick[0] <= largest)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_xlabel("size of the collective", color=INK)
        ax.set_ylabel(label, color=INK)
        ax.grid(axis="y", color=RULE, linewidth=0.6)
    axes[0].legend(frameon=False, fontsize=9, labelcolor=INK)
    facts = results[0]["facts"]
    figure.suptitle(f"{facts['title']}, PyTorch {facts['torch']}", x=0.01, ha="left", fontsize=11, color=INK)
    figure.savefig(path)


def kernels(results, bandwidth, path):
    """GB/s of each level, a panel for each operation. bandwidth: bytes/s of the device's memory, or None.

    results: of measure/kernels.py; only those with status "done" are drawn.
    """
    results = [result for result in results if result["status"] == "done"]
    names = list(dict.fromkeys(result["name"] for result in results))
    figure, axes = new_figure(1.5 + 4.2 * len(names), 3.2, columns=len(names))
    for ax, name in zip(axes, names):
        rows = [result for result in results if result["name"] == name]
        rates = [result["gb_per_s"] for result in rows]
        ax.barh(range(len(rows)), rates, height=0.68, color=SPEED)
        for position, (row, rate) in enumerate(zip(rows, rates)):
            ms = row["forward_ms"] + row["backward_ms"]
            text = f"{rate:.4g}   {ms:.3g} ms"
            beside = dict(xytext=(4, 0), textcoords="offset points", va="center")
            ax.annotate(text, (rate, position), fontsize=8, color=INK, bbox=LABEL, **beside)
        if bandwidth:
            ax.axvline(bandwidth / 1e9, color=MUTED, linewidth=1, linestyle="--")
        ax.set_xlim(0, max(1.5 * max(rates), 1.2 * (bandwidth or 0) / 1e9))
        ax.set_yticks(range(len(rows)), [row["level"] for row in rows])
        ax.invert_yaxis()
        ax.set_title(name, loc="left", fontsize=10, color=MUTED)
        ax.set_xlabel("GB/s, forward and backward", color=INK)
    facts = results[0]["facts"]
    limit = f"; dashed: memory's {bandwidth / 1e9:,.0f} GB/s" if bandwidth else ""
    about_device = f"{facts['hardware']}, PyTorch {facts['torch']}{limit}"
    figure.suptitle(f"One operation at every level: {about_device}", x=0.01, ha="left", fontsize=11, color=INK)
    figure.savefig(path)


def roofline(table, peak_flops, bandwidth, facts, path):
    """TFLOP/s against arithmetic intensity for each category of kernels, below the device's roof.

    table: from profiler.make_table; a point's area is the category's share of the step. peak_flops in FLOP/s, bandwidth
    in bytes/s; the roof is min(peak_flops, FLOP/byte × bandwidth) (Williams et al. 2009, "Roofline").
    """
    figure, (ax,) = new_figure(9, 5.6)
    points = {name: row for name, row in table.items() if "tflops" in row}
    low, high = 0.25, max([4000, *(1.5 * row["flop_per_byte"] for row in points.values())])
    bottom = min([0.2, *(0.5 * row["tflops"] for row in points.values())])
    ridge, peak = peak_flops / bandwidth, peak_flops / 1e12
    ax.plot([low, ridge, high], [low * peak / ridge, peak, peak], color=INK, linewidth=1.6)
    ax.text(high, 1.12 * peak, f"{peak:,.0f} TFLOP/s", ha="right", fontsize=9, color=INK)
    ax.text(ridge / 1.4, peak / 1.2, f"{bandwidth / 1e12:.1f} TB/s", ha="right", fontsize=9, color=INK)
    for (name, row), color in zip(points.items(), PALETTE):
        x, y, share = row["flop_per_byte"], row["tflops"], row["share"]
        ax.plot([x, x], [y, y / row["of_roof"]], color=RULE, linewidth=1, zorder=0)
        label = f"{name}: {share:.1%} of the step, at {row['of_roof']:.0%} of its roof"
        ax.scatter([x], [y], s=30 + 1500 * share, color=color, alpha=0.85, linewidth=0, label=label)
    legend = ax.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK, labelspacing=0.8)
    for handle in legend.legend_handles:
        handle.set_sizes([60])
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, 2.2 * peak))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.set_xlabel("arithmetic intensity: FLOPs per byte", color=INK)
    ax.set_ylabel("TFLOP/s reached", color=INK)
    ax.set_title(f"Roofline: {about(facts)}", loc="left", fontsize=11, color=INK)
    figure.savefig(path)
