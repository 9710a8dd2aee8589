"""The folder of several measurements, and their table, in the terminal and as Markdown."""

import shlex
import signal
import sys
from dataclasses import dataclass
from typing import Literal

from checkpoints.run_folder import folder_of, lock, make_folder
from common.cli import print_over_bar
from common.errors import UserError, first_line
from common.files import json_digest, read_json, write_json
from data.demo import make_data
from data.shards import identity, open_shards
from watch.hardware import environment


@dataclass
class ResultsFlags:
    """Where a command measures, and the folder of its results."""

    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto: a GPU if there is one."""
    log_dir: str = "log"
    """Folder in which the results' folder is made."""
    run_name: str | None = None
    """Name of the results' folder; by default the command's, with date and time."""


class Results:
    """A folder with KIND.json and KIND.md, locked for this process; a ladder's has KIND.png and what runs print."""

    def __init__(self, flags, kind, device, columns, goes_on=False):
        """Make the folder, print the table's head, and let SIGTERM end the process as Ctrl-C does.

        flags: with log_dir and run_name. goes_on: an existing folder of this kind is taken, with the runs that are
        kept() in it. Raises UserError for another folder that exists, one that another process writes, one that cannot
        be made, or a run in it that cannot be read.
        """
        if flags.run_name is not None and (folder := folder_of(flags.log_dir, flags.run_name)).exists():
            if not (goes_on and (folder / f"{kind}.json").exists()):
                raise UserError(f"{folder} exists: choose another --run_name, or delete it")
        self.folder, self.kind, self.columns = make_folder(flags.log_dir, flags.run_name, kind), kind, columns
        self._lock = lock(self.folder)  # until the process ends: another ladder would delete the run that is measured
        self.environment = environment(device)
        self.rows, self._texts = [], []
        for path in self.folder.glob("[0-9]*.json"):  # of runs, all of them before anything is overwritten
            read_result(path)
        if not (self.folder / f"{kind}.json").exists():
            self._write()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on Ctrl-C: the run under measurement ends first
        again = f"; after a stop the same command with --run_name {self.folder.name} goes on" if goes_on else ""
        print(f"results: {self.folder}/{again}\n{align(columns, columns)}")

    def _write(self):
        write_json(self.folder / f"{self.kind}.json", dict(command=shlex.join(sys.argv), results=self.rows))

    @property
    def done(self):
        """The rows that have a result."""
        return [row for row in self.rows if row["status"] == "done"]

    def keep(self, row):
        """Write the result of a run to NAME.json, for kept(); returns it."""
        write_json(self.folder / f"{row['name']}.json", row)
        return row

    def kept(self, name, config, **expected):
        """The result that an earlier start has left in NAME.json, or None. config: the Config of the run.

        Raises UserError if it cannot be read, if it has other values than `expected`, {name: value}, or if it is of
        other hardware, data or code, or another version or commit.
        """
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        row = read_result(path)
        found = row["facts"] | row
        for fact, value in (self.environment | dict(data_sha256=data_sha256(config)) | expected).items():
            if found.get(fact) != value:
                raise UserError(
                    f"{self.folder} has runs whose {fact} is {found.get(fact)}, and now it is {value}: choose another "
                    "--run_name, or delete it"
                )
        return row

    def add(self, row, cells, note, draw=None):
        """Print a row of the table, and write all: KIND.json, KIND.md and, with draw(path), the figure KIND.png.

        row: a dictionary with status, facts (of environment()) if it is "done", else a reason. cells: texts, only the
        first if it is not done. note: below the table.
        """
        self.rows.append(row)
        self._texts.append(cells if row["status"] == "done" else [*cells, f"{row['status']}: {row['reason']}"])
        print_over_bar(align(self._texts[-1], self.columns))
        self._write()
        text = f"{markdown_table(self.columns, self._texts)}\n\n{note}"
        if self.done:
            facts = self.done[0]["facts"]
            text += f"\n\n{facts['hardware']}, PyTorch {facts['torch']}"
            text += f", CUDA {facts['cuda']}." if facts["cuda"] else "."
            if draw:
                draw(self.folder / f"{self.kind}.png")
        (self.folder / f"{self.kind}.md").write_text(text + "\n")

    def __str__(self):
        names = (f"{self.kind}.{ending}" for ending in ("md", "json", "png"))
        return f"{self.folder}/ has {', '.join(name for name in names if (self.folder / name).exists())}"


def read_result(path):
    """The result of a run that Results.keep() wrote. Raises UserError if the file is damaged."""
    try:
        return read_json(path, command=str, facts=dict)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({first_line(error)}): delete it, and that run starts again") from error


def data_sha256(config):
    """The SHA-256 of what recognizes the data of a run: data.shards.identity(). Raises UserError as open_shards()."""
    if config.demo:
        make_data(config.data_dir)
    shards = [shard for split in ("train", "val") for shard in open_shards(config.data_dir, split)]
    return json_digest(identity(config.data_dir, shards))


def align(texts, columns, first=30):
    """A line of the terminal's table, the first column to the left and the others to the right."""
    widths = [max(11, len(name)) for name in columns[1:]]  # "not reached"
    return "  ".join([texts[0].ljust(first), *(text.rjust(width) for text, width in zip(texts[1:], widths))])


def markdown_table(columns, rows):
    """Rows of texts as a Markdown table; cells that a row lacks are empty."""
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += [f"| {' | '.join([*row, *[''] * (len(columns) - len(row))])} |" for row in rows]
    return "\n".join(lines)
