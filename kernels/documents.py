"""Attention within documents: where the documents of a micro-batch lie, and FlashAttention over each of them.

A micro-batch is cut out of one stream of tokens, so a row holds the end of one document, whole documents, and the
beginning of another. A document begins with <|endoftext|> or at a row's start.

FlashAttention takes the documents as one sequence of tokens and the offset of each document's first token
("variable-length" attention), and computes no score between two documents.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.errors import UserError

# FlashAttention-4's kernels search the list of offsets for every tile, so a launch gets about as many tokens as this
GROUP_TOKENS = 32768
LARGEST_GRID = 65535  # CUDA's limit in the dimension in which FlashAttention-2 counts sequences


class Documents(NamedTuple):
    """The documents of a micro-batch, as attention takes them; without values, each row is one document."""

    hidden: torch.Tensor | None = None  # (B, 1, T, T) bool: keys that a query must not see
    offsets: torch.Tensor | None = None  # (documents + 1,) int32, see find_offsets


NO_BOUNDARIES = Documents()


def first_tokens(tokens, end_of_text):
    """(B, T) bool: whether each of the tokens (B, T) is the first of its document."""
    return (tokens == end_of_text) | (torch.arange(tokens.size(1), device=tokens.device) == 0)


def find_hidden(tokens, end_of_text):
    """`hidden` of Documents for tokens (B, T)."""
    document = first_tokens(tokens, end_of_text).cumsum(dim=1)
    T = tokens.size(1)
    future = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
    return ((document[:, :, None] != document[:, None, :]) | future)[:, None]


def count_groups(B, T):
    """Number of equal groups of rows with about GROUP_TOKENS tokens each."""
    divisors = [n for n in range(1, B + 1) if B % n == 0]
    return min(divisors, key=lambda n: abs(math.log(B * T / n / GROUP_TOKENS)))


def find_offsets(tokens, end_of_text):
    """The offsets of documents among the B·T tokens, FlashAttention's cu_seqlens: (groups · N + 1,) int32.

    The rows form count_groups(B, T) groups. A group has N offsets: the first token of each of its documents, then the
    group's end, repeated (N: padded_count of the largest group). The last offset is B·T, so the N + 1 offsets from g·N
    on bound the documents of group g. tokens (B, T) are in host memory: a kernel launch needs the number of documents,
    which is then known without waiting for the GPU.
    """
    groups = count_groups(*tokens.shape)
    size = tokens.numel() // groups
    first = first_tokens(tokens, end_of_text).reshape(groups, size)
    ends = size * torch.arange(1, groups + 1, dtype=torch.int32)
    offsets = ends[:, None].repeat(1, padded_count(first.sum(dim=1).max().item()))
    group, place = first.nonzero(as_tuple=True)
    number = first.cumsum(dim=1)[first] - 1  # of a document in its group
    offsets[group, number] = (size * group + place).int()
    return F.pad(offsets.flatten(), (0, 1), value=tokens.numel())


def move_offsets(offsets, device):
    """The result of find_offsets on a device, marked for torch.compile: one graph for any number of documents."""
    offsets = offsets.to(device, non_blocking=True)
    torch._dynamo.mark_dynamic(offsets, 0)
    return offsets


def padded_count(count):
    """Offsets of a group with `count` documents: the next multiple of 4, from 128 on of 8, from 256 on of 16, ...

    So numbers are few: cuDNN builds a plan for each. The additional sequences are empty, but take time.
    """
    step = max(4, (1 << count.bit_length()) // 32)
    return -(-count // step) * step


def has_varlen_attention(device, head_width):
    """Whether document_attention runs under the present autocast."""
    if device.type != "cuda" or torch.version.hip or not torch.is_autocast_enabled("cuda"):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_width % 8 == 0 and head_width <= 256


# ----------------------------------------------------------------------------------------------------------------------
# FlashAttention-2, by the operators below torch.nn.attention.varlen.varlen_attn


@torch.library.custom_op("gpt2::document_attention", mutates_args=())
def document_attention(qkv: torch.Tensor, n_head: int, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, stats) of causal attention within documents. qkv (B, T, 3C) bf16 or fp16; offsets of Documents.

    y (B, T, C); stats (H, B·T) float32, the log-sum-exp of each softmax, which backward needs. Raises UserError
    for more documents than LARGEST_GRID.
    """
    B, T, width = qkv.shape
    if len(offsets) > LARGEST_GRID:
        raise UserError(f"FlashAttention takes {LARGEST_GRID:,} documents at most: use a smaller --micro_batch_size")
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
    dy: torch.Tensor,
    qkv: torch.Tensor,
    y: torch.Tensor,
    stats: torch.Tensor,
    offsets: torch.Tensor,
    n_head: int,
) -> torch.Tensor:
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
