"""How much GPU memory a step takes, and the largest micro-batch that fits."""

import torch

from common.cli import UserError
from data.tokenizer import VOCAB_SIZE
from optim.optimizer import state_bytes
from parallel.fsdp import blocks_together, shard_group_size
from parallel.pipeline import blocks_in_flight, blocks_of_stages

LARGEST_MICRO_BATCH = 64  # sequences; more gains 1% for twice the memory
LOGIT_ROWS = 4096  # of fused_cross_entropy, whose file needs Triton

# Peak bytes of forward and backward: (per layer, token and unit of width), (the head, per token and vocabulary
# entry), (attention without flash, per score in each layer). Fitted to peaks of GPT-2 124M on an H200, PyTorch 2.11.
PEAK_BYTES = {
    # (compile, 16 bits)
    (True, True): (33, 2.7, 4),
    (True, False): (44, 8, 4),
    (False, True): (45, 9, 6),
    (False, False): (64, 12, 4),
}


def nearest_multiples(number, factor):
    """The multiples of factor below and above number, in words."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def data_ranks(distributed):
    """What the micro-batches of a batch are divided among, in words."""
    size = distributed.world_size // distributed.data_size
    return f"{distributed.data_size} {f'groups of {size} ranks' if size > 1 else 'ranks'}"


def free_memory(distributed):
    """Free GPU memory in bytes, the least of all ranks'; None without GPUs."""
    if distributed.device.type != "cuda":
        return None
    return distributed.minimum(torch.cuda.mem_get_info(distributed.device)[0])


def choose_micro_batch_size(config, distributed, free):
    """The largest power of two, up to LARGEST_MICRO_BATCH, that fits and divides the batch: (size, reason).

    free: bytes, as free_memory gives them. Raises UserError if no micro-batch size divides the batch.
    """
    share = config.seq_len * distributed.data_size
    if config.total_batch_size % share:
        nearest = nearest_multiples(config.total_batch_size, share)
        raise UserError(
            f"--total_batch_size {config.total_batch_size} cannot be divided into sequences of {config.seq_len} tokens "
            f"over {data_ranks(distributed)}: try {nearest}"
        )
    if free is not None:
        room = 0.85 * free - bytes_of_weights(config, distributed)
        if config.fused_cross_entropy:
            # LOGIT_ROWS rows of logits, the embedding table in their dtype, and its float32 gradient
            width = 2 if config.autocast != "off" else 4
            room -= VOCAB_SIZE * (width * (LOGIT_ROWS + config.n_embd) + 4 * config.n_embd)
        limit = room / (config.seq_len * bytes_per_token(config))
        memory = f"the {free / 2**30:.0f} GB of free memory"
        reason = f"the largest up to {LARGEST_MICRO_BATCH} that divides the batch and fits {memory}"
        if limit < 1:
            reason = f"the smallest, though it may not fit {memory}"
    else:
        limit = 1024 / config.seq_len  # on a CPU more tokens gain nothing
        reason = f"the default on {distributed.device.type}"
    if config.pipeline > 1:  # with 4 micro-batches for each stage the bubble is small (Huang et al. 2019, "GPipe")
        limit = min(limit, config.total_batch_size // (share * 4 * config.pipeline))
        reason += f", as long as --pipeline {config.pipeline} has {4 * config.pipeline} micro-batches"
    size = 1
    while size * 2 <= min(limit, LARGEST_MICRO_BATCH) and config.total_batch_size % (size * 2 * share) == 0:
        size *= 2
    return size, reason


def check_micro_batch_size(config, distributed):
    """Raises UserError if the micro-batches of all ranks do not divide the batch."""
    share = config.seq_len * distributed.data_size  # tokens of one sequence in every micro-batch
    if config.total_batch_size % (config.micro_batch_size * share) == 0:
        return
    sequences = config.total_batch_size // share
    fits = [b for b in range(1, sequences + 1) if config.total_batch_size % (b * share) == 0]
    nearest = nearest_multiples(config.total_batch_size, config.micro_batch_size * share)
    hint = f"--micro_batch_size {min(fits, key=lambda b: abs(b - config.micro_batch_size))} or " if fits else ""
    raise UserError(
        f"--total_batch_size {config.total_batch_size} is not a multiple of micro_batch_size {config.micro_batch_size} "
        f"× seq_len {config.seq_len} × {data_ranks(distributed)}: try {hint}--total_batch_size {nearest}"
    )


def less_memory(micro_batch_size=1):
    """What to do when memory runs out, for an error message. micro_batch_size: 1 where it does not matter."""
    if micro_batch_size > 1:
        return f"use --micro_batch_size {max(b for b in range(1, micro_batch_size) if micro_batch_size % b == 0)}"
    several = "--parallel zero3 or --context on several GPUs"
    return f"use {several}, --activation_checkpointing full, or a smaller --model or --seq_len"


def count_params(config):
    return 12 * config.n_layer * config.n_embd**2 + (VOCAB_SIZE + config.seq_len) * config.n_embd


def bytes_of_weights(config, distributed):
    """Bytes a rank holds for the weights: float32 master weights, gradients, optimizer state, and compute weights."""
    block = 12 * config.n_embd**2 / config.tensor
    embeddings = count_params(config) / config.tensor - config.n_layer * block
    stages = blocks_of_stages(config)
    blocks = max(sum(stages[rank :: config.pipeline]) for rank in range(config.pipeline))
    weights = embeddings + blocks * block
    held = 4 + 4 + state_bytes(config)
    if config.pipeline > 1:
        # FSDP keeps the weights gathered and accumulates whole gradients in float32 until the last micro-batch; a
        # schedule has buffers to receive every micro-batch and its gradient
        width = 2 if config.bf16_residual else 4
        buffers = 2 * width * config.n_embd * config.stages_per_rank * config.total_batch_size / distributed.data_size
        return held * weights / shard_group_size(config, distributed) + (width + 4) * weights + buffers
    if config.parallel == "ddp":
        # +2: bf16 weights. They take 4 at the end of backward, when the activations are already freed
        return (held + 2) * weights
    unit = blocks_together(config) * block
    gathered = weights if config.parallel == "zero2" else embeddings + 2 * unit  # one unit computes, one is prefetched
    width = 4 if config.autocast == "off" else 2
    reduced = (width + 4) * max(unit, embeddings)  # a unit's gradients, and their float32 copy for the reduce-scatter
    return held * weights / shard_group_size(config, distributed) + width * gathered + reduced


def bytes_per_token(config):
    """Peak bytes for each token of a micro-batch: training's, or evaluation's if that takes more."""
    half = config.autocast != "off"
    layer, head, score = PEAK_BYTES[config.compile, half]
    layer = config.n_embd * layer + (0 if config.flash else config.n_head * config.seq_len * score)
    head, width = head / config.tensor, 2 if half else 4
    if config.tensor > 1:  # each rank has a part of everything but the inputs of c_attn and c_fc
        layer = layer / config.tensor + 2 * width * config.n_embd
    if config.context > 1:  # c_proj reads a copy of attention's output, that of the second all-to-all
        layer += width * config.n_embd
    blocks = blocks_in_flight(config)
    layers = blocks * layer
    if config.activation_checkpointing != "off":
        # each block's input; with "selective" also the outputs of GEMMs, ten times C, and of --context's all-to-alls,
        # four times C; plus one block being recomputed
        kept = 2 if config.bf16_residual else 4
        if config.activation_checkpointing == "selective":
            kept += 10 * width + (4 * width if config.context > 1 else 0)
        layers = blocks * config.n_embd * kept + layer
    training = layers + (0 if config.fused_cross_entropy else VOCAB_SIZE * head)
    training /= config.context
    # evaluation splits no sequence. It returns each token's loss and so holds all logits: 2 bytes compiled, 11 with
    # eager float32 copies
    compiled = config.compile and config.stages_per_rank == 1
    evaluation = VOCAB_SIZE * (2 if compiled else 11) * (1 if half else 2) / config.tensor
    return max(training, evaluation)
