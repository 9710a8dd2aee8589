"""Activation checkpointing: backward recomputes activations that forward does not keep (Chen et al. 2016).

"full" keeps a block's input alone. "selective" also keeps the outputs of GEMMs and attention and recomputes the cheap
operations between them (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").
"""

import functools

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

GEMMS = ("aten::mm", "aten::addmm", "aten::bmm")
# of --tensor and --context: without their outputs, recomputing would communicate once more
COLLECTIVES = ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")


def checkpoint_activations(model, mode, saved_operators):
    """Let a GPT's blocks recompute their activations. mode: "off", "full" or "selective".

    saved_operators: names of operators, besides GEMMS and COLLECTIVES, whose outputs "selective" keeps.
    """
    if mode == "off":
        return
    options = dict(use_reentrant=False, preserve_rng_state=False)  # the model has no dropout
    if mode == "selective":
        collectives = [f"_c10d_functional::{name}" for name in COLLECTIVES]
        policy = functools.partial(save_matmuls_policy, frozenset((*GEMMS, *collectives, *saved_operators)))
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in model.transformer.h:
        block.recompute = options
        # "selective" saves the outputs of gpt2::mlp, but GELU's output is cheap to recompute
        block.mlp.keep_gelu = mode != "selective"


def save_matmuls_policy(saved, context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operation.name() in saved else CheckpointPolicy.PREFER_RECOMPUTE
