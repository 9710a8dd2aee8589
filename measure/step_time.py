"""An estimate of a step's time: FLOPs at a measured rate, and the bytes that every way to use several GPUs sends.

In an all-gather or a reduce-scatter of S bytes by n ranks each rank sends (n-1)/n S, in an all-reduce twice that
(Patarasuk and Yuan 2009). Over several machines, the ranks of a machine do so first, and then the machines:

    (n-1)/n S / link  +  (m-1)/m S g / network       n ranks in each of m machines; g such groups share a machine's
                                                     network. link: bytes/s of a GPU; network: bytes/s of a machine

With P parameters on a rank, 16-bit weights and float32 gradients, a step of M micro-batches has

    ddp          all-reduce 4P                                  once a step             waits
    zero2        all-gather 2P                                  once a step             overlaps
                 reduce-scatter 4P                              every micro-batch       overlaps
    zero3        all-gather 2P twice, reduce-scatter 4P         every micro-batch       overlaps
    hsdp         as zero3 in a machine; all-reduce of shards    once a step             overlaps

(Rajbhandari et al. 2020, "ZeRO", section 7). With --overlap_gradients ddp's all-reduce overlaps too. The embedding
table never overlaps: its gather comes before the first block, and its gradient is complete after all others. With
x = B T C / N numbers of 2 bytes on each of N ranks:

    tensor       4 all-gathers and 4 reduce-scatters of N x     every block             waits
                 (Narayanan et al. 2021, section 3.2; Korthikanti et al. 2022)
    context      all-to-alls of 4x in forward, 4x in backward   every block             waits
                 (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.2)
    pipeline     B T C forward and as many backward             every stage             waits
                 the bubble, (N-1)/V micro-batches              once a step             waits
                 (Narayanan et al. 2021, sections 2.2 and 3.2)

The bytes of tensor's and context's collectives count COPIES times, since they copy their inputs and outputs.
"full" activation checkpointing repeats the collectives of a block's forward, "selective" its all-gathers. --tensor and
--pipeline with ddp use FSDP, which overlaps the all-reduce; with --pipeline all averaging comes after the last
micro-batch, and waits.
"""

from dataclasses import dataclass

from data.tokenizer import VOCAB_SIZE
from optim.schedules import accumulation_steps
from parallel.fsdp import is_sharded, shard_group_size
from parallel.memory import compute_bytes, params_of_embeddings, params_of_rank
from parallel.pipeline import blocks_of_stages

# Measured with GPT-2 124M and 1558M on H200s: dev/LOG.md, docs/scaling.md
LAYER_SECONDS = 0.3e-3  # fixed time of a block: micro-batches of 64, 32, 16 sequences take 108.6, 56.4, 30 ms (124M)
STEP_SECONDS = 2e-3  # the update and the rest of a step of 124M; 1558M takes 25 ms, which the fitted MFU contains
SLOWEST = 1.015  # several GPUs wait for the slowest
SHARDED = dict(ddp=1.03, zero2=1.03, zero3=1.05, hsdp=1.05)  # FSDP's computation, against DDP's; hsdp: as zero3
COPIES = 1.5  # times the bytes of tensor's and context's collectives, which copy input and output; 124M, --context 2
LATENCY = 20e-6  # of a collective, however small: an assumption
# --overlap_gradients: the splits of a compiled graph, and NCCL beside them. Fitted over TCP; 5 to 8 ms over NVLink
SPLIT_GRAPH_SECONDS = 8e-3
BACKWARD_SHARE = 2 / 3  # of a micro-batch's time: what --overlap_gradients can hide averaging behind
RECOMPUTED = dict(off=1, selective=1.07, full=4 / 3)  # FLOPs of a block; selective: equivalent to 5% of a step


@dataclass(frozen=True)
class Cluster:
    """The GPUs of an estimate."""

    gpus: int
    gpus_per_machine: int
    peak: float  # a GPU's FLOP/s
    mfu: float  # share of the peak that it reaches with large micro-batches
    link: float  # bytes/s that a GPU sends inside a machine
    network: float  # bytes/s that a machine sends to others


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they consist of."""

    computation: float
    bubble: float  # of --pipeline
    communication: float  # exposed: not overlapped
    sent: float  # all communication, also overlapped

    @property
    def total(self):
        return self.computation + self.bubble + self.communication


def gather(size, count, stride, cluster):
    """Seconds of an all-gather or a reduce-scatter of a tensor of `size` bytes, of half an all-reduce of it, or of an
    all-to-all in which each rank's input has `size` bytes, by `count` ranks, each `stride` after the one before."""
    ranks = max(1, min(count, cluster.gpus_per_machine // stride))  # in a machine
    machines = -(-count // ranks)
    sharing = cluster.gpus_per_machine // ranks  # groups that send over the network of one machine at the same time
    inside = (ranks - 1) / ranks * size / cluster.link
    between = (machines - 1) / machines * size * sharing / cluster.network
    return inside + between + (LATENCY if count > 1 else 0)


def flops_of_block(config):
    """FLOPs per token, forward and backward, of a block: its GEMMs, and as many as attention's time is worth.

    Attention computes half of the T x T scores that its formula counts, at a rate that grows with T: at T = 1,024 its
    time is worth 0.80 of the formula, for long sequences 0.61. Fitted to steps of 124M with T up to 262,144 on H100s.
    """
    attention = 0.612 * (1 + 310 / config.seq_len)
    return 72 * config.n_embd**2 + attention * 12 * config.n_embd * config.seq_len


def micro_batch_seconds(config, cluster):
    """Seconds of one micro-batch's computation, on a pipeline's slowest rank."""
    tokens = config.micro_batch_size * config.seq_len / (config.context * config.tensor)
    rate = cluster.peak * cluster.mfu
    block = tokens * flops_of_block(config) * RECOMPUTED[config.activation_checkpointing] / rate
    head = tokens * 6 * VOCAB_SIZE * config.n_embd / rate
    of_ranks = [blocks * (block + LAYER_SECONDS) for blocks in blocks_of_stages(config)]
    of_ranks[-1] += head
    return max(of_ranks) * (SHARDED[config.parallel] if is_sharded(config) else 1)


def split_seconds(config, distributed, cluster):
    """Seconds of one micro-batch's communication for --tensor, --context and --pipeline."""
    tensor, context, pipeline = config.tensor, config.context, config.pipeline
    stream = compute_bytes(config) * config.micro_batch_size * config.seq_len * config.n_embd / context  # bytes
    blocks = max(blocks_of_stages(config))
    # selective keeps the outputs of reduce-scatters and all-to-alls, and repeats all-gathers
    collectives = dict(off=8, selective=10, full=12)[config.activation_checkpointing] * blocks + 4  # 4: embedding, head
    copied = COPIES * stream
    seconds = collectives * gather(copied, tensor, 1, cluster)
    # q, k and v in one all-to-all, attention's output in the other; as many in backward
    exchange = sum(gather(part * copied / tensor, context, tensor, cluster) for part in (3, 1))
    seconds += blocks * exchange * (3 if config.activation_checkpointing == "full" else 2)
    if pipeline > 1:
        stage = tensor * distributed.data_context_size  # ranks of a stage, which send at the same time
        machine = cluster.gpus_per_machine
        rate = cluster.network / min(stage, machine) if pipeline * stage > machine else cluster.link
        seconds += 2 * stream / tensor / rate
    return seconds


def averaging_seconds(config, distributed, cluster):
    """Seconds of communication of weights and gradients: (in every micro-batch, once a step)."""
    params, tensor, shards = params_of_rank(config), config.tensor, shard_group_size(config, distributed)
    gradient = 2 if config.bf16_gradients else 4
    gathered = gather(compute_bytes(config) * params, shards, tensor, cluster)
    scattered = gather(gradient * params, shards, tensor, cluster)
    replicas = distributed.data_context_size // shards
    all_reduced = 2 * gather(gradient * params / shards, replicas, tensor * shards, cluster)
    if config.pipeline > 1:
        # the first and the last stage add up the gradients of the table
        stage = tensor * distributed.data_context_size
        table = 4 * VOCAB_SIZE * config.n_embd / tensor / shards
        summed = 2 * gather(table, 2, (config.pipeline - 1) * stage, cluster)
        return 0, gathered + scattered + all_reduced + summed
    if config.parallel == "zero2":
        return scattered, gathered
    return 2 * gathered + scattered, all_reduced


def step_time(config, distributed, cluster):
    """The StepTime of a Config with its sizes and micro_batch_size."""
    micro_steps = accumulation_steps(config.batch_warmup_steps, config, distributed.data_size)
    slowest = SLOWEST if distributed.world_size > 1 else 1
    micro_batch = slowest * micro_batch_seconds(config, cluster)
    split = split_seconds(config, distributed, cluster)
    each, once = averaging_seconds(config, distributed, cluster)
    computation = micro_steps * micro_batch + STEP_SECONDS
    if config.overlap_gradients:
        computation += SPLIT_GRAPH_SECONDS
    exposed = 1.0  # share of averaging that no computation can hide
    if config.overlap_gradients or (is_sharded(config) and config.pipeline == 1):
        exposed = params_of_embeddings(config) / params_of_rank(config)
    cover = (BACKWARD_SHARE if config.overlap_gradients else 1) * micro_batch  # what can hide the rest
    # a micro-batch hides at most its own time; what comes once a step overlaps with one micro-batch
    hidden = (micro_steps - 1) * min(cover, (1 - exposed) * each) + min(cover, (1 - exposed) * (each + once))
    sent = micro_steps * (split + each) + once
    bubble = (config.pipeline - 1) * (micro_batch + split)
    return StepTime(computation, bubble, sent - hidden, sent)
