"""Links: time and bandwidth of the collectives between the ranks at hand, and what they mean for a training step.

    torchrun --standalone --nproc_per_node=2 -m measure.links
    NCCL_P2P_DISABLE=1 torchrun --standalone --nproc_per_node=2 -m measure.links        # without NVLink
    torchrun --standalone --nproc_per_node=2 -m measure.links --gpus_per_machine 8 --machines 1 2 --network 400 12.5

Collectives of one size follow each other, as in nccl-tests, and the definitions of size and bandwidth are those of
nccl-tests. The tables of steps are estimates: the measured time of every collective that DDP and FSDP start in a step
of train_gpt2.py with its default flags, beside the time of its computation at an assumed MFU.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from common.cli import parse
from common.errors import UserError, out_of_memory, run
from config import SIZES, Config, refuse_unavailable_flags, resolve
from measure import communication, figures
from measure.child_run import prepare, save
from measure.communication import BUS_FACTORS
from measure.tables import align, markdown_table
from measure.timing import LONGEST, WARM_UP, TimingFlags, dtype_of_activations, time_of
from model import GPT, GPTConfig
from optim.schedules import accumulation_steps
from parallel import process_group
from parallel.memory import free_memory
from parallel.rendezvous import ranks_of_machine
from watch.hardware import environment, flops_per_token, peak_flops

MODES = ("ddp", "zero2", "zero3")
ELEMENT = 4  # bytes: float32, as gradients
COLUMNS = ("collective", "size", "ms", "algorithm GB/s", "bus GB/s")
COLUMN_WIDTHS = (16, 8, 10, 14, 10)
STEP_COLUMNS = ("model", "mode", "micro-batch", "GB a step", "communication ms", "computation ms", "share")
MACHINE_COLUMNS = ("model", "GPUs", "network GB/s", "ms a step", "tokens/sec", "of linear", "with overlap")


@dataclass
class Flags(TimingFlags):
    """Time the collectives between the ranks at hand, and estimate what they cost a training step."""

    largest: int | None = None
    """Upper limit of the sizes, powers of 4 from 1 KB; by default 1 GB (2^30 bytes) on GPUs, 16 MB elsewhere."""
    models: tuple[Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny"], ...] = (
        "gpt2",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
    )
    """Models of the tables of steps."""
    total_batch_size: int = 524288
    """Tokens in a step."""
    micro_batch_size: int | None = None
    """Sequences in one forward pass of a device; by default, what fits in each mode."""
    bf16_gradients: bool = False
    """Steps that average gradients in bf16."""
    mfu: float = 0.5
    """MFU at which a step computes, for the tables of steps."""
    peak_tflops: float | None = None
    """The device's dense bf16 peak, for the tables of steps; known for common GPUs."""
    machines: tuple[int, ...] = ()
    """Numbers of machines to estimate ddp on, for example 1 2 4."""
    gpus_per_machine: int | None = None
    """With --machines: GPUs in a machine, linked with the measured bus bandwidth; by default as many as ranks."""
    network: tuple[float, ...] = ()
    """With --machines: bandwidths of a machine's network in one direction, in GB/s (100 Gb/s are 12.5)."""


def main():
    flags = parse(Flags)
    distributed = process_group.start(flags.device)
    if flags.largest is None:
        flags.largest = 2**30 if distributed.device.type == "cuda" else 2**24
    check(flags, distributed)
    free = free_memory(distributed)
    fp16 = dtype_of_activations(distributed.device) == torch.float16  # its loss scale needs ddp
    modes = ("ddp",) if fp16 else MODES
    steps = [plan_step(name, mode, flags, distributed, free) for name in flags.models for mode in modes]
    elsewhere = plan_machines(flags, distributed, free)
    folder = distributed.on_main(lambda: prepare(flags.log_dir, flags.run_name, "links", goes_on=False))
    with out_of_memory(f"use a --largest below {flags.largest}"):
        results = measure_links(flags, distributed, folder)
    if distributed.is_main:
        measured = {}
        for result in results:
            measured.setdefault(result["name"], []).append((result["bytes"], result["ms"]))
        tables = step_table(flags, distributed, steps, measured)
        tables += machine_table(flags, distributed, elsewhere, measured) if elsewhere else ""
        save_links(folder, results, tables)
        print(f"\n{tables}\n\n{folder}/ has links.md, links.json and links.png")
    process_group.stop()


def check(flags, distributed):
    """Raises UserError for flags that cannot be measured or estimated."""
    if distributed.world_size == 1:
        command = "torchrun --standalone --nproc_per_node=2 -m measure.links"
        raise UserError(f"links need several ranks: {command}")
    if flags.largest < 2**10 or flags.repeats < 1:
        raise UserError("--largest must be at least 1024 bytes, and --repeats at least 1")
    if not 0 < flags.mfu <= 1 or (flags.peak_tflops is not None and flags.peak_tflops <= 0):
        raise UserError("--mfu must be above 0 and at most 1, and --peak_tflops above 0")
    if not flags.models:
        raise UserError("--models needs at least one model")
    if min((*flags.machines, *flags.network, 1)) <= 0:
        raise UserError("--machines and --network must be above 0")
    if flags.gpus_per_machine is not None and (flags.gpus_per_machine < 2 or not flags.machines):
        raise UserError("--gpus_per_machine must be at least 2, and needs --machines")
    if bool(flags.network) != (max(flags.machines, default=1) > 1):
        raise UserError("--machines and --network go together, such as --machines 1 2 4 --network 400 12.5")
    if flags.machines and machines_at_hand(distributed) > 1:
        raise UserError("--machines starts from the links inside one machine: measure on one")
    if flags.machines and not peak_flops(distributed.device, flags.peak_tflops):
        raise UserError("--machines needs the device's peak: use --peak_tflops")


def machines_at_hand(distributed):
    return -(-distributed.world_size // ranks_of_machine(distributed.world_size))


# ----------------------------------------------------------------------------------------------------------------------
# The measurement


def measure_links(flags, distributed, folder):
    """Time every collective at every size; all ranks call this.

    Returns a result for each: bytes, ms, and GB/s (10^9 bytes) by both definitions.
    """
    sizes = [4**i for i in range(5, 20) if 4**i <= flags.largest]
    facts, main = facts_of_links(distributed), distributed.is_main
    results = []
    if main:
        print(f"{facts['title']}\nresults: {folder}/\n{align(COLUMNS, COLUMN_WIDTHS)}")
    with tqdm(total=len(sizes) * len(BUS_FACTORS), leave=False, disable=None if main else True) as bar:
        for name, factor in BUS_FACTORS.items():
            for size in sizes:
                size, ms = time_collective(name, size, flags.repeats, distributed)
                algorithm = 1e-6 * size / ms
                result = dict(name=name, bytes=size, ms=ms, algorithm_gb_per_s=algorithm)
                result |= dict(bus_gb_per_s=algorithm * factor(distributed.world_size), status="done", facts=facts)
                results.append(result)
                if main:
                    bar.write(align(cells(result), COLUMN_WIDTHS))
                bar.update()
            if main:
                save_links(folder, results)
    return results


def time_collective(name, size, repeats, distributed):
    """(bytes, ms): the collective's size, rounded down to equal parts for all ranks, and its mean time on all ranks."""
    n, device = distributed.world_size, distributed.device
    part = torch.zeros(max(1, size // (ELEMENT * n)), device=device)
    whole = torch.zeros(n * len(part), device=device)  # zeros stay zeros, however often they are summed
    received = torch.empty_like(whole) if name == "all-to-all" else None
    # names of PyTorch 2.13, which deprecates those of 2.11
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    collective = {
        "all-reduce": partial(dist.all_reduce, whole),
        "all-gather": partial(all_gather, whole, part),
        "reduce-scatter": partial(reduce_scatter, part, whole),
        "all-to-all": partial(dist.all_to_all_single, received, whole),
    }[name]

    def mean_ms(count):
        # the ranks begin together: after a collective that is not timed
        ms, _ = time_of(device, lambda: [collective() for _ in range(count)], first=collective)
        return distributed.all_reduce(ms)[0] / n / count

    mean_ms(WARM_UP)
    # all ranks compute the same count, from the same mean
    count = max(1, min(repeats, int(1e3 * LONGEST / mean_ms(1))))
    return ELEMENT * len(whole), mean_ms(count)


def facts_of_links(distributed):
    """As environment(); the title names ranks, machines, backend and the environment variables that choose a route."""
    facts, machines = environment(distributed.device), machines_at_hand(distributed)
    gpu = distributed.device.type == "cuda"
    backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if gpu else "gloo"
    # NCCL_DEBUG changes nothing, NCCL_VERSION is a container's
    passive = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_VERSION")
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_") and name not in passive}
    hardware = f"{distributed.world_size} × {facts['hardware']}" + (f" on {machines} machines" if machines > 1 else "")
    title = ", ".join(("Links: " + hardware, backend, *(f"{name}={value}" for name, value in variables.items())))
    return facts | dict(hardware=hardware, backend=backend, variables=variables, title=title)


def size_text(size):
    for unit, scale in (("GB", 2**30), ("MB", 2**20)):
        if size >= 0.99 * scale:  # a size that is rounded down to equal parts
            return f"{size / scale:.3g} {unit}"
    return f"{size / 2**10:.3g} KB"


def cells(result):
    rates = (result["algorithm_gb_per_s"], result["bus_gb_per_s"])
    return [result["name"], size_text(result["bytes"]), f"{result['ms']:.4f}", *(f"{rate:.4g}" for rate in rates)]


def save_links(folder, results, tables=""):
    text = f"{results[0]['facts']['title']}\n\n{markdown_table(COLUMNS, [cells(result) for result in results])}\n\n"
    text += "A GB of size is 2^30 bytes, a GB/s is 10^9 bytes/s. Algorithm bandwidth is size over time; bus "
    text += "bandwidth is what a rank's link carries in one direction (nccl-tests' definitions)."
    save(folder, "links", results, f"{text}\n\n{tables}".strip(), partial(figures.links, results))


# ----------------------------------------------------------------------------------------------------------------------
# What the times mean for a step


class Step(NamedTuple):
    """A training step of train_gpt2.py with its default flags."""

    name: str  # of the model
    config: Config  # resolved
    model: GPT  # on "meta": shapes only
    ranks: int

    def micro_steps(self):
        return accumulation_steps(0, self.config, self.ranks)

    def computation_ms(self, flags, device):
        """Milliseconds of forward and backward of all micro-batches at flags.mfu; None if the peak is unknown."""
        flops = flops_per_token(self.model, self.config.seq_len) * self.config.total_batch_size
        peak = flags.mfu * peak_flops(device, flags.peak_tflops)
        return 1e3 * flops / (self.ranks * peak) if peak else None


def plan_step(name, mode, flags, distributed, free):
    """The Step of a model in a mode of --parallel. free: bytes, of free_memory(). Raises UserError for wrong flags."""
    sizes = dict(zip(("n_layer", "n_head", "n_embd"), SIZES[name]))
    batch = dict(total_batch_size=flags.total_batch_size, micro_batch_size=flags.micro_batch_size)
    config = Config(parallel=mode, bf16_gradients=flags.bf16_gradients, **sizes, **batch)
    config, notes = resolve(config, distributed, free)
    refuse_unavailable_flags(dict(bf16_gradients=True) if flags.bf16_gradients else {}, notes)
    with torch.device("meta"):
        model = GPT(GPTConfig(config.seq_len, pad_vocab=config.pad_vocab, **sizes))
    return Step(name, config, model, distributed.world_size)


def plan_machines(flags, distributed, free):
    """The Steps of ddp on several machines: [(machines, Step)]."""
    gpus, steps = flags.gpus_per_machine or distributed.world_size, []
    for name in flags.models:
        for machines in flags.machines:
            everywhere = replace(distributed, world_size=machines * gpus)
            steps.append((machines, plan_step(name, "ddp", flags, everywhere, free)))
    return steps


def step_table(flags, distributed, steps, measured):
    """What the measured times mean for steps on the ranks at hand, as Markdown.

    measured: {operation: [(bytes, ms), ...]}, as communication.ms_of_step takes it.
    """
    rows, faster = [], []
    for step in steps:
        sent = communication.collectives_of_step(step.model, step.config, step.micro_steps())
        total, computation = communication.ms_of_step(sent, measured), step.computation_ms(flags, distributed.device)
        texts = [step.name, step.config.parallel, str(step.config.micro_batch_size)]
        texts += [f"{communication.bytes_of_step(sent) / 1e9:,.2f}", f"{total:,.1f}"]
        texts += [f"{computation:,.1f}", f"{total / (total + computation):.1%}"] if computation else ["–", "–"]
        rows.append(texts)
        if computation and step.config.parallel == "ddp":
            wait, overlap = communication.wait_for_averaging(total, computation / step.micro_steps(), sent)
            faster += [f"{step.name} ({total:,.1f} ms become {wait:,.1f})"] if overlap else []
    peak = peak_flops(distributed.device, flags.peak_tflops) / 1e12
    speed = f"computed at {flags.mfu:.0%} of {peak:g} TFLOP/s" if peak else "of unknown computation (use --peak_tflops)"
    text = f"A step of {flags.total_batch_size:,} tokens, {speed}:\n\n{markdown_table(STEP_COLUMNS, rows, left=2)}\n\n"
    text += "Communication is the sum of all collectives; share is communication over communication + computation. ddp "
    text += "waits for all of it. zero2 and zero3 overlap it with computation."
    named = ", ".join(faster) or "none of these"
    return text + (f" By this estimate `--overlap_gradients` is faster for: {named}." if peak else "")


def machine_table(flags, distributed, steps, measured):
    """An estimate of ddp's speed on several machines, as Markdown. steps: of plan_machines."""
    gpus = flags.gpus_per_machine or distributed.world_size
    size, ms = measured["all-reduce"][-1]
    bus = BUS_FACTORS["all-reduce"](distributed.world_size) * size / (1e-3 * ms)  # bytes/s
    rows = []
    for machines, step in steps:
        tokens, parameters = step.config.total_batch_size, step.model.num_params()
        computation = step.computation_ms(flags, distributed.device)
        micro_batch = computation / step.micro_steps()
        buckets = communication.collectives_of_step(step.model, step.config, 1)
        gradients = communication.bytes_of_step(buckets)
        alone = computation * step.ranks + communication.rest_of_step_ms(parameters)  # ms on one GPU
        for network in flags.network if machines > 1 else (0.0,):
            averaging = communication.averaging_ms(gradients, gpus, bus, machines, 1e9 * network)
            wait, overlap = communication.wait_for_averaging(averaging, micro_batch, buckets)
            total, overlapped = (
                communication.ddp_step_ms(micro_batch, step.micro_steps(), waited, parameters)
                for waited in (averaging, wait)
            )
            texts = [step.name, str(step.ranks), f"{network:g}" if network else "", f"{total:,.0f}"]
            texts += [f"{1e3 * tokens / total:,.0f}", f"{alone / step.ranks / total:.0%}"]
            rows.append([*texts, f"{1e3 * tokens / overlapped:,.0f}" if overlap else "–"])
    text = f"An estimate of ddp with {flags.total_batch_size:,} tokens a step on machines of {gpus} GPUs, which "
    text += f"average gradients at a bus bandwidth of {bus / 1e9:.3g} GB/s. The last column has tokens/sec with "
    text += "`--overlap_gradients` where that is faster:"
    return f"\n\n{text}\n\n{markdown_table(MACHINE_COLUMNS, rows)}"


if __name__ == "__main__":
    run(main)
