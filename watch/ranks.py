"""What each rank reports of a step: its own time, before it waits for other ranks, and its GPU's power and clock.

All ranks end a step together, since they wait for each other's gradients: only the time before that wait differs. The
all-reduce that carries the loss carries these reports too, so they cost no collective.
MegaScale (Jiang et al. 2024, arXiv 2402.15627, section 5.1) finds its stragglers by CUDA events in the same way.
"""

import collections
import math
import statistics
import time
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from measure.energy import PowerMeter
from measure.memory_parts import MemoryRecorder
from measure.tables import align

BEHIND = 0.02  # a rank whose own time is this much above the others' median is named on the step line
SETTLING = 2  # steps that are not measured: the first compiles, and in the second DDP broadcasts its buckets' order
WINDOW = 1000  # steps that the table of ranks summarizes
COLUMNS = ("rank", "own ms", "behind", "SM MHz", "W", "°C")
WIDTHS = (4, 9, 7, 6, 6, 4)


class RankReport(NamedTuple):
    """One rank's step. NaN: not measured."""

    own_ms: float = math.nan  # from the step's start, data loading included, to the last gradient of backward
    joules: float = math.nan  # of the whole step
    watts: float = math.nan  # at the end of the step, as the clock and the temperature
    sm_mhz: float = math.nan
    celsius: float = math.nan


class RankMonitor:
    """Measures this rank's steps, the memory of one of them, and passes the reports on to all ranks.

    Own times are DDP's alone: models that are sharded or split by --tensor, --context or --pipeline have collectives
    inside forward and backward, which make all ranks as slow as the slowest. Own times of the first two steps
    are not measured.
    """

    def __init__(self, model, train_forward, optimizer, config, distributed):
        """model: a GPT; train_forward: the same, in DDP or not; config: a resolved Config."""
        self.distributed = distributed
        self.memory = MemoryRecorder(model, optimizer, config, distributed.device)
        self.power = PowerMeter(distributed.device)
        self._steps = 0
        self._last_gradient = None
        self._report = RankReport()  # of this rank's last complete step
        if isinstance(train_forward, DistributedDataParallel) and config.context == 1:
            # backward ends with the embeddings. DDP reduces gradients on another stream, for which this one waits only
            # after the last gradient, so an overlapping all-reduce does not count.
            for embedding in (model.transformer.wte, model.transformer.wpe):
                embedding.weight.register_post_accumulate_grad_hook(self._mark_gradient)

    def _mark_gradient(self, _):
        self._last_gradient = self._mark()

    def _mark(self):
        """A point in this device's time. On a GPU it is an event: the host does not wait."""
        if self.distributed.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, start, end):
        return start.elapsed_time(end) if self.distributed.device.type == "cuda" else 1000 * (end - start)

    def start_step(self):
        """Call this before the step's first batch is read."""
        self.memory.start_step()
        self._began, self._start, self._last_gradient = time.perf_counter(), self._mark(), None
        self._joules = self.power.joules()

    def report(self):
        """(ranks, fields) float64: this rank's report of the step before in its row, zeros elsewhere; to be summed over
        the ranks. This step's times are known only after the host has waited for the norm.

        Call this between backward and the update."""
        self.memory.end_backward()
        cuda = self.distributed.device.type == "cuda"
        # page-locked memory, so that the copy to the GPU does not wait for it
        shape = (self.distributed.world_size, len(RankReport._fields))
        rows = torch.zeros(shape, dtype=torch.float64, pin_memory=cuda)
        rows[self.distributed.rank] = torch.tensor(self._report, dtype=torch.float64)
        return rows

    def end_step(self, sums):
        """(seconds of this step, the RankReports of the step before, this rank's memory by MemoryRecorder.end_step).

        sums: the elements of report(), summed over the ranks. Call it after the host has waited for that all-reduce.
        """
        measured = self._last_gradient is not None and self._steps >= SETTLING
        own_ms = self._ms(self._start, self._last_gradient) if measured else math.nan
        sample = self.power.sample
        joules = self.power.joules() - self._joules
        self._report = RankReport(own_ms, joules, sample.watts, sample.sm_mhz, sample.celsius)
        self._steps += 1
        fields = len(RankReport._fields)
        reports = [RankReport(*sums[i : i + fields]) for i in range(0, len(sums), fields)]
        return time.perf_counter() - self._began, reports, self.memory.end_step()


def energy(reports):
    """Joules of one step over all ranks; NaN if a rank's are not known."""
    return sum(report.joules for report in reports)


def behind(times):
    """By how much each of these times exceeds the median of the others, as a fraction of it."""
    return [own / statistics.median(times[:i] + times[i + 1 :]) - 1 for i, own in enumerate(times)]


class RankHistory:
    """The reports of a run's last steps."""

    def __init__(self):
        self._reports = collections.deque(maxlen=WINDOW)

    def add(self, reports):
        """Keep one step's RankReports. Returns (values for the log, a column for the step line or None).

        The log has the sums of energy and power, the slowest clock and the highest temperature of all ranks.
        """
        self._reports.append(reports)
        values = {}
        if math.isfinite(energy(reports)):
            values = dict(joules=energy(reports), watts=sum(report.watts for report in reports))
            values["sm_mhz"] = min(report.sm_mhz for report in reports)
            values["celsius"] = max(report.celsius for report in reports)
        times = [report.own_ms for report in reports]
        if len(times) < 2 or not all(map(math.isfinite, times)):
            return values, None
        late = behind(times)
        slowest = max(range(len(late)), key=late.__getitem__)
        values |= dict(own_ms=times, slowest_rank=slowest, slowest_behind=late[slowest])
        return values, f"rank {slowest} is {late[slowest]:.1%} behind" if late[slowest] > BEHIND else None

    def table(self):
        """Lines of the table of ranks, medians over the last WINDOW steps; none if nothing was measured."""
        ranks = [self._medians(rank) for rank in range(len(self._reports[-1]) if self._reports else 0)]
        if not any(math.isfinite(value) for report in ranks for value in report):
            return []
        times = [report.own_ms for report in ranks]
        lates = behind(times) if len(times) > 1 else [math.nan]
        lines = [align(COLUMNS, WIDTHS)]
        for rank, (report, late) in enumerate(zip(ranks, lates)):
            formats = "{:.2f}", "{:+.1%}", "{:.0f}", "{:.0f}", "{:.0f}"
            values = report.own_ms, late, report.sm_mhz, report.watts, report.celsius
            texts = [form.format(value) if math.isfinite(value) else "–" for form, value in zip(formats, values)]
            lines.append(align((str(rank), *texts), WIDTHS))
        return lines

    def _medians(self, rank):
        """A RankReport of one rank's medians."""
        of_fields = zip(*(reports[rank] for reports in self._reports))
        known = [[value for value in values if math.isfinite(value)] for values in of_fields]
        return RankReport(*(statistics.median(values) if values else math.nan for values in known))
