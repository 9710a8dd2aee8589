"""What happens to gradients, in every parallel mode: they accumulate, are averaged over the ranks, clipped, freed."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.device import full_tensor
from parallel import tensor
from parallel.fsdp import is_sharded
from parallel.pipeline import Pipeline


def wrap_ddp(model, config, distributed, begin_averaging):
    """The model, compiled or not, with its gradients averaged over the ranks in backward.

    begin_averaging() is called before each all-reduce of a bucket. Returns the model itself on one rank and for a model
    that FSDP shards.
    """
    if distributed.world_size == 1 or is_sharded(config):
        return model
    device_ids = [distributed.device.index] if distributed.device.type == "cuda" else None
    # gradient_as_bucket_view: gradients are views of the communication buckets, which saves one copy of all gradients
    ddp = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    # overlap_gradients: torch.compile splits its graph at DDP's buckets, so a bucket's all-reduce can run during the
    # rest of backward. Each split adds passes over memory. https://docs.pytorch.org/docs/stable/notes/ddp.html
    torch._dynamo.config.optimize_ddp = config.overlap_gradients
    # bf16_gradients: the all-reduce sends half the bytes
    average = bf16_compress_hook if config.bf16_gradients else allreduce_hook

    def begin(group, bucket):
        begin_averaging()
        return average(group, bucket)

    ddp.register_comm_hook(None, begin)
    return ddp


@contextlib.contextmanager
def accumulation(trainer, last):
    """A context for the forward and backward of one micro-batch; `last` says whether it ends the step.

    Gradients accumulate on each rank, and the last backward averages them over the replicas. But for zero1, a sharded
    model reduce-scatters gradients in every backward, so that no rank holds all of them.
    """
    model, train_forward, config = trainer.model, trainer.train_forward, trainer.config
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or config.parallel != "zero1")
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
    """Zero the gradients after an update. DDP's, which live in its buckets, and those that a CUDA graph adds to stay
    allocated; others are freed."""
    stay = isinstance(trainer.train_forward, DistributedDataParallel) or trainer.config.cuda_graphs
    trainer.optimizer.zero_grad(set_to_none=not stay)
