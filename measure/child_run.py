"""One measurement: a short run of train_gpt2.py in a child process, and the folder that holds several of them.

A child process inherits no memory, compiled graphs or settings from the measurement before it.
"""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from checkpoints.run_folder import folder_of, make_folder
from common.errors import UserError
from common.files import read_json, write_json
from config import SETTLING_STEPS
from measure.energy import mj_per_token

OUT_OF_MEMORY = "out of memory"
# Environment variables that torchrun sets for its ranks; child processes must not inherit them
TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$|TORCHELASTIC_|TORCH_NCCL_ASYNC_ERROR"
)
SCRIPT = Path(__file__).parent.parent / "train_gpt2.py"


def plain(config):
    """config with defaults for the ladder's flags and for those that measure() sets."""
    own = "ladder rungs ladder_steps log_dir run_name".split()
    return dataclasses.replace(config, **{name: getattr(type(config), name) for name in own})


def measure(arguments, folder, name, ranks, steps, bar):
    """Run train_gpt2.py with these arguments, which train `steps` steps, in a child process; returns a dictionary.

    folder, name: the run's folder is folder/name. ranks: number of processes. bar: a tqdm bar that counts steps.
    A run that is done leaves its result in folder/NAME.json, and is not run again. Raises UserError if that result
    belongs to another command.
    status is "done", "skipped" (this machine cannot run it), "stopped" (by a signal) or "failed" (a bug); all but
    "done" come with a reason.
    A done run has ms, tokens_per_sec and mfu (medians over the steps after SETTLING_STEPS), spread (interquartile range
    of ms over its median), peak_gb, memory_gb ({part: GB} at the peak of a step of rank 0, see measure/memory_parts.py;
    None without a GPU), mj_per_token (energy of all GPUs, or None), loss (of the last step), and facts (the run's
    config.json).
    """
    launcher, options, module = "python", [], []
    if ranks > 1:
        launcher, options = "torchrun", ["--standalone", f"--nproc_per_node={ranks}"]
        module = ["-m", "torch.distributed.run"]
    result = dict(name=name, status="done", command=shlex.join([launcher, *options, SCRIPT.name, *arguments]))
    kept = folder / f"{name}.json"
    if kept.exists():
        before = read_json(kept, command=str)
        if before["command"] != result["command"]:
            raise UserError(f"{folder} has runs with other flags: choose another --run_name, or delete it")
        bar.update(steps)
        return before
    shutil.rmtree(folder / name, ignore_errors=True)  # of a measurement that was stopped
    own = ["--log_dir", str(folder), "--run_name", name]
    command = [sys.executable, *module, *options, str(SCRIPT), *arguments, *own]

    environment = {key: value for key, value in os.environ.items() if not TORCHRUN.match(key)}
    environment.setdefault("WANDB_RUN_GROUP", folder.name)  # read by wandb
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        del environment["OMP_NUM_THREADS"]  # torchrun's value for its ranks; the DDP rung's torchrun sets it again
    began = bar.n
    output = open(folder / f"{name}.txt", "w", buffering=1)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        for line in process.stdout:
            output.write(line)
            if line.startswith("step ") and " | loss " in line:
                bar.update(1)
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
    medians = {
        name: rows[-1][key] and statistics.median(row[key] for row in rows[SETTLING_STEPS:])
        for name, key in (("ms", "step_ms"), ("tokens_per_sec", "tokens_per_sec"), ("mfu", "mfu"))
    }
    ms = [row["step_ms"] for row in rows[SETTLING_STEPS:]]
    quartiles = statistics.quantiles(ms, n=4) if len(ms) > 1 else ms * 3
    medians["spread"] = (quartiles[2] - quartiles[0]) / quartiles[1]
    # a row has the energy of the step before
    joules = [row.get("joules", math.nan) for row in rows[SETTLING_STEPS + 1 :]]
    tokens = rows[-2]["tokens"] - rows[SETTLING_STEPS - 1]["tokens"]
    medians["mj_per_token"] = mj_per_token(joules, [row["step_ms"] / 1000 for row in rows[SETTLING_STEPS:-1]], tokens)
    memory = next((row["memory_gb"] for row in rows if "memory_gb" in row), None)
    result |= medians | dict(peak_gb=rows[-1]["peak_gb"], memory_gb=memory, loss=rows[-1]["train_loss"], facts=facts)
    write_json(kept, result)
    return result


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


def prepare(log_dir, run_name, kind, goes_on=True):
    """Make the results' folder with an empty KIND.json, and let SIGTERM end the process as Ctrl-C does.

    Raises UserError if the folder exists or cannot be made.

    goes_on: an existing folder of the same kind is taken, and measure() skips the runs that are done in it.
    """
    results = f"{kind}.json"
    if run_name is not None and (folder := folder_of(log_dir, run_name)).exists():
        if not (goes_on and (folder / results).exists()):
            raise UserError(f"{folder} exists: choose another --run_name, or delete it")
    folder = make_folder(log_dir, run_name, kind)
    if not (folder / results).exists():
        write_json(folder / results, dict(command=shlex.join(sys.argv), results=[]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on Ctrl-C: the run under measurement ends first
    return folder


def save(folder, kind, results, markdown, draw, steps=None):
    """Write the results so far to KIND.json, KIND.md and, with draw(path), KIND.png. steps: how many were timed in each
    run, if the results are medians of steps."""
    write_json(folder / f"{kind}.json", dict(command=shlex.join(sys.argv), results=results))
    facts = next((result["facts"] for result in results if result["status"] == "done"), None)
    if facts:
        versions = f"PyTorch {facts['torch']}" + (f", CUDA {facts['cuda']}" if facts["cuda"] else "")
        markdown += f"\n\n{facts['hardware']}, {versions}."
        if steps:
            spread = max(result["spread"] for result in results if result["status"] == "done")
            markdown += (
                f" Medians of {steps} steps after {SETTLING_STEPS} to warm up; the middle half of a run's steps spans "
                f"{spread:.1%} of its median, or less."
            )
        draw(folder / f"{kind}.png")
    (folder / f"{kind}.md").write_text(markdown + "\n")


def report_failures(results):
    """Raises UserError if a run failed because of a bug; skipped runs do not count."""
    failed = [result["name"] for result in results if result["status"] == "failed"]
    if failed:
        raise UserError(f"{len(failed)} of {len(results)} runs failed: {', '.join(failed)}; the reasons are above")
