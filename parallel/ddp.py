"""DDP: every rank holds the whole model and a share of the batch; gradients are averaged in the last backward."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

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
