"""--profile: PyTorch's profiler over a few steps, their time summed by category of kernel, a timeline of all ranks.
--memory_snapshot: a few steps' allocations, for PyTorch's memory viewer."""

import contextlib
import gzip
import json
import os
import re
from collections import Counter

import torch

from common.errors import UserError
from common.files import write_json
from config import SETTLING_STEPS

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
def trace(config, distributed, folder):
    """A context for the training loop, with an object whose step() is to be called after every step: a running
    torch.profiler.profile, or a MemorySnapshot.

    The profiler traces config.profile steps after SETTLING_STEPS, with the time between them, on every rank. After the
    last of them trace.json.gz, of all ranks, and profile.json, of rank 0, are written to the run's folder, and rank 0's
    table is printed.
    """
    snapshot = config.memory_snapshot
    tracer = MemorySnapshot(snapshot, folder) if snapshot else start(config.profile, distributed, folder)
    try:
        yield tracer
    finally:
        tracer.stop()  # a profiler that still runs would crash Python's exit


def start(steps, distributed, folder):
    """A running profiler of `steps` steps."""
    # Kineto logs its start and stop at level 5, errors at 4; gpu_seconds() raises an error if the trace has no kernel
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if distributed.device.type == "cuda" else [kinds.CPU]
    profile = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=SETTLING_STEPS - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profile: report(profile, steps, distributed, folder),
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
        self.steps, self.path, self._done = steps, folder / "memory_snapshot.pickle", 0

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


def report(profile, steps, distributed, folder):
    """Write a profile's files and print its table, the largest category first. A collective."""
    if profile.step_num < SETTLING_STEPS + steps:
        if distributed.is_main:
            print("the run has ended among the steps of --profile: there is no profile")
        return
    paths = [folder / f"trace_rank_{rank}.json.gz" for rank in range(distributed.world_size)]
    profile.export_chrome_trace(str(paths[distributed.rank]))
    distributed.all_reduce(0)  # all ranks have written theirs
    if not distributed.is_main:
        return
    traces = [json.loads(gzip.decompress(path.read_bytes())) for path in paths]
    device = distributed.device.type
    total, seconds = gpu_seconds(traces[0]["traceEvents"]) if device == "cuda" else cpu_seconds(profile)
    trace = folder / "trace.json.gz"
    with gzip.open(trace, "wt", compresslevel=5) as file:
        json.dump(merge(traces), file)
    for path in paths:
        path.unlink()
    kinds = {name: dict(ms=1000 * s / steps, share=s / total) for name, s in seconds.most_common()}
    write_json(folder / "profile.json", dict(steps=steps, kinds=kinds))
    print(f"profile of {steps} steps of {1000 * total / steps:.2f} ms, tracing included: time on the {device}")
    print(f"{'':16s} {'ms a step':>10s} {'share':>7s}")
    for name, row in kinds.items():
        print(f"{name:16s} {row['ms']:10.2f} {row['share']:7.1%}")
    print(f"trace: {trace} (open it in https://ui.perfetto.dev)")


def merge(traces):
    """The Chrome trace of all ranks from theirs: every process, and every GPU, is that of a rank.

    The ranks of one machine share a clock; those of several machines differ by the error of their clocks.
    """
    merged = traces[0] | dict(traceEvents=[])
    for rank, trace in enumerate(traces):
        late = (trace.get("baseTimeNanoseconds", 0) - merged.get("baseTimeNanoseconds", 0)) / 1000  # µs
        # the metadata names processes without events too, one for each GPU of the machine
        used = sorted({event["pid"] for event in trace["traceEvents"] if event["ph"] != "M"}, key=str)
        pids = {pid: 1000 * (rank + 1) + i for i, pid in enumerate(used)}
        for event in trace["traceEvents"]:
            if event["pid"] not in pids:
                continue
            if event["name"] == "process_name":
                event["args"] = dict(name=f"rank {rank}: {event['args']['name']}")
            if event["name"] == "process_sort_index":
                event["args"] = dict(sort_index=pids[event["pid"]])
            if isinstance(event.get("id"), int):  # of an arrow from a launch to its kernel
                event["id"] += 10**9 * rank
            event["pid"] = pids[event["pid"]]
            if "ts" in event:
                event["ts"] += late
            merged["traceEvents"].append(event)
    return merged


def gpu_seconds(events):
    """(total, by category): seconds from the first traced step's start to the last one's end, and a Counter.

    Communication counts only while no other kernel runs, so that the categories and IDLE add up to the total, unless
    kernels of several streams overlap. Raises UserError if no kernel was traced.
    """
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    begin, end = min(e["ts"] for e in marks), max(e["ts"] + e["dur"] for e in marks)  # µs
    seconds, computation, communication = Counter(), [], []  # lists of intervals
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
