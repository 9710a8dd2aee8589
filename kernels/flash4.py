"""Attention on packed q, k and v: cuDNN's forward, which PyTorch has, and the backward of FlashAttention-4 (the package
flash-attn-4). On Hopper they are the fastest of each.

F.scaled_dot_product_attention returns the gradients of q, k and v as three tensors, which a copy must then pack for the
backward of c_attn. So does FlashAttention-4's function for autograd; the function below it, which is called here,
writes them to strided views of one (B, T, 3C) tensor.

https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute
"""

import os

import torch
from torch import Tensor

from common.device import missing_package
from common.errors import UserError, first_line

# The package compiles its kernels at their first use, which takes seconds; with this it keeps them on disk
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
# At other widths two kernels disagree on a buffer's layout, and the gradient of q is wrong
WIDTHS = (32, 64, 96, 128)


def missing():
    """Why the package flash-attn-4 cannot be used, or None."""
    return missing_package("flash_attn.cute.interface")


@torch.library.custom_op("gpt2::flash4", mutates_args=())
def flash4(qkv: Tensor, n_head: int, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y, stats) of causal attention with n_head heads. qkv (B, T, 3C) bf16 or fp16.

    offsets, of kernels.documents.Documents: a token attends within its own document.
    y (B, T, C); stats float32, (B, H, T), with documents (H, B·T): the log-sum-exp of each softmax, for backward.
    Raises UserError for other head widths than WIDTHS.
    """
    B, T, C = *qkv.shape[:2], qkv.size(2) // 3
    if (width := C // n_head) not in WIDTHS:
        raise UserError(f"FlashAttention-4 has a backward for heads of width {WIDTHS}, not {width}")
    if offsets is None:
        q, k, v = (part.unflatten(2, (n_head, width)).transpose(1, 2) for part in qkv.chunk(3, dim=2))  # (B, H, T, D)
        # without a bias, with the log-sum-exp
        y, stats, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, is_causal=True)
        return y.transpose(1, 2).reshape(B, T, C), stats.view(B, n_head, T)
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # imports the compiler, a second

    q, k, v = qkv.view(B * T, 3, n_head, width).unbind(1)  # (B·T, H, D)
    causal = dict(window_size=(-1, 0), return_aux=AuxRequest(lse=True))
    y, stats = varlen_attn(q, k, v, offsets, offsets, T, T, **causal)
    return y.reshape(B, T, C), stats


@flash4.register_fake
def _(qkv, n_head, offsets=None):
    B, T, width = qkv.shape
    stats = (B, n_head, T) if offsets is None else (n_head, B * T)
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(stats, dtype=torch.float32)


@torch.library.custom_op("gpt2::flash4_backward", mutates_args=())
def flash4_backward(dy: Tensor, qkv: Tensor, y: Tensor, stats: Tensor, n_head: int, offsets: Tensor | None) -> Tensor:
    """The gradient of qkv, (B, T, 3C), for dy (B, T, C). Raises UserError if the kernels on disk cannot be read or
    written."""
    from flash_attn.cute.interface import _flash_attn_bwd

    dqkv = torch.empty_like(qkv)
    tensors = [part.unflatten(2, (n_head, -1)) for x in (qkv, dqkv) for part in x.chunk(3, dim=2)]
    tensors += [x.unflatten(2, (n_head, -1)) for x in (y, dy)]  # (B, T, H, D)
    options = dict(causal=True, deterministic=torch.are_deterministic_algorithms_enabled())
    if offsets is not None:
        tensors, T = [x.flatten(0, 1) for x in tensors], qkv.size(1)  # (B·T, H, D)
        options |= dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=T, max_seqlen_k=T)
    q, k, v, dq, dk, dv, y, dy = tensors
    try:
        _flash_attn_bwd(q, k, v, y, dy, stats, dq=dq, dk=dk, dv=dv, **options)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "object file" not in str(error):  # a file that was cut off
            raise
        from flash_attn.cute.cache_utils import get_cache_path

        hint = f"delete {get_cache_path()}, or use --attention sdpa"
        raise UserError(f"FlashAttention-4's kernels on disk: {first_line(error)}: {hint}") from error
    return dqkv


@flash4_backward.register_fake
def _(dy, qkv, y, stats, n_head, offsets):
    return torch.empty_like(qkv)


def save_for_backward(ctx, inputs, output):
    qkv, ctx.n_head, offsets = inputs
    ctx.save_for_backward(qkv, *output, offsets)
    ctx.set_materialize_grads(False)


def backward(ctx, dy, _):
    qkv, y, stats, offsets = ctx.saved_tensors
    return flash4_backward(dy.contiguous(), qkv, y, stats, ctx.n_head, offsets), None, None


flash4.register_autograd(backward, setup_context=save_for_backward)
