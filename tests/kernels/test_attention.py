"""The choice of F.scaled_dot_product_attention's kernel, and attention on packed q, k and v by cuDNN's front end."""

import pytest
import torch
import torch.nn.functional as F
from test_model import SIZES, batch
from torch.backends import cuda

from common.errors import UserError
from kernels import packed_qkv
from kernels.attention import CAN_USE, SDPA_OPERATORS, limit_sdpa, missing_sdpa_kernel
from model import GPT, GPTConfig

ENABLED = dict(cudnn=cuda.cudnn_sdp_enabled, flash=cuda.flash_sdp_enabled, efficient=cuda.mem_efficient_sdp_enabled)
cudnn = pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")


@pytest.fixture
def restore():
    yield
    limit_sdpa("sdpa")


@pytest.mark.parametrize("name", [*CAN_USE, "sdpa", "written_out", "cudnn_packed"])
def test_only_the_chosen_kernel_is_enabled(name, restore):
    limit_sdpa(name)
    chosen = {name} & CAN_USE.keys() or CAN_USE.keys()
    assert {backend for backend, enabled in ENABLED.items() if enabled()} == chosen


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAN_USE)
def test_the_chosen_kernel_runs(name, restore):
    if missing_sdpa_kernel(name, torch.device("cuda"), torch.bfloat16, 64):
        pytest.skip(f"PyTorch has no {name} kernel here")
    limit_sdpa(name)
    q, k, v = torch.randn(3, 2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    kernels = {event.key for event in profile.key_averages()} & set(SDPA_OPERATORS)
    assert kernels == {f"aten::_scaled_dot_product_{name}_attention"}


@pytest.mark.gpu
def test_a_size_without_a_kernel_is_refused():
    reason = missing_sdpa_kernel("flash", torch.device("cuda"), torch.float32, 64)
    assert reason == "PyTorch has no flash kernel here for torch.float32 and heads of width 64"


def loss_and_gradients(x, y, **options):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**(SIZES | dict(n_embd=128, n_head=2)), **options)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.gpu
def test_model_is_the_same():
    x, y = (tensor.cuda() for tensor in batch())
    expected, gradients = loss_and_gradients(x, y)
    loss, found = loss_and_gradients(x, y, attention="cudnn_packed")
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() < 2e-2 * gradient.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("B, T, heads, width", [(2, 1024, 12, 64), (3, 37, 2, 64), (1, 200, 5, 32), (2, 129, 3, 128)])
def test_against_float64(B, T, heads, width, dtype, tolerance):
    leaf = torch.randn(B, T, 3 * heads * width, device="cuda").to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    dy = torch.randn(B, T, heads * width, device="cuda").to(dtype)
    y, _ = packed_qkv.packed_qkv(leaf, heads)
    y.backward(dy)
    q, k, v = (part.unflatten(2, (heads, width)).transpose(1, 2) for part in exact.chunk(3, dim=2))
    future = torch.ones(T, T, device="cuda", dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) / width**0.5).masked_fill(future, -torch.inf)
    expected = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
    expected.backward(dy.double())
    for found, reference in ((y, expected), (leaf.grad, exact.grad)):
        assert (found.double() - reference).norm() < tolerance * reference.norm()


@pytest.mark.gpu
def test_operator_registration():
    """Shapes, dtypes and strides of the fake kernels, and no output aliases an input."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    qkv = torch.randn(2, 64, 3 * 128, device="cuda").bfloat16()
    for leaf in (qkv, qkv.clone().requires_grad_()):
        torch.library.opcheck(packed_qkv.packed_qkv, (leaf, 2), test_utils=checks)
    y, stats = packed_qkv.packed_qkv(qkv, 2)
    torch.library.opcheck(
        packed_qkv.packed_qkv_backward, (torch.randn_like(y), qkv, y, stats, 2, None, False), test_utils=checks
    )


@pytest.mark.gpu
def test_unsupported_head_width():
    with pytest.raises(UserError, match=r"2 heads of width 20, .*multiple of 8.*: use --attention sdpa$"):
        packed_qkv.packed_qkv(torch.randn(1, 64, 3 * 40, device="cuda").bfloat16(), 2)


def test_cudnn_error_is_one_line(monkeypatch):
    def refuse(*_):
        raise cudnn.cudnnGraphNotSupportedError("no engine for this graph.\nmore lines")

    monkeypatch.setattr(packed_qkv, "plan", refuse)
    with pytest.raises(UserError) as caught:
        packed_qkv.packed_qkv(torch.randn(1, 64, 3 * 16).bfloat16(), 2)
    assert str(caught.value) == (
        "cuDNN has no attention for 2 heads of width 8, 1 sequences of 64 tokens (no engine for this graph): "
        "use --attention sdpa"
    )
