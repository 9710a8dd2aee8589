"""Against float64 references: on a GPU where there is one, else in Triton's interpreter (see conftest)."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_model import SIZES, batch, loss_and_gradients

from model import GPT, GPTConfig
from sample import generate

kernels = pytest.importorskip("kernels", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]  # the interpreter truncates to bfloat16
SCALE = torch.tensor(0.5, device=DEVICE)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(ours, reference, inputs, tolerance):
    """Values and gradients of ours(*inputs) against reference, which gets the inputs in float64."""
    results = []
    for function, dtype in ((ours, None), (reference, torch.float64)):
        leaves = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in inputs]
        outputs = function(*leaves)
        generator = torch.Generator().manual_seed(7)
        factors = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
        sum((y.double() * f.to(DEVICE)).sum() for y, f in zip(outputs, factors)).backward()
        results.append([*(y.detach().double() for y in outputs), *(x.grad.double() for x in leaves)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize("dtype, tolerance", KINDS)
@pytest.mark.parametrize("V, table", [(301, 384), (301, 301), (256, 256), (50257, 50304), (50257, 50257)])
def test_cross_entropy_and_its_gradient(V, table, dtype, tolerance):
    """With ignored targets, the first and the last word, and padding that would win if it were counted."""
    logits = 3 * normal(5, table, dtype=dtype)
    logits[:, V:] = 50
    targets = torch.tensor([0, V - 1, -1, 3, V // 2], device=DEVICE)
    leaf = logits[:, :V].double().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=-1, reduction="none")
    expected.sum().backward()
    losses = kernels.cross_entropy_(logits, targets, V)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :V].double(), leaf.grad, rtol=max(1e-4, tolerance), atol=1e-6)
    assert not logits[:, V:].any()


def test_a_word_far_likelier_than_the_target():
    """e^88 is more than float32 holds: then the maximum itself is subtracted."""
    logits = normal(3, 384)
    logits[1, 17] = 300
    logits[2] -= 300
    targets = torch.tensor([4, 5, -1], device=DEVICE)
    leaf = logits[:, :301].double().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=-1, reduction="none")
    expected.sum().backward()
    losses = kernels.cross_entropy_(logits, targets, 301)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :301].double(), leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype, tolerance", KINDS)
@pytest.mark.parametrize("rows", [7, 50, 1000])
def test_the_head_in_parts(monkeypatch, rows, dtype, tolerance):
    """Parts that do not divide the batch; the gradients come with the factor of the loss."""
    monkeypatch.setattr(kernels, "ROWS_OF_LOGITS", rows)
    V, C = 301, 48
    targets = torch.randint(V, (3, 17), device=DEVICE)
    targets[1, 4] = targets[2] = -1
    table = normal(384, C) / C**0.5
    table[V:] = 0

    def reference(x, weight):
        logits = x @ weight[:V].t()
        return (0.25 * F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1),)

    ours = lambda x, weight: (0.25 * kernels.mean_loss(x, weight, targets, V),)  # noqa: E731
    check(ours, reference, [normal(3, 17, C, dtype=dtype), table], tolerance)


@pytest.mark.parametrize("shape", [(4, 16), (68, 48), (128, 130), (1024, 768)])
def test_float8_is_exact_where_it_can_be(shape):
    """What 8 bits hold comes out as it is, both ways around; the interpreter rounds other numbers wrongly."""
    x = 0.5 * torch.randint(-15, 16, shape, device=DEVICE).float()
    x[0, 0] = -600
    peak = torch.ones((), device=DEVICE)
    small, small_t, sums = kernels.quantize(x, SCALE, peak, column_sums=True)
    expected = (x / SCALE).clamp(-448, 448)
    assert torch.equal(small.float(), expected) and torch.equal(small_t.float(), expected.t())
    assert peak == 600 and torch.equal(sums, x.sum(0))
    kernels.quantize(0.1 * x, SCALE, peak)
    assert peak == 600


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter does not round to float8 as GPUs do")
def test_float8_rounds_as_pytorch_does():
    x = 3 * normal(512, 768, dtype=torch.bfloat16)
    small, small_t, _ = kernels.quantize(x, SCALE / 20, torch.zeros((), device=DEVICE))
    expected = (x.float() / (SCALE / 20)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(small.float(), expected.float()) and torch.equal(small_t.float(), expected.float().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 16), (68, 48), (128, 130)])
def test_gelu_in_float8(shape, dtype):
    """As GELU in float32, to 3 bits; the bias's gradient is exact. Both ways around they are the same."""
    h, bias, dy = 2 * normal(*shape, dtype=dtype), normal(shape[1]), normal(*shape, dtype=dtype)
    leaves = [h.double().requires_grad_(), bias.double().requires_grad_()]
    expected = F.gelu(sum(leaves), approximate="tanh")
    expected.backward(dy.double())
    scale, peak = torch.tensor(8 / 448, device=DEVICE), torch.zeros((), device=DEVICE)
    small, small_t = kernels.gelu(h, bias, scale, peak)
    assert torch.equal(small.float().t(), small_t.float())
    assert (small.float() * scale - expected).norm() < 0.15 * expected.norm()
    assert peak.item() == pytest.approx(expected.abs().max().item(), rel=1e-5)
    peak.zero_()
    (small, small_t), bias_gradient = kernels.gelu_backward(h, bias, dy, scale, peak)
    assert torch.equal(small.float().t(), small_t.float())
    assert (small.float() * scale - leaves[0].grad).norm() < 0.15 * leaves[0].grad.norm()
    assert peak.item() == pytest.approx(leaves[0].grad.abs().max().item(), rel=1e-5)
    torch.testing.assert_close(bias_gradient.double(), leaves[1].grad, rtol=1e-4, atol=1e-5)


def model(**options):
    torch.manual_seed(1)
    return GPT(GPTConfig(**SIZES, **options)).to(DEVICE)


@pytest.fixture
def calls(monkeypatch):
    """The types and rows of what cross_entropy_ got: [(dtype, rows), ...]."""
    seen = []

    def spy(real, x, *rest):
        seen.append((x.dtype, len(x)))
        return real(x, *rest)

    monkeypatch.setattr(kernels, "cross_entropy_", partial(spy, kernels.cross_entropy_))
    return seen


def test_the_model_is_the_same(calls, monkeypatch):
    monkeypatch.setattr(kernels, "ROWS_OF_LOGITS", 30)
    x, y = (tensor.to(DEVICE) for tensor in batch())
    y[0, :5] = -1
    plain, fused = (loss_and_gradients(model(fused_cross_entropy=fused), x, y) for fused in (False, True))
    assert fused[0] == pytest.approx(plain[0], rel=1e-5)
    for name, gradient in plain[1].items():
        torch.testing.assert_close(fused[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert [rows for _, rows in calls] == [24, 24, 24]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_they_work_in_16_bits(calls, dtype):
    x, y = (tensor.to(DEVICE) for tensor in batch())
    losses = []
    for fused in (False, True):
        with torch.autocast(DEVICE, dtype):
            losses.append(loss_and_gradients(model(fused_cross_entropy=fused), x, y)[0])
    assert losses[1] == pytest.approx(losses[0], rel=3e-3)
    assert {kind for kind, _ in calls} == {dtype}


def test_the_compiler_knows_what_they_return():
    """Shapes, types and strides of the operations' stand-ins, and that nothing returned is an input."""
    targets = torch.arange(6, device=DEVICE)
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, weights_dtype, requires_grad in itertools.product(dtypes, dtypes, (False, True)):
        x, weight = normal(6, 16, dtype=dtype), normal(32, 16, dtype=weights_dtype)
        x, weight = x.requires_grad_(requires_grad), weight.requires_grad_(requires_grad)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(kernels.head_loss, (x, weight, targets, 30, 2), test_utils=checks)


def test_what_is_not_contiguous():
    x, weight, targets = normal(4, 1, 16), normal(32, 16), torch.randint(30, (4, 9), device=DEVICE)[:, 5:6]
    logits = (x @ weight.t())[..., :30].flatten(0, 1)
    assert kernels.mean_loss(x, weight, targets, 30).item() == pytest.approx(
        F.cross_entropy(logits, targets.flatten()).item(), rel=1e-4
    )


def test_results_repeat():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    one, two = (loss_and_gradients(model(fused_cross_entropy=True), x, y) for _ in range(2))
    assert one[0] == two[0] and all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def test_evaluation_and_generation_agree_with_the_plain_model():
    x, y = (tensor.to(DEVICE) for tensor in batch())
    plain, fused = model(), model(fused_cross_entropy=True)
    with torch.no_grad():
        torch.testing.assert_close(fused(x, y, reduction="none"), plain(x, y, reduction="none"))
        torch.testing.assert_close(fused.eval()(x), plain.eval()(x))
        tokens = [torch.cat(list(generate(each, x[:, :3], 4, temperature=0))) for each in (plain, fused)]
        assert torch.equal(*tokens)


@pytest.mark.parametrize("B, K, N", [(1, 48, 10), (3, 33, 70), (4, 1030, 9)])
def test_a_linear_layer_for_one_token(B, K, N):
    """With all that may come with the product, and with nothing; K longer than a block, and shorter."""
    x, weight, bias, added = normal(B, K), normal(N, K), normal(N), normal(B, N)
    norm = torch.nn.LayerNorm(K, device=DEVICE)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    expected = F.linear(norm.double()(x.double()), weight.double(), bias.double())
    expected = added.double() + F.gelu(expected, approximate="tanh")
    found = kernels.token_linear(x, weight, bias, norm=norm.float(), gelu=True, added=added)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernels.token_linear(x, weight), F.linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 300])
def test_attention_of_one_token(length):
    B, H, D, capacity = 2, 3, 10, 301
    qkv, keys, values = 3 * normal(B, 3 * H * D), normal(B, H, capacity, D), normal(B, H, capacity, D)
    q, k, v = qkv.double().view(B, 3, H, D).transpose(0, 1)
    before = [torch.cat((old[:, :, :length].double(), new[:, :, None]), 2) for old, new in ((keys, k), (values, v))]
    after = keys[:, :, length + 1 :].clone()
    y = kernels.token_attention(qkv, keys, values, torch.tensor([length], device=DEVICE))
    expected = F.scaled_dot_product_attention(q[:, :, None], *before).flatten(1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(keys[:, :, length], k.float()) and torch.equal(values[:, :, length], v.float())
    assert torch.equal(keys[:, :, length + 1 :], after)
