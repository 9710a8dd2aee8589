"""What a step does with gradients, in every parallel mode: accumulate, average over the ranks, clip, free."""

import contextlib

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.dtensors import full_tensor
from parallel import tensor
from parallel.pipeline import Pipeline


@contextlib.contextmanager
def accumulation(trainer, last):
    """A context for the forward and backward of one micro-batch; `last` says whether it ends the step.

    Gradients accumulate on each rank, and the last backward averages them over the replicas. A sharded model
    reduce-scatters gradients in every backward, so that no rank holds all of them.
    """
    model, train_forward, config = trainer.model, trainer.train_forward, trainer.config
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or config.parallel in ("zero3", "hsdp"))
    local = isinstance(train_forward, DistributedDataParallel) and not last
    with tensor.loss(config), train_forward.no_sync() if local else contextlib.nullcontext():
        yield


def clip(model, max_norm):
    """Scale the gradients down to a norm of max_norm, over all stages of a Pipeline; 0: leave them as they are.

    Returns the norm before, () float32, in either case: the log has it, and a step whose norm is not finite is skipped.
    """
    stages, counted = isinstance(model, Pipeline), dict(model.named_parameters())
    if stages and model.has_head:  # the first stage counts the table
        del counted["transformer.wte.weight"]
    norm = full_tensor(get_total_norm([parameter.grad for parameter in counted.values()]))
    if stages:
        norm = norm**2
        dist.all_reduce(norm, group=model.group)
        norm = norm.sqrt()
    if max_norm:
        clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def zero(trainer):
    """Zero the gradients after an update. DDP's live in its buckets and stay allocated; others are freed."""
    trainer.optimizer.zero_grad(set_to_none=not isinstance(trainer.train_forward, DistributedDataParallel))
