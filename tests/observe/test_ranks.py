import math
import re
import statistics

import pytest
import torch
from conftest import ROOT, metrics

from observe.power import PowerMeter, Sample
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


def test_energy_power_clock_and_temperature():
    """Energy and power add up over the ranks; the slowest clock and the hottest GPU count."""
    history, reports = (
        RankHistory(),
        [RankReport(10.0, 90.0, 700.0, 1755.0, 61.0), RankReport(9.0, 60.0, 500.0, 1980.0, 70.0)],
    )
    values, _ = history.add(reports)
    assert {name: values[name] for name in ("joules", "watts", "sm_mhz", "celsius")} == dict(
        joules=150.0, watts=1200.0, sm_mhz=1755.0, celsius=70.0
    )
    assert [line.split() for line in history.table()[1:]] == [
        ["0", "10.00", "+11.1%", "1755", "700", "61"],
        ["1", "9.00", "-10.0%", "1980", "500", "70"],
    ]
    alone = RankHistory()
    assert "own_ms" not in alone.add([RankReport(joules=90.0, watts=700.0)])[0]
    assert alone.table()[1].split() == ["0", "–", "–", "–", "700", "–"]
    assert Sample(time=10.0, joules=500.0, watts=100.0).joules_at(10.25) == 525
    meter = PowerMeter(torch.device("cpu"))
    assert math.isnan(meter.joules()) and meter.problem is None
