"""The backward of attention by FlashAttention-4 (the package flash-attn-4), on q, k and v packed in one tensor.

FlashAttention-4's function for autograd returns the gradients of q, k and v as three tensors, so that a copy would have
to pack them. The function below it, which is called here, writes them to strided views of one (B, T, 3C) tensor.

https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute
"""

import os

import torch

from common.device import missing_package
from common.errors import UserError, first_line
from kernels.documents import count_groups

# The package compiles its kernels at their first use, which takes seconds; with this it keeps them on disk
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
# At other widths two kernels disagree on a buffer's layout, and the gradient of q is wrong
WIDTHS = (32, 64, 96, 128)


def missing():
    """Why the package flash-attn-4 cannot be used, or None."""
    return missing_package("flash_attn.cute.interface")


def backward(dy, qkv, y, stats, n_head, dqkv, offsets):
    """Write the gradient of qkv (B, T, 3C) to dqkv, for dy and y (B, T, C), all contiguous, bf16 or fp16.

    stats: the log-sum-exp of each softmax, float32: (B, H, T, 1), or (B, T, H) with documents. offsets: None, or the
    result of kernels.documents.find_offsets. Raises UserError for other head widths than WIDTHS, and if the kernels on
    disk cannot be read or written.
    """
    if (width := y.size(2) // n_head) not in WIDTHS:
        raise UserError(f"FlashAttention-4 has a backward for heads of width {WIDTHS}, not {width}")
    if offsets is None:
        return launch(dy, qkv, y, stats.squeeze(3), n_head, dqkv)
    B, T, _ = qkv.shape
    groups = count_groups(B, T)
    # (groups, tokens, ...)
    dy, qkv, y, dqkv, stats = (x.view(groups, -1, x.size(2)) for x in (dy, qkv, y, dqkv, stats))
    stats = stats.mT.contiguous()  # (groups, H, tokens)
    N = (len(offsets) - 1) // groups
    offsets = offsets.unfold(0, N + 1, N)  # (groups, N + 1)
    offsets = offsets - offsets[:, :1]  # from the group's first token
    for *tensors, stats_of_group, bounds, gradient in zip(dy, qkv, y, stats, offsets, dqkv):
        documents = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=T, max_seqlen_k=T)
        launch(*tensors, stats_of_group, n_head, gradient, **documents)


def launch(dy, qkv, y, stats, n_head, dqkv, **documents):
    """As backward, of (B, T, ...) tensors and stats (B, H, T).

    documents: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of one group, whose tensors have no B.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    # views of (..., H, D)
    q, k, v, dq, dk, dv = (part.unflatten(-1, (n_head, -1)) for x in (qkv, dqkv) for part in x.chunk(3, dim=-1))
    y, dy = (x.unflatten(-1, (n_head, -1)) for x in (y, dy))
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = dict(dq=dq, dk=dk, dv=dv)
    try:
        _flash_attn_bwd(q, k, v, y, dy, stats, causal=True, deterministic=deterministic, **gradients, **documents)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "object file" not in str(error):  # a file that was cut off
            raise
        from flash_attn.cute.cache_utils import get_cache_path

        hint = f"delete {get_cache_path()}, or use --attention cudnn_packed"
        raise UserError(f"FlashAttention-4's kernels on disk: {first_line(error)}: {hint}") from error
