"""The doors of this folder: check() how flags divide a model and its batch, place() the model, describe() the mode."""

from torch.distributed.device_mesh import init_device_mesh

from common.errors import Note
from parallel import context, fsdp, memory, pipeline, tensor


def check(config, distributed, free_memory, notes):
    """Check how the flags divide the model and the batch over the ranks, and choose micro_batch_size; in place.

    free_memory: bytes, from memory.free_memory. Raises UserError for flags that conflict.
    """
    pipeline.check_flags(config, distributed)
    tensor.check_flags(config, distributed, notes)
    context.check_flags(config, distributed)
    fsdp.check_flags(config, distributed, notes)
    if config.micro_batch_size is None:
        config.micro_batch_size, reason = memory.choose_micro_batch_size(config, distributed, free_memory)
        notes.append(Note("micro_batch_size", config.micro_batch_size, reason))
    else:
        memory.check_batch(config, distributed)
    pipeline.check_micro_batches(config, distributed)
    fsdp.check_accumulation(config, distributed)


def place(model, config, distributed, autocast):
    """The model that this rank trains, on its device: all of a GPT with ddp, otherwise its stage, parts and shards.

    model: a GPT on the device "meta". autocast: the context of a forward. The weights are uninitialized afterwards:
    checkpoints.resume.initialize() fills them.
    """
    if fsdp.is_sharded(config):
        ranks, shards = distributed.data_context_size, fsdp.shard_group_size(config, distributed)
        mesh = init_device_mesh(
            distributed.device.type,
            (config.pipeline, ranks // shards, shards, config.tensor),
            mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
        )
        # tensor: each rank has some heads, columns of the MLP and rows of the embedding table
        if config.tensor > 1:
            tensor.split(model, mesh["tensor"], config.seq_len // config.context)
        # pipeline: each rank has some blocks
        root, blocks = model, model.transformer.h
        if config.pipeline > 1:
            model = pipeline.Pipeline(model, config, distributed, autocast, mesh["pipeline"])
            root, blocks = model.stage, model.stage.blocks
        if config.tensor > 1:
            tensor.return_full_tensors(root)
        # zero1 to zero3, hsdp: each rank has a shard of every parameter
        fsdp.shard(root, list(blocks), config, mesh["replicate", "shard"] if shards < ranks else mesh["shard"])
        root.to_empty(device=distributed.device)
    else:
        model.to_empty(device=distributed.device)
    # context: each rank has some tokens of every sequence; in attention some heads
    context.split(model, config, distributed)
    return model


def describe(config, distributed):
    """The parallel mode in words, for the plan."""
    parts = []
    if config.pipeline > 1:
        stages = " + ".join(map(str, pipeline.blocks_of_stages(config)))
        bubble = f"{pipeline.bubble(config, distributed):.1%} of a step"
        parts.append(f"{config.pipeline} ranks share the blocks, {stages}; the bubble is {bubble}")
    for size, thing in ((config.tensor, "layer"), (config.context, "sequence")):
        if size > 1:
            parts.append(f"{size} ranks split every {thing}")
    mode, shards = config.parallel, fsdp.shard_group_size(config, distributed)
    if mode == "hsdp":
        mode += f", {distributed.data_context_size // shards} copies on {shards} ranks each"
    return "; ".join([*parts, mode + (", gradients averaged in bf16" if config.bf16_gradients else "")])
