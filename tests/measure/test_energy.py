import pytest
import torch

from measure.energy import mj_per_token, read_joules


def test_energy_is_the_difference_of_two_readings():
    assert mj_per_token((10.0, 500.0), (12.0, 1700.0), tokens=600) == 2000
    assert mj_per_token((10.0, 500.0), (11.9, 1700.0), tokens=600) is None  # too short
    assert mj_per_token(None, (12.0, 1700.0), tokens=600) is None
    assert read_joules([]) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_uses_energy():
    pytest.importorskip("pynvml")
    before = read_joules([0])
    x = torch.randn(8192, 8192, device="cuda")
    for _ in range(200):
        x = (x @ x).tanh()
    torch.cuda.synchronize()
    assert read_joules([0])[1] > before[1]
