"""Which rank is slow: each rank's own time in a step, before it waits for the other ranks.

All ranks end a step together, since they wait for each other's gradients: only the time before that wait differs. The
all-reduce that carries the loss carries these times too, so they cost no collective.
MegaScale (Jiang et al. 2024, arXiv 2402.15627, section 5.1) finds its stragglers by CUDA events in the same way.

watched() is the context of the training loop.
"""

import contextlib
import math
import os
import statistics
import time
from types import SimpleNamespace

import torch

BEHIND = 0.02  # a rank whose own time is this much above the others' median is named on the step line
SETTLING = 2  # steps that are not measured: the first compiles, and in the second DDP broadcasts its buckets' order


class RankMonitor:
    """Measures this rank's steps and passes its own times on to all ranks.

    An own time is in ms, from the step's start, data loading included, to DDP's first all-reduce of gradients: with
    NCCL, PyTorch 2.15's DDP makes backward wait after each. Compiled as one graph, backward is over by then, but for
    the gradients' way into DDP's buckets. The time is NaN where it is not measured: in the first two steps of a
    micro-batch size, and without DDP. Models that are sharded, or split by --tensor, --context or --pipeline, have
    collectives inside forward and backward, which make all ranks as slow as the slowest.
    """

    def __init__(self, distributed):
        self.trained_seconds = 0.0  # of this process's steps, but the first two of each new micro-batch size
        self.distributed = distributed
        self._size, self._steps, self._marks = None, 0, {}  # _steps: with micro-batches of this size
        self._own_ms = math.nan  # of the last complete step

    def _mark(self, name):
        """Keep a point in this device's time. On a GPU it is an event: the host does not wait."""
        self._marks[name] = time.perf_counter()
        if self.distributed.device.type == "cuda":
            self._marks[name] = torch.cuda.Event(enable_timing=True)
            self._marks[name].record()

    def start_step(self, size):
        """Call this before the step's first batch is read. size: sequences of a micro-batch; a new one compiles."""
        if size != self._size:
            self._size, self._steps = size, 0
        self._began, self._marks = time.perf_counter(), {}
        self._mark("start")

    def begin_averaging(self):
        """Call this before each of DDP's all-reduces of gradients."""
        if self.distributed.context == 1 and "gradients" not in self._marks:
            self._mark("gradients")

    def report(self):
        """(ranks,) float64, to be summed over the ranks: this rank's own time of the step before in its place, zeros
        elsewhere. This step's time is known only after the host has waited for the norm."""
        # page-locked memory, so that the copy to the GPU does not wait for it
        pinned = self.distributed.device.type == "cuda"
        times = torch.zeros(self.distributed.world_size, dtype=torch.float64, pin_memory=pinned)
        times[self.distributed.rank] = self._own_ms
        return times

    def end_step(self):
        """Seconds of this step. Call it after the host has waited for the all-reduce of report()."""
        self._own_ms = math.nan
        if "gradients" in self._marks and self._steps >= SETTLING:
            start, end = self._marks["start"], self._marks["gradients"]
            gpu = self.distributed.device.type == "cuda"
            self._own_ms = start.elapsed_time(end) if gpu else 1000 * (end - start)
        seconds = time.perf_counter() - self._began
        self.trained_seconds += seconds if self._steps >= SETTLING else 0.0
        self._steps += 1
        return seconds


def behind(times):
    """By how much each rank's own time exceeds the median of the others', as a fraction of it; two ranks or more."""
    return [own / statistics.median(times[:i] + times[i + 1 :]) - 1 for i, own in enumerate(times)]


def slowest(times):
    """(values for the log, a column for the step line or None) of all ranks' own times in a step, in ms."""
    if len(times) < 2 or not all(map(math.isfinite, times)):
        return {}, None
    late = behind(times)
    rank = late.index(max(late))
    values = dict(own_ms=times, slowest_rank=rank, slowest_behind=late[rank])
    return values, f"rank {rank} is {late[rank]:.1%} behind" if late[rank] > BEHIND else None


@contextlib.contextmanager
def watched(run):
    """A context for the training loop, whose object has a step() to call after each step. run: train_gpt2.Run.

    It records what --profile or --memory_snapshot asks for. When a collective of NCCL reaches its timeout, every rank
    writes PyTorch's flight recorder, its last 2,000 collectives, into the run's folder.
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{run.checkpointer.folder}/flight_recorder_rank_")
    config = run.trainer.config
    if config.profile or (run.log and config.memory_snapshot):
        from measure import profile  # no other run imports it

        with profile.trace(config, run.trainer.distributed, run.checkpointer.folder) as tracer:
            yield tracer
    else:
        yield SimpleNamespace(step=lambda: None)
