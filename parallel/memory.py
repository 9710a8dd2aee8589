"""How much GPU memory a step takes, and the largest micro-batch that fits."""

from dataclasses import replace

import torch

from common.errors import UserError
from data.tokenizer import VOCAB_SIZE
from kernels.needs import small_micro_batch
from optim.optimizer import OPTIMIZERS
from optim.schedules import accumulation_steps
from parallel.fsdp import blocks_together, is_one_unit, is_sharded, shard_group_size
from parallel.pipeline import blocks_in_flight, blocks_of_stages
from parallel.tensor import sequence_parts

LARGEST_MICRO_BATCH = 128  # sequences; with 128 a step of 124M is 1.03 x as fast as with 64, on an H100
USABLE = 0.85  # of free memory; the rest is for fragments, cuBLAS and NCCL
LOGIT_ROWS = 4096  # of kernels/cross_entropy.py, which needs Triton

# Peak bytes of forward and backward: (per layer, token and unit of width), (the head, per token and vocabulary
# entry), (attention without flash, per score in each layer). Fitted to peaks of GPT-2 124M on an H200, PyTorch 2.11.
PEAK_BYTES = {
    # (compile, 16 bits)
    (True, True): (33, 2.7, 4),
    (True, False): (44, 8, 4),
    (False, True): (45, 9, 6),
    (False, False): (64, 12, 4),
}
LOSS_PARALLEL_BYTES = 9  # of the head with --tensor, at least: its logits and gradients are float32; fitted as well


def data_ranks(distributed):
    """The ranks, or groups of ranks, that the micro-batches of a batch are divided among, in words."""
    count, size = distributed.data_size, distributed.world_size // distributed.data_size
    plural = "s" if count != 1 else ""
    return f"{count} rank{plural}" if size == 1 else f"{count} group{plural} of {size} ranks"


def free_memory(distributed):
    """Free GPU memory in bytes, the least of all ranks'; None without GPUs."""
    if distributed.device.type != "cuda":
        return None
    return distributed.minimum(torch.cuda.mem_get_info(distributed.device)[0])


def choose_micro_batch_size(config, distributed, free):
    """The largest power of two, up to LARGEST_MICRO_BATCH, that fits and divides the batch: (size, reason).

    free: bytes, as free_memory gives them. Raises UserError if no micro-batch size divides the batch.
    """
    check_batch(replace(config, micro_batch_size=1), distributed)
    sequences = config.total_batch_size // (config.seq_len * distributed.data_size)  # of a rank in a step
    largest = LARGEST_MICRO_BATCH
    if config.pipeline > 1:  # with 4 micro-batches for each stage the bubble is small (Huang et al. 2019, "GPipe")
        largest = max(1, min(largest, sequences // (4 * config.pipeline)))
    if free is None:  # on a CPU more tokens gain nothing
        largest = max(1, min(largest, 1024 // config.seq_len))
    sizes = [2**i for i in range(8) if 2**i <= largest and sequences % 2**i == 0]
    if free is None:
        return sizes[-1], f"the default on {distributed.device.type}"
    memory = f"the {free / 2**30:.0f} GB of free memory"
    for size in reversed(sizes):
        if peak_bytes(replace(config, micro_batch_size=size), distributed) <= USABLE * free:
            return size, f"the largest up to {largest} that divides the batch and fits {memory}"
    return 1, f"the smallest, though it may not fit {memory}"


def check_batch(config, distributed):
    """Raises UserError if the micro-batches of all ranks do not divide the batch."""
    tokens, share = config.total_batch_size, config.seq_len * distributed.data_size
    of_ranks = config.micro_batch_size * share
    if tokens % of_ranks:
        below = tokens // of_ranks * of_ranks
        fits = [f"--micro_batch_size {b}" for b in range(1, config.micro_batch_size) if tokens % (b * share) == 0][-1:]
        fits += [f"--total_batch_size {each}" for each in (below, below + of_ranks) if each]
        raise UserError(
            f"--total_batch_size {tokens} is not a multiple of micro_batch_size {config.micro_batch_size} × seq_len "
            f"{config.seq_len} × {data_ranks(distributed)}: try {' or '.join(fits)}"
        )


def less_memory(micro_batch_size=1):
    """What to do when memory runs out, for an error message. micro_batch_size: 1 where it does not matter."""
    if micro_batch_size > 1:
        return f"use --micro_batch_size {max(b for b in range(1, micro_batch_size) if micro_batch_size % b == 0)}"
    several = "--parallel zero3 or --context on several GPUs"
    return f"use {several}, --activation_checkpointing full, or a smaller --model or --seq_len"


def peak_bytes(config, distributed):
    """Bytes that a GPU holds at the peak of a step, for a Config with its sizes and micro_batch_size."""
    params, shards = params_of_rank(config), shard_group_size(config, distributed)
    weights, states, activations = bytes_by_purpose(config, distributed)
    peak = weights + states + activations
    evaluation = 0
    if is_sharded(config) and (config.val_every or config.hellaswag_every or config.sample_every):
        # it gathers all weights, see fsdp.gathered(); there are no gradients
        evaluation = (4 / shards + compute_bytes(config)) * params + states
    accumulates = accumulation_steps(config, distributed.data_size) > 1
    graphed = config.cuda_graphs and small_micro_batch(config)
    if graphed:  # evaluations do not use the graphs' memory
        peak += bytes_of_evaluation(config)
    if not accumulates and not graphed and (is_sharded(config) or distributed.world_size == 1):
        # there are no gradients until backward, which makes them while it frees activations
        return max(evaluation, peak - min(4 * params / shards, activations))
    if config.compile and not is_sharded(config):
        # a compiled backward ends with all new gradients, beside the accumulated ones or DDP's buckets
        return max(peak, (4 + 4 + 4) * params + states)
    return max(evaluation, peak)


def bytes_by_purpose(config, distributed):
    """Bytes of a GPU's weights and gradients, of its optimizer states and, at their peak, of activations."""
    states = bytes_of_states(config) / shard_group_size(config, distributed)
    return bytes_of_weights(config, distributed), states, bytes_of_activations(config)


def describe(config, distributed):
    """What a GPU's memory holds in a step, in words. An estimate; not all of it is there at the same time."""
    weights, states, activations = (f"{part / 2**30:.1f} GB" for part in bytes_by_purpose(config, distributed))
    return f"about {weights} of weights and gradients, {states} of optimizer states, {activations} of activations"


def params_of_rank(config):
    """Parameters that --tensor and --pipeline leave a rank, the most of all ranks, before sharding."""
    return params_of_embeddings(config) + max(blocks_of_stages(config)) * 12 * config.n_embd**2 / config.tensor


def params_of_embeddings(config):
    return (VOCAB_SIZE + config.seq_len) * config.n_embd / config.tensor


def has_one_unit(config):
    """Whether FSDP gathers a rank's part of the model as a whole."""
    return is_one_unit(config, max(blocks_of_stages(config)), config.n_embd)


def compute_bytes(config):
    """Bytes of a number in GEMMs and attention."""
    return 4 if config.autocast == "off" else 2


def bytes_of_weights(config, distributed):
    """Bytes of a rank's weights, in float32 and to compute with, and gradients, accumulated and being reduced."""
    params, embeddings, width = params_of_rank(config), params_of_embeddings(config), compute_bytes(config)
    if not is_sharded(config):  # in float32, and the 16-bit copies that autocast makes of the weights
        return (4 + 4 + (width if width < 4 else 0)) * params
    own = 4 * params / shard_group_size(config, distributed)
    if config.pipeline > 1:  # weights stay gathered, gradients whole and in float32, until the last micro-batch
        return own + (width + 4) * params
    unit = blocks_together(config) * 12 * config.n_embd**2 / config.tensor
    gathered = params
    if config.parallel in ("zero3", "hsdp") and not has_one_unit(config):
        gathered = embeddings + 2 * unit  # one computes, one is prefetched
    # a unit's gradients, and their float32 copy for the reduce-scatter
    reduced = params if has_one_unit(config) else max(unit, embeddings)
    accumulates = config.parallel == "zero1" and accumulation_steps(config, distributed.data_size) > 1
    return 2 * own + width * gathered + (width + 4) * reduced + accumulates * 4 * params


def bytes_of_states(config):
    """Bytes of the optimizer's states of a rank, before sharding."""
    of_blocks, of_embeddings = OPTIMIZERS[config.optimizer].state_bytes
    embeddings = params_of_embeddings(config)
    return (params_of_rank(config) - embeddings) * of_blocks + embeddings * of_embeddings


def bytes_of_activations(config):
    """Peak bytes of activations and logits, of training or an evaluation, on the rank with most."""
    tokens, width = config.micro_batch_size * config.seq_len, compute_bytes(config)
    layer, head, score = PEAK_BYTES[config.compile, width == 2]
    layer = config.n_embd * layer + (0 if config.flash else config.n_head * config.seq_len * score)
    if config.tensor > 1:  # each rank has a part of everything but the inputs of c_attn and c_fc
        head = max(head, LOSS_PARALLEL_BYTES) / config.tensor
        layer = layer / config.tensor + 2 * width * config.n_embd
    if config.context > 1:  # c_proj reads a copy of attention's output, that of the second all-to-all
        layer += width * config.n_embd
    kept, recomputed = layer, 0  # bytes per token: of each block in flight; of the one block being recomputed
    if config.activation_checkpointing != "off":
        # each block's input; with "selective" also the outputs of GEMMs and attention, 8 C, and of --context's
        # all-to-alls, 4 C; plus one block being recomputed
        of_block = 2 if config.bf16_residual else 4  # bytes for each unit of width
        if config.activation_checkpointing == "selective":
            of_block += (12 if config.context > 1 else 8) * width
        kept, recomputed = config.n_embd * of_block / sequence_parts(config), layer
    of_ranks = [tokens * (blocks * kept + recomputed) / config.context for blocks in blocks_in_flight(config)]
    if config.fused_cross_entropy:
        # the rows of one chunk of logits, the embedding table in their dtype, and its float32 gradient
        rows = min(LOGIT_ROWS, tokens / config.context)
        logits = VOCAB_SIZE * (width * (rows + config.n_embd) + 4 * config.n_embd)
    else:
        logits = tokens * VOCAB_SIZE * head / config.context
    # a pipeline's last rank has the logits, and the fewest micro-batches in flight
    return max(*of_ranks, of_ranks[-1] + logits, bytes_of_evaluation(config))


def bytes_of_evaluation(config):
    """Bytes of an evaluation's logits, 2 for each compiled, 11 with eager float32 copies. No sequence is split."""
    evaluates = config.val_every > 0 or config.hellaswag_every > 0
    tokens, width = config.micro_batch_size * config.seq_len, compute_bytes(config)
    return evaluates * tokens * VOCAB_SIZE * (1 if config.compile else 5.5) * width / config.tensor
