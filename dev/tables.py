"""Write the tables of README.md, docs/ and LOG.md from the records, dev/records/*.json.

    python dev/tables.py             # writes what stands between <!--table:NAME--> and <!--/table-->, and gains
    python dev/tables.py --check     # says which tables differ, with exit code 1 if one does

A record has `rows`, and as `columns` {heading: template}. A cell is its column's template filled in by a row, such as
"{tokens_per_second:,}"; it is empty if the row lacks the field. `more_rows` are in no table. To replace a measurement
write a new record of the same name. <!--gain:RUNG--> stands for a rung's gain with its interval, <!--times:RUNG-->
without. A file of bench.py --record in dev/records/cards/ is a row of the table of cards.
"""

import json
import re
import string
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for python dev/tables.py

from common.cli import ROOT, parse
from common.errors import UserError, run
from measure import hardware
from optimizations import OPTIMIZATIONS
from watch.hardware import PEAK_TFLOPS

RECORDS = ROOT / "dev" / "records"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "dev" / "LOG.md")
MADE = re.compile(r"(<!--(table|gain|times):(\w+)-->\n?)(.*?)(<!--/\2-->)", re.S)
CARD = {
    "GPUs": "{gpus} × {hardware}",
    "command": "`{command}`",
    "tokens/sec": "{tokens_per_second:,}",
    "MFU": "{mfu_percent}%",
    "peak GB": "{peak_gb}",
    "PyTorch": "{torch}",
    "record": "[{name}](../dev/records/cards/{name}.json)",
}


@dataclass
class Tables:
    """Write the tables of README.md, docs/ and dev/LOG.md from dev/records/."""

    check: bool = False
    """Write nothing; say which tables differ."""


def main():
    check = parse(Tables).check
    different = []
    for page in PAGES:
        text = page.read_text()
        different += [f"{page.name}: {name}" for _, kind, name, old, _ in MADE.findall(text) if old != make(kind, name)]
        if not check:
            page.write_text(MADE.sub(lambda match: f"{match[1]}{make(match[2], match[3])}{match[5]}", text))
    if check and different:
        raise UserError(f"not as in dev/records ({', '.join(different)}): run python dev/tables.py")
    print("\n".join(different) or "all tables are as in dev/records")


def load(name):
    """The record of this name. Raises UserError if there is none or it is no JSON."""
    path = RECORDS / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def make(kind, name):
    """A gain, or the lines of a table: made by the function of its name below, or from its record alone."""
    if kind != "table":
        rows = {row["name"]: row for row in gains()}
        if name not in rows:
            raise UserError(f"{kind}:{name}: no ladder has such a rung")
        return cell(load("ladder")["interval" if kind == "gain" else "gain"], rows[name])
    if name in SPECIAL:
        return SPECIAL[name]()
    record = load(name)
    return markdown(record["columns"], record["rows"])


class Template(string.Formatter):
    """str.format, in which a text has no format: "out of memory" may stand where others have a number."""

    def format_field(self, value, format_spec):
        return value if isinstance(value, str) else format(value, format_spec)


def cell(template, row):
    """The text of a cell; none where the record lacks a field, or has null."""
    try:
        return Template().vformat(template, (), {name: value for name, value in row.items() if value is not None})
    except KeyError:
        return ""


def markdown(columns, rows):
    """A table. A first cell that repeats the one above is empty; columns with numbers, but the first, are on the right.
    Lines begin with a bar if a row begins with an empty cell or with a list's sign."""
    texts = [[cell(template, row) for template in columns.values()] for row in rows]
    numbers = [any(re.match(r"[-+]?\d", text) for text in column) for column in zip(*texts)]
    rule = ["---", *("---:" if is_number else "---" for is_number in numbers[1:])]
    above = [None, *(line[0] for line in texts)]
    texts = [["", *line[1:]] if line[0] == before else line for line, before in zip(texts, above)]
    bar = "| " if any(re.match(r"$|[-+*]", line[0]) for line in texts) else ""
    return "".join(f"{bar}{' | '.join(line)}".rstrip() + "\n" for line in (columns, rule, *texts))


# ----------------------------------------------------------------------------------------------------------------------
# Tables of more than one record


def rungs():
    """The rows of ladder.json, each with the row of its rung in ladder_second.json, from another card, as `second`, and
    in ladder_h100.json as `h100`.

    Raises UserError if the first two are of different kinds of GPU, versions or commits."""
    first, second = load("ladder"), load("ladder_second")
    if different := [key for key in ("card", "commit", "versions") if first[key] != second[key]]:
        raise UserError(f"ladder.json and ladder_second.json differ in {', '.join(different)}")
    others = {row["name"]: row for row in second["rows"]}
    if missing := [row["name"] for row in first["rows"] if row["name"] not in others]:
        raise UserError(f"ladder_second.json has no {', '.join(missing)}")
    h100 = {row["name"]: row for row in load("ladder_h100")["rows"]}
    return [row | dict(second=others[row["name"]], h100=h100.get(row["name"])) for row in first["rows"]]


def gains():
    """The rows of ladder.json, those of 8 bits in ladder_fp8.json, and all rungs together of each ladder, as
    "together", "together_second", ...: the baseline was timed again in turn with the last rung.
    """
    rows = [*rungs(), *load("ladder_fp8")["rows"]]
    for ladder in ("ladder", "ladder_second", "ladder_h100", "ladder_h100_second", "ladder_fp8"):
        (again,) = (row for row in load(ladder)["more_rows"] if row["name"] == "baseline again")
        low, ratio, high = (1 / again[field] for field in ("high", "times_before", "low"))
        together = dict(times_before=ratio, low=low, high=high, mark=again["mark"])
        rows.append(dict(name=ladder.replace("ladder", "together"), **together))
    return rows


def ladder():
    return markdown(load("ladder")["columns"], rungs())


def optimizations():
    """Every optimization with what one types for it and its gain: that of its rung, or of ladder.json's `gains`."""
    record = load("ladder")
    texts = {row["name"]: cell(record["gain"], row) for row in gains()} | record["gains"]
    rows = [
        dict(help=row.help, command=command(row), off="" if row.default else " (off)", gain=texts.get(row.name, ""))
        for row in OPTIMIZATIONS
    ]
    return markdown({"what": "{help}", "flag": "`{command}`{off}", "gain": "{gain}"}, rows)


def command(row):
    """What turns an optimization on, as one types it."""
    value = "" if not row.on else f" {row.name}" if row.name in row.on else f" {row.on[0]}"
    return "torchrun" if row.name == "ddp" else f"--{row.flag}{value}"


def cards():
    paths = sorted((RECORDS / "cards").glob("*.json"))
    return markdown(CARD, [load(f"cards/{path.stem}") | dict(name=path.stem) for path in paths])


def hardware_table():
    """The GPUs of measure/hardware.py, and what was measured on two of them."""
    measured = {}
    for gpu in ("H100", "H200"):
        card = load(f"cards/{gpu.lower()}")
        measured[gpu] = f"{card['tokens_per_second']:,}, PyTorch {card['torch'].rpartition('.')[0]}"
    rows = [row | dict(measured=measured.get(row["GPU"], "")) for row in hardware.rows()]
    return markdown({name: f"{{{name}}}" for name in rows[0]}, rows)


def flash_attention():
    """The versions of FlashAttention in attention.json, and the share of the H200's peak that their kernels reach."""
    record = load("attention")
    table, peak = record["flash_attention"], PEAK_TFLOPS["H200"]
    for row in table["rows"]:
        for name, unit in (("forward", "forward TFLOP/s"), ("both", "TFLOP/s")):
            rates = {at["T"]: at[unit].get(row.get("kernel")) for at in record["rows"]}
            row[name] = {T: rate if isinstance(rate, str) else rate / peak for T, rate in rates.items() if rate}
    return markdown(table["columns"], table["rows"])


SPECIAL = dict(ladder=ladder, optimizations=optimizations, cards=cards, hardware=hardware_table)
SPECIAL["flash_attention"] = flash_attention

if __name__ == "__main__":
    run(main)
