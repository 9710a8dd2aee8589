"""Ranks and their devices, and how a model is spread over them: DDP, ZeRO by FSDP2, activation checkpointing.

All of it is applied to the model from outside. The ranks form one mesh of (replicate, shard): the ranks of a row hold a
copy of the weights between them, and there are as many copies as rows. With ddp a row is one rank, with zero2 and zero3
it is all of them, with hsdp those of a machine.
"""

import contextlib
import functools
import gc
import math
import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported once there is a group, its default arguments would hold the group
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as recompute

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
        """Each number (or tensor of no dimensions) added up over all ranks, in float64; returns a list of floats."""
        return self.begin_sum(*values)()

    def begin_sum(self, *values):
        """A function that waits for sum(*values), but not for what a GPU is given to do after them. Until it is called
        they must not change."""
        return self._begin(values, dist.ReduceOp.SUM)

    def min(self, value):
        """The smallest of all ranks' numbers, as a float."""
        return self._begin([value], dist.ReduceOp.MIN)()[0] if dist.is_initialized() else float(value)

    def _begin(self, values, operation):
        if not dist.is_initialized() and self.device.type != "cuda":
            return lambda: [float(value) for value in values]
        # what is on the device stays there until all of it is known: one wait for the device
        options = dict(dtype=torch.float64, device=self.device)
        values = [v.to(**options) if isinstance(v, torch.Tensor) else torch.full((), v, **options) for v in values]
        result = torch.stack(values)
        if dist.is_initialized():
            dist.all_reduce(result, operation)
        if self.device.type != "cuda":
            return result.tolist
        result = torch.empty_like(result, device="cpu", pin_memory=True).copy_(result, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait():
            arrived.synchronize()
            return result.tolist()

        return wait

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
        store, _, _ = next(dist.rendezvous("env://"))
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(meet(store, rank, world_size), store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=30),  # all wait while rank 0 checks tens of GB of a checkpoint
            device_id=device if backend == "nccl" else None,
        )
    return Ranks(rank, world_size, device)


def meet(store, rank, world_size):
    """A name for this start of the ranks, the same on all of them and never used before.

    torchrun's restarts share a store, where the addresses of the processes before them still are, and its count of
    restarts differs from machine to machine. So rank 0 makes up a name and answers whoever calls it by that. Who has
    read the name of the rank 0 before gets no answer, and looks again.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("rank 0", own)
        for other in range(1, world_size):
            caller = store.get(f"{own} {other}").decode()
            store.set(f"{own} {caller}", "welcome")
        return own
    while True:
        name = store.get("rank 0").decode()
        store.set(f"{name} {rank}", own)
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{name} {own}"], timedelta(seconds=1))
            return name


def stop():
    """Leave the process group. Let go of the model first, which holds it when it is in DDP or in pieces.

    A group that is held keeps its threads, and gloo's end the whole process with SIGABRT when one of them lets go of a
    collective that backward started (and with it, of a Python object) while Python itself is ending.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# The model over the ranks

# Parameters, or more: where blocks are small, to gather each alone takes Python longer than the GPU to compute with it.
# A trial of GPT-2 124M with zero3 on two H200s: four together are 1.02 x as fast, 1.05 x with one micro-batch a step.
GATHERED_TOGETHER = 25_000_000


def in_words(config, ranks):
    """How the model is spread over the ranks, for a person."""
    words = config.parallel
    if config.parallel == "hsdp":
        words += f", {ranks.world_size // config.shard_ranks} copies on {config.shard_ranks} ranks each"
    return words + (", gradients averaged in bf16" if config.bf16_gradients else "")


def row_length(config, ranks):
    """How many ranks hold one copy of the weights between them."""
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return {"ddp": 1, "hsdp": config.shard_ranks or machine}.get(config.parallel, ranks.world_size)


def blocks_together(config):
    """How many blocks' weights are gathered at the same time."""
    return max(1, min(math.ceil(GATHERED_TOGETHER / (12 * config.n_embd**2)), config.n_layer // 3))


def shard(model, config, ranks):
    """Spread a GPT's weights, gradients and AdamW's state over the ranks (Rajbhandari et al. 2020, "ZeRO"), in place.

    Each piece is gathered before it computes, with autocast in bf16, a block (or some small ones) while the one before
    is at work; float32 stays in the shards. zero2 keeps what it has gathered until the step ends; zero3 and hsdp let go
    of a block at once. https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    size = row_length(config, ranks)
    shape = (ranks.world_size // size, size)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))
    mesh = mesh if shape[0] > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.autocast == "bf16" else None,
        reduce_dtype=torch.bfloat16 if config.bf16_gradients else torch.float32,
        cast_forward_inputs=False,  # the residual stream has the type that --bf16_residual says
    )
    blocks, together = list(model.transformer.h), blocks_together(model.config)
    units = [blocks[i : i + together] for i in range(0, len(blocks), together)]
    for part in (*units, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=lets_go(part, model, config))
    for unit, following in zip(units, units[1:]):
        unit[0].set_modules_to_forward_prefetch([following[0]])  # in backward that is what FSDP does


def place(model, config, ranks):
    """Allocate a GPT where it trains: with ddp all of it on every rank's device, else a piece of it. It may be on the
    device "meta"; what weights it had are lost, and sharded.fill() brings others."""
    if config.parallel != "ddp":
        shard(model, config, ranks)
    model.to_empty(device=ranks.device)


def lets_go(part, model, config):
    """Whether a part's weights are dropped between forward and backward: not those that backward begins with."""
    return config.parallel != "zero2" and part is not model


def wrap_ddp(model, config, ranks):
    """The model with its gradients averaged over ranks in backward. One rank, or a sharded model: the model itself.

    gradient_as_bucket_view: gradients live in the communication buckets, which saves a copy of them all, as long as
    they are not freed between steps: see zero_gradients().
    optimize_ddp: torch.compile cuts its graph where a bucket is full, so that averaging begins while backward still
    runs. https://docs.pytorch.org/docs/stable/notes/ddp.html
    """
    if ranks.world_size == 1 or config.parallel != "ddp":
        return model
    # overlap_gradients: the cuts cost passes over memory, more than they save where links are fast
    if config.compile:
        torch._dynamo.config.optimize_ddp = config.overlap_gradients == "on"
    device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    if config.bf16_gradients:
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def averaging_rate(ranks):
    """Bytes of gradients that the GPUs average in a second."""
    x = torch.zeros(2**26, device=ranks.device)
    for _ in range(3):  # the first sets up the connections
        start = time.perf_counter()
        dist.all_reduce(x)
        ranks.sum(x[0])  # waits for it
        seconds = time.perf_counter() - start
    return ranks.min(x.nbytes / seconds)


def micro_batch(model, train_forward, config, last):
    """A context for the forward and backward of a micro-batch, the last of its step or one before.

    Gradients add up on every rank and are averaged over the copies of the weights once, in the last backward. Where a
    copy lies in pieces, each backward adds to the pieces' gradients, so that nobody holds all of them.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or config.parallel != "zero2")
    elif isinstance(train_forward, DistributedDataParallel) and not last:
        return train_forward.no_sync()
    return contextlib.nullcontext()


def zero_gradients(optimizer, train_forward):
    """Begin a step. DDP's gradients stay in its buckets; where there are none, forward can have the memory."""
    optimizer.zero_grad(set_to_none=not isinstance(train_forward, DistributedDataParallel))


@contextlib.contextmanager
def gathered(model, config):
    """Meanwhile every rank has all weights to compute with, and may call the model as often as it likes; no gradients.

    Raises UserError where they do not fit.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        try:
            part.unshard()
        except torch.OutOfMemoryError as error:
            raise UserError(
                "out of memory: validation, HellaSwag and samples need all weights on every GPU; where these do not "
                "fit, leave them out: --val_every 0 --hellaswag_every 0 --sample_every 0"
            ) from error
    yield
    for part in parts:
        part.set_reshard_after_forward(lets_go(part, model, config), recurse=False)
        part.reshard()


def whole(tensor):
    """A tensor that may be in pieces over the ranks, as one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ----------------------------------------------------------------------------------------------------------------------
# Activation checkpointing

# What "selective" does not compute twice: products and attention
EXPENSIVE = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "gpt2::packed_attention",
    "gpt2::mlp",
    "gpt2::fp8_linear",
    "gpt2::fp8_mlp",
}


def keep_expensive(context, operation, *args, **kwargs):
    expensive = operation.name() in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(model, how):
    """Let backward compute anew what forward leaves out of memory (Chen et al. 2016), in place. how: "off"; "full", all
    of a block but its input; "selective", all but products and attention (Korthikanti et al. 2022)."""
    options = dict(use_reentrant=False, preserve_rng_state=False)  # there is no dropout
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_expensive)
    for block in model.transformer.h if how != "off" else ():
        block.mlp.keep_gelu = how != "selective"  # cheap, though it comes out of a product
        block.forward = recomputed(block.forward, options)


def recomputed(forward, options):
    def run(*args):  # torch.compile takes it for a graph, as it would neither a partial() nor checkpoint() itself
        return recompute(forward, *args, **options)

    return run
