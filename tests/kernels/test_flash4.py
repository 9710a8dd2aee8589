"""FlashAttention-4's backward: what is passed to its kernel, and on a Hopper GPU the kernel itself."""

import sys
import types

import pytest
import torch
from conftest import skip_without_flash4
from test_document_attention import END, compare, random_documents, tokens_of
from test_model import SIZES

from common.errors import UserError
from kernels import flash4
from kernels.documents import count_groups, find_hidden, find_offsets, move_offsets
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


@pytest.mark.parametrize("groups", [None, 1, 3])
def test_what_the_kernel_gets(monkeypatch, groups):
    module = types.SimpleNamespace(_flash_attn_bwd=reference)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setattr(flash4, "WIDTHS", (4,))
    H, D = 2, 4
    idx, _ = tokens_of(ROWS)
    B, T = idx.shape
    qkv = torch.randn(B, T, 3 * H * D, dtype=torch.float64, requires_grad=True)
    q, k, v = (part.unflatten(2, (H, D)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    bounds = None
    stats = (q @ k.mT / D**0.5).masked_fill(hidden, -torch.inf).logsumexp(3, keepdim=True)  # (B, H, T, 1)
    if groups:
        monkeypatch.setattr("kernels.documents.GROUP_TOKENS", B * T // groups)
        hidden, bounds = find_hidden(idx, END), find_offsets(idx, END)
        assert count_groups(B, T) == groups and bounds[-2] == bounds[-1]  # an empty document
        stats = (
            (q @ k.mT / D**0.5).masked_fill(hidden, -torch.inf).logsumexp(3).transpose(1, 2).contiguous()
        )  # (B, T, H)
    y = causal_attention(q, k, v, hidden).transpose(1, 2).flatten(2)
    dy = torch.randn_like(y)
    y.backward(dy)
    found = torch.full_like(qkv, torch.nan)
    with torch.no_grad():
        flash4.backward(dy, qkv, y, stats, H, found, bounds)
    torch.testing.assert_close(found, qkv.grad)

    def truncated(*_, **__):
        raise RuntimeError("Failed to add object file: Invalid ELF class")

    folder = types.SimpleNamespace(get_cache_path=lambda: "/tmp/kernels")
    monkeypatch.setitem(sys.modules, "flash_attn.cute.cache_utils", folder)
    module._flash_attn_bwd = truncated
    with pytest.raises(UserError, match="Invalid ELF class: delete /tmp/kernels, or use --attention cudnn_packed"):
        flash4.backward(dy, qkv, y, stats, H, found, bounds)
    with pytest.raises(UserError, match=r"heads of width \(4,\), not 8"):
        flash4.backward(dy, qkv, y, stats, 1, found, bounds)


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("B, T, heads, width", [(2, 1024, 12, 64), (3, 37, 2, 64), (2, 200, 5, 32), (2, 129, 3, 128)])
def test_kernel_against_float64(B, T, heads, width, dtype, tolerance, monkeypatch):
    skip_without_flash4()
    monkeypatch.setattr("kernels.documents.GROUP_TOKENS", T)  # each row is a group
    from kernels.packed_qkv import packed_qkv

    idx = random_documents(B, T)
    no_boundaries = torch.zeros_like(idx)
    for documents in (idx, torch.full_like(idx, END), no_boundaries):
        compare(lambda *inputs: packed_qkv(*inputs, flash4_backward=True), documents, heads, width, dtype, tolerance)

    def without_documents(qkv, n_head, offsets):
        return packed_qkv(qkv, n_head, flash4_backward=True)

    compare(without_documents, no_boundaries, heads, width, dtype, tolerance)


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
    from kernels.packed_qkv import packed_qkv, packed_qkv_backward

    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    idx = random_documents(2, 64)
    for offsets in (None, find_offsets(idx.cpu(), END).cuda()):
        qkv = torch.randn(2, 64, 3 * 128, device="cuda").bfloat16()
        torch.library.opcheck(packed_qkv, (qkv.requires_grad_(), 2, offsets, True), test_utils=checks)
        with torch.no_grad():
            y, stats = packed_qkv(qkv, 2, offsets)
            inputs = (torch.randn_like(y), qkv.detach(), y, stats, 2, offsets, True)
            torch.library.opcheck(packed_qkv_backward, inputs, test_utils=checks)
