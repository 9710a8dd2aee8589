"""The batches of an evaluation, the validation loss and bits per byte."""

import functools
import math

import torch

from common.errors import UserError
from common.progress import progress
from common.signals import Stopped
from data.tokenizer import END_OF_TEXT, token_bytes
from kernels.documents import find_offsets, move_offsets


def batches_of_rank(batches, title, distributed, stop_signal=None):
    """Yield this rank's share of the batches, with a progress bar. Ranks that split layers have the same share.

    stop_signal: a StopSignal, or None. If that of any rank has received a signal, all ranks raise Stopped, after the
    same number of batches.
    """
    alone = distributed.world_size == 1
    for first in progress(range(0, len(batches), distributed.data_context_size), title):
        if not alone:
            # the all-reduce is queued before the batch, so a GPU computes the batch while the host reads the result
            agreed = distributed.begin_all_reduce(bool(stop_signal and stop_signal.name))
        if first + distributed.data_context_rank < len(batches):
            yield batches[first + distributed.data_context_rank]
        if (stop_signal and stop_signal.name) if alone else agreed()[0]:
            raise Stopped


def validation_sequences(stream, config):
    """Number of sequences that a validation evaluates: the first val_tokens of the stream, at least one sequence."""
    return max(1, min(config.val_tokens, stream.total - 1) // config.seq_len)


@torch.no_grad()
def validation_loss(losses_of, stream, config, distributed, stop_signal=None):
    """Mean loss in nats per token over the first val_tokens of the stream, or all, in whole sequences, at least one.

    losses_of(x, y, offsets): each token's loss, (B, T), 0 where y is -1; offsets as GPT.forward takes them. The tokens
    are the same for any batch size, micro-batch size and number of ranks. Raises Stopped as batches_of_rank.
    """
    B, T, device = config.micro_batch_size, config.seq_len, distributed.device
    sequences = validation_sequences(stream, config)
    sums = []
    for first in batches_of_rank(range(0, sequences, B), "validation", distributed, stop_signal):
        n = min(B, sequences - first)
        tokens = torch.from_numpy(stream.read(first * T, n * T + 1)).long()
        x = torch.zeros((B, T), dtype=torch.long)
        y = torch.full_like(x, -1)  # rows after the last sequence have no targets and no loss
        x[:n], y[:n] = tokens[:-1].view(n, T), tokens[1:].view(n, T)
        offsets = move_offsets(find_offsets(x, END_OF_TEXT), device)
        sums.append(losses_of(x.to(device), y.to(device), offsets).float().sum())
    total = torch.stack(sums).cpu().double().sum() if sums else 0.0
    return distributed.all_reduce(total)[0] / distributed.tensor / (sequences * T)


def bits_per_byte(loss, stream, config):
    """The validation loss in bits per byte of text, or None without a tokenizer. loss: nats per token.

    The nats of all tokens, those of <|endoftext|> included, over the bytes of the text: the measure does not depend on
    the tokenizer (Gao et al. 2020, "The Pile", section 3.1).
    """
    if missing_tokenizer():
        return None
    tokens = validation_sequences(stream, config) * config.seq_len
    return loss * tokens / bytes_of_text(stream, tokens) / math.log(2)


@functools.cache
def bytes_of_text(stream, tokens):
    """Bytes of a validation's targets; at least 1, also if all are <|endoftext|>."""
    return max(1, int(token_bytes()[stream.read(1, tokens)].sum()))


@functools.cache
def missing_tokenizer():
    """Why there is no tokenizer, or None: an evaluation without one goes on, and tries no second download."""
    try:
        token_bytes()
    except UserError as error:
        return str(error)
