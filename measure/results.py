"""The folder of several measurements, and their tables, for the terminal and as Markdown."""

import shlex
import signal
import sys

from checkpoints.run_folder import folder_of, lock, make_folder
from common.errors import UserError
from common.files import write_json
from watch.hardware import environment


class Results:
    """A folder with KIND.json and KIND.md, locked for this process; a ladder's also has KIND.png and every run."""

    def __init__(self, log_dir, run_name, kind, device, goes_on=False):
        """Make the folder, and let SIGTERM end the process as Ctrl-C does.

        goes_on: an existing folder of this kind is taken, and child_run.measure() skips the runs that are done in it.
        Raises UserError for another folder that exists, one that another process writes, or one that cannot be made.
        """
        if run_name is not None and (folder := folder_of(log_dir, run_name)).exists():
            if not (goes_on and (folder / f"{kind}.json").exists()):
                raise UserError(f"{folder} exists: choose another --run_name, or delete it")
        self.folder, self.kind = make_folder(log_dir, run_name, kind), kind
        self._lock = lock(self.folder)  # until the process ends: another ladder would delete the run that is measured
        self.environment = environment(device)
        if not (self.folder / f"{kind}.json").exists():
            self._write([])
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on Ctrl-C: the run under measurement ends first

    def _write(self, results):
        write_json(self.folder / f"{self.kind}.json", dict(command=shlex.join(sys.argv), results=results))

    def save(self, results, columns, rows, note, draw=None):
        """Write the results so far to KIND.json, their table to KIND.md and, with draw(path), the figure KIND.png.

        rows: texts, of which a row may lack the last. note: below the table.
        """
        self._write(results)
        text = f"{markdown_table(columns, rows)}\n\n{note}"
        if done := [result for result in results if result["status"] == "done"]:
            facts = done[0]["facts"]
            text += f"\n\n{facts['hardware']}, PyTorch {facts['torch']}"
            text += f", CUDA {facts['cuda']}." if facts["cuda"] else "."
            if draw:
                draw(self.folder / f"{self.kind}.png")
        (self.folder / f"{self.kind}.md").write_text(text + "\n")

    def __str__(self):
        return f"{self.folder}/ has {self.kind}.md and {self.kind}.json"


def align(texts, widths):
    """A line of the terminal's table, the first column to the left and the others to the right."""
    return "  ".join(text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(texts, widths)))


def markdown_table(columns, rows):
    """Rows of texts as a Markdown table; cells that a row lacks are empty."""
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += [f"| {' | '.join([*row, *[''] * (len(columns) - len(row))])} |" for row in rows]
    return "\n".join(lines)
