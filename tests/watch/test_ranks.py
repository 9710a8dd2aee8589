import math
import pickle
import re
import statistics

import pytest
from conftest import metrics

from watch.hang import explain
from watch.ranks import slowest

# Rank 1 takes a quarter of a second longer for each batch, and waits before the fourth until the hang is reported
SLOW_RANK = """
import os
import time
from pathlib import Path
import train_gpt2
from watch import hang
hang.LIMIT = 2
class SlowLoader(train_gpt2.Loader):
    batches = 0
    def next_batch(self):
        self.batches += 1
        if os.environ["RANK"] == "1":
            time.sleep(0.25)
            while self.batches == 4 and len(list(Path("log/slow/hang").glob("*_rank_*"))) < 4:
                time.sleep(0.1)
            if self.batches == 4:
                time.sleep(2.6)  # rank 0 has printed its line, and the hang is not reported again
        return super().next_batch()
train_gpt2.Loader = SlowLoader
train_gpt2.main()
"""


def test_the_slow_rank_and_the_missing_rank_are_named(train, script):
    """The slow one although both ranks take the same time for a step."""
    run = train("slow", "--max_steps", 5, script=script(SLOW_RANK), ranks=2)
    rows = [row for row in metrics(run) if "step_ms" in row]
    assert ["own_ms" in row for row in rows] == [False, False, False, True, True]  # of the step before
    own_ms = [statistics.median(row["own_ms"][rank] for row in rows[3:]) for rank in (0, 1)]
    assert own_ms[1] > 250 and 1 in [row["slowest_rank"] for row in rows[3:]]
    output = (run / "output.txt").read_text()
    assert re.search(r"^step     \d/5 \| loss .* left \| rank 1 is [\d.]+% behind$", output, re.M)

    missing = r"no collective for 2 s: rank 1 did not arrive at gloo:all_reduce \d+ of default_pg, where rank 0 waits; "
    missing += r"rank 1 is at train_gpt2.py:\d+ accumulate; stacks and flight recorder: log/slow/(hang[.\d]*)/"
    assert re.findall(f"^{missing}$", output, re.M) == ["hang"] and not (run / "hang.1").exists()
    for rank in (0, 1):
        entries = pickle.loads((run / f"hang/flight_recorder_rank_{rank}").read_bytes())["entries"]
        assert {entry["profiling_name"] for entry in entries} >= {"gloo:all_reduce"}
        assert "train_step" in (run / f"hang/stacks_rank_{rank}.txt").read_text()
    assert "in next_batch" in (run / "hang/stacks_rank_1.txt").read_text()


def test_the_missing_rank_is_not_one_that_waits_elsewhere():
    """Rank 0 waits for rank 1, which waits for rank 3 in the tensor group of both."""
    waits = [9, "nccl:all_reduce", "default_pg"], [4, "nccl:all_gather", "mesh_tensor"]
    world, behind = dict(last=9, waits=waits[0]), dict(last=8, waits=None)
    answers = {
        0: dict(groups=dict(a=world, b=dict(last=5, waits=None)), where="0"),
        1: dict(groups=dict(a=behind, c=dict(last=4, waits=waits[1])), where="1"),
        2: dict(groups=dict(a=world), where="2"),
        3: dict(groups=dict(a=behind, c=dict(last=3, waits=None)), where="data.py:3 read"),
    }
    rank_3 = "rank 3 did not arrive at nccl:all_reduce 9 of default_pg, where rank 0 waits; rank 3 is at data.py:3 read"
    assert explain(answers, 4) == rank_3
    del answers[3]
    assert explain(answers, 4) == rank_3.replace("is at data.py:3 read", "does not answer")
    arrived = {rank: dict(groups=dict(a=world), where=f"line {rank}") for rank in (0, 1)}
    assert explain(arrived, 2) == "rank 0 is at line 0, rank 1 is at line 1"


def test_a_rank_is_behind_the_median_of_the_others():
    assert slowest([math.nan]) == slowest([10.0]) == slowest([math.nan, 10.0]) == ({}, None)
    values, text = slowest([10.0, 10.0, 10.3])
    assert values == dict(own_ms=[10.0, 10.0, 10.3], slowest_rank=2, slowest_behind=pytest.approx(0.03))
    assert text == "rank 2 is 3.0% behind"
    assert slowest([10.0, 12.0, 10.0, 8.0])[0]["slowest_behind"] == pytest.approx(0.2)
    assert slowest([10.0, 10.0, 10.1])[1] is None
