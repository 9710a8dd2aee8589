"""The choice of F.scaled_dot_product_attention's kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda

from kernels.attention import CAN_USE, SDPA_OPERATORS, limit_sdpa, missing_sdpa_kernel

ENABLED = dict(cudnn=cuda.cudnn_sdp_enabled, flash=cuda.flash_sdp_enabled, efficient=cuda.mem_efficient_sdp_enabled)


@pytest.fixture
def restore():
    yield
    limit_sdpa("sdpa")


@pytest.mark.parametrize("name", [*CAN_USE, "sdpa", "written_out", "flash4", "triton"])
def test_only_the_chosen_kernel_is_enabled(name, restore):
    limit_sdpa(name)
    chosen = {name} & CAN_USE.keys() or CAN_USE.keys()
    assert {backend for backend, enabled in ENABLED.items() if enabled()} == chosen


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAN_USE)
def test_the_chosen_kernel_runs(name, restore):
    if missing_sdpa_kernel(name, torch.device("cuda"), torch.bfloat16, 64):
        pytest.skip(f"PyTorch has no {name} kernel here")
    limit_sdpa(name)
    q, k, v = torch.randn(3, 2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    kernels = {event.key for event in profile.key_averages()} & set(SDPA_OPERATORS)
    assert kernels == {f"aten::_scaled_dot_product_{name}_attention"}


@pytest.mark.gpu
def test_a_size_without_a_kernel_is_refused():
    reason = missing_sdpa_kernel("flash", torch.device("cuda"), torch.float32, 64)
    assert reason == "PyTorch has no flash kernel here for torch.float32 and heads of width 64"
