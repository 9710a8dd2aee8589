"""The ways to spread a step over several GPUs, what they take, and the command of the best: an estimate, without a GPU.

python -m measure.plan --model gpt2-xl --gpus 16 --memory 80
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
import shlex
from dataclasses import dataclass, replace

import torch

from common.cli import flag
from common.errors import UserError, run
from config import GROUPS, Config, command_line, read_command_line, set_sizes
from measure.child_run import run_config
from measure.results import align
from measure.step_time import Cluster, StepTime, step_time
from parallel import fsdp, place
from parallel.memory import StepMemory, count_params, step_memory
from parallel.process_group import Distributed
from watch.hardware import PEAK_TFLOPS, WITHOUT_BF16, is_named, peak_tflops_of

# What a plan chooses, the simplest first
PARALLEL = ("ddp", "zero2", "zero3", "hsdp")
CHECKPOINTING = ("off", "selective", "full")
CHOSEN = ("parallel", "tensor", "context", "pipeline", "activation_checkpointing", "micro_batch_size")
EQUAL = 1.02  # times the fastest step: closer than the estimate can tell

COLUMNS = ("mode", "B", "peak GB", "ms a step", "tokens/sec", "waits")
WIDTHS = (42, 3, 7, 9, 10, 6)
ROWS = 10  # at most


@dataclass
class Plan:
    """A plan for several GPUs. It is an estimate, and needs no GPU."""

    TITLE = "plan"

    gpus: int = flag(8, at_least=1)
    """GPUs in all."""
    gpus_per_machine: int = flag(8, at_least=1)
    """GPUs of one machine."""
    gpu: str = "H100"
    """Kind of GPU, for its peak."""
    memory: float = 80.0
    """Memory of a GPU, in GB (2^30 bytes)."""
    mfu: float = flag(0.54, above=0, at_most=1)
    """MFU of a GPU alone with large micro-batches; 0.52 to 0.57 are measured on H200s for 124M and 1558M."""
    link: float = flag(300.0, above=0)
    """GB (10^9 bytes) a second that a GPU sends inside a machine; NVLink between H200s: 300, measured."""
    network: float = flag(400.0, above=0)
    """GB (10^9 bytes) a second that a machine sends to others; 8 × 400 Gb/s InfiniBand: 400, 100 Gb/s: 12.5."""


@dataclass
class PlanConfig(Plan, Config):
    """Print which --parallel, --tensor, ... fit, their memory and time, and the best command. Those given are kept.

    Takes every flag of train_gpt2.py.
    """

    GROUPS = (Plan, *GROUPS)


def main():
    config, typed = read_command_line(PlanConfig)
    check(config)
    # also those of --config's or --resume's file
    kept = {*typed, *(name for name in CHOSEN if getattr(config, name) != getattr(Config, name))}
    sized, cluster, free = replace(config), cluster_of(config), config.memory * 2**30
    set_sizes(sized, None)
    if any(is_named(name, config.gpu) for name in WITHOUT_BF16):
        sized.autocast = "fp16"
    layouts = find_layouts(sized, cluster, free, kept)
    best = choose(layouts, free, kept)
    machines = cluster.gpus // cluster.gpus_per_machine
    where = f", {machines} machines of {cluster.gpus_per_machine}" if machines > 1 else ""
    print(
        f"{count_params(sized) / 1e6:,.0f}M parameters, {config.total_batch_size:,} tokens a step in sequences of "
        f"{config.seq_len:,}, on {cluster.gpus} × {config.gpu} with {config.memory:g} GB{where}\n"
    )
    print(align(COLUMNS, WIDTHS))
    for layout in of_each_kind(layouts, free, best)[:ROWS]:
        print(align(cells(layout), WIDTHS))
    print(
        "\nThis is an estimate. B: sequences of a micro-batch. Waits: share of a step for communication that nothing\n"
        f"hides, and --pipeline's bubble. Assumed: {config.mfu:.0%} of the peak in large micro-batches (--mfu), "
        f"{config.link:g} GB/s between\nGPUs of a machine (--link), {config.network:g} GB/s between machines "
        "(--network); formulas: measure/step_time.py.\n"
        f"The simplest within {EQUAL - 1:.0%} of the fastest, {describe(best)}:\n"
    )
    chosen = {name: getattr(best.config, name) for name in CHOSEN}
    print(command(cluster, command_line(run_config(config, **chosen))))


def cells(layout):
    """A Layout's row of the table as text."""
    time, c = layout.time, layout.config
    return [
        describe(layout),
        str(c.micro_batch_size),
        f"{layout.memory.peak / 2**30:.1f}",
        f"{1000 * time.total:,.0f}",
        f"{c.total_batch_size / time.total:,.0f}",
        f"{(time.communication + time.bubble) / time.total:.1%}",
    ]


def command(cluster, arguments):
    """The command that trains on a Cluster's GPUs. arguments: of train_gpt2.py."""
    machine, machines = cluster.gpus_per_machine, cluster.gpus // cluster.gpus_per_machine
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={machine}"]
    if cluster.gpus == 1:
        launcher = ["python"]
    elif machines > 1:
        launcher = ["torchrun", f"--nnodes={machines}", f"--nproc_per_node={machine}", "--rdzv_backend=c10d"]
        launcher += ["--rdzv_endpoint=FIRST_MACHINE:29500", "--rdzv_id=gpt2"]
    return shlex.join([*launcher, "train_gpt2.py", *arguments])


def check(config):
    """Raises UserError for a Plan and Config that cannot be planned."""
    if config.gpus > config.gpus_per_machine and config.gpus % config.gpus_per_machine:
        raise UserError(f"--gpus {config.gpus} is not a multiple of --gpus_per_machine {config.gpus_per_machine}")
    if not peak_tflops_of(config.gpu):
        raise UserError(f"--gpu {config.gpu}: known are {', '.join(PEAK_TFLOPS)}")
    if config.fp8 or config.autocast == "off":
        raise UserError("a plan knows the speed of bf16 and fp16: leave out --fp8 and --autocast off")
    if config.gpus == 1 and config.bf16_gradients:
        raise UserError("--bf16_gradients is for several GPUs: leave it out")
    if config.init_from != "scratch":
        raise UserError("a plan takes the sizes from --model, --n_layer, --n_head and --n_embd: leave out --init_from")


def cluster_of(config):
    """The Cluster of a Plan."""
    peak = peak_tflops_of(config.gpu)
    machine = min(config.gpus, config.gpus_per_machine)
    return Cluster(config.gpus, machine, peak * 1e12, config.mfu, config.link * 1e9, config.network * 1e9)


@dataclass(frozen=True)
class Layout:
    """One way to spread a step over the GPUs."""

    config: object  # a Config with all sizes and micro_batch_size
    memory: StepMemory
    time: StepTime

    @property
    def splits(self):
        """The ways in which a model or a sequence is split: {flag: ranks}."""
        sizes = {name: getattr(self.config, name) for name in ("tensor", "context", "pipeline")}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def simplicity(self):
        """A key that sorts the simplest layout first."""
        c = self.config
        return len(self.splits), PARALLEL.index(c.parallel), CHECKPOINTING.index(c.activation_checkpointing)


def find_layouts(config, cluster, free, given):
    """All Layouts that the flags allow, the fastest first, with the largest micro-batches that fit.

    config: a Config with its sizes. free: bytes of a GPU's memory. given: names of the flags in CHOSEN that keep
    config's value. Raises UserError, that of the simplest layout, if no layout is allowed.
    """
    device = torch.device("cuda")  # which need not exist
    divisors = [n for n in range(1, cluster.gpus + 1) if cluster.gpus % n == 0]
    in_machine = [n for n in divisors if cluster.gpus_per_machine % n == 0]
    values = dict(parallel=PARALLEL, tensor=in_machine, context=in_machine, pipeline=divisors)
    values["activation_checkpointing"] = CHECKPOINTING
    values |= {name: [getattr(config, name)] for name in values if name in given}
    found, errors = [], []
    for choice in itertools.product(*values.values()):
        candidate = replace(config, **dict(zip(values, choice)))
        splits = (candidate.tensor, candidate.context, candidate.pipeline)
        distributed = Distributed(0, cluster.gpus, device, *splits, cluster.gpus_per_machine)
        try:
            if prepare(candidate, distributed, free, given):
                memory = step_memory(candidate, distributed)
                found.append(Layout(candidate, memory, step_time(candidate, distributed, cluster)))
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0] if errors else UserError(f"--parallel {config.parallel} needs several GPUs: leave it out")
    return sorted(found, key=lambda layout: layout.time.total)


def prepare(config, distributed, free, given):
    """Complete a Config in place, as a run does. Returns False if it equals a simpler one.

    Raises UserError for flags that a run refuses.
    """
    if config.overlap_gradients and (fsdp.is_sharded(config) or distributed.world_size == 1 or not config.compile):
        raise UserError("--overlap_gradients needs --compile, several ranks, and ddp without --tensor and --pipeline")
    config.fused_cross_entropy &= config.tensor == 1
    config.bf16_residual &= config.autocast == "bf16"
    place.check(config, distributed, free, [])
    ranks = distributed.data_context_size
    if config.parallel != "ddp" and ranks == 1 and (distributed.world_size == 1 or "parallel" not in given):
        return False  # there is nothing to shard: ddp
    shards = fsdp.shard_group_size(config, distributed)
    return config.parallel != "hsdp" or shards not in (1, ranks) or "parallel" in given  # else ddp, or zero3


def choose(layouts, free, given):
    """The simplest Layout that fits and takes at most EQUAL times the step time of the fastest.

    layouts: of find_layouts. Raises UserError if none fits.
    """
    fitting = [layout for layout in layouts if layout.memory.fits(free)]
    if not fitting:
        least = min(layouts, key=lambda layout: layout.memory.peak)
        fixed = "".join(f", leave out --{name}" for name in CHOSEN if name in given)
        raise UserError(
            f"nothing fits {free / 2**30:g} GB a GPU: the least, {describe(least)}, takes "
            f"{least.memory.peak / 2**30:.1f} GB: use more --gpus{fixed}, or a smaller --model or --seq_len"
        )
    equal = [layout for layout in fitting if layout.time.total <= EQUAL * fitting[0].time.total]
    return min(equal, key=lambda layout: layout.simplicity)


def of_each_kind(layouts, free, best):
    """The best Layout, and for each other mode and combination of splits the fastest that fits; the fastest first."""
    kinds = {}
    for layout in (best, *layouts):
        if layout.memory.fits(free):
            kinds.setdefault((layout.config.parallel, *layout.splits), layout)
    return sorted(kinds.values(), key=lambda layout: layout.time.total)


def describe(layout):
    """A Layout in words."""
    c = layout.config
    words = [c.parallel, *(f"{name} {size}" for name, size in layout.splits.items())]
    if c.activation_checkpointing != "off":
        words.append(f"{c.activation_checkpointing} checkpointing")
    return ", ".join(words)


if __name__ == "__main__":
    run(main)
