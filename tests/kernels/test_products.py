"""The MLP's operation against float64: cuBLASLt's on a GPU where there is one, else PyTorch's own products."""

import pytest
import torch
import torch.nn.functional as F
from test_model import SIZES, assert_same, batch, loss_and_gradients

from kernels import cublaslt
from model import GPT, GPTConfig
from sample import generate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def inputs(N, C, dtype, D=None):
    """x, w1, b1, w2, b2, and the gradient to the output; in float64 what they are in dtype."""
    D = D or 4 * C
    shapes = [((N, C), 1), ((D, C), C**-0.5), ((D,), 1), ((C, D), D**-0.5), ((C,), 1), ((N, C), 1)]
    return [(scale * torch.randn(shape)).to(dtype).double().to(DEVICE) for shape, scale in shapes]


def mlp(x, w1, b1, w2, b2, keep=True):
    return cublaslt.mlp(x, w1, b1, w2, b2, keep)[0]


def plain(x, w1, b1, w2, b2):
    return F.gelu(x @ w1.t() + b1, approximate="tanh") @ w2.t() + b2


def output_and_gradients(function, tensors, dtype):
    *leaves, dy = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def error(one, other):
    return ((one.double() - other).norm() / other.norm()).item()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("N, C, D", [(1, 16, 64), (13, 16, 64), (131, 64, 256), (257, 33, 77), (512, 768, 3072)])
def test_values_and_gradients(N, C, D, dtype, tolerance, keep):
    tensors = inputs(N, C, dtype, D)
    found = output_and_gradients(lambda *given: mlp(*given, keep), tensors, dtype)
    for ours, expected in zip(found, output_and_gradients(plain, tensors, torch.float64)):
        assert ours.dtype == dtype and error(ours, expected) < tolerance


def test_far_from_zero():
    """GELU is the identity there, or 0, and its slope 1 or 0: nothing overflows on the way."""
    x = torch.tensor([[-300.0, -20, 0, 20, 300] + [0] * 11], device=DEVICE).bfloat16()
    eye, zero = torch.eye(16, device=DEVICE).bfloat16(), torch.zeros(16, device=DEVICE).bfloat16()
    y, dx, *_ = output_and_gradients(mlp, [x, eye, zero, eye, zero, torch.ones_like(x)], torch.bfloat16)
    assert torch.equal(y[0, :5].float().cpu(), torch.tensor([0.0, 0, 0, 20, 300]))
    assert torch.equal(dx[0, :5].float().cpu(), torch.tensor([0, 0, 0.5, 1, 1]))


def test_the_compiler_knows_what_they_return():
    for dtype, keep in ((torch.float32, True), (torch.bfloat16, False)):
        x, w1, b1, w2, b2, dy = (each.to(dtype) for each in inputs(6, 16, dtype))
        leaves = [each.requires_grad_() for each in (x, w1, b1, w2, b2)]
        torch.library.opcheck(cublaslt.mlp, (*leaves, keep))
        _, h, a = cublaslt.mlp(*leaves, keep)
        torch.library.opcheck(cublaslt.mlp_backward, tuple(each.detach() for each in (dy, x, w1, w2, h, a)))


def test_a_small_bias_is_not_lost_in_rounding():
    """After the first steps biases are far below what bf16 tells apart beside the MLP's output, but they add up."""
    x, w1, b1, w2, b2, _ = (each.bfloat16() for each in inputs(4096, 64, torch.bfloat16))
    small = torch.full_like(b2, 1e-4)
    moved = mlp(x, w1, b1, w2, small).float() - mlp(x, w1, b1, w2, torch.zeros_like(small)).float()
    assert moved.mean().item() == pytest.approx(1e-4, rel=0.2)


def model(**options):
    torch.manual_seed(1)
    return GPT(GPTConfig(**SIZES, **options)).to(DEVICE)


def test_the_model_is_the_same():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    fused = model(fused_gelu=True)
    expected = loss_and_gradients(model(), x, y)
    for block in (None, *fused.transformer.h):  # GELU's output kept in all layers, then in fewer and fewer
        if block is not None:
            block.mlp.keep_gelu = False
        assert_same(loss_and_gradients(fused, x, y), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_works_in_16_bits(dtype):
    x, y = (tensor.to(DEVICE) for tensor in batch())
    losses, gradients = [], []
    for fused in (False, True):
        kinds = []
        gpt = model(fused_gelu=fused)
        gpt.transformer.h[1].mlp.register_forward_hook(lambda module, given, y, kinds=kinds: kinds.append(y.dtype))
        with torch.autocast(DEVICE, dtype):
            loss, gradient = loss_and_gradients(gpt, x, y)
        losses.append(loss)
        gradients.append(gradient["transformer.h.1.mlp.c_fc.weight"])
        assert kinds == [dtype]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert gradients[1].dtype == torch.float32 and error(gradients[1], gradients[0].double()) < 3e-2


def test_what_is_not_contiguous():
    fused = model(fused_gelu=True).transformer.h[0].mlp
    x = torch.randn(5, 3, 2 * SIZES["n_embd"], device=DEVICE)[..., : SIZES["n_embd"]].transpose(0, 1)
    expected = fused.c_proj(F.gelu(fused.c_fc(x), approximate="tanh"))
    torch.testing.assert_close(fused(x), expected)


def test_results_repeat():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    with torch.autocast(DEVICE, torch.bfloat16):
        one, two = (loss_and_gradients(model(fused_gelu=True), x, y) for _ in range(2))
    assert one[0] == two[0] and all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def test_evaluation_and_generation_agree_with_the_plain_model():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    both = model().eval(), model(fused_gelu=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(*(each(x, y, reduction="none") for each in both))
        tokens = [torch.cat(list(generate(each, x[:, :3], 4, temperature=0))) for each in both]
        assert torch.equal(*tokens)


# ----------------------------------------------------------------------------------------------------------------------
# cuBLASLt itself


def pairs(dtype):
    """a and b of a b, each as it is and as a transposed view, and where the product goes."""
    for N, K, M in ((64, 128, 256), (96, 768, 3072), (1000, 64, 40)):
        a, b = torch.randn(N, K, device=DEVICE).to(dtype), torch.randn(K, M, device=DEVICE).to(dtype)
        for one in (a, a.t().contiguous().t()):
            for other in (b, b.t().contiguous().t()):
                yield one, other, torch.empty(N, M, device=DEVICE, dtype=dtype)


@on_a_gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-3), (torch.float16, 5e-4)])
def test_products_either_way_around(dtype, tolerance):
    for a, b, out in pairs(dtype):
        assert cublaslt.launch(a, b, out)
        assert error(out, a.double() @ b.double()) < tolerance
        bias = torch.randn(b.size(1), device=DEVICE).to(dtype)
        assert cublaslt.launch(a, b, out, bias=bias)
        assert error(out, a.double() @ b.double() + bias.double()) < tolerance


@on_a_gpu
def test_gelu_at_the_end():
    """The two of the MLP are cuBLASLt's, not PyTorch's."""
    x, w1, b1, w2, _, dy = (each.bfloat16() for each in inputs(512, 768, torch.bfloat16))
    h, out = (torch.empty(512, 3072, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    assert cublaslt.launch(x, w1.t(), out, cublaslt.GELU, b1, h)
    expected = x.double() @ w1.double().t() + b1.double()
    assert error(h, expected) < 3e-3 and error(out, F.gelu(expected, approximate="tanh")) < 3e-3
    assert cublaslt.launch(dy, w2, out, cublaslt.GELU_BACKWARD, aux=h)
    slope = torch.ops.aten.gelu_backward(dy.double() @ w2.double(), h.double(), approximate="tanh")
    assert error(out, slope) < 3e-3


@on_a_gpu
@pytest.mark.parametrize("fast", [True, False])
def test_in_8_bits(fast):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("older than Hopper")
    a, b = (torch.randn(size, 768, device=DEVICE).to(torch.float8_e4m3fn) for size in (512, 256))
    scales = dict(scale_a=torch.tensor(0.5, device=DEVICE), scale_b=torch.tensor(3.0, device=DEVICE))
    out = torch.empty(512, 256, device=DEVICE, dtype=torch.bfloat16)
    assert cublaslt.launch(a, b.t(), out, fast=fast, **scales)
    assert error(out, 1.5 * a.double() @ b.double().t()) < (2e-2 if fast else 3e-3)


@on_a_gpu
def test_what_was_measured_changes_no_bit(monkeypatch):
    """Of the sizes that training has, on other numbers than those of the measurement."""
    for N, K, M, extra in (
        (8192, 768, 3072, ("gelu", "bias", "aux")),
        (8192, 768, 3072, ("gelu_backward", "aux")),
        (8192, 3072, 768, ("bias",)),
        (8192, 3072, 768, ()),
        (4096, 768, 50304, ()),
    ):
        out = torch.empty(N, M, device=DEVICE, dtype=torch.bfloat16)

        def launch(seed, N=N, K=K, M=M, extra=extra, out=out):
            generator = torch.Generator(DEVICE).manual_seed(seed)
            shapes = (N, K), (M, K), (N, M), (M,)
            a, b, aux, bias = (torch.randn(s, device=DEVICE, generator=generator).bfloat16() for s in shapes)
            gelu = cublaslt.GELU if "gelu" in extra else cublaslt.GELU_BACKWARD if "gelu_backward" in extra else 0
            given = dict(bias=bias if "bias" in extra else None, aux=aux if "aux" in extra else None)
            assert cublaslt.launch(a, b.t(), out, gelu, **given)
            return out.clone(), aux

        results = []
        for tune, seeds in ((True, (1, 2)), (False, (2,))):
            monkeypatch.setattr(cublaslt, "plans", {})
            monkeypatch.setattr(cublaslt, "autotune", tune)
            for seed in seeds:
                result = launch(seed)
            results.append(result)
        assert all(map(torch.equal, *results))


@on_a_gpu
def test_what_is_not_aligned_is_left_to_pytorch():
    a, b = torch.randn(64, 72, device=DEVICE).bfloat16()[:, 3:67], torch.randn(64, 32, device=DEVICE).bfloat16()
    assert not cublaslt.launch(a, b, a.new_empty(64, 32))
    assert error(cublaslt.product(a, b), a.double() @ b.double()) < 3e-3
