"""One measurement: a short run of train_gpt2.py in a child process, and what the commands that start several share.

A child process inherits no memory, compiled graphs or settings from the measurement before it.
"""

import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch

from common.cli import check_bounds
from common.errors import UserError
from common.files import read_json, write_json
from config import INTERVALS, SETTLING_STEPS, Config, command_line
from data.shards import open_shards
from measure.energy import mj_per_token, read_joules

OUT_OF_MEMORY = "out of memory"
UNEVEN = 0.3  # a warning from this ratio of the step times' interquartile range to their median
# Environment variables that torchrun sets for its ranks; child processes must not inherit them
TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$|TORCHELASTIC_|TORCH_NCCL_ASYNC_ERROR"
)
OFF = (*INTERVALS, "batch_warmup_steps")  # in short runs
SCRIPT = Path(__file__).parent.parent / "train_gpt2.py"


def run_config(config, **changes):
    """The Config of a run that measure() starts: `config`, which may have flags of a measurement too, with changes."""
    own = {field.name: getattr(config, field.name) for field in fields(Config)}
    return Config(**own | dict(ladder=False, log_dir=Config.log_dir, run_name=None) | changes)


def short_run(config, steps):
    """The arguments of train_gpt2.py for a measurement of `steps` steps after SETTLING_STEPS, without evaluations."""
    return command_line(run_config(config, **dict.fromkeys(OFF, 0), max_steps=SETTLING_STEPS + steps))


def print_unused(typed):
    """Name the flags of the command line, {name: value}, that short runs do not use."""
    if unused := sorted({"max_steps", *OFF}.intersection(typed)):
        print(f"not used: --{', --'.join(unused)}; runs are short, and nothing is evaluated or saved")


def check(config):
    """Raises UserError if every run would fail."""
    check_bounds(config)
    if config.profile or config.memory_snapshot:
        raise UserError("--profile and --memory_snapshot are for a single run: both slow down what is measured here")
    if not config.demo:
        open_shards(config.data_dir, "train")


def is_other_rank():
    """Whether this is a rank of torchrun that starts no runs; rank 0 starts the processes of all."""
    return os.environ.get("RANK", "0") != "0"


def count_devices(config):
    """Processes of the largest run: as many as torchrun started, or one for each GPU."""
    if "WORLD_SIZE" in os.environ:
        if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
            raise UserError("the ladder runs on one machine: start it with torchrun --standalone, or without torchrun")
        return int(os.environ["WORLD_SIZE"])
    return max(1, torch.cuda.device_count()) if config.device in ("auto", "cuda") else 1


def measure(arguments, results, name, ranks, steps, bar):
    """Run train_gpt2.py with these arguments, which train `steps` steps, in a child process; returns a dictionary.

    results: a Results; the run's folder is NAME in its folder. ranks: number of processes. bar: a tqdm bar that counts
    steps. A run that is done leaves its result in NAME.json, and is not run again. Raises UserError if that result
    belongs to another command, hardware, version or commit.
    status is "done", "skipped" (this machine cannot run it), "stopped" (by a signal) or "failed" (a bug); all but
    "done" come with a reason.
    A done run has ms, tokens_per_sec and mfu (medians over the steps after SETTLING_STEPS), spread (interquartile range
    of ms over its median), peak_gb, mj_per_token (energy of all GPUs, or None), loss (of the last step), and facts (the
    run's config.json).
    """
    launcher, options, module = "python", [], []
    if ranks > 1:
        launcher, options = "torchrun", ["--standalone", f"--nproc_per_node={ranks}"]
        module = ["-m", "torch.distributed.run"]
    result = dict(name=name, status="done", command=shlex.join([launcher, *options, SCRIPT.name, *arguments]))
    folder = results.folder
    if before := read_kept(folder / f"{name}.json", result["command"], results.environment):
        bar.update(steps)
        return before
    shutil.rmtree(folder / name, ignore_errors=True)  # of a measurement that was stopped
    own = ["--log_dir", str(folder), "--run_name", name]
    command = [sys.executable, *module, *options, str(SCRIPT), *arguments, *own]

    environment = {key: value for key, value in os.environ.items() if not TORCHRUN.match(key)}
    environment.setdefault("WANDB_RUN_GROUP", folder.name)  # read by wandb
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        del environment["OMP_NUM_THREADS"]  # torchrun's value for its ranks; the DDP rung's torchrun sets it again
    began, trained, gpus = bar.n, 0, range(min(ranks, torch.cuda.device_count()))
    energy = {}  # {steps done: reading}
    output = open(folder / f"{name}.txt", "w", buffering=1)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        for line in process.stdout:
            output.write(line)
            if line.startswith("step ") and " | loss " in line:
                bar.update(1)
                trained += 1
                if trained in (SETTLING_STEPS, steps):
                    energy[trained] = read_joules(gpus)
        code = process.wait()
    finally:
        # also on Ctrl-C: no training stays behind on the GPU
        process.terminate()
        try:
            process.wait(60)  # training finishes its micro-batch
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()
        bar.update(began + steps - bar.n)
    if code:
        return result | explain(Path(output.name).read_text(), code, output.name)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_ms" in row]  # without evaluations
    facts = json.loads((folder / name / "config.json").read_text())
    if not facts["finished"]:
        return result | dict(status="stopped", reason=f"a signal ended it after {len(rows)} of {steps} steps")
    timed = rows[SETTLING_STEPS:]
    ms = [row["step_ms"] for row in timed]
    quartiles = statistics.quantiles(ms, n=4) if len(ms) > 1 else ms * 3
    tokens = rows[-1]["tokens"] - rows[SETTLING_STEPS - 1]["tokens"]
    on_gpu = facts["device"] == "cuda"
    result |= dict(
        ms=statistics.median(ms),
        tokens_per_sec=statistics.median(row["tokens_per_sec"] for row in timed),
        mfu=rows[-1]["mfu"] and statistics.median(row["mfu"] for row in timed),
        spread=(quartiles[2] - quartiles[0]) / quartiles[1],
        peak_gb=rows[-1]["peak_gb"],
        mj_per_token=mj_per_token(energy.get(SETTLING_STEPS), energy.get(steps), tokens) if on_gpu else None,
        loss=rows[-1]["train_loss"],
        facts=facts,
    )
    write_json(folder / f"{name}.json", result)
    return result


def uneven_warning(result):
    """A line, in a list, about a measurement whose steps are uneven; else an empty list."""
    spread = result.get("spread", 0)
    if spread < UNEVEN:
        return []
    return [f"uneven steps: the interquartile range is {spread:.0%} of the median; is the device shared?"]


def medians(rows, steps):
    """A sentence on what was measured. rows: of measure(), which timed `steps` steps."""
    spread = max((row["spread"] for row in rows if row["status"] == "done"), default=0)
    return (
        f"Medians of {steps} steps after {SETTLING_STEPS} to warm up; the middle half of a run's steps spans "
        f"{spread:.1%} of its median, or less."
    )


def read_kept(path, command, environment):
    """The result that an earlier start has left in a file, or None. environment: of watch.hardware.

    Raises UserError if it was measured by another command, on other hardware, or with other versions or another commit.
    """
    if not path.exists():
        return None
    before = read_json(path, command=str, facts=dict)
    if before["command"] != command:
        raise UserError(f"{path.parent} has runs with other flags: choose another --run_name, or delete it")
    for name, now in environment.items():
        then = before["facts"].get(name)
        if name != "command" and then != now:
            raise UserError(
                f"{path.parent} has runs whose {name} is {then}, and now it is {now}: choose another --run_name, or "
                "delete it"
            )
    return before


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
        return dict(status="skipped", reason=OUT_OF_MEMORY if error.startswith(OUT_OF_MEMORY) else error)
    return dict(status="failed", reason=f"exit code {code}, {lines[-1].strip()} (see {where})")


def finish(results, rows):
    """Say where the results are. rows: of measure(). Raises UserError if a run failed because of a bug; skipped runs do
    not count."""
    print(f"{results}, {results.kind}.png and a folder for every run")
    failed = [row["name"] for row in rows if row["status"] == "failed"]
    if failed:
        raise UserError(f"{len(failed)} of {len(rows)} runs failed: {', '.join(failed)}; the reasons are above")
