"""Packed attention against the plain path, on a GPU with cuDNN's front end."""

import pytest
import torch
from test_model import SIZES, batch

from model import GPT, GPTConfig

pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import attention  # noqa: E402


def run(x, y, **options):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**(SIZES | dict(n_embd=128, n_head=2)), **options)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_packed_attention_is_the_same():
    x, y = (tensor.cuda() for tensor in batch())
    expected, gradients = run(x, y)
    loss, found = run(x, y, packed_qkv=True)
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() < 2e-2 * gradient.norm(), name


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("B, T, heads, width", [(2, 1024, 12, 64), (3, 37, 2, 64), (1, 200, 5, 32), (2, 129, 3, 128)])
def test_against_float64(B, T, heads, width, dtype, tolerance):
    leaf = torch.randn(B, T, 3 * heads * width, device="cuda").to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    dy = torch.randn(B, T, heads * width, device="cuda").to(dtype)
    y, _ = attention.packed_qkv(leaf, heads)
    y.backward(dy)
    q, k, v = (part.unflatten(2, (heads, width)).transpose(1, 2) for part in exact.chunk(3, dim=2))
    scores = (q @ k.transpose(2, 3) / width**0.5).masked_fill(
        ~torch.ones(T, T, device="cuda").tril().bool(), -torch.inf
    )
    expected = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
    expected.backward(dy.double())
    for found, reference in ((y, expected), (leaf.grad, exact.grad)):
        assert (found.double() - reference).norm() < tolerance * reference.norm()
