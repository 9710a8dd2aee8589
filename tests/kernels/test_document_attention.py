"""Attention within documents: each document of a row computes what it computes alone."""

import pytest
import torch
import torch.nn.functional as F
from reference import varlen_attn as attention_by_hand
from test_model import SIZES, batch, loss_and_gradients, tiny
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.varlen import varlen_attn

from kernels.attention import limit_sdpa
from kernels.documents import NO_BOUNDARIES, find_hidden, find_offsets, move_offsets, padded_count
from model import GPT, GPTConfig, causal_attention
from optimizations import saved_operators
from parallel.activation_checkpointing import checkpoint_activations

END = SIZES["vocab_size"] - 1  # <|endoftext|>, with which a document begins
# Columns at which the documents of each row begin, besides the first
ROWS = {
    "random": [[5, 6, 17], [], [9]],
    "one token each": [list(range(1, 24)), list(range(1, 24)), [23]],
    "one document fills the row": [[], [], []],
}


def tokens_of(rows):
    x, y = batch()
    x[x == END] = 0
    for row, starts in enumerate(rows):
        x[row, starts] = END
    return x, y


def without_positions(**options):
    model = tiny(**options)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    return model


def each_alone(model, x, y, rows):
    """(logits, loss, gradients) of a model that gets one document at a time."""
    logits, loss = [], 0
    model.zero_grad()
    for row, starts in enumerate(rows):
        bounds = [0, *starts, x.size(1)]
        for first, end in zip(bounds, bounds[1:]):
            logits.append(model(x[None, row, first:end])[0])
            loss = loss + F.cross_entropy(logits[-1], y[row, first:end], reduction="sum")
    (loss / x.numel()).backward()
    logits = torch.cat(logits).view(*x.shape, -1)
    return logits, loss.item() / x.numel(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("how", ["flash", "written out", "full", "selective"])
def test_each_document_alone(rows, how):
    x, y = tokens_of(rows)
    logits, loss, gradients = each_alone(without_positions(), x, y, rows)
    model = without_positions(mask_documents=True, attention="written_out" if how == "written out" else "sdpa")
    if how in ("full", "selective"):
        checkpoint_activations(model, how, saved_operators())
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-5)
    found = loss_and_gradients(model, x, y)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    gradients.pop("transformer.wpe.weight")  # a document alone begins at position 0
    for name, expected in gradients.items():
        gradient = found[1][name]
        torch.testing.assert_close(gradient, expected[: len(gradient)], rtol=1e-3, atol=1e-5, msg=name)


def test_positions_run_on_and_a_row_without_boundaries_is_one_document():
    x, y = tokens_of(ROWS["one document fills the row"])
    masked, plain = tiny(mask_documents=True), tiny()
    torch.testing.assert_close(masked(x), plain(x), rtol=1e-4, atol=1e-5)
    x[:, 12] = END
    positions = plain.embed(x, torch.arange(24))[:, 12:]  # of the row, not of the document
    with torch.no_grad():
        for block in plain.transformer.h:
            positions = block(positions, None, NO_BOUNDARIES)
        torch.testing.assert_close(masked(x)[:, 12:], plain.head(positions, None, "mean"), rtol=1e-4, atol=1e-5)


def test_a_cache_continues_one_document():
    x, _ = tokens_of(ROWS["one document fills the row"])
    x[:, 0] = END
    model = tiny(mask_documents=True)
    cache = model.new_cache()
    with torch.no_grad():
        model(x[:, :10], cache=cache)
        for position in range(10, 24):
            last = model(x[:, position : position + 1], cache=cache)
        torch.testing.assert_close(last[:, 0], model(x)[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_offsets_are_those_of_the_mask(rows):
    x, _ = tokens_of(rows)
    starts = [24 * row + column for row, columns in enumerate(rows) for column in (0, *columns)]
    offsets = find_offsets(x, END)
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == starts + [72] * (padded_count(len(starts)) + 1 - len(starts))
    document = torch.searchsorted(offsets, torch.arange(72), right=True).view(3, 24)
    same = document[:, :, None] == document[:, None, :]
    assert torch.equal(~find_hidden(x, END)[:, 0], same.tril())


def test_padded_count():
    counts = range(1, 5000)
    assert all(n <= padded_count(n) < n + max(4, n / 16 + 1) for n in counts)
    assert len({padded_count(n) for n in counts}) < 120  # plans of cuDNN


def test_the_model_takes_the_offsets_where_a_kernel_does(monkeypatch):
    """Otherwise it takes a mask, also with flash4."""
    x, y = tokens_of(ROWS["random"])
    model, flash4 = (tiny(mask_documents=True, attention=each) for each in ("sdpa", "flash4"))
    expected = model(x, y)
    assert torch.equal(flash4(x, y), expected)
    monkeypatch.setattr("model.has_varlen_attention", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_hand)
    torch.testing.assert_close(model(x, y, find_offsets(x, END)), expected)
    others = find_offsets(tokens_of(ROWS["one document fills the row"])[0], END)
    assert (model(x, y, others) - expected).abs() > 1e-4


def test_one_graph_for_any_number_of_documents(monkeypatch):
    monkeypatch.setattr("model.has_varlen_attention", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_hand)
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(tiny(mask_documents=True, n_layer=1), dynamic=False, fullgraph=True, backend=counter)
    for columns in ([], [5], list(range(1, 24))):
        x, y = tokens_of([columns, [], columns])
        forward(x, y, move_offsets(find_offsets(x, END), "cpu")).backward()
    assert counter.frame_count == 1


# ----------------------------------------------------------------------------------------------------------------------
# The kernels


@pytest.fixture(params=["flash", "cudnn"])
def varlen_kernel(request):
    """varlen_attn has only one of its kernels."""
    if request.param == "cudnn" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN takes documents by their offsets on Hopper and newer")
    limit_sdpa(request.param)
    yield
    limit_sdpa("sdpa")


def varlen(qkv, n_head, offsets):
    B, T, C = *qkv.shape[:2], qkv.size(2) // 3
    q, k, v = qkv.reshape(B * T, 3, n_head, -1).unbind(1)
    return varlen_attn(q, k, v, offsets, offsets, T, T, window_size=(-1, 0)).reshape(B, T, C), None


def random_documents(B, T):
    idx = torch.zeros(B, T, dtype=torch.long, device="cuda")
    idx[torch.rand(B, T, device="cuda") < 0.01] = END
    return idx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("B, T, heads, width", [(2, 1024, 12, 64), (3, 37, 2, 64), (1, 200, 5, 32), (2, 129, 3, 128)])
def test_kernels_against_float64(varlen_kernel, B, T, heads, width, dtype, tolerance):
    idx = random_documents(B, T)
    for documents in (idx, torch.full_like(idx, END), torch.zeros_like(idx)):
        compare(varlen, documents, heads, width, dtype, tolerance)


def compare(attention, idx, heads, width, dtype, tolerance):
    B, T = idx.shape
    leaf = torch.randn(B, T, 3 * heads * width, device="cuda").to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    dy = torch.randn(B, T, heads * width, device="cuda").to(dtype)
    y, _ = attention(leaf, heads, find_offsets(idx.cpu(), END).cuda())
    y.backward(dy)
    q, k, v = (part.unflatten(2, (heads, width)).transpose(1, 2) for part in exact.chunk(3, dim=2))
    hidden = find_hidden(idx, END)
    expected = causal_attention(q, k, v, hidden).transpose(1, 2).flatten(2)
    expected.backward(dy.double())
    assert leaf.grad.isfinite().all()
    for found, reference in ((y, expected), (leaf.grad, exact.grad)):
        assert (found.double() - reference).norm() < tolerance * reference.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_model_on_gpu(varlen_kernel, compiled):
    sizes = SIZES | dict(n_embd=128, n_head=2)
    losses, gradients = [], []
    for attention in ("written_out", "sdpa"):
        torch.manual_seed(1)
        model = GPT(GPTConfig(**sizes, mask_documents=True, attention=attention)).cuda()
        forward = torch.compile(model, dynamic=False, fullgraph=True) if compiled else model
        for rows in ROWS.values():  # one graph for all of them
            torch.manual_seed(0)
            x, y = tokens_of(rows)
            offsets = move_offsets(find_offsets(x, END), "cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = forward(x.cuda(), y.cuda(), offsets)
            loss.backward()
            losses.append(loss.item())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-3)
    for expected, found in zip(*gradients):
        assert (found - expected).norm() < 3e-2 * expected.norm()
