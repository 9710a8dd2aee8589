"""The head in float8 against float64: on a Hopper GPU where there is one, else in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from test_model import SIZES, batch, loss_and_gradients

from model import GPT, GPTConfig

pytest.importorskip("triton", reason="needs Triton")
from kernels import fp8_head  # noqa: E402
from kernels.fp8 import FP8_MAX  # noqa: E402
from kernels.fp8_head import fp8_cross_entropy, softmax_float8  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu(cpu_too=True)


def head(N, C, V, sharpness=1.0):
    """x, weight padded to a multiple of 64 rows, and targets that x predicts the better the larger the sharpness."""
    torch.manual_seed(0)
    weight = F.pad(torch.randn(V, C) / C**0.5, (0, 0, 0, -V % 64))
    targets = torch.randint(V, (N,))
    x = torch.randn(N, C) + sharpness * C**0.5 * weight[targets]
    return x.bfloat16().to(DEVICE), weight.to(DEVICE), targets.to(DEVICE)  # the same numbers on every device


def test_softmax_in_both_layouts():
    """With a row without a target, and padding that would dominate the softmax."""
    logits = 2 * torch.randn(20, 320, device=DEVICE)
    logits[:, 301:] = 50
    logits = logits.bfloat16()
    targets = torch.randint(301, (20,), device=DEVICE)
    targets[7] = -1
    scale = torch.full((), 1 / FP8_MAX, device=DEVICE)
    losses, softmax8, softmax8_t = softmax_float8(logits, targets, 301, scale)
    expected = F.cross_entropy(logits[:, :301].double(), targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    softmax = F.pad(logits[:, :301].double().softmax(1), (0, 19)) * (targets >= 0)[:, None]
    softmax.scatter_(1, targets.clamp(min=0)[:, None], 0.0)
    # e4m3 has 3 bits of mantissa, and numbers below 2^-6 are multiples of 2^-9
    rounding = 2**-4 if DEVICE == "cuda" else 0.51
    torch.testing.assert_close(softmax8.double() / FP8_MAX, softmax, rtol=rounding, atol=2**-9 / FP8_MAX)
    assert torch.equal(softmax8.view(torch.uint8).t(), softmax8_t.view(torch.uint8))


@pytest.mark.parametrize("sharpness, tolerance", [(0.0, 0.01), (0.7, 0.05), (1.3, 0.08)])
def test_loss_and_gradients(sharpness, tolerance, monkeypatch):
    """In chunks, with targets that have no loss; relative errors of whole gradients, at a high and at a low loss."""
    monkeypatch.setattr(fp8_head, "LOGIT_ROWS", 64)
    tolerance *= 1 if DEVICE == "cuda" else 6  # Triton's interpreter halves some values just below a power of 2
    x, weight, targets = head(96, 64, 301, sharpness)
    targets[[3, 70]] = -1
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    loss = 0.25 * fp8_cross_entropy(leaves[0].view(2, 48, 64), leaves[1], targets.view(2, 48), 301)
    loss.backward()
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = 0.25 * F.cross_entropy(exact[0] @ exact[1][:301].t(), targets, ignore_index=-1)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=tolerance / 10)
    assert leaves[1].grad.dtype == torch.float32 and leaves[0].grad.dtype == torch.bfloat16
    assert not leaves[0].grad[[3, 70]].any() and not leaves[1].grad[301:].any()
    for leaf, true in zip(leaves, exact):
        assert (leaf.grad.double() - true.grad).norm() < tolerance * true.grad.norm()


def test_a_models_head():
    """The loss and the gradients of a whole model; only the head is float8."""
    models = []
    for fp8_head_on in (False, True):
        torch.manual_seed(1)
        models.append(GPT(GPTConfig(**SIZES, fused_cross_entropy=True, fp8_head=fp8_head_on)).to(DEVICE))
    x, y = (tensor.to(DEVICE) for tensor in batch(B=2))
    (expected, gradients), (loss, found) = (loss_and_gradients(model, x, y) for model in models)
    assert loss != expected and loss == pytest.approx(expected, rel=1e-2)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() < 0.35 * gradient.norm(), name


def test_operator_registration():
    x, weight, targets = head(16, 16, 60)
    for requires_grad in (False, True):
        tensors = x.requires_grad_(requires_grad), weight.requires_grad_(requires_grad)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(fp8_head.summed_cross_entropy, (*tensors, targets, 60), test_utils=checks)
