"""The fused MLP against float64: with cuBLASLt's epilogues on a GPU, else with PyTorch's operators."""

import pytest
import torch
import torch.nn.functional as F
from test_model import SIZES, assert_same, batch, loss_and_gradients

from kernels import mlp
from model import GPT, GPTConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu(cpu_too=True)


def inputs(N, C, dtype, D=None):
    """x, w1, b1, w2, b2 and the gradient of the output: values of dtype, in float64."""
    D = D or 4 * C
    shapes = [((N, C), 1), ((D, C), C**-0.5), ((D,), 1), ((C, D), D**-0.5), ((C,), 1), ((N, C), 1)]
    return [(scale * torch.randn(shape)).to(dtype).double().to(DEVICE) for shape, scale in shapes]


def fused(x, w1, b1, w2, b2, keep_gelu=True):
    return mlp.mlp(x, w1, b1, w2, b2, keep_gelu)[0]


def plain(x, w1, b1, w2, b2):
    return F.gelu(x @ w1.t() + b1, approximate="tanh") @ w2.t() + b2


def output_and_gradients(function, tensors, dtype):
    *leaves, dy = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def error(one, other):
    return ((one.double() - other).norm() / other.norm()).item()


@pytest.mark.parametrize("keep_gelu", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("N, C, D", [(1, 16, 64), (13, 16, 64), (131, 64, 256), (257, 33, 77), (64, 768, 3072)])
def test_values_and_gradients(N, C, D, dtype, tolerance, keep_gelu):
    tensors = inputs(N, C, dtype, D)
    found = output_and_gradients(lambda *given: fused(*given, keep_gelu), tensors, dtype)
    for ours, expected in zip(found, output_and_gradients(plain, tensors, torch.float64)):
        assert ours.dtype == dtype and error(ours, expected) < tolerance


def test_large_inputs():
    """Far from 0 GELU is the identity or 0, and its derivative 1 or 0: nothing overflows on the way."""
    x = torch.tensor([[-300.0, -20, 0, 20, 300] + [0] * 11], device=DEVICE).bfloat16()
    eye, zero = torch.eye(16, device=DEVICE).bfloat16(), torch.zeros(16, device=DEVICE).bfloat16()
    y, dx, *_ = output_and_gradients(fused, [x, eye, zero, eye, zero, torch.ones_like(x)], torch.bfloat16)
    assert torch.equal(y[0, :5].float().cpu(), torch.tensor([0.0, 0, 0, 20, 300]))
    assert torch.equal(dx[0, :5].float().cpu(), torch.tensor([0, 0, 0.5, 1, 1]))


def test_small_bias_survives_rounding():
    """After the first steps biases are far below the resolution of bf16 at the MLP's output, but they add up."""
    x, w1, b1, w2, b2, _ = (each.bfloat16() for each in inputs(4096, 64, torch.bfloat16))
    small = torch.full_like(b2, 1e-4)
    difference = fused(x, w1, b1, w2, small).float() - fused(x, w1, b1, w2, torch.zeros_like(small)).float()
    assert difference.mean().item() == pytest.approx(1e-4, rel=0.2)


def test_operator_registration():
    """Shapes, dtypes and strides of the fake kernels, and no output aliases an input."""
    for dtype, keep_gelu in ((torch.float32, True), (torch.bfloat16, False)):
        x, w1, b1, w2, b2, dy = (each.to(dtype) for each in inputs(6, 16, dtype))
        leaves = [each.requires_grad_() for each in (x, w1, b1, w2, b2)]
        torch.library.opcheck(mlp.mlp, (*leaves, keep_gelu))
        _, h, a = mlp.mlp(*leaves, keep_gelu)
        torch.library.opcheck(mlp.mlp_backward, tuple(each.detach() for each in (dy, x, w1, w2, h, a)))


# ----------------------------------------------------------------------------------------------------------------------
# In the model


def model(**options):
    torch.manual_seed(1)
    return GPT(GPTConfig(**SIZES, **options)).to(DEVICE)


def test_model_is_the_same():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    gpt = model(fused_gelu=True)
    expected = loss_and_gradients(model(), x, y)
    for block in (None, *gpt.transformer.h):  # all layers keep GELU's output, then fewer and fewer
        if block is not None:
            block.mlp.keep_gelu = False
        assert_same(loss_and_gradients(gpt, x, y), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_is_16_bits_under_autocast(dtype):
    x, y = (tensor.to(DEVICE) for tensor in batch())
    losses, gradients = [], []
    for fused_gelu in (False, True):
        dtypes = []
        gpt = model(fused_gelu=fused_gelu)
        gpt.transformer.h[1].mlp.register_forward_hook(lambda module, args, y, dtypes=dtypes: dtypes.append(y.dtype))
        with torch.autocast(DEVICE, dtype):
            loss, gradient = loss_and_gradients(gpt, x, y)
        losses.append(loss)
        gradients.append(gradient["transformer.h.1.mlp.c_fc.weight"])
        assert dtypes == [dtype]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert gradients[1].dtype == torch.float32 and error(gradients[1], gradients[0].double()) < 3e-2


def test_non_contiguous_input():
    module = model(fused_gelu=True).transformer.h[0].mlp
    x = torch.randn(5, 3, 2 * SIZES["n_embd"], device=DEVICE)[..., : SIZES["n_embd"]].transpose(0, 1)
    torch.testing.assert_close(module(x), module.c_proj(F.gelu(module.c_fc(x), approximate="tanh")))


def test_results_repeat():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    with torch.autocast(DEVICE, torch.bfloat16):
        one, two = (loss_and_gradients(model(fused_gelu=True), x, y) for _ in range(2))
    assert_same(one, two, rtol=0, atol=0)


def test_evaluation_and_decoding_agree_with_the_plain_model():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    both = model().eval(), model(fused_gelu=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(*(each(x, y, reduction="none") for each in both))
        caches = [each.new_cache() for each in both]
        for tokens in (x[:, :3], x[:, 3:4], x[:, 4:5]):  # the prompt, then one token at a time
            torch.testing.assert_close(*(each(tokens, cache=cache) for each, cache in zip(both, caches)))
