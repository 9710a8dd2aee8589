import math
import os
import re
import statistics
from types import SimpleNamespace

import pytest
import torch
from conftest import metrics

from parallel.process_group import Distributed
from watch.ranks import RankMonitor, slowest, watched

# From the third step on rank 1 takes longer for a batch than rank 0 for the step (in the second DDP waits in forward)
SLOW_RANK = """
import os
import time
import train_gpt2
from watch.ranks import RankMonitor
rank, steps = int(os.environ["RANK"]), 0
class SlowLoader(train_gpt2.Loader):
    def next_batch(self, sequences):
        global steps
        steps += 1
        while rank == 1 and steps > 2 and not os.path.exists(f"step{steps}"):
            time.sleep(0.01)
        if rank == 1 and steps > 2:
            with open(f"step{steps}") as file:
                time.sleep(1.25 * float(file.read()))
        return super().next_batch(sequences)
def mark(self, name, real=RankMonitor._mark):
    real(self, name)
    if rank == 0 and name == "gradients":
        with open("own", "w") as file:
            file.write(str(self._marks["gradients"] - self._marks["start"]))
        os.rename("own", f"step{steps}")
train_gpt2.Loader, RankMonitor._mark = SlowLoader, mark
train_gpt2.main()
"""


def test_the_slow_rank_is_named(train, script):
    """The slow one although both ranks take the same time for a step."""
    run = train("slow", "--max_steps", 5, script=script(SLOW_RANK), ranks=2)
    rows = [row for row in metrics(run) if "step_ms" in row]
    assert ["own_ms" in row for row in rows] == [False, False, False, True, True]  # of the step before
    own_ms = [statistics.median(row["own_ms"][rank] for row in rows[3:]) for rank in (0, 1)]
    assert own_ms[1] > own_ms[0] and [row["slowest_rank"] for row in rows[3:]] == [1, 1]
    output = (run / "output.txt").read_text()
    assert re.search(r"^step     \d/5 \| loss .* left \| rank 1 is [\d.]+% behind$", output, re.M)


@pytest.mark.parametrize("context", [1, 2])
def test_an_own_time_ends_at_the_first_all_reduce_of_gradients(monkeypatch, context):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monitor = RankMonitor(Distributed(1, 4, torch.device("cpu"), context=context))
    for _ in range(3):
        monitor.start_step(8)  # reads the clock twice
        monitor.begin_averaging()
        monitor.begin_averaging()
        monitor.end_step()
    assert monitor.report().tolist() == pytest.approx([0, 1000 if context == 1 else math.nan, 0, 0], nan_ok=True)


def test_the_flight_recorders_are_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    config = SimpleNamespace(profile=0, memory_snapshot=0)
    run = SimpleNamespace(
        trainer=SimpleNamespace(config=config), checkpointer=SimpleNamespace(folder=tmp_path), log=None
    )
    with watched(run):
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_recorder_rank_"


def test_a_rank_is_behind_the_median_of_the_others():
    assert slowest([math.nan]) == slowest([10.0]) == slowest([math.nan, 10.0]) == ({}, None)
    values, text = slowest([10.0, 10.0, 10.3])
    assert values == dict(own_ms=[10.0, 10.0, 10.3], slowest_rank=2, slowest_behind=pytest.approx(0.03))
    assert text == "rank 2 is 3.0% behind"
    assert slowest([10.0, 12.0, 10.0, 8.0])[0]["slowest_behind"] == pytest.approx(0.2)
    assert slowest([10.0, 10.0, 10.1])[1] is None
