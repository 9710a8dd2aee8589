"""What the ranks send each other in a training step, and how long it takes on links whose speed is known.

Sizes of collectives are nccl-tests' S: bytes of the buffer that is all-reduced, of the gathered result, of the input of
a reduce-scatter, of the input of an all-to-all.
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from typing import NamedTuple

import numpy as np

from measure.step_time import BACKWARD_SHARE, SLOWEST, SPLIT_GRAPH_SECONDS, STEP_SECONDS
from parallel.fsdp import is_sharded, units_of

# DDP's defaults: a bucket is all-reduced when its gradients have this many bytes
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


class Collective(NamedTuple):
    operation: str  # a key of BUS_FACTORS
    bytes: int  # the collective's size
    count: int  # how many of this size a rank takes part in, in a step


# Bus bandwidth over algorithm bandwidth on n ranks, by nccl-tests' definition: the share of S that each rank's link
# carries in one direction. Bus bandwidths of different collectives and numbers of ranks compare with the link's.
BUS_FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}


def collectives_of_step(model, config, micro_steps):
    """The Collectives of a step of ddp, zero2 or zero3 on several ranks, without --tensor and --context.

    model: a GPT, on any device. config: a resolved Config. micro_steps: micro-batches that a rank accumulates.
    """
    gradient_bytes = 2 if config.bf16_gradients else 4
    if not is_sharded(config):
        buckets = bucket_bytes([4 * p.numel() for p in model.parameters()])
        return [Collective("all-reduce", size * gradient_bytes // 4, 1) for size in buckets]
    weight_bytes = 2 if config.autocast == "bf16" else 4
    units = units_of(list(model.transformer.h), model.config)
    sizes = [sum(p.numel() for block in unit for p in block.parameters()) for unit in units]
    root = sum(p.numel() for p in model.parameters()) - sum(sizes)
    # zero2 gathers once a step; zero3 once in each forward, and all but the root again in each backward
    gathers = 1 if config.parallel == "zero2" else micro_steps
    passes = 1 if config.parallel == "zero2" else 2  # that gather a block: forward, and zero3's backward
    result = [Collective("all-gather", root * weight_bytes, gathers)]
    result += [Collective("all-gather", size * weight_bytes, gathers * passes) for size in sizes]
    return result + [Collective("reduce-scatter", size * gradient_bytes, micro_steps) for size in (root, *sizes)]


def bucket_bytes(sizes):
    """The bytes of DDP's buckets. sizes: bytes of the gradients, in the order of the model's parameters."""
    buckets, limit = [0], FIRST_BUCKET_BYTES
    for size in reversed(sizes):  # backward computes the last layer's gradients first
        if buckets[-1] >= limit:
            buckets.append(0)
            limit = BUCKET_BYTES
        buckets[-1] += size
    return buckets


def bytes_of_step(collectives):
    return sum(each.bytes * each.count for each in collectives)


def ms_of_step(collectives, measured):
    """Milliseconds of a step's collectives, one after the other. measured: {operation: points of ms_of_collective}."""
    return sum(each.count * ms_of_collective(measured[each.operation], each.bytes) for each in collectives)


def ms_of_collective(points, size):
    """Milliseconds of a collective of `size` bytes. points: its measured [(bytes, ms), ...], ascending.

    Log-log interpolation between points. A smaller size takes the smallest point's time, which is latency; a larger
    size has the largest point's bandwidth.
    """
    sizes, times = zip(*points)
    if size > sizes[-1]:
        return times[-1] * size / sizes[-1]
    return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(times))))


# ----------------------------------------------------------------------------------------------------------------------
# Estimates for ddp on machines that are not at hand


def averaging_ms(gradient_bytes, ranks, bus, machines, network):
    """Milliseconds to average gradients over machines of `ranks` GPUs each: first in each machine, then between them.

    bus: bus bandwidth of an all-reduce in a machine. network: bandwidth of a machine's network in one direction. Both
    in bytes/s. Each part is a ring: n members send 2 (n - 1) / n of the bytes.
    """
    ring = BUS_FACTORS["all-reduce"]
    seconds = ring(ranks) * gradient_bytes / bus
    if machines > 1:
        seconds += ring(machines) * gradient_bytes / network
    return 1e3 * seconds


def wait_for_averaging(averaging, micro_batch, buckets):
    """(ms, overlap): how long a ddp step waits for its gradients' averaging, and whether --overlap_gradients is faster.

    averaging: ms to average the buckets, the Collectives of the step. micro_batch: ms of forward and backward of one
    micro-batch. With --overlap_gradients the last micro-batch's backward hides the averaging of all buckets but the
    last, which has the tied embedding's gradient, and the splits of the graph take SPLIT_GRAPH_SECONDS.
    """
    early = 1 - buckets[-1].bytes / bytes_of_step(buckets)  # the share of the other buckets
    hidden = min(early * averaging, BACKWARD_SHARE * micro_batch)
    overlapped = averaging - hidden + 1e3 * SPLIT_GRAPH_SECONDS
    return (overlapped, True) if overlapped < averaging else (averaging, False)


def ddp_step_ms(micro_batch, micro_steps, wait, parameters):
    """Milliseconds of a ddp step. micro_batch: ms of forward and backward of one micro-batch; wait: ms."""
    return SLOWEST * micro_batch * micro_steps + rest_of_step_ms(parameters) + wait


def rest_of_step_ms(parameters):
    """Milliseconds of the update and the rest of a step: AdamW's traffic is proportional to the parameters."""
    return 1e3 * STEP_SECONDS * parameters / 124e6
