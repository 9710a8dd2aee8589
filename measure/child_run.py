"""A run of train_gpt2.py in a child process, and what the commands that start several runs share.

A child process inherits no memory, compiled graphs or settings from the measurement before it.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch

from common.cli import check_bounds, progress
from common.device import choose_device_type
from common.errors import UserError
from config import INTERVALS, Config, command_line
from data.shards import open_shards
from measure.results import Results

OUT_OF_MEMORY = "out of memory"
OFF = (*INTERVALS, "batch_warmup_steps")  # in short runs
SCRIPT = Path(__file__).parent.parent / "train_gpt2.py"
SPEED = ("ms a step", "tokens/sec", "MFU", "peak GB")  # columns of speed()


def begin(config, kind, columns, typed=(), goes_on=True):
    """The Results of a command that starts several runs. typed: the flags of the command line that short runs may not
    use. goes_on: as of Results. Raises UserError if every run would fail."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("a measurement starts the processes of its runs: start it with python, not with torchrun")
    check_bounds(config)
    if config.profile or config.memory_snapshot:
        raise UserError("--profile and --memory_snapshot are for a single run: both slow down what is measured here")
    if not config.demo:
        open_shards(config.data_dir, "train")
    if unused := sorted({"max_steps", *OFF}.intersection(typed)):
        print(f"not used: --{', --'.join(unused)}; runs are short, and nothing is evaluated or saved")
    return Results(config, kind, torch.device(choose_device_type(config.device)), columns, goes_on)


def count_devices(config):
    """Processes of the largest run: one for each GPU."""
    return max(1, torch.cuda.device_count()) if config.device in ("auto", "cuda") else 1


def run_config(config, **changes):
    """The Config of a run that measure() starts: `config`, which may have flags of a measurement too, with changes."""
    own = {field.name: getattr(config, field.name) for field in fields(Config)}
    return Config(**own | dict(ladder=False, log_dir=Config.log_dir, run_name=None) | changes)


def speed(row):
    """The texts of SPEED for a result of turns.measure(); none if it is not done."""
    if row["status"] != "done":
        return []
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else "–"
    return [f"{row['ms']:.2f}", f"{row['tokens_per_sec']:,.0f}", mfu, f"{row['peak_gb']:.2f}"]


def torchrun_flags(ranks):
    return ["--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []


def shown_command(config, ranks):
    """The command line of a run with the flags of run_config(config)."""
    program = ["torchrun", *torchrun_flags(ranks)] if ranks > 1 else ["python"]
    return shlex.join([*program, SCRIPT.name, *command_line(run_config(config))])


def measure(config, results, name, ranks):
    """Run train_gpt2.py with the flags of a Config in a child process; returns a dictionary.

    results: a Results; the run's folder is NAME in its folder. ranks: number of processes. A run that is done is not
    run again. Raises UserError as Results.kept().
    status is "done", "skipped" (this machine cannot run it), "stopped" (by a signal) or "failed" (a bug). A done run
    has facts, those of its config.json; the others have a reason.
    """
    folder, shown = results.folder, shown_command(config, ranks)
    if before := results.kept(name, shown):
        return before
    shutil.rmtree(folder / name, ignore_errors=True)  # of a measurement that was stopped
    module = ["-m", "torch.distributed.run", *torchrun_flags(ranks)] if ranks > 1 else []
    own = ["--log_dir", str(folder), "--run_name", name]
    command = [sys.executable, *module, str(SCRIPT), *command_line(config), *own]
    environment = dict(WANDB_RUN_GROUP=folder.name) | os.environ  # read by wandb
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    output = folder / f"{name}.txt"
    with (
        open(output, "w", buffering=1) as file,
        progress(None, name, config.max_steps, unit="step") as bar,
        subprocess.Popen(command, env=environment, **pipe) as process,
    ):
        try:
            for line in process.stdout:
                file.write(line)
                bar.update(line.startswith("step ") and " | loss " in line)
            process.wait()
        finally:  # also on Ctrl-C: no training stays behind on the GPU
            process.terminate()
            try:
                process.wait(60)  # training finishes its micro-batch
            except subprocess.TimeoutExpired:
                process.kill()
    result = dict(name=name, status="done", command=shown)
    if process.returncode:
        return result | explain(output.read_text(), process.returncode, output)
    facts = json.loads((folder / name / "config.json").read_text())
    if not facts["finished"]:
        return result | dict(status="stopped", reason="a signal ended it")
    return results.keep(result | dict(facts=facts))


def read_metrics(folder):
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plain(error):
    """The reason in an error's text; of all that say that memory ran out, the same."""
    return OUT_OF_MEMORY if error.startswith(OUT_OF_MEMORY) else error


def explain(output, code, where):
    """Status and reason of a run that ended with exit code `code`, not 0."""
    lines = output.strip().splitlines() or ["no output"]
    # Linux kills a process when host memory runs out; torchrun reports it in its summary
    if code == -signal.SIGKILL or any("exitcode" in line and ": -9" in line for line in lines):
        return dict(status="skipped", reason=OUT_OF_MEMORY)
    if code == -signal.SIGTERM:
        return dict(status="stopped", reason="SIGTERM ended it before its first step")
    error = next((line.partition(": ")[2] for line in lines if line.startswith(("error: ", "error (rank "))), None)
    if error:
        return dict(status="skipped", reason=plain(error))
    return dict(status="failed", reason=f"exit code {code}, {lines[-1].strip()} (see {where})")


def finish(results):
    """Say where the results are. Raises UserError if a run failed because of a bug; skipped runs do not count."""
    print(f"{results}, {results.kind}.png and what each run printed")
    if failed := [row["name"] for row in results.rows if row["status"] == "failed"]:
        raise UserError(f"{len(failed)} of {len(results.rows)} runs failed: {', '.join(failed)}; the reasons are above")
