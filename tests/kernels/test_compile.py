"""The pass that replaces GEMMs in compiled graphs."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels import cublaslt, tuned_gemms
from kernels.compile import compile_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu(cpu_too=True)
SCALE = 1 if DEVICE == "cuda" else 4  # a processor without bf16 instructions takes 10 seconds for a large GEMM
N, K, M = 2048 // SCALE, 512 // SCALE, 2048 // SCALE
ON = SimpleNamespace(compile=True, tuned_gemms=True)


@pytest.fixture(autouse=True)
def smallest_result(monkeypatch):
    monkeypatch.setattr(cublaslt, "MIN_TUNED_SIZE", cublaslt.MIN_TUNED_SIZE // SCALE**2)


def normal(*shape):
    return torch.randn(*shape, device=DEVICE).bfloat16()


def output_and_gradients(function):
    torch.manual_seed(0)
    x, w, v, bias = (normal(*shape).requires_grad_() for shape in ((N, K), (M, K), (8, M), (M,)))
    y = function(x, w, bias, v)
    y.backward(normal(N, 8))
    return [each.float() for each in (y.detach(), x.grad, w.grad, bias.grad, v.grad)]


def two_layers(x, w, bias, v):  # and no more: Inductor's own kernels take seconds to compile
    return F.linear(F.linear(x, w, bias), v)


def test_large_gemms_are_replaced_in_forward_and_backward(tuned_gemms_calls):
    results = output_and_gradients(compile_model(two_layers, ON))
    # forward, the gradients of x, w and the hidden layer; the second layer's other results are smaller
    assert sorted(tuned_gemms_calls) == sorted([(N, K, M), (N, M, K), (M, N, K), (N, 8, M)])
    for one, other in zip(results, output_and_gradients(two_layers)):
        assert (one - other).norm() < 1e-2 * other.norm()


def compare(function, *tensors):
    """The compiled function's result with the function's own."""
    with torch.no_grad():
        result = compile_model(function, ON)(*tensors)
        torch.testing.assert_close(result.float(), function(*tensors).float(), rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize("shape, count", [((M,), 1), ((1,), 0), ((1, M), 0)])
def test_only_a_bias_of_one_row_is_added_by_cublaslt(shape, count, tuned_gemms_calls):
    compare(torch.addmm, normal(*shape), normal(N, K), normal(K, M))
    assert len(tuned_gemms_calls) == count


def test_a_gemm_in_float32_is_left(tuned_gemms_calls):
    compare(torch.mm, normal(N, K).float(), normal(K, M).float())
    assert not tuned_gemms_calls


def test_short_gemms_are_left(monkeypatch, tuned_gemms_calls):
    monkeypatch.setattr(tuned_gemms, "MIN_FLOPS", 2 * N * K * M + 1)
    compare(torch.mm, normal(N, K), normal(K, M))
    assert not tuned_gemms_calls


def test_without_the_flags_nothing_is_replaced(tuned_gemms_calls):
    assert compile_model(two_layers, SimpleNamespace(compile=False, tuned_gemms=True)) is two_layers
    compile_model(torch.mm, SimpleNamespace(compile=True, tuned_gemms=False))(normal(N, K), normal(K, M))
    assert not tuned_gemms_calls
