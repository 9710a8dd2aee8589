"""8-bit products: near the plain model's, with scales that follow. On a CPU in Triton's interpreter (see conftest)."""

import pytest
import torch
from test_model import SIZES, batch, loss_and_gradients

from model import GPT, GPTConfig
from sample import generate

pytest.importorskip("kernels", reason="needs Triton")
import fp8  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("this GPU is older than Hopper", allow_module_level=True)


def models(**options):
    """A plain model, and one of the same weights that computes in 8 bits."""
    result = []
    for _ in range(2):
        torch.manual_seed(1)
        result.append(GPT(GPTConfig(**SIZES, **options)).to(DEVICE))
    x, y = (tensor.to(DEVICE) for tensor in batch(B=2))
    fp8.convert(result[1], targets=y.numel())
    return *result, x, y


@pytest.mark.parametrize("fused_loss", [False, True])
def test_the_same_model_to_three_bits(fused_cross_entropy, monkeypatch):
    """All products of the blocks are in 8 bits, and no other."""
    products = []
    real = fp8.product
    monkeypatch.setattr(fp8, "product", lambda *args, **kwargs: products.append(args[0]) or real(*args, **kwargs))
    plain, small, x, y = models(fused_cross_entropy=fused_cross_entropy)
    names = [name for name, _ in plain.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in small.named_parameters())
    assert small.state_dict().keys() == plain.state_dict().keys()
    expected, gradients = loss_and_gradients(plain, x, y)
    for _ in range(2):  # with scales that are guessed, then with measured ones
        loss, found = loss_and_gradients(small, x, y)
        assert loss == pytest.approx(expected, rel=2e-3)
        for name in names:
            assert (found[name] - gradients[name]).norm() < 0.35 * gradients[name].norm(), name
        fp8.follow(small, 1)
        small.zero_grad()
    assert len(products) == 2 * 12 * SIZES["n_layer"] and {x.dtype for x in products} == {torch.float8_e4m3fn}


def test_a_step_gone_wrong_leaves_the_scales():
    _, small, x, y = models()
    mlp = small.transformer.h[0].mlp
    small(x, y).backward()
    fp8.follow(small, 1)
    before = mlp.scales.clone()
    small(x, y).backward()
    mlp.peaks.grad[0], mlp.peaks.grad[1], mlp.peaks.grad[2] = float("nan"), float("inf"), 0.0
    fp8.follow(small, 1)
    assert torch.equal(mlp.scales[:3], before[:3]) and mlp.scales.isfinite().all()


def test_scales_follow_the_largest_values():
    _, small, x, y = models()
    mlp = small.transformer.h[0].mlp
    guessed = mlp.scales[:, 0].clone()
    for _ in range(2):
        small(x, y).backward()
    found = mlp.peaks.grad / 2
    assert (found > 0).all()
    fp8.follow(small, 2)
    torch.testing.assert_close(mlp.scales[:4, 0], found * fp8.MARGIN / fp8.LARGEST)
    assert not torch.equal(mlp.scales[:4, 0], guessed[:4]) and not mlp.peaks.grad.any()


def test_weights_in_8_bits_are_those_after_the_step():
    _, small, x, y = models()
    layer = small.transformer.h[1].attn.c_proj
    small(x, y).backward()
    with torch.no_grad():
        layer.weight.mul_(3)
    fp8.follow(small, 1)
    again = layer.small[0][0].float() * layer.scales[2, 0]
    assert (again - layer.weight).norm() < 0.15 * layer.weight.norm()
    assert again.abs().max().item() == pytest.approx(layer.weight.abs().max().item(), rel=1e-5)
    assert torch.equal(layer.small[0][0].float().t(), layer.small[0][1].float())


def test_evaluation_takes_the_weights_as_they_are():
    plain, small, x, y = models()
    with torch.no_grad():
        assert torch.equal(small(x, y, reduction="none"), plain(x, y, reduction="none"))
        tokens = [torch.cat(list(generate(model, x[:, :3], 4, temperature=0))) for model in (plain, small)]
        assert torch.equal(*tokens)


def test_compiled_it_is_the_same():
    _, small, x, y = models()
    loss, gradients = loss_and_gradients(small, x, y)
    small.zero_grad()
    compiled = torch.compile(small, backend="aot_eager")
    again = compiled(x, y)
    again.backward()
    assert again.item() == pytest.approx(loss, rel=1e-5)
    for name, parameter in small.named_parameters():
        # a sum in another order may round to the neighbour in 8 bits
        assert (parameter.grad[:301] - gradients[name]).norm() < 0.02 * gradients[name].norm(), name
