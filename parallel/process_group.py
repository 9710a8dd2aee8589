"""The process group: this process's rank and device, and the collectives that training needs."""

from common.interrupt import Stopped

import gc
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group exists: its default arguments would keep the group alive
from torch.distributed.rendezvous import rendezvous

from common.cli import progress
from common.device import choose_device_type
from common.errors import UserError, first_line


@dataclass(frozen=True)
class Distributed:
    """This process's rank, the world size, this process's device, and how the ranks divide the batch.

    Every method is a collective: all ranks call it, in the same order. Without a process group the only rank is rank 0.
    """

    rank: int
    world_size: int
    device: torch.device
    tensor: int = 1  # adjacent ranks that split every layer
    context: int = 1  # adjacent ranks, or groups of `tensor` ranks, that split every sequence of training
    pipeline: int = 1  # stages: groups of adjacent ranks, each with its own blocks, through which a micro-batch passes
    ranks_of_machine: int = 1  # the fewest of all machines

    @property
    def data_size(self):
        """Number of different micro-batches that the ranks compute at a time."""
        return self.data_context_size // self.context

    @property
    def data_rank(self):
        """Which of these micro-batches this rank computes."""
        return self.data_context_rank // self.context

    @property
    def data_context_size(self):
        """Number of ranks, or groups of ranks that split the model, over which gradients are averaged.

        Evaluations, which split no sequence, divide their batches among these.
        """
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def data_context_rank(self):
        return self.rank // self.tensor % self.data_context_size

    @property
    def is_main(self):
        return self.rank == 0

    def all_reduce(self, *values):
        """The sum over all ranks of each number and each element of a tensor, in float64: a list of floats."""
        return self.begin_all_reduce(*values)()

    def begin_all_reduce(self, *values):
        """Start an all-reduce of the values; returns a function that waits for the sums.

        The function does not wait for work that the GPU is given afterwards. The values must not change before the
        function is called.
        """
        if not dist.is_initialized() and self.device.type != "cuda":
            return lambda: [float(x) for v in values for x in (v.flatten() if isinstance(v, torch.Tensor) else [v])]
        # one tensor on the device, so that the host waits for the device once
        options = dict(dtype=torch.float64, device=self.device)
        values = [
            v.to(**options, non_blocking=True).flatten()
            if isinstance(v, torch.Tensor)
            else torch.full((1,), v, **options)
            for v in values
        ]
        result = torch.cat(values)
        if dist.is_initialized():
            dist.all_reduce(result)
        if self.device.type != "cuda":
            return result.tolist
        result = torch.empty_like(result, device="cpu", pin_memory=True).copy_(result, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait():
            copied.synchronize()
            return result.tolist()

        return wait

    def minimum(self, value):
        """The smallest of all ranks' integers."""
        return min(tensor.item() for tensor in self.all_gather(torch.tensor(value)))

    def all_gather(self, tensor):
        """Every rank's tensor, of one shape and dtype: a list of CPU tensors in the order of ranks."""
        if not dist.is_initialized():
            return [tensor.cpu()]
        tensors = [torch.empty_like(tensor, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor.to(self.device))
        return [tensor.cpu() for tensor in tensors]

    def broadcast(self, value):
        """Rank 0's value on every rank. The value must be picklable."""
        if not dist.is_initialized():
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def on_main(self, work):
        """Call work() on rank 0 while the other ranks wait. Returns its result there, None elsewhere.

        A UserError of work() ends every rank.
        """
        result = error = None
        if self.is_main:
            try:
                result = work()
            except UserError as raised:
                error = raised
        if self.all_reduce(error is not None)[0]:
            raise error or UserError("rank 0 stopped")
        return result


def batches_of_rank(batches, title, distributed, stop=None):
    """Yield this rank's share of the batches, with a progress bar. Ranks that split layers have the same share.

    stop: a StopSignal, or None. If that of any rank has received a signal, all ranks raise Stopped, after the same
    number of batches.
    """
    alone = distributed.world_size == 1
    for first in progress(range(0, len(batches), distributed.data_context_size), title):
        if not alone:
            # the all-reduce is queued before the batch, so a GPU computes the batch while the host reads the result
            stops = distributed.begin_all_reduce(bool(stop and stop.requested))
        if first + distributed.data_context_rank < len(batches):
            yield batches[first + distributed.data_context_rank]
        if (stop and stop.requested) if alone else stops()[0]:
            raise Stopped


def launched():
    """(rank, world size, local rank, ranks of this machine), as torchrun says; (0, 1, 0, 1) without torchrun.

    Raises UserError for an environment variable that is missing or wrong.
    """
    if "WORLD_SIZE" not in os.environ:
        # of srun and mpirun, which start a process for each task, and no process group
        counts = [os.environ.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
        tasks = max((int(count) for count in counts if count.isdecimal()), default=1)
        if tasks > 1:
            raise UserError(
                f"{tasks} tasks would each do the same: start one torchrun on each machine, as clusters/slurm.sh does "
                "with `srun --ntasks-per-node=1 torchrun ...`, or set WORLD_SIZE=1 for separate runs"
            )
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1, 0, 1
    try:
        ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return *ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    except (KeyError, ValueError) as error:
        raise UserError(
            f"RANK, WORLD_SIZE or LOCAL_RANK is missing or wrong ({first_line(error)}): start with torchrun, or "
            "set them, MASTER_ADDR and MASTER_PORT for every rank"
        ) from error


def start_alone(device_type, reason):
    """The device of a command of one process. Raises UserError with the reason if torchrun has started several."""
    if launched()[1] > 1:
        raise UserError(f"{reason}: start it with python, not with torchrun")
    return start(device_type).device


def start(device_type, tensor=1, context=1, pipeline=1):
    """Join the process group that torchrun describes, if it started this process, and choose this rank's device.

    device_type: "auto", "cuda", "cpu" or "mps". tensor, context, pipeline: as in Distributed; one rank splits nothing.
    Raises UserError if the device does not exist, if there are more ranks than GPUs, or if the ranks do not meet.
    """
    device_type = choose_device_type(device_type)
    rank, world_size, local_rank, ranks_of_machine = launched()
    if device_type == "mps" and world_size > 1:
        raise UserError("several ranks cannot share an Apple GPU: start one process, or use --device cpu")
    device = torch.device(device_type)
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise UserError(
                f"{local_rank + 1} ranks or more on this machine, but {gpus} GPUs: use --nproc_per_node={gpus}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world_size == 1:
        return Distributed(rank, world_size, device)
    # the others wait while rank 0 hashes or writes a checkpoint: gpt2-xl's 19 GB on a disk of 21 MB/s
    timeout = timedelta(minutes=15)
    # torchrun's restarts share a store: without a name of its own a rank could read an address of the attempt before.
    # Machines count restarts apart
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if ranks_of_machine == world_size else "0"
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=dist.PrefixStore(f"attempt {attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device_type == "cuda" else None,
        )
    except (ValueError, dist.DistError) as error:  # ValueError: MASTER_ADDR or MASTER_PORT is not set
        raise UserError(f"the ranks do not meet ({first_line(error)}): start all of them, with torchrun") from error
    fewest = Distributed(rank, world_size, device).minimum(ranks_of_machine)
    return Distributed(rank, world_size, device, tensor, context, pipeline, fewest)


def stop():
    """Destroy the process group. Drop every reference to a DDP or FSDP model first.

    A referenced group keeps its threads. If one of gloo's threads releases a tensor while the interpreter shuts down,
    the process ends with SIGABRT.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def must_divide(flag, size, number, things):
    """Raises UserError if --FLAG SIZE does not divide this number of things."""
    if number % size:
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        raise UserError(f"--{flag} {size} does not divide {number} {things}: try one of {divisors}")
