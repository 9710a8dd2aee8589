"""Attention within documents: where the documents of a micro-batch lie, and FlashAttention over each of them.

A micro-batch is cut out of one stream of tokens, so a row holds the end of one document, whole documents, and the
beginning of another. A document begins with <|endoftext|> or at a row's start.

FlashAttention takes the documents as one sequence of tokens and the offset of each document's first token
("variable-length" attention), and computes no score between two documents.
"""

from typing import NamedTuple

import torch


class Documents(NamedTuple):
    """The documents of a micro-batch, as attention takes them; without values, each row is one document."""

    hidden: torch.Tensor | None = None  # (B, 1, T, T) bool: keys that a query must not see
    offsets: torch.Tensor | None = None  # (2^n + 1,) int32: each document's first token in the B·T, then B·T to the end
    count: torch.Tensor | None = None  # () int64, on the host: the number of documents


NO_BOUNDARIES = Documents()


def find_documents(idx, end_of_text, with_offsets):
    """The Documents of idx (B, T): `offsets` and `count`, or without with_offsets the mask `hidden`."""
    first = (idx == end_of_text) | (torch.arange(idx.size(1), device=idx.device) == 0)  # (B, T)
    if not with_offsets:
        document = first.cumsum(dim=1)
        future = torch.ones(idx.size(1), idx.size(1), dtype=torch.bool, device=idx.device).triu(1)
        return Documents(hidden=((document[:, :, None] != document[:, None, :]) | future)[:, None])
    return Documents(None, *find_offsets(first))


# one operator, so that the compiled backward does not recompute it: copying the count to the host synchronizes
@torch.library.custom_op("gpt2::find_offsets", mutates_args=())
def find_offsets(first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets, count) of Documents. first (B, T) bool: the first token of each document.

    Sized for one document per token, so that all micro-batches have the same shapes and compiled graph.
    """
    offsets = first.flatten().nonzero_static(size=slots(first.numel()) + 1, fill_value=first.numel())
    return offsets.flatten().int(), first.sum().cpu()


@find_offsets.register_fake
def _(first):
    offsets = first.new_empty(slots(first.numel()) + 1, dtype=torch.int32)
    return offsets, torch.empty((), dtype=torch.int64, device="cpu")


def slots(count):
    """Number of sequences of a kernel launch: `count` rounded up to a power of two; the extra ones are empty.

    A kernel spends time on each sequence, so B·T sequences are too many, and cuDNN builds a plan for each number.
    """
    return 1 << (int(count) - 1).bit_length()


def has_varlen_attention(device, head_width):
    """Whether document_attention runs under the present autocast."""
    if device.type != "cuda" or torch.version.hip or not torch.is_autocast_enabled("cuda"):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_width % 8 == 0 and head_width <= 256


# ----------------------------------------------------------------------------------------------------------------------
# FlashAttention-2, by the operators below torch.nn.attention.varlen.varlen_attn


@torch.library.custom_op("gpt2::document_attention", mutates_args=())
def document_attention(
    qkv: torch.Tensor, n_head: int, offsets: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, stats) of causal attention within documents. qkv (B, T, 3C) bf16 or fp16; offsets and count of Documents.

    y (B, T, C); stats (H, B·T) float32, the log-sum-exp of each softmax, which backward needs.
    """
    B, T, width = qkv.shape
    starts = offsets[: slots(count) + 1]
    y, stats, *_ = torch.ops.aten._flash_attention_forward(
        *heads(qkv, n_head), starts, starts, T, T, 0.0, is_causal=True, return_debug_mask=False
    )
    return y.reshape(B, T, width // 3), stats


@document_attention.register_fake
def _(qkv, n_head, offsets, count):
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(n_head, B * T, dtype=torch.float32)


@torch.library.custom_op("gpt2::document_attention_backward", mutates_args=())
def document_attention_backward(
    dy: torch.Tensor,
    qkv: torch.Tensor,
    y: torch.Tensor,
    stats: torch.Tensor,
    offsets: torch.Tensor,
    count: torch.Tensor,
    n_head: int,
) -> torch.Tensor:
    """The gradient of qkv, (B, T, 3C), for dy (B, T, C)."""
    T, starts = qkv.size(1), offsets[: slots(count) + 1]
    dy, y = (tensor.reshape(-1, n_head, tensor.size(2) // n_head) for tensor in (dy, y))
    dropout = dict(rng_state=torch.zeros(2, dtype=torch.uint64, device=y.device), unused=y.new_empty(0), dropout_p=0.0)
    gradients = torch.ops.aten._flash_attention_backward(
        dy, *heads(qkv, n_head), y, stats, starts, starts, T, T, is_causal=True, **dropout
    )
    return torch.stack(gradients, dim=1).view(qkv.shape)


@document_attention_backward.register_fake
def _(dy, qkv, y, stats, offsets, count, n_head):
    return qkv.new_empty(qkv.shape)


def heads(qkv, n_head):
    """Views of q, k and v, (B·T, H, D) each."""
    return qkv.reshape(-1, 3, n_head, qkv.size(2) // 3 // n_head).unbind(1)


def save_for_backward(ctx, inputs, output):
    qkv, ctx.n_head, offsets, count = inputs
    ctx.save_for_backward(qkv, *output, offsets, count)
    ctx.set_materialize_grads(False)


def backward(ctx, dy, _):
    return document_attention_backward(dy.contiguous(), *ctx.saved_tensors, ctx.n_head), None, None, None


document_attention.register_autograd(backward, setup_context=save_for_backward)
