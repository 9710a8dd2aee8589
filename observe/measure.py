"""One measurement: a few steps of train_gpt2.py in a process of its own; and the folder where several of them lie.

A process of its own inherits no memory, compiled graphs or settings from the measurement before.
"""

import dataclasses
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common.cli import OUT_OF_MEMORY_SIGNS, UserError
from config import EVALUATIONS, SETTLING_STEPS, Config, check_bounds, flags
from data.shards import open_shards

OUT_OF_MEMORY = "out of memory"
# What torchrun tells its processes, which is not meant for those that they start
TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$|TORCHELASTIC_|TORCH_NCCL_ASYNC_ERROR"
)


def measure(config, folder, name, ranks, bar):
    """Train SETTLING_STEPS + ladder_steps steps in a process of its own; returns a plain dictionary.

    status is "done", "skipped" (what was asked for is not to be had here: see reason) or "failed" (a bug: see reason).
    Done comes with ms a step, tokens/sec and mfu (medians of the measured steps), spread (the distance between the
    quartiles of a step's ms, over their median), peak_gb, loss (of the last step), and facts, the run's config.json.
    """
    steps = SETTLING_STEPS + config.ladder_steps
    off = dict.fromkeys((*EVALUATIONS, "batch_warmup_steps"), 0)
    own = dict(ladder=Config.ladder, rungs=Config.rungs, ladder_steps=Config.ladder_steps)
    config = dataclasses.replace(config, **off, **own, max_steps=steps)
    shown = flags(dataclasses.replace(config, log_dir="log", run_name=None))  # as a person would repeat it
    config = dataclasses.replace(config, log_dir=str(folder), run_name=name, wandb_group=folder.name)
    launcher, options = "python", []
    if ranks > 1:
        launcher, options = "torchrun", ["--standalone", f"--nproc_per_node={ranks}"]
    result = dict(name=name, status="done", command=shlex.join([launcher, *options, "train_gpt2.py", *shown]))
    script = str(Path(__file__).with_name("train_gpt2.py"))
    module = ["-m", "torch.distributed.run"] if ranks > 1 else []
    command = [sys.executable, *module, *options, script, *flags(config)]

    environment = {key: value for key, value in os.environ.items() if not TORCHRUN.match(key)}
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        del environment["OMP_NUM_THREADS"]  # torchrun sets it for several processes, and will again for those of DDP
    began = bar.n
    output = open(folder / f"{name}.txt", "w", buffering=1)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        for line in process.stdout:
            output.write(line)
            if line.startswith("step "):
                bar.update(1)
        code = process.wait()
    finally:
        # also on Ctrl-C: no training is left behind on the GPU
        process.terminate()
        try:
            process.wait(60)  # the training finishes its micro-batch
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()
        bar.update(began + steps - bar.n)
    if code:
        return result | explain(Path(output.name).read_text(), code, output.name)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    facts = json.loads((folder / name / "config.json").read_text())
    medians = {
        name: rows[-1][key] and statistics.median(row[key] for row in rows[SETTLING_STEPS:])
        for name, key in (("ms", "step_ms"), ("tokens_per_sec", "tokens_per_sec"), ("mfu", "mfu"))
    }
    ms = [row["step_ms"] for row in rows[SETTLING_STEPS:]]
    quartiles = statistics.quantiles(ms, n=4) if len(ms) > 1 else ms * 3
    medians["spread"] = (quartiles[2] - quartiles[0]) / quartiles[1]
    return result | medians | dict(peak_gb=rows[-1]["peak_gb"], loss=rows[-1]["train_loss"], facts=facts)


def explain(output, code, where):
    """Status and reason of a run that ended with a code other than 0."""
    if code == -9 or re.search(OUT_OF_MEMORY_SIGNS, output):
        return dict(status="skipped", reason=OUT_OF_MEMORY)
    errors = re.findall(r"^error(?: \(rank \d+\))?: (.*)", output, flags=re.MULTILINE)
    if errors:
        return dict(status="skipped", reason=errors[0])
    lines = output.strip().splitlines() or ["no output"]
    return dict(status="failed", reason=f"exit code {code}, {lines[-1].strip()} (all of it: {where})")


def prepare(config, kind):
    """The folder for the results, after a look at what would fail in every run."""
    check_bounds(config)
    if config.profile:
        raise UserError("--profile is for a single run: tracing would slow what is measured here")
    if not config.demo:
        open_shards(config.data_dir, "train")
    folder = Path(config.log_dir) / (config.run_name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists():
        raise UserError(f"{folder} is already there: choose another --run_name, or delete it")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}; choose another --log_dir") from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on Ctrl-C, the process under measurement ends first
    return folder


def save(folder, kind, config, results, markdown, draw):
    """Write what there is so far: KIND.json, KIND.md, and with draw(path) KIND.png."""
    (folder / f"{kind}.json").write_text(
        json.dumps(dict(command=shlex.join(sys.argv), results=results), indent=2) + "\n"
    )
    facts = next((result["facts"] for result in results if result["status"] == "done"), None)
    if facts:
        versions = f"PyTorch {facts['torch']}" + (f", CUDA {facts['cuda']}" if facts["cuda"] else "")
        spread = max(result["spread"] for result in results if result["status"] == "done")
        about = (
            f"{facts['hardware']}, {versions}. Medians of {config.ladder_steps} steps after {SETTLING_STEPS} to warm up"
            f"; the middle half of a run's steps spans {spread:.1%} of its median, or less."
        )
        markdown = f"{markdown}\n\n{about}"
        draw(folder / f"{kind}.png")
    (folder / f"{kind}.md").write_text(markdown + "\n")


def report_failures(results):
    """Raises UserError when a run ended in an error that is not a person's."""
    failed = [result["name"] for result in results if result["status"] == "failed"]
    if failed:
        raise UserError(f"{len(failed)} of {len(results)} runs failed: {', '.join(failed)}; the reasons are above")
