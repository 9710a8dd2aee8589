"""Tensors that may be DTensors: the shard of a rank, the whole, and copying the whole into a shard."""

from torch.distributed.tensor import DTensor, distribute_tensor


def local(x):
    """A DTensor's shard on this rank; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x):
    """The whole of a DTensor; a plain tensor as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def fill(x, whole):
    """Copy a whole tensor, the same on all ranks, into a tensor that may be a DTensor: each rank takes its shard."""
    if isinstance(x, DTensor):
        whole = distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)
    x.copy_(whole)
