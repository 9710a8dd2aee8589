"""FlashAttention-4's backward: what is passed to its kernel, and on a Hopper GPU the kernel itself."""

import sys
import types

import pytest
import torch
from conftest import skip_without_flash4
from test_document_attention import END, compare, random_documents, tokens_of
from test_model import SIZES

from common.errors import UserError
from kernels.documents import find_hidden, find_offsets, move_offsets
from kernels.flash4 import flash4, flash4_backward
from model import GPT, GPTConfig, causal_attention

ROWS = [[5, 6, 17], [], [9]]  # columns at which the documents of each row begin, besides the first


def reference(q, k, v, out, dout, lse, *, causal, deterministic, dq, dk, dv, **documents):
    """Algorithm 4 of the FlashAttention paper (Dao et al. 2022), without tiles: one sequence at a time."""
    assert causal and not deterministic
    if documents:
        offsets, T = documents["cu_seqlens_q"], documents["max_seqlen_q"]
        assert offsets is documents["cu_seqlens_k"] and T == documents["max_seqlen_k"] >= offsets.diff().max()
        places = [slice(first, end) for first, end in zip(offsets, offsets[1:])]
        lse = [lse[:, place] for place in places]  # (H, tokens)
    else:
        places = range(len(q))
    for place, log_sum in zip(places, lse):
        query, key, value, y, dy = (x[place].transpose(0, 1) for x in (q, k, v, out, dout))  # (H, tokens, D)
        scale = query.size(-1) ** -0.5
        p = (query @ key.mT * scale - log_sum[..., None]).exp().tril()
        ds = p * (dy @ value.mT - (dy * y).sum(-1, keepdim=True)) * scale
        for gradient, found in ((dq, ds @ key), (dk, ds.mT @ query), (dv, p.mT @ dy)):
            gradient[place] = found.transpose(0, 1)


@pytest.mark.parametrize("masked", [False, True])
def test_what_the_kernel_gets(monkeypatch, masked):
    module = types.SimpleNamespace(_flash_attn_bwd=reference)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    H, D = 2, 4
    idx, _ = tokens_of(ROWS)
    B, T = idx.shape
    qkv = torch.randn(B, T, 3 * H * D, dtype=torch.float64, requires_grad=True)
    q, k, v = (part.unflatten(2, (H, D)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    hidden, offsets = find_hidden(torch.zeros_like(idx), END), None
    if masked:
        hidden, offsets = find_hidden(idx, END), find_offsets(idx, END)
        assert offsets[-2] == offsets[-1]  # an empty document
    stats = (q @ k.mT / D**0.5).masked_fill(hidden, -torch.inf).logsumexp(3)  # (B, H, T)
    if masked:
        stats = stats.transpose(0, 1).flatten(1)  # (H, B·T)
    y = causal_attention(q, k, v, hidden).transpose(1, 2).flatten(2)
    dy = torch.randn_like(y)
    y.backward(dy)
    with torch.no_grad():
        inputs = dy, qkv, y, stats, H, offsets
        torch.testing.assert_close(flash4_backward(*inputs), qkv.grad)

    def truncated(*_, **__):
        raise RuntimeError("Failed to add object file: Invalid ELF class")

    folder = types.SimpleNamespace(get_cache_path=lambda: "/tmp/kernels")
    monkeypatch.setitem(sys.modules, "flash_attn.cute.cache_utils", folder)
    module._flash_attn_bwd = truncated
    with pytest.raises(UserError, match="Invalid ELF class: delete /tmp/kernels, or use --attention sdpa"):
        flash4_backward(*inputs)
    with pytest.raises(UserError, match=r"heads of width \(32, 64, 96, 128\), not 8"):
        flash4(qkv, 1)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("B, T, heads, width", [(2, 1024, 12, 64), (3, 37, 2, 64), (2, 200, 5, 32), (2, 129, 3, 128)])
def test_kernel_against_float64(B, T, heads, width, dtype, tolerance):
    skip_without_flash4()
    idx = random_documents(B, T)
    no_boundaries = torch.zeros_like(idx)
    for documents in (idx, torch.full_like(idx, END), no_boundaries):
        compare(flash4, documents, heads, width, dtype, tolerance)
    compare(lambda qkv, n_head, offsets: flash4(qkv, n_head), no_boundaries, heads, width, dtype, tolerance)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_model_twice(masked):
    """Its gradients are the model's own, and with deterministic algorithms the same bits each time."""
    skip_without_flash4()
    idx, y = tokens_of(ROWS)
    offsets = move_offsets(find_offsets(idx, END), "cuda")
    x, y = idx.cuda(), y.cuda()
    sizes = SIZES | dict(n_embd=128, n_head=2, mask_documents=masked)
    gradients = []
    torch.use_deterministic_algorithms(True)
    try:
        for name in ("written_out", "flash4", "flash4"):
            torch.manual_seed(1)
            model = GPT(GPTConfig(**sizes, attention=name)).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.compile(model, dynamic=False, fullgraph=True)(x, y, offsets if masked else None)
            loss.backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    finally:
        torch.use_deterministic_algorithms(False)
    expected, found, again = gradients
    assert (found - expected).norm() < 3e-2 * expected.norm()
    assert torch.equal(found, again)


@pytest.mark.gpu(hopper=True)
def test_registration():
    """Shapes, dtypes and strides of the fake kernels, and no output aliases an input."""
    skip_without_flash4()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    idx = random_documents(2, 64)
    for offsets in (None, find_offsets(idx.cpu(), END).cuda()):
        qkv = torch.randn(2, 64, 3 * 128, device="cuda").bfloat16()
        torch.library.opcheck(flash4, (qkv.requires_grad_(), 2, offsets), test_utils=checks)
        with torch.no_grad():
            y, stats = flash4(qkv, 2, offsets)
            inputs = (torch.randn_like(y), qkv.detach(), y, stats, 2, offsets)
            torch.library.opcheck(flash4_backward, inputs, test_utils=checks)
