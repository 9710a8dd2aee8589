"""A run's folder: its name, its lock, its config.json, and the names of its checkpoints."""

import shutil
import time
from pathlib import Path

from common import files
from common.errors import UserError

LOCK, FLAGS = "lock", "flags.yaml"
STATE, TRAINING = "optimizer.safetensors", "training.json"  # of a checkpoint, beside its weights


def folder_of(log_dir, run_name):
    """The folder of a named run. Raises UserError for a name that is not one plain folder's."""
    # not printable: control characters, and bytes that are not UTF-8
    if not run_name or run_name.startswith(".") or "/" in run_name or not run_name.isprintable():
        raise UserError(
            f"--run_name {run_name!r}: it must be a folder's name in UTF-8, without a slash or a leading dot"
        )
    return Path(log_dir) / run_name


def make_folder(log_dir, run_name, kind):
    """Make a run's folder, if it is missing. A run without a name gets a new folder: KIND-DATE-TIME, or that with .1,
    .2, ... if another run has it. Raises UserError."""
    path = Path(log_dir) / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    while True:
        folder = unused_name(path) if run_name is None else folder_of(log_dir, run_name)
        try:
            folder.mkdir(parents=True, exist_ok=run_name is not None)
            return folder
        except OSError as error:
            if run_name is not None or not folder.exists():  # else another process was faster
                raise UserError(f"cannot make {error.filename}: {error.strerror}; choose another --log_dir") from error


def lock(folder):
    """Lock a run's folder for this process: returns a file that holds the lock until it is closed.

    Two processes that write one run would overwrite each other's logs. Raises UserError if another process holds it.
    """
    return files.lock(folder / LOCK, f"{folder} is being written by another process: choose another --run_name")


def facts_of(folder):
    """The content of a run's config.json; an empty dictionary if there is none that can be read."""
    try:
        return files.read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}  # another program's file, or half written


def flags_file_of(flags):
    """The flags.yaml of the run that --resume PATH names, or None.

    flags: a command line, {flag: value}. If this command has begun a branch before, it is the branch's flags.yaml.
    """
    resume = flags.get("resume", "auto")
    if resume in ("auto", "never"):
        return None
    run = run_of(resume)
    branch = Path(flags.get("log_dir", run.parent), flags.get("run_name") or "")
    if facts_of(branch).get("resume") == resume:
        run = branch
    return run / FLAGS if "finished" in facts_of(run) else None


def run_of(path):
    """The folder of a run, given that folder or one of its checkpoints, which may be a symlink there or to it."""
    path = Path(path)
    folders = [path, path.absolute().parent, path.resolve().parent]
    return next((folder for folder in folders if "finished" in facts_of(folder)), folders[1])


def checkpoints_of(folder):
    """A run's checkpoint folders, the newest first."""
    found = [path for path in Path(folder).glob("checkpoint_*") if path.name.removeprefix("checkpoint_").isdecimal()]
    return sorted(found, key=step_of)[::-1]


def goes_on(checkpoint, folder):
    """Whether a run in this folder continues from a checkpoint of its own, not from another run's."""
    return run_of(checkpoint).resolve() == folder.resolve()


def step_of(path):
    """The step of a checkpoint folder, from its name."""
    return int(path.name.removeprefix("checkpoint_"))


def set_aside_newer(folder, step, logs=False):
    """Rename a run's checkpoints after `step` to *.abandoned, after copying its logs, which the caller then cuts.

    Returns these checkpoints. logs: copy the logs if there are none, too.
    The newest checkpoint goes first: after an interruption the logs cover all checkpoints that are left.
    """
    newer = [path for path in checkpoints_of(folder) if step_of(path) > step]
    for log in [folder / "log.txt", folder / "metrics.jsonl"] if newer or logs else []:
        if log.exists():
            shutil.copy(log, unused_name(log.with_name(log.name + ".abandoned")))
    for path in newer:
        aside = path.rename(unused_name(path.with_name(path.name + ".abandoned")))
        print(f"{path} is newer than step {step}: renamed to {aside.name}")
    return newer


def unused_name(path):
    """path, or path.1, path.2, ... if it exists."""
    names = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, 1000))]
    return next(name for name in names if not name.exists())
