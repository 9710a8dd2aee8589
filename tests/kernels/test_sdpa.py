"""The choice of F.scaled_dot_product_attention's kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda

from kernels import sdpa

ENABLED = dict(cudnn=cuda.cudnn_sdp_enabled, flash=cuda.flash_sdp_enabled, efficient=cuda.mem_efficient_sdp_enabled)


@pytest.fixture(autouse=True)
def restore():
    yield
    sdpa.use_backend("auto")


@pytest.mark.parametrize("name", [*sdpa.BACKENDS, "auto", "written_out"])
def test_only_the_chosen_backend_is_enabled(name):
    sdpa.use_backend(name)
    chosen = {name} & sdpa.BACKENDS.keys() or sdpa.BACKENDS.keys()
    assert {backend for backend, enabled in ENABLED.items() if enabled()} == chosen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", sdpa.BACKENDS)
def test_the_chosen_kernel_runs(name):
    if sdpa.missing(name, torch.device("cuda"), torch.bfloat16, 64):
        pytest.skip(f"PyTorch has no {name} kernel here")
    sdpa.use_backend(name)
    q, k, v = torch.randn(3, 2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    kernels = {event.key for event in profile.key_averages()} & set(sdpa.OPERATORS)
    assert kernels == {f"aten::_scaled_dot_product_{name}_attention"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_size_without_a_kernel_is_refused():
    reason = sdpa.missing("flash", torch.device("cuda"), torch.float32, 64)
    assert reason == "PyTorch has no flash kernel here for torch.float32 and heads of width 64"
