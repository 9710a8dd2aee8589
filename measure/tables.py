"""Tables of measurements, for the terminal and as Markdown."""

from common.errors import word
from measure.figures import describe, model_of, uneven

COLUMNS = ("rung", "ms a step", "tokens/sec", "× before", "× first", "MFU", "peak GB", "mJ/token", "loss")
MEASURES = (1, 2, 5, 6, 7)  # the columns that a sweep has too
WIDTHS = (28, 10, 11, 8, 8, 6, 8, 8, 8)


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


def align(texts, widths):
    """A line of the terminal's table, the first column to the left and the others to the right."""
    return "  ".join(text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(texts, widths)))


def marked_cells(result, results):
    """As cells, with a mark on the time of uneven steps."""
    texts = cells(result, results)
    if noise := uneven(result):
        texts[1] += f" (uneven steps: {noise})"
    return texts


def markdown_table(columns, rows, left=1):
    """Rows of texts as a Markdown table, its first `left` columns to the left; cells that a row lacks are empty."""
    lines = [f"| {' | '.join(columns)} |", "| --- " * left + "|" + " ---: |" * (len(columns) - left)]
    lines += [f"| {' | '.join([*row, *[''] * (len(columns) - len(row))])} |" for row in rows]
    return "\n".join(lines)


def markdown(results):
    rows = [marked_cells(result, results[:count]) for count, result in enumerate(results, 1)]
    note = "Losses are those of the last step: compare only rows with the same recipe and tokens a step."
    return f"{markdown_table(COLUMNS, rows)}\n\n{note}"


def sweep_markdown(axes, results):
    rows = []
    for result in results:
        texts = marked_cells(result | dict(rung=""), [result])
        texts = [texts[i] for i in MEASURES] if len(texts) > 2 else texts[1:]
        rows.append([*map(word, result["cell"].values()), *texts])
    return markdown_table([*axes, *(COLUMNS[i] for i in MEASURES)], rows, left=len(axes))


def uneven_warning(result):
    """A line, in a list, about a measurement whose steps are uneven; else an empty list."""
    if not uneven(result):
        return []
    return [f"uneven steps: the interquartile range is {uneven(result)} of the median; is the device shared?"]


def winners(done):
    """A line for each model of a sweep: which combination is the fastest, and by how much. done: the fastest first."""
    lines = []
    for model in dict.fromkeys(model_of(result["cell"]) for result in done):
        best, *others = [result for result in done if model_of(result["cell"]) == model]
        text = f"{describe(best['cell'])} wins: {best['tokens_per_sec']:,.0f} tok/s"
        if others:
            next_ratio, last_ratio = (best["tokens_per_sec"] / r["tokens_per_sec"] for r in (others[0], others[-1]))
            text += f", {next_ratio:.3f} × the next ({describe(others[0]['cell'])}), {last_ratio:.2f} × the slowest"
        lines.append(text)
    return lines
