"""A run's folder: its lock, its config.json, and the names of its checkpoints."""

import errno
import fcntl
import json
import os
from pathlib import Path

from common.cli import UserError

LOCK = "lock"


def lock(folder):
    """Lock a run's folder for this process: returns a file that holds the lock until it is closed.

    Two processes that write one run would overwrite each other's logs. Raises UserError if another process holds it.
    """
    file = open(folder / LOCK, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{folder} is being written by another process: choose another --run_name") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # a file system without locks
            raise
    return file


def facts_of(folder):
    """The content of a run's config.json; an empty dictionary if there is none that can be read."""
    try:
        facts = json.loads((folder / "config.json").read_text())
        return facts if isinstance(facts, dict) else {}
    except (OSError, ValueError):
        return {}  # another program's file, or half written


def launch_id():
    """An identifier that all restarts of one torchrun launch share, or None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]  # starttime, proc(5)
    except OSError:
        started = ""  # not Linux
    return f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}-{started}"


def run_of_this_launch(log_dir):
    """The name of the run that this torchrun launch began before it restarted its processes, or None."""
    own = launch_id()
    if own is None:
        return None
    folders = [path.parent for path in Path(log_dir).glob("*/config.json")]
    return next((folder.name for folder in folders if facts_of(folder).get("launch") == own), None)


def checkpoints_of(folder):
    """A run's checkpoint folders, the newest first."""
    return sorted((path for path in Path(folder).glob("checkpoint_*") if path.name[11:].isdigit()), key=step_of)[::-1]


def step_of(path):
    """The step of a checkpoint folder, from its name."""
    return int(path.name[11:])


def unused_name(path):
    """path, or path.1, path.2, ... if it exists."""
    names = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, 1000))]
    return next(name for name in names if not name.exists())
