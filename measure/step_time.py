"""An estimate of a step's time: FLOPs at a measured rate, and the bytes that every way to use several GPUs sends.

In an all-gather, a reduce-scatter or an all-to-all of S bytes by n ranks each rank sends (n-1)/n S, in an all-reduce
twice that (Patarasuk and Yuan 2009); over several machines the ranks of a machine do so first, and then the machines.
With P parameters on a rank, 16-bit weights, float32 gradients, and x = B T C / N numbers of 2 bytes on each of N ranks:

    ddp          all-reduce 4P                                  once a step             waits
    zero1        all-gather 2P, reduce-scatter 4P               once a step             overlaps
    zero2        all-gather 2P                                  once a step             overlaps
                 reduce-scatter 4P                              every micro-batch       overlaps
    zero3        all-gather 2P twice (one unit: once),          every micro-batch       overlaps
                 reduce-scatter 4P
    hsdp         as zero3 in a machine; all-reduce of shards    once a step             overlaps
    tensor       4 all-gathers and 4 reduce-scatters of N x     every block             waits
    context      all-to-alls of 4x in forward, 4x in backward   every block             waits
    pipeline     B T C forward and as many backward             every stage             waits

(Rajbhandari et al. 2020, "ZeRO", section 7; Narayanan et al. 2021, sections 2.2 and 3.2; Korthikanti et al. 2022;
Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.2). The embedding table never overlaps: its gather comes before the
first block, and its gradient is complete after all others. All averaging waits in a model of one FSDP unit, and with
--pipeline, where the bubble waits too.
"""

from data.tokenizer import VOCAB_SIZE
from optim.schedules import accumulation_steps
from parallel.fsdp import is_sharded, shard_group_size
from parallel.memory import compute_bytes, has_one_unit, params_of_embeddings, params_of_rank
from parallel.pipeline import blocks_of_stages
from watch.hardware import PEAK_TFLOPS

# Measured with GPT-2 124M and 1558M on H200s: dev/LOG.md, docs/scaling.md
LAYER_SECONDS = 0.3e-3  # fixed time of a block: micro-batches of 64, 32, 16 sequences take 108.6, 56.4, 30 ms (124M)
STEP_SECONDS = 2e-3  # the update and the rest of a step of 124M; 1558M takes 25 ms, which the fitted MFU contains
SLOWEST = 1.015  # several GPUs wait for the slowest
# FSDP's computation, against DDP's; zero1 as zero2 and hsdp as zero3, not measured
SHARDED = dict(ddp=1.03, zero1=1.03, zero2=1.03, zero3=1.05, hsdp=1.05)
ONE_UNIT = 1.01  # of a model of one unit: zero1 to zero3 take 1.009 to 1.011 x ddp's time
COPIES = 1.5  # times the bytes of tensor's and context's collectives, which copy input and output; 124M, --context 2
LATENCY = 20e-6  # of a collective, however small: an assumption
RECOMPUTED = dict(off=1, selective=1.07, full=4 / 3)  # FLOPs of a block; selective: equivalent to 5% of a step


def gather(size, count, stride, config):
    """Seconds of an all-gather, a reduce-scatter or an all-to-all of `size` bytes by `count` ranks, each `stride` after
    the one before. config: a PlanConfig, as in all functions here."""
    machine = min(config.gpus, config.gpus_per_machine)
    ranks = max(1, min(count, machine // stride))  # in a machine
    machines = -(-count // ranks)
    sharing = machine // ranks  # groups that send over the network of one machine at the same time
    seconds = (ranks - 1) / ranks * size / (1e9 * config.link)
    seconds += (machines - 1) / machines * size * sharing / (1e9 * config.network)
    return seconds + (LATENCY if count > 1 else 0)


def micro_batch_seconds(config):
    """Seconds of one micro-batch's computation, on a pipeline's slowest rank."""
    C, T = config.n_embd, config.seq_len
    tokens = config.micro_batch_size * T / (config.context * config.tensor)
    rate = 1e12 * PEAK_TFLOPS[config.gpu] * config.mfu
    # Attention computes half of the T x T scores that its formula, 12 C T, counts, at a rate that grows with T: its
    # time is worth 0.80 of the formula at T = 1,024, 0.61 for long sequences. Fitted to 124M with T up to 262,144.
    flops = 72 * C**2 + 0.612 * (1 + 310 / T) * 12 * C * T  # per token, forward and backward, of a block
    block = tokens * flops * RECOMPUTED[config.activation_checkpointing] / rate + LAYER_SECONDS
    of_ranks = [blocks * block for blocks in blocks_of_stages(config)]
    of_ranks[-1] += tokens * 6 * VOCAB_SIZE * C / rate  # the head
    sharded = ONE_UNIT if has_one_unit(config) else SHARDED[config.parallel] if is_sharded(config) else 1
    return max(of_ranks) * sharded * (SLOWEST if config.gpus > 1 else 1)


def split_seconds(config):
    """Seconds of one micro-batch's communication for --tensor, --context and --pipeline."""
    tensor, context, pipeline = config.tensor, config.context, config.pipeline
    stream = compute_bytes(config) * config.micro_batch_size * config.seq_len * config.n_embd / context  # bytes
    blocks = max(blocks_of_stages(config))
    # selective keeps the outputs of reduce-scatters and all-to-alls, and repeats all-gathers
    gathers, exchanges = dict(off=(8, 2), selective=(10, 2), full=(12, 3))[config.activation_checkpointing]
    seconds = (blocks * gathers + 4) * gather(COPIES * stream, tensor, 1, config)  # 4: of the embedding and the head
    seconds += blocks * exchanges * gather(COPIES * 4 * stream / tensor, context, tensor, config)
    if pipeline > 1:  # to a neighbor all of it is sent, in an all-gather of two ranks half
        seconds += 2 * gather(2 * stream / tensor, 2, config.gpus // pipeline, config)
    return seconds


def averaging_seconds(config, distributed):
    """Seconds of communication of weights and gradients: (in every micro-batch, once a step)."""
    params, tensor, shards = params_of_rank(config), config.tensor, shard_group_size(config, distributed)
    gradient = 2 if config.bf16_gradients else 4
    gathered = gather(compute_bytes(config) * params, shards, tensor, config)
    scattered = gather(gradient * params, shards, tensor, config)
    replicas = distributed.data_context_size // shards
    all_reduced = 2 * gather(gradient * params / shards, replicas, tensor * shards, config)
    if config.pipeline > 1 or config.parallel == "zero1":
        return 0, gathered + scattered + all_reduced
    if config.parallel == "zero2":
        return scattered, gathered
    return (1 if has_one_unit(config) else 2) * gathered + scattered, all_reduced


def step_time(config, distributed):
    """(seconds of a step, share that waits for communication or the pipeline). config: with sizes, micro_batch_size."""
    micro_steps = accumulation_steps(config, distributed.data_size)
    micro_batch, split = micro_batch_seconds(config), split_seconds(config)
    each, once = averaging_seconds(config, distributed)
    waits = micro_steps * (split + each) + once + (config.pipeline - 1) * (micro_batch + split)
    if is_sharded(config) and config.pipeline == 1:
        # a micro-batch hides at most its own time; what comes once a step overlaps with one micro-batch
        hidden = 0 if has_one_unit(config) else 1 - params_of_embeddings(config) / params_of_rank(config)
        waits -= (micro_steps - 1) * min(micro_batch, hidden * each) + min(micro_batch, hidden * (each + once))
    seconds = micro_steps * micro_batch + STEP_SECONDS + waits
    return seconds, waits / seconds
