"""What a run tells: the step line, log.txt, metrics.jsonl, wandb; tokens/sec and MFU."""

import collections
import contextlib
import json
import math
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from checkpoints.checkpoint import checkpoints, number, unused_name

from checkpoints.resume import LOCK, facts_of, launch, lock
from common.cli import UserError
from common.files import whole, write_json

SPIKE = 5  # a loss this many standard deviations above the mean of the last SPIKE_WINDOW is marked
SPIKE_WINDOW = 100

# Dense bf16 peak in TFLOP/s (fp16 for V100 and T4, which have no bf16), from NVIDIA's data sheets.
PEAK_TFLOPS = {
    "B200": 2250,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989.4,
    "H200": 989.4,
    "H800": 989.4,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 149.7,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}


def peak_tflops(device):
    """The device's dense bf16 peak in TFLOP/s by its name, or None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def flops_per_token(model, seq_len):
    """FLOPs of forward and backward for a token: 6N + 12·L·C·T (Chowdhery et al. 2022, PaLM, appendix B)."""
    c = model.config
    return 6 * model.num_params() + 12 * c.n_layer * c.n_embd * seq_len


def peak_memory(device):
    """The most memory this process has held so far in GB (2**30): what PyTorch allocated on a GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # in bytes on macOS, in units of 1024 elsewhere (getrusage(2))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def duration(seconds):
    """A time to go, in two units: 4h52m, 3m10s."""
    seconds = int(seconds)
    if seconds >= 86400:
        return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s"


def environment(device):
    """Versions, hardware and git commit, for whoever reads the run later."""
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = git.stdout.strip() if git.returncode == 0 else None  # none: not a checkout
    except FileNotFoundError:
        commit = None  # git is not installed
    gpu = device.type == "cuda"
    return dict(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if gpu else None,
        cudnn=torch.backends.cudnn.version() if gpu else None,
        hardware=torch.cuda.get_device_name(device) if gpu else f"{platform.machine()} {device.type}",
        command=" ".join(sys.argv),
        git_commit=commit,
    )


def step_and_stream(line):
    """Of a line of metrics.jsonl. Raises ValueError, KeyError or TypeError for another."""
    values = json.loads(line)
    return int(values["step"]), "train" if "train_loss" in values else "evaluation"


def step_and_stream_in_log(line):
    """Of a line of log.txt. Raises ValueError for another."""
    step, stream, value = line.split()
    float(value)
    return int(step), stream


class RunLog:
    """Writes one run's folder and its wandb page. Only rank 0 makes one.

    log.txt has lines of `{step} {stream} {value}`, stream one of train, val, hella; metrics.jsonl an object a line with
    everything else. A step's number counts the updates before it, as in the peers' logs.
    """

    def __init__(self, config, device, world_size, flops_per_token, resumed=None, training=None):
        """training: what `resumed` says, the checkpoint that this run goes on from.

        Raises UserError when the run's folder holds a run that is finished or under way, or cannot be written.
        """
        self.config = config
        self.device = device
        self.flops_per_token = flops_per_token
        peak = config.peak_tflops or peak_tflops(device)
        self.peak_flops = peak and peak * 1e12 * world_size
        self.folder = Path(config.log_dir) / config.run_name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.folder)
            before = self._facts_before(resumed)
            self.facts = dict(vars(config), world_size=world_size, **environment(device))
            self.facts |= dict(launch=launch(), finished=False)
            self.facts["wandb_id"] = before.get("wandb_id") if training and before else None
            self._write_facts()
            # line-buffered: what was logged is in the file, whatever happens next
            self.log_txt = self._go_on("log.txt", training, before, step_and_stream_in_log)
            self.metrics_jsonl = self._go_on("metrics.jsonl", training, before, step_and_stream)
            last = [line.split()[2] for line in open(self.folder / "log.txt") if line.split()[1] == "train"]
        except OSError as error:
            raise UserError(
                f"cannot write the run's folder {self.folder}: {error.strerror}; choose another --log_dir"
            ) from error
        self._losses = collections.deque(filter(math.isfinite, map(float, last)), maxlen=SPIKE_WINDOW)
        self.wandb = None
        self._start_wandb()

    # ---- the run that this folder has already

    def _facts_before(self, resumed):
        """What config.json says of a run in this folder, or None. Raises UserError when it is not to be touched."""
        if all(path.name == LOCK or path.suffix == ".unfinished" for path in self.folder.iterdir()):
            return None
        before = facts_of(self.folder)
        if "finished" not in before:
            raise UserError(f"{self.folder} holds something else: choose another --run_name, or delete it")
        own = resumed and resumed.resolve().parent == self.folder.resolve()
        if not own and (before["finished"] or checkpoints(self.folder)):
            raise UserError(f"{self.folder} already holds a run: choose another --run_name, or delete it")
        return before

    def _go_on(self, name, training, before, parse):
        """Open a log to append to, without the lines of steps that come again. parse(line): its step and its stream."""
        path = self.folder / name
        kept = []
        if before and not training and path.exists():
            path.rename(unused_name(path.with_name(name + ".old")))  # of a run that ended before its first checkpoint
        lines = []
        if training and before and path.exists():
            if any(number(other) > training["step"] for other in checkpoints(self.folder)):  # a past that is left
                shutil.copy(path, unused_name(path.with_name(name + ".abandoned")))
            lines = path.read_text(errors="replace").splitlines(keepends=True)
        for line in lines:
            try:
                step, stream = parse(line)
            except (ValueError, KeyError, TypeError):
                continue  # torn by the end of the run before
            if step < training["step"] or (step == training["step"] and stream != "train" and training["evaluated"]):
                kept.append(line)
        with whole(path) as file:
            file.write("".join(kept).encode())
        return open(path, "a", buffering=1)

    def _write_facts(self):
        write_json(self.folder / "config.json", self.facts)

    # ---- wandb: never asks, never stops training

    def _start_wandb(self):
        """Online when logged in, else offline; WANDB_MODE decides for "auto" where it is set."""
        choice = self.config.wandb
        if choice == "auto":
            choice = os.environ.get("WANDB_MODE", "auto")
        if choice == "disabled":
            return
        for mode in ("online", "offline") if choice in ("auto", "online") else (choice,):
            try:
                import wandb

                if mode == "online" and not wandb.login(prompt=False):
                    if choice == "online":
                        print("wandb is not logged in: `wandb login` once; this run is recorded offline")
                    continue
                self._samples = wandb.Table(columns=["step", "text"], log_mode="INCREMENTAL")
                self.wandb = wandb.init(
                    project=self.config.wandb_project,
                    name=self.config.run_name,
                    group=self.config.wandb_group,
                    id=self.facts["wandb_id"],
                    resume="allow" if self.facts["wandb_id"] else None,
                    mode=mode,
                    dir=self.folder,
                    config=self.facts,
                    settings=wandb.Settings(silent=True, init_timeout=60),
                )
                # not wandb's own step, which cannot go back to a checkpoint's
                self.wandb.define_metric("step", hidden=True)
                self.wandb.define_metric("*", step_metric="step")
                self.wandb.define_metric("by_tokens/*", step_metric="tokens")
                self.facts["wandb_id"] = self.wandb.id
                self._write_facts()
                return
            except Exception as error:
                self._lose_wandb(error, mode)

    def _lose_wandb(self, error, mode="run"):
        self.wandb = None
        gone = (ConnectionResetError, BrokenPipeError)
        if isinstance(error, gone):  # its process, which it would say again, in 30 lines, when Python ends
            import wandb

            with contextlib.suppress(*gone):
                wandb.teardown()
        print(
            f"wandb {mode} failed ({type(error).__name__}: {error}); training goes on, all metrics are in {self.folder}"
        )

    def _to_wandb(self, step, values):
        if self.wandb is None:
            return
        try:
            self.wandb.log(values | dict(step=step))
        except Exception as error:
            self._lose_wandb(error)

    def where_to_watch(self):
        """One line: the page on wandb, or the command that shows an offline run in the terminal."""
        if self.wandb is None:
            return f"{self.folder}/metrics.jsonl"
        if not self.wandb.offline:
            return self.wandb.url
        return f"wandb leet {Path(self.wandb.dir).parent}"

    # ---- what training reports

    def train_step(
        self, step, tokens, loss, lr, grad_norm, seconds, step_tokens, seconds_left, loss_scale=None, bad_steps=0
    ):
        """Print and log one step: tokens so far, loss in nats, seconds and tokens of this step, seconds to the end.

        bad_steps counts those in a row, with this one, whose loss or gradient was not finite, and which were skipped.
        """
        deviations = self._spike(loss)
        rate = step_tokens / seconds
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        print(
            f"step {step:5d}/{self.config.max_steps} | loss {loss:.6f} | lr {lr:.4e} | norm {grad_norm:.4f} | "
            f"{seconds * 1000:.2f} ms | {rate:,.0f} tok/s | "
            + (f"MFU {mfu:.1%} | " if mfu else "")
            + (f"{duration(seconds_left)} left" if seconds_left is not None else "time left unknown")
            + (f" | not finite, skipped ({bad_steps} in a row)" if bad_steps else "")
            + (f" | spike, {deviations:.0f} standard deviations" if deviations else ""),
        )
        values = dict(train_loss=loss, lr=lr, grad_norm=grad_norm, step_ms=seconds * 1000, tokens_per_sec=rate, mfu=mfu)
        values["peak_gb"] = peak_memory(self.device)
        if bad_steps:
            values["bad_steps"] = bad_steps
        if deviations:
            values["spike"] = deviations
        if loss_scale is not None:
            values["loss_scale"] = loss_scale
        self._record(step, tokens, values, f"{step} train {loss:.6f}\n")
        page = {f"train/{name.removeprefix('train_')}": value for name, value in values.items() if value is not None}
        by_tokens = {"by_tokens/train_loss": loss, "by_tokens/tokens_per_sec": rate}
        self._to_wandb(step, page | by_tokens | dict(tokens=tokens))

    def _spike(self, loss):
        """By how many standard deviations the loss stands above the last SPIKE_WINDOW, if that is SPIKE or more."""
        losses = self._losses
        mean, deviation = (statistics.fmean(losses), statistics.pstdev(losses)) if len(losses) >= 20 else (loss, 0)
        if math.isfinite(loss):
            losses.append(loss)
        return (loss - mean) / deviation if deviation and loss > mean + SPIKE * deviation else None

    def evaluation(self, step, tokens, stream, value, text, seconds, **values):
        """Print text, and log an evaluation: `value` in log.txt under "val" or "hella", `values` by name elsewhere."""
        print(f"step {step:5d}/{self.config.max_steps} | {text} | {seconds:.1f} s")
        self._record(step, tokens, values, f"{step} {stream} {value:.4f}\n")
        page = {f"eval/{name}": v for name, v in values.items()} | {
            f"by_tokens/{name}": v for name, v in values.items()
        }
        self._to_wandb(step, page | dict(tokens=tokens))

    def samples(self, step, tokens, texts):
        """Log sampled texts, and print them."""
        for i, text in enumerate(texts):
            print(f"sample {i}: {text}")
        self._record(step, tokens, dict(samples=texts))
        if self.wandb is not None:
            for text in texts:
                self._samples.add_data(step, text)
            self._to_wandb(step, dict(samples=self._samples))

    def _record(self, step, tokens, values, line=""):
        """values to metrics.jsonl, line to log.txt. Raises UserError when the disk does not take them."""
        values = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        with self._writing(step):
            self.log_txt.write(line)
            self.metrics_jsonl.write(json.dumps(dict(step=step, tokens=tokens, **values)) + "\n")

    def flush(self, step):
        """Return when a power failure would leave no gap before the checkpoint of this step."""
        with self._writing(step):
            os.fsync(self.log_txt.fileno())
            os.fsync(self.metrics_jsonl.fileno())

    @contextlib.contextmanager
    def _writing(self, step):
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write the log in {self.folder} ({error.strerror}): stopped at step {step}; make room, then "
                "start the same command with this --run_name"
            ) from error

    def close(self, finished=True):
        self.facts["finished"] = finished
        try:
            self._write_facts()
        except OSError as error:
            print(f"cannot write {self.folder}/config.json: {error.strerror}")
        self.log_txt.close()
        self.metrics_jsonl.close()
        if self.wandb is not None:
            try:
                self.wandb.finish()
            except Exception as error:
                self._lose_wandb(error)
        self._lock.close()
