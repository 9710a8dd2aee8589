"""A run's report: one HTML file with its curves, evaluations, samples, speed, checkpoints and flags, for any browser.

    python -m watch.report log/RUN                # log/RUN/report.html, also while it trains

train_gpt2.py writes a run's own at its end, or when it is stopped. The file needs no network and no script.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import base64
import statistics
import string
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from checkpoints.run_folder import checkpoints_of, facts_of
from common.cli import parse
from common.errors import UserError, run, word
from common.files import atomic_write
from watch import curves

PAGE = Path(__file__).with_name("report_page.html")
# What a reader asks first; the other flags and facts are below the fold
FACTS = "model init_from dataset data_dir hardware world_size parallel optimizer lr lr_schedule total_batch_size "
FACTS += "micro_batch_size seq_len autocast compile attention seed torch cuda git_commit"
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
    evaluations, behind, samples = {}, {}, []
    for row in rows:
        if "samples" in row:
            samples = row["samples"]  # those of the last time
        elif "train_loss" not in row:  # validation and multiple choice have rows of their own
            evaluations.setdefault(row["step"], {}).update(row)
        elif "slowest_rank" in row:
            behind.setdefault(row["slowest_rank"], []).append(row["slowest_behind"])
    ranks = [{"slowest rank": rank, "steps": len(behind[rank]), "behind": max(behind[rank])} for rank in sorted(behind)]
    image = base64.b64encode(curves.draw([folder]).read_bytes()).decode()
    known = {name: facts[name] for name in FACTS.split() if facts.get(name) is not None}
    sections = {
        "Curves": f'<div class="wide"><img alt="Curves" src="data:image/png;base64,{image}"></div>',
        "Command": preformatted(facts.get("command", "")),
        "Run": definitions(known) + f"<details><summary>All flags and facts</summary>{definitions(facts)}</details>",
        "Evaluations": table(list(evaluations.values())),
        "Rollbacks": table(facts.get("rollbacks", [])),
        "Samples of the model": "".join(map(preformatted, samples)),
        "Slowest ranks, largest fraction behind the others": table(ranks),
        "Checkpoints": preformatted("\n".join(map(str, checkpoints_of(folder)))),
    }
    body = tiles(rows) + "".join(f"<h2>{name}</h2>{text}" for name, text in sections.items() if text)
    state = f"{'finished' if facts.get('finished') else 'not finished'} at {time.strftime('%Y-%m-%d %H:%M %Z')}"
    page = string.Template(PAGE.read_text()).substitute(title=escape(folder.resolve().name), state=state, body=body)
    path = folder / "report.html"
    with atomic_write(path) as file:
        file.write(page.encode(errors="replace"))
    return path


def tiles(rows):
    boxes = ""
    for metric, (label, text) in TILES.items():
        if found := [row[metric] for row in rows if row.get(metric) is not None]:
            number = text.format(last=found[-1], median=statistics.median(found))
            boxes += f"<div><b>{number}</b>{label}</div>"
    return f'<div class="tiles">{boxes}</div>'


def shown(value):
    """A value as HTML: large numbers with separators, fractions with five digits."""
    large = type(value) is int and value >= 10_000
    return f"{value:,}" if large else f"{value:.5g}" if isinstance(value, float) else escape(word(value))


def preformatted(text):
    return f"<pre>{escape(text.strip())}</pre>" if text.strip() else ""


def definitions(values):
    pairs = (f"<div><dt>{escape(name)}</dt><dd>{shown(value)}</dd></div>" for name, value in values.items())
    return f"<dl>{''.join(pairs)}</dl>"


def table(rows):
    """An HTML table of dictionaries: a column for each of their keys. Without rows nothing."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = ("".join(f"<td>{shown(row.get(name, ''))}</td>" for name in names) for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr><tr>{"</tr><tr>".join(lines)}</tr></table></div>' if rows else ""


def main():
    try:
        print(write(Path(parse(Flags).run)))
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error


if __name__ == "__main__":
    run(main)
