"""FlashAttention-2 within documents, by the operators below torch.nn.attention.varlen.varlen_attn."""

import torch
from torch import Tensor


@torch.library.custom_op("gpt2::document_attention", mutates_args=())
def document_attention(qkv: Tensor, n_head: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(y, stats) of causal attention within documents. qkv (B, T, 3C) bf16 or fp16; offsets of Documents.

    y (B, T, C); stats (H, B·T) float32, the log-sum-exp of each softmax, which backward needs.
    """
    B, T, width = qkv.shape
    y, stats, *_ = torch.ops.aten._flash_attention_forward(
        *heads(qkv, n_head), offsets, offsets, T, T, 0.0, is_causal=True, return_debug_mask=False
    )
    return y.reshape(B, T, width // 3), stats


@document_attention.register_fake
def _(qkv, n_head, offsets):
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(n_head, B * T, dtype=torch.float32)


@torch.library.custom_op("gpt2::document_attention_backward", mutates_args=())
def document_attention_backward(
    dy: Tensor, qkv: Tensor, y: Tensor, stats: Tensor, offsets: Tensor, n_head: int
) -> Tensor:
    """The gradient of qkv, (B, T, 3C), for dy (B, T, C)."""
    T = qkv.size(1)
    dy, y = (tensor.reshape(-1, n_head, tensor.size(2) // n_head) for tensor in (dy, y))
    dropout = dict(rng_state=torch.zeros(2, dtype=torch.uint64, device=y.device), unused=y.new_empty(0), dropout_p=0.0)
    gradients = torch.ops.aten._flash_attention_backward(
        dy, *heads(qkv, n_head), y, stats, offsets, offsets, T, T, is_causal=True, **dropout
    )
    return torch.stack(gradients, dim=1).view(qkv.shape)


@document_attention_backward.register_fake
def _(dy, qkv, y, stats, offsets, n_head):
    return qkv.new_empty(qkv.shape)


def heads(qkv, n_head):
    """Views of q, k and v, (B·T, H, D) each."""
    return qkv.reshape(-1, 3, n_head, qkv.size(2) // 3 // n_head).unbind(1)


def save_for_backward(ctx, inputs, output):
    qkv, ctx.n_head, offsets = inputs
    ctx.save_for_backward(qkv, *output, offsets)
    ctx.set_materialize_grads(False)


def backward(ctx, dy, _):
    return document_attention_backward(dy.contiguous(), *ctx.saved_tensors, ctx.n_head), None, None


document_attention.register_autograd(backward, setup_context=save_for_backward)
