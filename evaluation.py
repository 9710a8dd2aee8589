"""The evaluations of a training run: validation loss, HellaSwag and other tasks, and samples."""

import functools
import math
import time

import torch

from data.loader import make_batch
from data.tokenizer import token_bytes
from parallel.fsdp import gathered
from parallel.process_group import batches_of_rank
from sample import sample_in_training


def evaluate_if_due(run, stop):
    """Validation, HellaSwag and samples, each when its flag says so and after the last step. A collective.

    run: train_gpt2.Run. Raises Stopped, on all ranks, if any rank received a signal before the samples, which are
    short: nothing unfinished is logged.
    """
    trainer, log, step, tokens = run.trainer, run.log, run.step, run.tokens
    config, distributed, model = trainer.config, trainer.distributed, trainer.model

    def due(every):
        return every > 0 and (step % every == 0 or step == config.max_steps)

    def losses_of(batch, at=None):
        with trainer.autocast:
            return trainer.forward(*batch, reduction="none", at=at)

    if due(config.val_every):
        began = time.perf_counter()
        with gathered(model, config):
            loss = validation_loss(losses_of, run.val_stream, config, distributed, stop)
        if log:
            seconds = time.perf_counter() - began
            log.validation(step, tokens, loss, seconds, bits_per_byte(loss, run.val_stream, config))
    if run.tasks and due(config.hellaswag_every):
        began = time.perf_counter()
        with gathered(model, config):
            scores = run.tasks.evaluate(losses_of, distributed, stop)
        if log:
            log.tasks(step, tokens, scores, time.perf_counter() - began)
    if step > 0 and due(config.sample_every):
        with gathered(model, config), trainer.autocast:
            texts = sample_in_training(model, config.seed, distributed)
        if log:
            log.samples(step, tokens, texts)


@torch.no_grad()
def validation_loss(losses_of, stream, config, distributed, stop=None):
    """Mean loss in nats per token over the first val_tokens of the stream, or all, in whole sequences, at least one.

    losses_of(batch): the loss of each of a Batch's targets, (B, T), 0 where there is none. The tokens are the same for
    any batch size, micro-batch size and number of ranks. Raises Stopped as batches_of_rank.
    """
    B, T, device = config.micro_batch_size, config.seq_len, distributed.device
    sequences = stream.sequences(config.val_tokens, config.seq_len)
    sums = []
    for first in batches_of_rank(range(0, sequences, B), "validation", distributed, stop):
        n = min(B, sequences - first)
        tokens = torch.from_numpy(stream.read(first * T, n * T + 1)).long()
        inputs = torch.zeros((B, T), dtype=torch.long)
        targets = torch.full_like(inputs, -1)  # rows after the last sequence have no targets and no loss
        inputs[:n], targets[:n] = tokens[:-1].view(n, T), tokens[1:].view(n, T)
        sums.append(losses_of(make_batch(inputs, targets, device)).float().sum())
    total = torch.stack(sums).cpu().double().sum() if sums else 0.0
    return distributed.all_reduce(total)[0] / distributed.tensor / (sequences * T)


def bits_per_byte(loss, stream, config):
    """The validation loss in bits per byte of text. loss: nats per token.

    The nats of all tokens, those of <|endoftext|> included, over the bytes of the text: the measure does not depend on
    the tokenizer (Gao et al. 2020, "The Pile", section 3.1).
    """
    tokens = stream.sequences(config.val_tokens, config.seq_len) * config.seq_len
    return loss * tokens / bytes_of_text(stream, tokens) / math.log(2)


@functools.cache
def bytes_of_text(stream, tokens):
    """Bytes of a validation's targets; at least 1, also if all are <|endoftext|>."""
    return max(1, int(token_bytes()[stream.read(1, tokens)].sum()))
