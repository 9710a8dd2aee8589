"""Ranks and their devices: the process group, and DDP around the model."""

import gc
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported once there is a group, its default arguments would hold the group
from torch.nn.parallel import DistributedDataParallel

from cli import UserError


@dataclass(frozen=True)
class Ranks:
    """One process's place among all: rank of world_size, and the device it drives."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self):
        return self.rank == 0

    def sum(self, *values):
        """Each number (or one-element tensor) added up over all ranks, in float64; returns a list of floats."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def min(self, value):
        """The smallest of all ranks' numbers, as a float."""
        return self._reduce([value], dist.ReduceOp.MIN)[0]

    def _reduce(self, values, operation):
        values = [float(value) for value in values]
        if not dist.is_initialized():
            return values
        result = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(result, operation)
        return result.tolist()

    def gather(self, tensor):
        """Each rank's tensor, of one size and type on all, as a list in the order of ranks; on the CPU."""
        if not dist.is_initialized():
            return [tensor]
        tensors = [torch.empty_like(tensor, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor.to(self.device))
        return [tensor.cpu() for tensor in tensors]

    def share(self, value):
        """Rank 0's value, which is JSON's, on every rank."""
        if not dist.is_initialized():
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def on_main(self, work):
        """What work() returns on rank 0, None on the others, which wait for it. Its UserError ends every rank."""
        result = error = None
        if self.is_main:
            try:
                result = work()
            except UserError as raised:
                error = raised
        if self.sum(error is not None)[0]:
            raise error or UserError("rank 0 stopped")
        return result


def choose_device_type(choice):
    """What "auto" stands for on this machine: "cuda", "mps" or "cpu"; another choice stands for itself."""
    if choice != "auto":
        return choice
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def start(device_type):
    """Join torchrun's other processes, if it started this one, and take a device: "auto", "cuda", "cpu" or "mps".

    Raises UserError when the device is not there, or there are more ranks than GPUs.
    """
    device_type = choose_device_type(device_type)
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda, but PyTorch sees no GPU: check nvidia-smi and the PyTorch build, or use --device cpu"
        )
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps, but PyTorch sees no Apple GPU: use --device cpu")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if device_type == "mps" and world_size > 1:
        raise UserError("several ranks cannot share an Apple GPU: start one process, or use --device cpu")
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(device_type)
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise UserError(
                f"{local_rank + 1} ranks or more on this machine, but {gpus} GPUs: use --nproc_per_node={gpus}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world_size > 1:
        # torchrun's restarts share a store, and would find the addresses of the processes before them
        store, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, device_id=device if backend == "nccl" else None
        )
    return Ranks(rank, world_size, device)


def stop():
    """Leave the process group. Let go of a model in DDP first: it holds the group.

    A group that is held keeps its threads, and gloo's end the whole process with SIGABRT when one of them lets go of a
    collective that backward started (and with it, of a Python object) while Python itself is ending.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def wrap_ddp(model, ranks):
    """The model with its gradients averaged over ranks in backward (outside no_sync()). One rank: the model itself.

    gradient_as_bucket_view: gradients live in the communication buckets, which saves a copy of them all.
    """
    if ranks.world_size == 1:
        return model
    device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
