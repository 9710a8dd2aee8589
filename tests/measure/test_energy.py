import math

import torch

from measure.energy import PowerMeter, Sample, mj_per_token


def test_energy_of_steps():
    assert Sample(time=10.0, joules=500.0, watts=100.0).joules_at(10.25) == 525
    assert mj_per_token([500.0, 700.0], [0.9, 1.1], tokens=600) == 2000
    assert mj_per_token([500.0, 700.0], [0.9, 1.0], tokens=600) is None  # too short
    assert mj_per_token([500.0, math.nan], [1.0, 1.0], tokens=600) is mj_per_token([], [], tokens=0) is None
    meter = PowerMeter(torch.device("cpu"))
    assert math.isnan(meter.joules()) and meter.problem is None
