"""Casts to float8: on a GPU where there is one, else in Triton's interpreter (see conftest)."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="needs Triton")
from kernels import fp8_cast  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu(cpu_too=True)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def scalar(value):
    return torch.tensor(float(value), device=DEVICE)


# a tile is 64 x 64; the interpreter takes seconds for many of them
@pytest.mark.parametrize("shape", [(4, 16), (68, 48), (128, 130), *([(1024, 768)] if DEVICE == "cuda" else [])])
def test_representable_values_are_exact(shape):
    """Row-major and transposed; values beyond 448 saturate. (The interpreter does not round other values correctly.)"""
    x = 0.5 * torch.randint(-15, 16, shape, device=DEVICE).float()
    x[0, 0] = -600
    scale, amax = scalar(0.5), scalar(1)
    x8, x8_t, sums = fp8_cast.quantize(x, scale, amax, column_sums=True)
    expected = (x / scale).clamp(-448, 448)
    assert torch.equal(x8.float(), expected) and torch.equal(x8_t.float(), expected.t())
    assert amax == 600 and torch.equal(sums, x.sum(0))
    fp8_cast.quantize(0.1 * x, scale, amax)
    assert amax == 600


def test_writes_into_given_tensors():
    x, scale = normal(8, 16).round(), scalar(1)
    pair = fp8_cast.empty_float8_pair(x)
    x8, x8_t, sums = fp8_cast.quantize(x, scale, out=pair)
    assert x8 is pair[0] and x8_t is pair[1] and sums is None
    assert torch.equal(x8.float(), x) and torch.equal(x8_t.float(), x.t())


# Triton's interpreter does not round to float8 as GPUs do
@pytest.mark.gpu
def test_rounds_as_pytorch_does():
    x, scale = 3 * normal(512, 768, dtype=torch.bfloat16), scalar(0.025)
    x8, x8_t, _ = fp8_cast.quantize(x, scale, scalar(0))
    expected = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(x8.float(), expected.float()) and torch.equal(x8_t.float(), expected.float().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 16), (68, 48), (128, 130)])
def test_gelu(shape, dtype):
    """GELU and its gradient are near float64 to 3 bits; amax and the gradient of the bias are exact."""
    h, bias, da = 2 * normal(*shape, dtype=dtype), normal(shape[1]), normal(*shape, dtype=dtype)
    leaves = [h.double().requires_grad_(), bias.double().requires_grad_()]
    expected = F.gelu(sum(leaves), approximate="tanh")
    expected.backward(da.double())
    scale, amax = scalar(8 / 448), scalar(0)
    a8, a8_t = fp8_cast.gelu(h, bias, scale, amax)
    assert torch.equal(a8.float().t(), a8_t.float())
    assert (a8.float() * scale - expected).norm() < 0.15 * expected.norm()
    assert amax.item() == pytest.approx(expected.abs().max().item(), rel=1e-5)
    amax.zero_()
    (dh8, dh8_t), bias_gradient = fp8_cast.gelu_backward(h, bias, da, scale, amax)
    assert torch.equal(dh8.float().t(), dh8_t.float())
    assert (dh8.float() * scale - leaves[0].grad).norm() < 0.15 * leaves[0].grad.norm()
    assert amax.item() == pytest.approx(leaves[0].grad.abs().max().item(), rel=1e-5)
    torch.testing.assert_close(bias_gradient.double(), leaves[1].grad, rtol=1e-4, atol=1e-5)
