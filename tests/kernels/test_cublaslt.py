"""GEMMs by cuBLASLt against float64, on a GPU."""

import re

import pytest
import torch
import torch.nn.functional as F

from kernels import cublaslt

FP8 = torch.float8_e4m3fn


def normal(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def error(one, other):
    return ((one.double() - other).norm() / other.norm()).item()


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise ImportError('no module cuda.core')", r"cannot be imported \(no module cuda.core\): pip install -r"),
        ("raise RuntimeError('failed to load libnvrtc')", r"cannot be imported \(failed to load libnvrtc\)"),
        ("def get_version(): raise RuntimeError('no cuBLAS')", r"cannot be used \(no cuBLAS\)"),
    ],
)
def test_why_cublaslt_is_missing(code, reason, install):
    install("nvmath.bindings.cublasLt", code)
    assert re.search(reason, cublaslt.missing.__wrapped__())


def test_cpu_tensors_are_not_supported():
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    assert not cublaslt.gemm(a, a, torch.empty_like(a))


@pytest.mark.gpu
def test_unaligned_tensors_are_not_supported():
    a, b = normal(64, 72, dtype=torch.bfloat16)[:, 3:67], normal(64, 32, dtype=torch.bfloat16)
    assert not cublaslt.gemm(a, b, a.new_empty(64, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("N, K, M", [(64, 128, 256), (96, 768, 3072), (1000, 64, 40)])
def test_row_major_and_transposed_inputs(N, K, M):
    a, b, bias = (normal(*shape, dtype=torch.bfloat16) for shape in ((N, K), (K, M), (M,)))
    out = a.new_empty(N, M)
    for one in (a, a.t().contiguous().t()):
        for other in (b, b.t().contiguous().t()):
            assert cublaslt.gemm(one, other, out)
            assert error(out, a.double() @ b.double()) < 3e-3
            assert cublaslt.gemm(one, other, out, bias=bias)
            assert error(out, a.double() @ b.double() + bias.double()) < 3e-3


@pytest.mark.gpu
def test_gelu_epilogues():
    """On a GPU cuBLASLt computes the MLP's two epilogues; kernels/mlp.py does not fall back to PyTorch."""
    x, w1, b1 = (normal(*shape, dtype=torch.bfloat16) for shape in ((512, 768), (3072, 768), (3072,)))
    w1 *= 768**-0.5
    w2, dy = normal(768, 3072, dtype=torch.bfloat16, scale=3072**-0.5), normal(512, 768, dtype=torch.bfloat16)
    h, out = (x.new_empty(512, 3072) for _ in range(2))
    assert cublaslt.gemm(x, w1.t(), out, "GELU_AUX", bias=b1, aux=h)
    expected = x.double() @ w1.double().t() + b1.double()
    assert error(h, expected) < 3e-3 and error(out, F.gelu(expected, approximate="tanh")) < 3e-3
    assert cublaslt.gemm(dy, w2, out, "DGELU", aux=h)
    expected = torch.ops.aten.gelu_backward(dy.double() @ w2.double(), h.double(), approximate="tanh")
    assert error(out, expected) < 3e-3


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("fast_accumulation, tolerance", [(True, 2e-2), (False, 3e-3)])
def test_float8(fast_accumulation, tolerance):
    a, b = normal(512, 768, dtype=FP8), normal(256, 768, dtype=FP8)
    scales = dict(scale_a=torch.tensor(0.5, device="cuda"), scale_b=torch.tensor(3.0, device="cuda"))
    out = torch.empty(512, 256, device="cuda", dtype=torch.bfloat16)
    assert cublaslt.gemm(a, b.t(), out, fast_accumulation=fast_accumulation, **scales)
    assert error(out, 1.5 * a.double() @ b.double().t()) < tolerance


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize(
    "N, K, M, dtype, bias, fast_accumulation",
    [
        (4096, 768, 50304, torch.bfloat16, None, None),  # the head's logits, in bf16
        (8192, 768, 3072, torch.bfloat16, False, True),  # c_fc
        (8192, 3072, 768, torch.bfloat16, True, True),  # c_proj
        (8192, 3072, 768, torch.bfloat16, False, False),  # the gradient of c_fc's input
        (3072, 8192, 768, torch.float32, False, False),  # the gradient of c_fc's weight
    ],
)
def test_tuning_changes_no_bit(N, K, M, dtype, bias, fast_accumulation, monkeypatch):
    """Of GEMMs as training has them, on other values than those of the measurement."""
    out = torch.empty(N, M, device="cuda", dtype=dtype)
    scales = dict(scale_a=torch.tensor(0.5, device="cuda"), scale_b=torch.tensor(3.0, device="cuda"))

    def gemm(seed):
        torch.manual_seed(seed)
        if fast_accumulation is None:
            a, b = normal(N, K, dtype=dtype), normal(M, K, dtype=dtype)
            assert cublaslt.gemm(a, b.t(), out)
            return out.clone()
        a, b = normal(N, K, dtype=FP8), normal(M, K, dtype=FP8)
        options = dict(bias=normal(M, dtype=dtype) if bias else None, fast_accumulation=fast_accumulation)
        assert cublaslt.gemm(a, b.t(), out, **scales, **options)
        return out.clone()

    events = []
    monkeypatch.setattr(torch.cuda, "Event", lambda real=torch.cuda.Event, **kw: events.append(1) or real(**kw))
    monkeypatch.setattr(cublaslt, "plans", {})
    gemm(seed=1)
    assert events  # it was timed
    tuned = gemm(seed=2)
    monkeypatch.setattr(cublaslt, "plans", {})
    monkeypatch.setattr("kernels.cublaslt.MIN_TUNED_SIZE", float("inf"))
    assert torch.equal(tuned, gemm(seed=2))
