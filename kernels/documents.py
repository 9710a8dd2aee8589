"""Where the documents of a micro-batch lie, for attention within documents.

A micro-batch is cut out of one stream of tokens, so a row holds the end of one document, whole documents, and the
beginning of another. A document begins with <|endoftext|> or at a row's start.

FlashAttention takes the documents as one sequence of tokens and the offset of each document's first token
("variable-length" attention), and computes no score between two documents.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


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


def find_offsets(tokens, end_of_text):
    """The offsets of documents among the B·T tokens, FlashAttention's cu_seqlens: (N + 1,) int32.

    The first token of each document, then B·T, repeated: N is padded_count of the documents. tokens (B, T) are in host
    memory: a kernel launch needs the number of documents, which is then known without waiting for the GPU.
    """
    starts = first_tokens(tokens, end_of_text).flatten().nonzero().flatten().int()
    return F.pad(starts, (0, padded_count(len(starts)) + 1 - len(starts)), value=tokens.numel())


def move_offsets(offsets, device):
    """The result of find_offsets on a device, marked for torch.compile: one graph for any number of documents."""
    offsets = offsets.to(device, non_blocking=True)
    torch._dynamo.mark_dynamic(offsets, 0)
    return offsets


def padded_count(count):
    """Sequences for `count` documents: the next multiple of 4, from 128 on of 8, from 256 on of 16, ...

    So numbers are few: cuDNN builds a plan for each. The additional sequences are empty, but take time.
    """
    step = max(4, (1 << count.bit_length()) // 32)
    return -(-count // step) * step
