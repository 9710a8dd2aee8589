"""Packed attention against the plain path, on a GPU with cuDNN's front end."""

import pytest
import torch
from test_model import SIZES, batch

from model import GPT, GPTConfig

pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


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
    loss, found = run(x, y, packed_attention=True)
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() < 2e-2 * gradient.norm(), name
