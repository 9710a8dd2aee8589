import math

import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig

SIZES = dict(seq_len=24, vocab_size=301, n_layer=3, n_head=4, n_embd=32)


def tiny(**options):
    torch.manual_seed(1)
    return GPT(GPTConfig(**(SIZES | options)))


def batch(B=3, T=24):
    tokens = torch.randint(SIZES["vocab_size"], (B, T + 1))
    return tokens[:, :-1], tokens[:, 1:].clone()


def loss_and_gradients(model, x, y, forward=None):
    model.zero_grad()
    loss = (model if forward is None else forward)(x, y)
    loss.backward()
    V = model.config.vocab_size
    return loss.item(), {n: p.grad[:V] if n.endswith("wte.weight") else p.grad for n, p in model.named_parameters()}


def assert_same(one, other, rtol=1e-5, atol=1e-6):
    assert one[0] == pytest.approx(other[0], rel=rtol)
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], rtol=rtol, atol=atol, msg=name)


def test_bf16_residual_differs_by_rounding():
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss_and_gradients(tiny(bf16_residual=on), x, y)[0] for on in (False, True)]
        kinds = [block_input_dtype(tiny(bf16_residual=on), x) for on in (False, True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] != losses[1]
    assert kinds == [torch.float32, torch.bfloat16]


def block_input_dtype(model, x):
    """What the last block gets of the residual stream."""
    seen = []
    model.transformer.h[-1].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    model(x)
    return seen[0]


def test_flash_is_the_written_out_attention():
    x, y = batch()
    assert_same(*(loss_and_gradients(tiny(attention=each), x, y) for each in ("sdpa", "written_out")))


def test_padding_the_vocabulary_changes_nothing():
    padded, plain = tiny(pad_vocab=True), tiny(pad_vocab=False)
    assert padded.transformer.wte.weight.shape[0] == 384 and plain.transformer.wte.weight.shape[0] == 301
    assert padded.num_params() == plain.num_params()
    x, y = batch()
    assert padded(x).shape == plain(x).shape == (3, 24, 301)
    assert_same(loss_and_gradients(padded, x, y), loss_and_gradients(plain, x, y))
    assert padded.transformer.wte.weight.grad[301:].abs().max() == 0  # padding is never trained


def test_the_compiler_traces_one_graph_that_is_the_same():
    """Without Inductor, which the tests of --compile run."""
    x, y = batch()
    x[0, 5] = SIZES["vocab_size"] - 1  # a document begins
    model = tiny(mask_documents=True, n_layer=1)
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
    assert_same(loss_and_gradients(model, x, y), loss_and_gradients(model, x, y, compiled), atol=1e-5)
    with torch.no_grad():
        expected = model(x, y, reduction="none")
        torch.testing.assert_close(compiled(x, y, reduction="none"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_autocast_stays_close(dtype, tolerance):
    x, y = batch()
    model = tiny()
    with torch.autocast("cpu", dtype):
        loss = model(x, y).item()
    assert loss == pytest.approx(model(x, y).item(), rel=tolerance)


@pytest.mark.gpu
def test_tf32_stays_close():
    x, y = (tensor.cuda() for tensor in batch())
    model = tiny().cuda()
    losses = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        losses.append(model(x, y).item())
    torch.set_float32_matmul_precision("highest")
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_loss_of_chosen_targets():
    x, y = batch()
    model = tiny()
    y[:, :10] = -1
    losses = model(x, y, reduction="none")
    expected = F.cross_entropy(model(x).transpose(1, 2), y.clamp(min=0), reduction="none")
    assert losses.shape == y.shape and losses[:, :10].abs().max() == 0
    torch.testing.assert_close(losses[:, 10:], expected[:, 10:])
    assert model(x, y).item() == pytest.approx(expected[:, 10:].mean().item(), rel=1e-5)
    at = torch.tensor([30, 11, 12, 71])  # of 3 × 24
    torch.testing.assert_close(model(x, y.flatten()[at], reduction="none", at=at), losses.flatten()[at])
    torch.testing.assert_close(model(x, at=at), model(x).flatten(0, 1)[at])


def test_no_token_sees_the_future():
    x, _ = batch()
    model = tiny()
    changed = x.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 301
    torch.testing.assert_close(model(x)[:, :12], model(changed)[:, :12])
    assert (model(x)[:, 12:] - model(changed)[:, 12:]).abs().amax(dim=-1).min() > 0


@pytest.mark.parametrize("attention", ["sdpa", "written_out"])
def test_the_cache_takes_several_tokens_a_call(attention):
    model = tiny(attention=attention)
    x, _ = batch()
    expected = model(x)
    for pieces in ([24], [9, 15], [1, 1, 2, 20], [20, 1, 3]):
        cache = model.new_cache()
        logits = [model(piece, cache=cache) for piece in x.split(pieces, dim=1)]
        ends = torch.tensor(pieces).cumsum(0) - 1
        torch.testing.assert_close(torch.cat(logits, dim=1), expected[:, ends], rtol=1e-4, atol=1e-5)


def test_gpt2_has_its_parameters_and_its_initialization():
    with torch.device("meta"):
        assert GPT(GPTConfig()).num_params() == 124_439_808
        assert GPT(GPTConfig(n_layer=48, n_head=25, n_embd=1600)).num_params() == 1_557_611_200
    model = GPT(GPTConfig(seq_len=512, vocab_size=2000, n_layer=8, n_head=4, n_embd=128))
    block = model.transformer.h[0]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert model.transformer.wte.weight[:2000].std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attn.c_attn.bias.abs().max() == 0 and (block.ln_1.weight == 1).all()
    assert model(torch.randint(2000, (4, 64)), torch.randint(2000, (4, 64))).item() == pytest.approx(
        math.log(2000), abs=0.1
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT(GPTConfig(n_embd=30, n_head=4)),
        lambda: tiny()(torch.zeros(1, 25, dtype=torch.long)),
    ],
)
def test_what_does_not_fit_is_refused(make):
    with pytest.raises(ValueError):
        make()
