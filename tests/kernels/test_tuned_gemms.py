"""The pass that replaces GEMMs in compiled graphs."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels import cublaslt, inductor, tuned_gemms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, K, M = 2048, 512, 2048


@pytest.fixture(autouse=True)
def replace_gemms_that_a_cpu_computes_quickly(monkeypatch):
    monkeypatch.setattr(tuned_gemms, "MIN_FLOPS", 1)


def losses_and_gradients(function, dtype):
    torch.manual_seed(0)
    x, w, v = (torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_() for shape in ((N, K), (M, K), (8, M)))
    bias = torch.randn(M, device=DEVICE).to(dtype).requires_grad_()
    loss = function(x, w, bias, v)
    loss.backward()
    return [loss.float().detach(), *(each.grad.float() for each in (x, w, bias, v))]


def two_layers(x, w, bias, v):
    return F.linear(F.linear(x, w, bias).sin(), v).float().square().mean()


@pytest.mark.parametrize("dtype, replaced", [(torch.bfloat16, 4), (torch.float32, 0)])
def test_large_gemms_in_16_bits_are_replaced_in_forward_and_backward(dtype, replaced, monkeypatch):
    calls, real = [], cublaslt.mm
    monkeypatch.setattr(cublaslt, "mm", lambda a, b, *rest: calls.append((*a.shape, b.size(1))) or real(a, b, *rest))
    flags = SimpleNamespace(compile=True, tuned_gemms=True)
    results = losses_and_gradients(inductor.compile(two_layers, flags), dtype)
    # forward, the gradients of x, w and the hidden layer; the second layer's other results are smaller
    assert sorted(calls) == sorted([(N, K, M), (N, M, K), (M, N, K), (N, 8, M)][:replaced])
    for one, other in zip(results, losses_and_gradients(two_layers, dtype)):
        assert (one - other).norm() < 1e-2 * other.norm()


def replaced(function, *tensors, monkeypatch):
    """How many GEMMs of a compiled function are replaced. Its result is compared with the function's own."""
    calls, real = [], cublaslt.mm
    monkeypatch.setattr(cublaslt, "mm", lambda *arguments: calls.append(1) or real(*arguments))
    with torch.no_grad():
        result = inductor.compile(function, SimpleNamespace(compile=True, tuned_gemms=True))(*tensors)
        torch.testing.assert_close(result.float(), function(*tensors).float(), rtol=2e-2, atol=1e-1)
    return len(calls)


@pytest.mark.parametrize("shape, count", [((M,), 1), ((1,), 0), ((1, M), 0)])
def test_only_a_bias_of_one_row_is_added_by_cublaslt(shape, count, monkeypatch):
    x, w, bias = (torch.randn(*sizes, device=DEVICE).bfloat16() for sizes in ((N, K), (K, M), shape))
    assert replaced(torch.addmm, bias, x, w, monkeypatch=monkeypatch) == count


def test_a_gemm_of_dynamic_size_is_left(monkeypatch):
    x, w = torch.randn(N, K, device=DEVICE).bfloat16(), torch.randn(K, M, device=DEVICE).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)  # raises if compilation makes the size static
    assert replaced(torch.mm, x, w, monkeypatch=monkeypatch) == 0


def test_short_gemms_are_left(monkeypatch):
    monkeypatch.setattr(tuned_gemms, "MIN_FLOPS", 2 * N * K * M + 1)
    x, w = torch.randn(N, K, device=DEVICE).bfloat16(), torch.randn(K, M, device=DEVICE).bfloat16()
    assert replaced(torch.mm, x, w, monkeypatch=monkeypatch) == 0


def test_without_the_flags_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(cublaslt, "mm", lambda *_: pytest.fail("replaced"))
    off = SimpleNamespace(compile=False, tuned_gemms=True)
    assert inductor.compile(two_layers, off) is two_layers
    losses_and_gradients(inductor.compile(two_layers, SimpleNamespace(compile=True, tuned_gemms=False)), torch.bfloat16)
