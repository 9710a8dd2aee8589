"""A run's report: one HTML file with its curves, evaluations, samples, speed, checkpoints and flags, for any browser.

    python -m watch.report log/RUN                # log/RUN/report.html, also while it trains

train_gpt2.py writes a run's own at its end, or when it is stopped. The file needs no network and no script.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import base64
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jinja2
import tyro

from checkpoints.run_folder import checkpoints_of, facts_of
from common.cli import parse
from common.errors import run, word
from common.files import atomic_write
from watch import curves

PAGE = Path(__file__).with_name("report_page.html")
# The figures at the top: {metric: (its name, its last or median value)}
TILES = dict(
    step=("step", "{last}"),
    tokens=("tokens", "{last:,}"),
    val_loss=("validation loss", "{last:.4f}"),
    hellaswag_acc_norm=("HellaSwag acc_norm", "{last:.4f}"),
    tokens_per_sec=("tokens/sec", "{median:,.0f}"),
    mfu=("MFU", "{median:.1%}"),
    peak_gb=("GB of memory", "{last:.2f}"),
)


@dataclass
class Flags:
    """Write a run's report.html."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""


def write(folder):
    """Write curves.png and report.html: the report's path. Raises UserError for a run that cannot be read, OSError."""
    rows, facts = curves.read_rows(folder), facts_of(folder)
    rollbacks = facts.get("rolled_back", [])
    tiles, evaluations, samples = {}, {}, []
    for metric, (label, text) in TILES.items():
        if found := [row[metric] for row in rows if row.get(metric) is not None]:
            tiles[label] = text.format(last=found[-1], median=statistics.median(found))
    for row in rows:
        if "samples" in row:
            samples = row["samples"]  # those of the last time
        elif "train_loss" not in row:  # validation and multiple choice have rows of their own
            evaluations.setdefault(row["step"], {}).update(row)
    environment = jinja2.Environment(autoescape=True)
    environment.filters["shown"] = shown
    page = environment.from_string(PAGE.read_text()).render(
        title=folder.resolve().name,
        time=time.strftime("%Y-%m-%d %H:%M %Z"),
        tiles=tiles,
        image=base64.b64encode(curves.draw([folder]).read_bytes()).decode(),
        facts={name: facts[name] for name in facts if name not in ("rolled_back", "norms", "plan")},
        plan=facts.get("plan", []),
        evaluations=list(evaluations.values()),
        rollbacks=[{name: each[name] for name in each if name != "norms"} for each in rollbacks],
        norms=facts.get("norms") or next((each["norms"] for each in reversed(rollbacks)), None),
        samples=samples,
        checkpoints=checkpoints_of(folder),
    )
    path = folder / "report.html"
    with atomic_write(path) as file:
        file.write(page.encode(errors="replace"))
    return path


def shown(value):
    """A value as text: large numbers with separators, fractions with five digits, – for None."""
    if value is None:
        return "–"
    large = type(value) is int and value >= 10_000
    return f"{value:,}" if large else f"{value:.5g}" if isinstance(value, float) else word(value)


def main():
    print(write(Path(parse(Flags).run)))


if __name__ == "__main__":
    run(main)
