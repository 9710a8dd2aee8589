"""Milliseconds of a function, and of forward and backward, by the device's clock; the commands that time kernels."""

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch

from common.cli import flag, parse, progress
from common.errors import UserError, first_line, is_out_of_memory
from measure.child_run import OUT_OF_MEMORY
from measure.results import Results, ResultsFlags
from parallel.process_group import start_alone
from watch.hardware import ask_nvidia_smi, gpu_facts

WARM_UP = 3  # runs that are not measured
LONGEST = 2.0  # seconds after which no further run is started
BUSY = 2_000_000  # clock cycles, 1 ms: the GPU waits until the host has launched a kernel, so that Python is not timed
# More than any GPU's L2 cache, as in triton.testing.do_bench: the runs read their inputs from memory, as in a step, in
# which other layers fill the cache in between
FLUSH_BYTES = 256 * 2**20


@dataclass
class TimingFlags(ResultsFlags):
    """What all commands that time kernels have."""

    repeats: int = flag(20, at_least=1)
    """Runs of one measurement, fewer if they take more than 2 s."""


@dataclass
class KernelFlags(TimingFlags):
    """The sizes of a kernel's inputs."""

    tokens: int | None = flag(None, at_least=1)
    """Tokens in each measurement, B × T; by default 65,536 on a GPU, 1,024 elsewhere."""
    n_embd: int = flag(768, at_least=1)
    """Embedding width C."""


def start(flags_type):
    """(KernelFlags of the command line, the device) of a command that times kernels."""
    flags = parse(flags_type)
    device = start_alone(flags.device, "this times one device")
    flags.tokens = flags.tokens or (65536 if device.type == "cuda" else 1024)
    return flags, device


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


def mean_ms(device, function, count):
    """Milliseconds of a function, over `count` calls in a row, which begin after one that is not timed."""
    ms, _ = time_of(device, lambda: [function() for _ in range(count)], first=function)
    return ms / count


def forward_and_backward(device, function, leaves, repeats):
    """{forward_ms, backward_ms, peak_gb, gpu} of a function without arguments. The times are medians.

    leaves: the tensors whose gradients backward computes. A result that needs no gradient has no backward, which then
    takes 0 ms. peak_gb: GB (2**30) at the peak beyond those held before. gpu: clocks and power, as gpu_facts(). Both
    are None on a CPU. On a GPU forward and backward each begin with an L2 cache that holds none of their inputs.
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
        if y.requires_grad:
            gradient = torch.ones_like(y) if y.dim() == 0 else torch.randn_like(y)
            ms, _ = time_of(device, partial(y.backward, gradient), flush)
            backward.append(ms)
            del gradient
        del y
    peak_gb = (torch.cuda.max_memory_allocated(device) - before) / 2**30 if gpu else None
    asked = ask_nvidia_smi(device)
    while asked and asked.poll() is None:  # it answers while the GPU works
        time_of(device, function)
    backward_ms = statistics.median(backward[WARM_UP:]) if backward else 0.0
    forward_ms = statistics.median(forward[WARM_UP:])
    return dict(forward_ms=forward_ms, backward_ms=backward_ms, peak_gb=peak_gb, gpu=gpu_facts(asked))


def time_all(kind, flags, device, cases, measure, unit, limit, note, passes=("forward", "backward")):
    """Measure one kernel after the other: a table in the terminal, KIND.json and KIND.md.

    cases: {name: value} of each, which measure(**case) takes; it returns {name: value} of a result. unit: that of its
    "rate", and of `limit`, the device's own rate, or None or 0. note: below the table. passes: those that cases have.
    """
    results = Results(flags, kind, device, (*cases[0], *(f"{each} ms" for each in passes), unit, "of limit", "peak GB"))
    note += f"; the limit is {limit:,.0f} {unit}" if limit else ""
    for case in progress(cases, kind, unit="kernel"):
        result = case | dict(facts=results.environment) | attempt(partial(measure, **case), device)
        cells = [*map(str, case.values())]
        if result["status"] == "done":
            cells += [f"{result[f'{each}_ms']:.3f}" if result[f"{each}_ms"] else "–" for each in passes]
            cells.append(f"{result['rate']:,.4g}")
            cells.append(f"{result['rate'] / limit:.0%}" if limit else "–")
            cells.append("–" if result["peak_gb"] is None else f"{result['peak_gb']:.2f}")
        results.add(result, cells, f"{note}. GB/s are 10^9 bytes, GB 2^30.")
    print(results)


def attempt(measure, device):
    """{status, ...}: "done" with what measure() returns, or "skipped" with a reason: memory, or its UserError."""
    try:
        return dict(status="done") | measure()
    except Exception as error:
        if is_out_of_memory(error):
            return dict(status="skipped", reason=OUT_OF_MEMORY)
        if isinstance(error, UserError | ImportError):  # an ImportError: a package that a kernel's package needs
            return dict(status="skipped", reason=first_line(error))
        raise
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
