import math
import os
import re
import statistics
from types import SimpleNamespace

import pytest
from conftest import metrics

from watch.ranks import slowest, watched

# Rank 1 takes a quarter of a second longer for each batch
SLOW_RANK = """
import os
import time
import train_gpt2
class SlowLoader(train_gpt2.Loader):
    def next_batch(self):
        if os.environ["RANK"] == "1":
            time.sleep(0.25)
        return super().next_batch()
train_gpt2.Loader = SlowLoader
train_gpt2.main()
"""


def test_the_slow_rank_is_named(train, script):
    """The slow one although both ranks take the same time for a step."""
    run = train("slow", "--max_steps", 5, script=script(SLOW_RANK), ranks=2)
    rows = [row for row in metrics(run) if "step_ms" in row]
    assert ["own_ms" in row for row in rows] == [False, False, False, True, True]  # of the step before
    own_ms = [statistics.median(row["own_ms"][rank] for row in rows[3:]) for rank in (0, 1)]
    assert own_ms[1] > 250 and 1 in [row["slowest_rank"] for row in rows[3:]]
    output = (run / "output.txt").read_text()
    assert re.search(r"^step     \d/5 \| loss .* left \| rank 1 is [\d.]+% behind$", output, re.M)


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
