"""Milliseconds of a function, and of forward and backward, by the device's clock; the flags of commands that time."""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from common.cli import flag

WARM_UP = 3  # runs that are not measured
LONGEST = 2.0  # seconds after which no further run is started
BUSY = 2_000_000  # clock cycles, 1 ms: the GPU waits until the host has launched a kernel, so that Python is not timed
# More than any GPU's L2 cache, as in triton.testing.do_bench: the runs read their inputs from memory, as in a step, in
# which other layers fill the cache in between
FLUSH_BYTES = 256 * 2**20


@dataclass
class TimingFlags:
    """What all commands that time kernels have."""

    repeats: int = flag(20, at_least=1)
    """Runs of one measurement, fewer if they take more than 2 s."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto: a GPU if there is one."""
    log_dir: str = "log"
    """Folder in which the results' folder is made."""
    run_name: str | None = None
    """Name of the results' folder; by default the command's, with date and time."""


def dtype_of_activations(device):
    """The dtype of a training step's activations: bf16, fp16 on GPUs without it, float32 on a CPU."""
    if device.type == "cpu":
        return torch.float32
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else torch.float16


def time_of(device, function, first=lambda: None):
    """(ms, the result) of a function, by the device's clock. first(): work of the device before it, not timed."""
    if device.type != "cuda":
        synchronize = torch.mps.synchronize if device.type == "mps" else lambda: None
        first()
        synchronize()
        began = time.perf_counter()
        result = function()
        synchronize()
        return 1e3 * (time.perf_counter() - began), result
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    first()
    start.record()
    result = function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end), result


def forward_and_backward(device, function, leaves, repeats):
    """{forward_ms, backward_ms, peak_gb} of a function without arguments: medians, and peak_gb on a GPU, else None.

    leaves: the tensors whose gradients backward computes. A result that needs no gradient has no backward, which then
    takes 0 ms. peak_gb: GB (2**30) at the peak beyond those held before. On a GPU forward and backward each begin with
    an L2 cache that holds none of their inputs.
    """
    gpu = device.type == "cuda"
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device).zero_ if gpu else lambda: None
    forward, backward = [], []
    before = torch.cuda.memory_allocated(device) if gpu else 0
    for repeat in range(WARM_UP + repeats):
        if repeat == WARM_UP:
            began = time.perf_counter()
            if gpu:  # the first calls may tune kernels, with buffers of their own
                torch.cuda.reset_peak_memory_stats(device)
        elif repeat > WARM_UP and time.perf_counter() - began > LONGEST:
            break
        for leaf in leaves:
            leaf.grad = None
        ms, y = time_of(device, function, flush)
        forward.append(ms)
        if not y.requires_grad:
            backward.append(0.0)
            continue
        gradient = torch.ones_like(y) if y.dim() == 0 else torch.randn_like(y)
        ms, _ = time_of(device, partial(y.backward, gradient), flush)
        backward.append(ms)
        del y, gradient
    times = dict(
        forward_ms=statistics.median(forward[WARM_UP:]), backward_ms=statistics.median(backward[WARM_UP:]), peak_gb=None
    )
    if gpu:
        times["peak_gb"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    return times
