"""DDP: every rank holds the whole model and a share of the batch; gradients are averaged in the last backward."""

import contextlib

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from parallel import tensor
from parallel.fsdp import is_sharded


def wrap_ddp(model, config, distributed):
    """The model, compiled or not, with its gradients averaged over the ranks in backward.

    Returns the model itself on one rank and for a model that FSDP shards.
    """
    if distributed.world_size == 1 or is_sharded(config):
        return model
    device_ids = [distributed.device.index] if distributed.device.type == "cuda" else None
    # gradient_as_bucket_view: gradients are views of the communication buckets, which saves one copy of all gradients
    ddp = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    # overlap_gradients: torch.compile splits its graph at DDP's buckets, so that a bucket's all-reduce runs during the
    # rest of backward. Each split adds passes over memory. https://docs.pytorch.org/docs/stable/notes/ddp.html
    torch._dynamo.config.optimize_ddp = config.overlap_gradients
    # bf16_gradients: the all-reduce sends half the bytes
    if config.bf16_gradients:
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


@contextlib.contextmanager
def micro_batch(model, train_forward, config, last):
    """A context for the forward and backward of one micro-batch; `last` says whether it ends the step.

    Gradients accumulate locally and are averaged over the replicas once, in the last backward. A sharded model
    reduce-scatters gradients in every backward, so that no rank holds all of them.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or config.parallel in ("zero3", "hsdp"))
    local = isinstance(train_forward, DistributedDataParallel) and not last
    with tensor.loss(config), train_forward.no_sync() if local else contextlib.nullcontext():
        yield


def zero_gradients(optimizer, train_forward):
    """Zero the gradients after an update. DDP's live in its buckets and stay allocated; others are freed."""
    optimizer.zero_grad(set_to_none=not isinstance(train_forward, DistributedDataParallel))
