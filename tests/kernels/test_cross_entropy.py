"""Fused cross-entropy against float64: on a GPU where there is one, else in Triton's interpreter (see conftest)."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_model import SIZES, assert_same, batch, loss_and_gradients

from model import GPT, GPTConfig

pytest.importorskip("triton", reason="needs Triton")
from kernels import cross_entropy  # noqa: E402
from kernels.cross_entropy import cross_entropy_, fused_cross_entropy  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu(cpu_too=True)
DTYPES = [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]  # the interpreter truncates to bfloat16


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def value_and_gradients(function, leaves):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    value = function(*leaves)
    value.backward()
    return [value.detach().double(), *(x.grad.double() for x in leaves)]


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("V, V_padded", [(301, 384), (301, 301), (256, 256), (50257, 50304), (50257, 50257)])
def test_losses_and_gradient_of_logits(V, V_padded, dtype, tolerance):
    """With ignored targets, the first and the last token, and padding that would dominate the softmax."""
    logits = 3 * normal(5, V_padded, dtype=dtype)
    logits[:, V:] = 50
    targets = torch.tensor([0, V - 1, -1, 3, V // 2], device=DEVICE)
    leaf = logits[:, :V].double().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=-1, reduction="none")
    expected.sum().backward()
    losses = cross_entropy_(logits, targets, V)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :V].double(), leaf.grad, rtol=max(1e-4, tolerance), atol=1e-6)
    assert not logits[:, V:].any()


def test_overflow_subtracts_the_maximum():
    """A token e^88 times likelier than the target overflows float32 when the target's logit is the shift."""
    logits = normal(3, 384)
    logits[1, 17] = 300
    logits[2] -= 300
    targets = torch.tensor([4, 5, -1], device=DEVICE)
    leaf = logits[:, :301].double().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=-1, reduction="none")
    expected.sum().backward()
    losses = cross_entropy_(logits, targets, 301)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :301].double(), leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("rows", [7, 50, 1000])
def test_chunks(monkeypatch, rows, dtype, tolerance):
    """Chunks that do not divide the batch, and a loss with a factor."""
    monkeypatch.setattr(cross_entropy, "LOGIT_ROWS", rows)
    V, C = 301, 48
    targets = torch.randint(V, (3, 17), device=DEVICE)
    targets[1, 4] = targets[2] = -1
    x, weight = normal(3, 17, C, dtype=dtype), normal(384, C) / C**0.5
    weight[V:] = 0

    def reference(x, weight):
        logits = x @ weight[:V].t()
        return 0.25 * F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    found = value_and_gradients(lambda x, weight: 0.25 * fused_cross_entropy(x, weight, targets, V), [x, weight])
    expected = value_and_gradients(reference, [x.double(), weight.double()])
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())


def test_operator_registration():
    """Shapes, dtypes and strides of the fake kernel, and no output aliases an input."""
    targets = torch.arange(6, device=DEVICE)
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, weight_dtype, requires_grad in itertools.product(dtypes, dtypes, (False, True)):
        x, weight = normal(6, 16, dtype=dtype), normal(32, 16, dtype=weight_dtype)
        x, weight = x.requires_grad_(requires_grad), weight.requires_grad_(requires_grad)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(cross_entropy.summed_cross_entropy, (x, weight, targets, 30), test_utils=checks)


def test_non_contiguous_inputs():
    x, weight, targets = normal(4, 1, 16), normal(32, 16), torch.randint(30, (4, 9), device=DEVICE)[:, 5:6]
    logits = (x @ weight.t())[..., :30].flatten(0, 1)
    assert fused_cross_entropy(x, weight, targets, 30).item() == pytest.approx(
        F.cross_entropy(logits, targets.flatten()).item(), rel=1e-4
    )


# ----------------------------------------------------------------------------------------------------------------------
# In the model


def model(**options):
    torch.manual_seed(1)
    return GPT(GPTConfig(**SIZES, **options)).to(DEVICE)


@pytest.fixture
def calls(monkeypatch):
    """The dtype and the number of rows of the logits of each call of cross_entropy_."""
    seen = []

    def spy(logits, *rest):
        seen.append((logits.dtype, len(logits)))
        return cross_entropy_(logits, *rest)

    monkeypatch.setattr(cross_entropy, "cross_entropy_", spy)
    return seen


def test_model_is_the_same(calls, monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGIT_ROWS", 30)
    x, y = (tensor.to(DEVICE) for tensor in batch())
    y[0, :5] = -1
    plain, fused = (loss_and_gradients(model(fused_cross_entropy=fused), x, y) for fused in (False, True))
    assert_same(fused, plain, rtol=1e-3, atol=1e-5)
    assert fused[0] == pytest.approx(plain[0], rel=1e-5)
    assert [rows for _, rows in calls] == [24, 24, 24]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_16_bits_under_autocast(calls, dtype):
    x, y = (tensor.to(DEVICE) for tensor in batch())
    losses = []
    for fused in (False, True):
        with torch.autocast(DEVICE, dtype):
            losses.append(loss_and_gradients(model(fused_cross_entropy=fused), x, y)[0])
    assert losses[1] == pytest.approx(losses[0], rel=3e-3)
    assert {dtype for dtype, _ in calls} == {dtype}


def test_results_repeat():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    one, two = (loss_and_gradients(model(fused_cross_entropy=True), x, y) for _ in range(2))
    assert_same(one, two, rtol=0, atol=0)


def test_evaluation_takes_the_plain_path(calls):
    x, y = (tensor.to(DEVICE) for tensor in batch())
    plain, fused = model().eval(), model(fused_cross_entropy=True).eval()
    with torch.no_grad():
        assert torch.equal(fused(x, y, reduction="none"), plain(x, y, reduction="none"))
        assert torch.equal(fused(x), plain(x))
    assert not calls
