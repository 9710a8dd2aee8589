"""What a run tells: the step line, log.txt, metrics.jsonl, wandb; tokens/sec and MFU."""

import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path

import torch

from cli import UserError

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


class RunLog:
    """Writes one run's folder and its wandb page. Only rank 0 makes one.

    log.txt has lines of `{step} {stream} {value}`, stream one of train, val, hella; metrics.jsonl an object a line with
    everything else. A step's number counts the updates before it, as in the peers' logs.
    """

    def __init__(self, config, device, world_size, flops_per_token):
        """Raises UserError when the run's folder already holds a run or cannot be written."""
        self.config = config
        self.device = device
        self.flops_per_token = flops_per_token
        peak = config.peak_tflops or peak_tflops(device)
        self.peak_flops = peak and peak * 1e12 * world_size
        self.folder = Path(config.log_dir) / config.run_name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise UserError(f"{self.folder} already holds a run: choose another --run_name, or delete it")
            # line-buffered: what was logged is in the file, whatever happens next
            self.log_txt = open(self.folder / "log.txt", "w", buffering=1)
            self.metrics_jsonl = open(self.folder / "metrics.jsonl", "w", buffering=1)
            self.facts = dict(vars(config), world_size=world_size, **environment(device))
            (self.folder / "config.json").write_text(json.dumps(self.facts, indent=2) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write the run's folder {self.folder}: {error.strerror}; choose another --log_dir"
            ) from error
        self.wandb = None
        self._start_wandb()

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
                    mode=mode,
                    dir=self.folder,
                    config=self.facts,
                    settings=wandb.Settings(silent=True, init_timeout=60),
                )
                self.wandb.define_metric("by_tokens/*", step_metric="tokens")
                return
            except Exception as error:
                self._lose_wandb(error, mode)

    def _lose_wandb(self, error, mode="run"):
        self.wandb = None
        print(
            f"wandb {mode} failed ({type(error).__name__}: {error}); training goes on, all metrics are in {self.folder}"
        )

    def _to_wandb(self, step, values):
        if self.wandb is None:
            return
        try:
            self.wandb.log(values, step=step)
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

    def train_step(self, step, tokens, loss, lr, grad_norm, seconds, step_tokens, seconds_left, loss_scale=None):
        """Print and log one step: tokens so far, loss in nats, seconds and tokens of this step, seconds to the end."""
        rate = step_tokens / seconds
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        print(
            f"step {step:5d}/{self.config.max_steps} | loss {loss:.6f} | lr {lr:.4e} | norm {grad_norm:.4f} | "
            f"{seconds * 1000:.2f} ms | {rate:,.0f} tok/s | "
            + (f"MFU {mfu:.1%} | " if mfu else "")
            + (f"{duration(seconds_left)} left" if seconds_left is not None else "time left unknown"),
        )
        self.log_txt.write(f"{step} train {loss:.6f}\n")
        values = dict(train_loss=loss, lr=lr, grad_norm=grad_norm, step_ms=seconds * 1000, tokens_per_sec=rate, mfu=mfu)
        values["peak_gb"] = peak_memory(self.device)
        if loss_scale is not None:
            values["loss_scale"] = loss_scale
        self._record(step, tokens, values)
        page = {f"train/{name.removeprefix('train_')}": value for name, value in values.items() if value is not None}
        by_tokens = {"by_tokens/train_loss": loss, "by_tokens/tokens_per_sec": rate}
        self._to_wandb(step, page | by_tokens | dict(tokens=tokens))

    def evaluation(self, step, tokens, stream, value, text, seconds, **values):
        """Print text, and log an evaluation: `value` in log.txt under "val" or "hella", `values` by name elsewhere."""
        print(f"step {step:5d}/{self.config.max_steps} | {text} | {seconds:.1f} s")
        self.log_txt.write(f"{step} {stream} {value:.4f}\n")
        self._record(step, tokens, values)
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

    def _record(self, step, tokens, values):
        values = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self.metrics_jsonl.write(json.dumps(dict(step=step, tokens=tokens, **values)) + "\n")

    def close(self):
        self.log_txt.close()
        self.metrics_jsonl.close()
        if self.wandb is not None:
            try:
                self.wandb.finish()
            except Exception as error:
                self._lose_wandb(error)
