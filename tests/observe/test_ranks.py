import re
import statistics

import pytest
from conftest import ROOT, metrics

from observe.ranks import RankHistory, RankReport, behind

SLOW_RANK = """
import os
import time
import train_gpt2
class SlowLoader(train_gpt2.Loader):
    def next_batch(self):
        time.sleep(0.25 if os.environ["RANK"] == "1" else 0)
        return super().next_batch()
train_gpt2.Loader = SlowLoader
train_gpt2.main()
"""


def test_the_slow_rank_is_named(train, tmp_path, monkeypatch):
    """Although both ranks take the same time for a step."""
    (tmp_path / "slow.py").write_text(SLOW_RANK)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = train("slow", "--max_steps", 5, script=tmp_path / "slow.py", ranks=2)
    rows = [row for row in metrics(run) if "step_ms" in row]
    assert ["own_ms" in row for row in rows] == [False, False, False, True, True]  # of the step before
    own_ms = [statistics.median(row["own_ms"][rank] for row in rows[3:]) for rank in (0, 1)]
    assert own_ms[1] > 250 and 1 in [row["slowest_rank"] for row in rows[3:]]
    output = (run / "output.txt").read_text()
    assert re.search(r"^step     \d/5 \| loss .* left \| rank 1 is [\d.]+% behind$", output, re.M)
    table = output[output.index("rank     own ms   behind") :].splitlines()
    assert [line.split()[:2] for line in table[1:3]] == [[str(rank), f"{own_ms[rank]:.2f}"] for rank in (0, 1)]


def test_a_rank_is_behind_the_median_of_the_others():
    assert behind([10.0, 10.0, 12.0, 8.0]) == pytest.approx([0, 0, 0.2, -0.2])
    history = RankHistory()
    assert history.table() == [] and history.add([RankReport()]) == ({}, None)
    values, text = RankHistory().add([RankReport(ms) for ms in (10.0, 10.0, 10.3)])
    assert values == dict(own_ms=[10.0, 10.0, 10.3], slowest_rank=2, slowest_behind=pytest.approx(0.03))
    assert text == "rank 2 is 3.0% behind"
    _, text = RankHistory().add([RankReport(ms) for ms in (10.0, 10.0, 10.1)])
    assert text is None
