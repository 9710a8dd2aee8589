"""--profile: PyTorch's profiler over a few steps, time summed by category of kernel, and the roofline.
--memory_snapshot: a few steps' allocations, for PyTorch's memory viewer."""

import contextlib
import gzip
import json
import os
import re
from collections import Counter

import torch

from common.errors import UserError
from config import SETTLING_STEPS
from measure import figures
from measure.roofline import gpu_peaks, work
from optim.schedules import accumulation_steps
from parallel.fsdp import is_sharded

IDLE = "idle"
OUTSIDE_OPERATORS = "Python, compiled"  # on a CPU: time outside operators, such as torch.compile's kernels and Python
COMMUNICATION = "communication"
# The first pattern that matches a kernel's name decides its category. Inductor's names list the fused operations.
CATEGORIES = {
    COMMUNICATION: r"nccl|all_?reduce|all_?gather|reduce_?scatter|c10d::",
    "loss": r"log_?softmax|cross_entropy|^(?!triton).*nll_loss",
    "attention": r"flash|fmha|sdpa|cudnn::fusion|attention|softmax",
    "optimizer": r"adam|multi_tensor_apply|foreach|lpnorm|linalg_vector_norm",
    "normalization": r"layer_?norm|gammabeta|rowwisemoments",
    "matrix products": r"^(?!triton_(poi|red|per)).*(gemm|gemv|nvjet|cutlass|cublas|splitk|addmm|::b?mm|linear|matmul)",
    "copies": r"mem(cpy|set)|direct_copy|copy_kernel|catarray|aten::(copy_|cat|clone|fill_|zero_)"
    r"|^triton_poi_fused_(_to_copy|clone|view|transpose|permute|cat|split|_unsafe|t|_)+(_\d+)?$",
    "element-wise": r"",
}


def category_of(name):
    """The category of a GPU kernel, or of an operator on a CPU."""
    return next(category for category, pattern in CATEGORIES.items() if re.search(pattern, name.lower()))


@contextlib.contextmanager
def trace(trainer, log, step):
    """A context for the training loop, with start()'s object or None. log: rank 0's RunLog, None on the other ranks.

    A run that ends among the traced steps writes no profile; a profiler that still runs would crash Python's exit.
    """
    tracer = log and start(trainer, log, step)
    try:
        yield tracer
    finally:
        if tracer:
            tracer.stop()


def start(trainer, log, step):
    """An object whose step() is to be called after every training step: a running torch.profiler.profile, or a
    MemorySnapshot; None without both flags.

    The profiler traces config.profile steps, SETTLING_STEPS after `step`, with the time between them. After the last of
    them it prints the table and writes trace.json.gz, profile.json and, if the roofline is known, roofline.png to the
    run's folder.

    trainer: train_gpt2.Trainer.
    """
    config = trainer.config
    if config.memory_snapshot:
        return MemorySnapshot(config.memory_snapshot, log.folder)
    if not config.profile:
        return None
    # Kineto logs its start and stop at level 5, errors at 4; gpu_seconds() raises an error if the trace has no kernel
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if log.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=SETTLING_STEPS - 1, warmup=1, active=config.profile, repeat=1),
        on_trace_ready=lambda profile: report(profile, trainer, log, step + SETTLING_STEPS),
        acc_events=True,
    )
    profile.start()
    return profile


class MemorySnapshot:
    """Records allocations with their Python stacks for `steps` steps, SETTLING_STEPS after its start, and writes them
    to memory_snapshot.pickle in the run's folder.

    https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """

    def __init__(self, steps, folder):
        self.steps, self.path = steps, folder / "memory_snapshot.pickle"
        self._done = 0

    def stop(self):
        torch.cuda.memory._record_memory_history(enabled=None)

    def step(self):
        self._done += 1
        if self._done == SETTLING_STEPS:
            torch.cuda.memory._record_memory_history(stacks="python")
        if self._done == SETTLING_STEPS + self.steps:
            torch.cuda.memory._dump_snapshot(str(self.path))
            self.stop()
            print(f"memory of {self.steps} steps: {self.path} (open it in https://docs.pytorch.org/memory_viz)")


def report(profile, trainer, log, first):
    """Write a profile's files and print its table. first: the first traced step."""
    config, distributed, steps = trainer.config, trainer.distributed, trainer.config.profile
    if profile.step_num < SETTLING_STEPS + steps:
        print("the run has ended among the steps of --profile: there is no profile")
        return
    trace = log.folder / "trace.json.gz"
    profile.export_chrome_trace(str(trace))
    if log.device.type == "cuda":
        title = "GPU time by kind of kernel"
        total, seconds = gpu_seconds(read_trace(trace))
    else:
        title = "time by kind of operation"
        total, seconds = cpu_seconds(profile)
    peaks = None
    # work() counts whole layers, sequences and weights, fused operations in 16 bits, and AdamW with float32 moments
    whole = config.context == 1 and not is_sharded(config)
    adamw = config.optimizer == "adamw"
    if config.compile and config.autocast != "off" and not config.fp8 and whole and adamw:
        peaks = gpu_peaks(log.device, log.peak_flops and log.peak_flops / distributed.world_size)
    micro_steps = sum(accumulation_steps(first + i, config, distributed.data_size) for i in range(steps)) / steps
    work_per_step = work(trainer.model.config, config.seq_len, micro_steps * config.micro_batch_size * config.seq_len)
    table = make_table(seconds, total, steps, peaks, work_per_step)
    facts = dict(steps=steps, roof=peaks, kinds=table)
    (log.folder / "profile.json").write_text(json.dumps(facts, indent=2) + "\n")
    if peaks:
        figures.roofline(table, *peaks, log.facts, log.folder / "roofline.png")
    print_table(table, steps, total, title, peaks)
    print(f"trace: {trace} (open it in https://ui.perfetto.dev)")


def make_table(seconds, total, steps, peaks, work):
    """{category: row}, the largest first. A row has ms per step and share of the total time; with peaks also FLOP/byte,
    TFLOP/s, and the share of the roof that was reached.

    seconds: Counter by category, of `total` seconds in `steps` steps; peaks: of gpu_peaks(); work: of roofline.work().
    """
    table = {name: dict(ms=1000 * s / steps, share=s / total) for name, s in seconds.most_common()}
    for name, (flops, moved) in work.items() if peaks else ():
        if name in table and moved:
            peak_flops, bandwidth = peaks
            reached, intensity = flops / table[name]["ms"] * 1000, flops / moved
            of_roof = reached / min(peak_flops, intensity * bandwidth)
            table[name] |= dict(flop_per_byte=intensity, tflops=reached / 1e12, of_roof=of_roof)
    return table


def print_table(table, steps, total, title, peaks):
    """Print one line per category."""
    print(f"profile of {steps} steps of {1000 * total / steps:.2f} ms, tracing included: {title}")
    columns = f" {'FLOP/byte':>10s} {'TFLOP/s':>8s} {'of roof':>8s}" if peaks else ""
    print(f"{'':16s} {'ms a step':>10s} {'share':>7s}{columns}")
    for name, row in table.items():
        text = f"{name:16s} {row['ms']:10.2f} {row['share']:7.1%}"
        if "tflops" in row:
            text += f" {row['flop_per_byte']:10.1f} {row['tflops']:8.1f} {row['of_roof']:8.0%}"
        print(text)
    if peaks:
        print(f"roof: {peaks[0] / 1e12:g} TFLOP/s, {peaks[1] / 1e9:,.0f} GB/s")
    else:
        print("(no roofline: it needs a GPU with known peaks, --compile, 16 bits without --fp8, AdamW with float32")
        print("moments, and ddp without --tensor, --context and --pipeline)")


def read_trace(path):
    """The events of a Chrome trace."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def gpu_seconds(events):
    """(total, by category): seconds from the first traced step's start to the last one's end, and a Counter.

    Communication counts only while no other kernel runs, so that the categories and IDLE add up to the total, unless
    kernels of several streams overlap.
    Raises UserError if no kernel was traced.
    """
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    begin, end = min(e["ts"] for e in marks), max(e["ts"] + e["dur"] for e in marks)  # µs
    seconds = Counter()
    computation, communication = [], []  # intervals
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        # the update of the step before still runs at `begin`, that of the last step at `end`
        interval = max(begin, event["ts"]), min(end, event["ts"] + event["dur"])
        if interval[0] >= interval[1]:
            continue
        category = category_of(event["name"])
        if category == COMMUNICATION:
            communication.append(interval)
        else:
            computation.append(interval)
            seconds[category] += (interval[1] - interval[0]) / 1e6
    if not computation:
        raise UserError("--profile traced no GPU kernel: KINETO_LOG_LEVEL=0 as an environment variable shows why")
    computing, busy = union_length(computation), union_length(computation + communication)
    if communication:
        seconds[COMMUNICATION] = (busy - computing) / 1e6
    seconds[IDLE] = (end - begin - busy) / 1e6
    return (end - begin) / 1e6, seconds


def union_length(intervals):
    """The length of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def cpu_seconds(profile):
    """As gpu_seconds, on a CPU: an operator's time without that of the operators it calls."""
    averages = profile.key_averages()
    total = sum(e.cpu_time_total for e in averages if e.key.startswith("ProfilerStep")) / 1e6
    seconds = Counter()
    for event in averages:
        if "::" in event.key:
            seconds[category_of(event.key)] += event.self_cpu_time_total / 1e6
    seconds[OUTSIDE_OPERATORS] = total - sum(seconds.values())
    return total, seconds
