"""ZeRO by FSDP2: weights, gradients and optimizer state sharded over ranks (Rajbhandari et al. 2020, "ZeRO").

The ranks form a mesh of (pipeline, replicate, shard, tensor). A shard group holds one copy of the weights, or of the
part that --pipeline and --tensor give to a rank. zero1 to zero3 use one shard group, hsdp one for each machine. With
--pipeline or --tensor, ddp is FSDP with shard groups of one rank: DDP does not know the parts of a model or layer.
Ranks that share sequences by --context are replicas or shards as any others.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import contextlib
import math

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from common.errors import Note, UserError, out_of_memory
from kernels.needs import is_sharded
from optim.schedules import accumulation_steps
from parallel import tensor

# Minimum number of parameters in one all-gather. With smaller all-gathers Python takes longer to launch a block than
# the GPU to compute it. GPT-2 124M with zero3 in blocks on two H200s: gathering four together is 1.02 x as fast, 1.05 x
# with one micro-batch a step.
MIN_ALL_GATHER_PARAMS = 25_000_000
# Maximum number of parameters in the blocks of a model that zero1 to zero3 gather as one unit. A unit's hooks end a
# compiled graph, and torch.compile fuses within a graph. GPT-2 124M on two H200s: 1.02 (zero1, zero2) and 1.03 x
# (zero3) as fast as in blocks, with 0.3 to 0.4 GB more.
MAX_ONE_UNIT_PARAMS = 100_000_000


def shard_group_size(config, distributed):
    """Number of ranks that FSDP divides one copy of the weights among, after --tensor has divided the layers."""
    of_machine = max(1, distributed.ranks_of_machine // distributed.tensor)
    return {"ddp": 1, "hsdp": of_machine}.get(config.parallel, distributed.data_context_size)


def check_flags(config, distributed, notes):
    """Check --parallel and flags that depend on it; changes config and notes in place. Raises UserError."""
    if not is_sharded(config):
        return
    mode = config.parallel
    if mode == "ddp":
        mode = f"--pipeline {config.pipeline}" if config.pipeline > 1 else f"--tensor {config.tensor}"
    if config.autocast == "fp16":
        raise UserError(f"--autocast fp16 scales its gradients, which needs --parallel ddp, not {mode}")
    if config.autocast == "bf16" and not config.bf16_residual:
        config.bf16_residual = True
        notes.append(Note("bf16_residual", True, f"{mode} gathers the embeddings in bf16"))
    ranks, shards = distributed.data_context_size, shard_group_size(config, distributed)
    if ranks % shards:
        raise UserError(f"--parallel hsdp: the {shards} ranks of a machine do not divide {ranks}: use zero3")
    if config.parallel != "ddp" and shards == 1:
        notes.append(Note("parallel", config.parallel, "a shard group has one rank: nothing is sharded"))


def check_accumulation(config, distributed):
    """Raises UserError where FSDP would sum a step's micro-batches in bf16: those that it averages once a step."""
    copies = distributed.data_context_size > shard_group_size(config, distributed)
    once = copies or config.pipeline > 1 or config.parallel == "zero1"
    micro_steps = accumulation_steps(config, distributed.data_size)
    if config.bf16_gradients and is_sharded(config) and micro_steps > 1 and once:
        raise UserError(
            f"--bf16_gradients would also accumulate {micro_steps} micro-batches in bf16 here: leave it out, or use "
            "--parallel zero2 or zero3 without --pipeline"
        )


def blocks_together(config):
    """Number of blocks in one FSDP unit, a third of all at most: their weights are gathered together."""
    return max(1, min(math.ceil(MIN_ALL_GATHER_PARAMS / (12 * config.n_embd**2)), config.n_layer // 3))


def is_one_unit(config, n_layer, n_embd):
    """Whether FSDP gathers a model of n_layer blocks, or a stage of one, as a whole."""
    return config.parallel in ("zero1", "zero2", "zero3") and 12 * n_layer * n_embd**2 <= MAX_ONE_UNIT_PARAMS


def shard(model, blocks, config, mesh):
    """Shard a GPT, or a stage of one, in place over a mesh of (replicate, shard) or (shard). Parameters become
    DTensors, whose shards are the float32 master weights.

    A unit of blocks is all-gathered, in bf16 under autocast, while the unit before it computes; a model of one unit
    first. zero1 and zero2 keep gathered weights until the step ends; zero3 and hsdp reshard a unit of blocks after its
    forward, and all units after their backward.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.autocast == "bf16" else None,
        reduce_dtype=torch.bfloat16 if config.bf16_gradients else torch.float32,
        cast_forward_inputs=False,  # --bf16_residual alone decides the dtype of the residual stream
    )
    together = blocks_together(model.config)
    units = [blocks[i : i + together] for i in range(0, len(blocks), together)]
    if is_one_unit(config, len(blocks), model.config.n_embd):
        units = []  # the root has all
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward(unit, model, config))
    for unit, following in zip(units, units[1:]):
        unit[0].set_modules_to_forward_prefetch([following[0]])  # FSDP prefetches by itself in backward only


def reshard_after_forward(unit, model, config):
    """Whether a unit's gathered weights are freed after forward. The root's are kept for backward."""
    return config.parallel in ("zero3", "hsdp") and unit is not model


@contextlib.contextmanager
def gathered(model, config):
    """Every rank holds all weights of its part of the model inside this context: no gradients, any number of forwards.

    Does nothing for a model that is not sharded. Raises UserError if the weights do not fit.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        with out_of_memory(
            "validation, HellaSwag and samples need all weights on every GPU; if they do not fit, turn them off: "
            "--val_every 0 --hellaswag_every 0 --sample_every 0"
        ):
            unit.unshard()
    try:
        with tensor.loss(config):
            yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(reshard_after_forward(unit, model, config), recurse=False)
            unit.reshard()
