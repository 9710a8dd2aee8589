"""Flash attention in Triton against PyTorch's in float64: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from test_model import batch, loss_and_gradients, tiny

from common.errors import UserError
from config import Config
from kernels import needs

pytest.importorskip("triton", reason="needs Triton")
from kernels.flash_triton import flash_triton, flash_triton_backward  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.gpu(cpu_too=True)
# Rounding of the inputs of tl.dot; the interpreter has no bfloat16
DTYPES = {torch.bfloat16: 1e-2, torch.float16: 2e-3} if GPU else {torch.float32: 1e-6, torch.float16: 2e-3}
# One token, one block that is not full, blocks and steps that do not divide T, every width
SHAPES = [(2, 1, 1, 16), (2, 37, 2, 64), (1, 193, 1, 32), (1, 129, 1, 128)]
SHAPES += [(2, 1024, 12, 64), (1, 4097, 2, 64), (1, 2048, 6, 128)] if GPU else []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, T, heads, width", SHAPES)
def test_against_float64(B, T, heads, width, dtype):
    leaf = torch.randn(B, T, 3 * heads * width, device=DEVICE).to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    q, k, v = (part.unflatten(2, (heads, width)).transpose(1, 2) for part in exact.chunk(3, dim=2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    dy = torch.randn_like(expected).to(dtype)
    expected.backward(dy.double())
    y, _ = flash_triton(leaf, heads)
    y.backward(dy)
    for found, reference in ((y, expected), (leaf.grad, exact.grad)):
        assert found.isfinite().all()
        assert (found.double() - reference).norm() < DTYPES[dtype] * reference.norm()


def test_large_scores_do_not_overflow():
    """The running maximum grows from block to block, by more than float32's exponent allows."""
    qkv = torch.zeros(1, 200, 3 * 16, device=DEVICE, dtype=torch.float16)
    qkv[..., :16] = 16
    qkv[..., 16:32] = torch.arange(200, device=DEVICE)[:, None]  # scores from 0 to 199 · 64
    qkv[..., 32:] = torch.arange(200, device=DEVICE)[:, None]
    y, _ = flash_triton(qkv, 1)
    assert torch.equal(y, qkv[..., 32:])  # each token sees itself alone


@pytest.mark.parametrize("compiled", [False, True])
def test_model(compiled):
    """Also compiled, as one graph; on a CPU without Inductor."""
    x, y = (tensor.to(DEVICE) for tensor in batch())
    found = []
    for attention in ("written_out", "triton"):
        model = tiny(attention=attention, n_head=2, n_layer=1).to(DEVICE)
        backend = "inductor" if GPU else "aot_eager"
        forward = torch.compile(model, dynamic=False, fullgraph=True, backend=backend) if compiled else model
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
            _, gradients = loss_and_gradients(model, x, y, forward)
        found.append(torch.cat([gradient.flatten() for gradient in gradients.values()]))
    expected, gradients = found
    assert (gradients - expected).norm() < (3e-2 if GPU else 1e-5) * expected.norm()


def test_registration():
    """Shapes, dtypes and strides of the fake kernels, and no output aliases an input."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    qkv = torch.randn(2, 20, 3 * 32, device=DEVICE).to(torch.float16)
    torch.library.opcheck(flash_triton, (qkv.requires_grad_(), 2), test_utils=checks)
    with torch.no_grad():
        y, stats = flash_triton(qkv, 2)
        inputs = torch.randn_like(y), qkv.detach(), y, stats, 2
        torch.library.opcheck(flash_triton_backward, inputs, test_utils=checks)


def test_other_widths_are_refused():
    with pytest.raises(UserError, match="width in .16, 32, 64, 128., not 24"):
        flash_triton(torch.zeros(1, 4, 72, device=DEVICE), 1)


def test_a_width_that_the_kernel_lacks_is_refused_before_the_run():
    assert needs.triton_width(Config(n_embd=768, n_head=12)) is None
    assert "96 wide" in needs.triton_width(Config(n_embd=768, n_head=8))
