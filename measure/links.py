"""Links: time and bandwidth of the collectives between the ranks at hand.

    torchrun --standalone --nproc_per_node=2 -m measure.links
    NCCL_P2P_DISABLE=1 torchrun --standalone --nproc_per_node=2 -m measure.links        # without NVLink

Collectives of one size follow each other, as in nccl-tests, and the definitions of size and bandwidth are those of
nccl-tests. `python -m measure.plan --link GB/S` says what a bandwidth means for a step.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
import os
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from tqdm import tqdm

from common.cli import flag, parse, progress
from common.errors import UserError, out_of_memory, run
from measure.results import Results
from measure.timing import LONGEST, WARM_UP, TimingFlags, mean_ms
from parallel import process_group
from watch.hardware import environment

ELEMENT = 4  # bytes: float32, as gradients
# Bus bandwidth on n ranks is algorithm bandwidth times this and (n - 1) / n, by nccl-tests' definition: what a rank's
# link carries in one direction. Bus bandwidths of different collectives and numbers of ranks compare with the link's.
BUS_FACTORS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
COLUMNS = ("collective", "size", "ms", "algorithm GB/s", "bus GB/s")
NOTE = (
    "A GB of size is 2^30 bytes, a GB/s is 10^9 bytes/s. Algorithm bandwidth is size over time; bus bandwidth is what "
    "a rank's link carries in one direction (nccl-tests' definitions)."
)


@dataclass
class Flags(TimingFlags):
    """Time the collectives between the ranks at hand."""

    largest: int | None = flag(None, at_least=1024)
    """Upper limit of the sizes, powers of 4 from 1 KB; by default 1 GB (2^30 bytes) on GPUs, 16 MB elsewhere."""


def main():
    flags = parse(Flags)
    distributed = process_group.start(flags.device)
    if flags.largest is None:
        flags.largest = 2**30 if distributed.device.type == "cuda" else 2**24
    if distributed.world_size == 1:
        raise UserError("links need several ranks: torchrun --standalone --nproc_per_node=2 -m measure.links")
    with out_of_memory(f"use a --largest below {flags.largest}"):
        measure_links(flags, distributed)
    process_group.stop()


def measure_links(flags, distributed):
    """Time every collective at every size, and write rank 0's Results; all ranks call this."""
    sizes = [4**i for i in range(5, 20) if 4**i <= flags.largest]
    facts = facts_of_links(distributed)
    results = distributed.on_main(lambda: Results(flags, "links", distributed.device, COLUMNS))
    for (name, factor), size in progress([*itertools.product(BUS_FACTORS.items(), sizes)], "links"):
        size, ms = time_collective(name, size, flags.repeats, distributed)
        rate = 1e-6 * size / ms
        bus = rate * factor * (distributed.world_size - 1) / distributed.world_size
        row = dict(name=name, bytes=size, ms=ms, algorithm_gb_per_s=rate, bus_gb_per_s=bus, status="done", facts=facts)
        if results:
            texts = [name, tqdm.format_sizeof(size, "B", 2**10), f"{ms:.4f}", f"{rate:.4g}", f"{bus:.4g}"]
            results.add(row, texts, f"{facts['title']}. {NOTE}")
    if results:
        print(f"{facts['title']}\n{results}")


def time_collective(name, size, repeats, distributed):
    """(bytes, ms): the collective's size, rounded down to equal parts for all ranks, and its mean time on all ranks."""
    n, device = distributed.world_size, distributed.device
    part = torch.zeros(max(1, size // (ELEMENT * n)), device=device)
    whole = torch.zeros(n * len(part), device=device)  # zeros stay zeros, however often they are summed
    received = torch.empty_like(whole) if name == "all-to-all" else None
    collective = {
        "all-reduce": partial(dist.all_reduce, whole),
        "all-gather": partial(dist.all_gather_single, whole, part),
        "reduce-scatter": partial(dist.reduce_scatter_single, part, whole),
        "all-to-all": partial(dist.all_to_all_single, received, whole),
    }[name]

    def mean_of_ranks(count):  # which begin together: after a collective that is not timed
        return distributed.all_reduce(mean_ms(device, collective, count))[0] / n

    mean_of_ranks(WARM_UP)
    # all ranks compute the same count, from the same mean
    count = max(1, min(repeats, int(1e3 * LONGEST / mean_of_ranks(1))))
    return ELEMENT * len(whole), mean_of_ranks(count)


def facts_of_links(distributed):
    """As environment(); the title names ranks, machines, backend and the environment variables that choose a route."""
    facts = environment(distributed.device)
    machines = -(-distributed.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", distributed.world_size)))
    gpu = distributed.device.type == "cuda"
    backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if gpu else "gloo"
    # NCCL_DEBUG changes nothing, NCCL_VERSION is a container's
    passive = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_VERSION")
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_") and name not in passive}
    hardware = f"{distributed.world_size} × {facts['hardware']}" + (f" on {machines} machines" if machines > 1 else "")
    title = ", ".join(("Links: " + hardware, backend, *(f"{name}={value}" for name, value in variables.items())))
    return facts | dict(hardware=hardware, backend=backend, variables=variables, title=title)


if __name__ == "__main__":
    run(main)
