"""The ways to spread a step over several GPUs, what they take, and the command of the best: an estimate, without a GPU.

python -m measure.plan --model gpt2-xl --gpus 16 --memory 80
"""

import common.interrupt  # first: Ctrl-C during the other imports

import shlex
from dataclasses import dataclass, replace

from common.cli import flag
from common.errors import UserError, run
from config import GROUPS, Config, command_line, read_command_line, set_sizes
from measure import planner
from measure.child_run import run_config
from measure.step_time import Cluster, flops_per_token
from measure.tables import align
from optim.schedules import accumulation_steps
from parallel.memory import count_params, data_ranks
from parallel.pipeline import blocks_of_stages
from watch.hardware import PEAK_TFLOPS, WITHOUT_BF16, is_named, mfu, peak_tflops_of

COLUMNS = ("mode", "B", "weights", "gradients", "states", "activations", "logits", "peak GB", "ms a step", "tokens/sec")
COLUMNS += ("MFU", "waits")
WIDTHS = (42, 3, 7, 9, 6, 11, 6, 7, 9, 10, 6, 6)
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
    kept = {*typed, *(name for name in planner.CHOSEN if getattr(config, name) != getattr(Config, name))}
    sized = replace(config)
    set_sizes(sized, None)
    best = print_layouts(sized, kept)
    print(command(cluster_of(config), command_line(run_config(config, **best))))


def print_layouts(config, given):
    """Print the layouts for a Plan and Config with its sizes. given: flags on the command line.

    Returns the flags of the best, {name: value}. Raises UserError if nothing fits.
    """
    cluster, free = cluster_of(config), config.memory * 2**30
    if any(is_named(name, config.gpu) for name in WITHOUT_BF16):
        config = replace(config, autocast="fp16")
    layouts, refused = planner.find_layouts(config, cluster, free, given)
    best = planner.choose(layouts, free, given)
    shown = planner.alternatives(layouts, free, best)
    machines = cluster.gpus // cluster.gpus_per_machine
    where = f", {machines} machines of {cluster.gpus_per_machine}" if machines > 1 else ""
    print(
        f"{count_params(config) / 1e6:,.0f}M parameters, {config.total_batch_size:,} tokens a step in sequences of "
        f"{config.seq_len:,}, on {cluster.gpus} × {config.gpu} with {config.memory:g} GB{where}\n"
    )
    print(align(COLUMNS, WIDTHS))
    for layout in shown[:ROWS]:
        print(align(cells(layout, cluster), WIDTHS))
    if len(shown) > ROWS:
        print(f"{len(shown) - ROWS} more are slower")
    print()
    for line in (*explanation(config), *steps(best, planner.too_large(layouts, free), refused, config)):
        print(line)
    return {name: getattr(best.config, name) for name in planner.CHOSEN}


def cells(layout, cluster):
    """A Layout's row of the table as text."""
    memory, seconds, c = layout.memory, layout.time.total, layout.config
    parts = (memory.weights, memory.gradients, memory.states, memory.activations, memory.logits, memory.peak)
    rate = c.total_batch_size / seconds
    return [
        planner.describe(layout),
        str(c.micro_batch_size),
        *(f"{part / 2**30:.1f}" for part in parts),
        f"{1000 * seconds:,.0f}",
        f"{rate:,.0f}",
        f"{mfu(rate, flops_per_token(c), cluster.peak * cluster.gpus):.1%}",
        f"{(layout.time.communication + layout.time.bubble) / seconds:.1%}",
    ]


def explanation(config):
    """What the figures of the table mean, and the assumptions behind them."""
    return (
        "This is an estimate. B: sequences of a micro-batch. Memory: GB on a GPU. Peak: below the sum where gradients",
        "replace activations, above it where ddp's backward ends with new gradients. Logits of --pipeline: what its",
        "last rank takes beyond the first one's activations. Waits: share of a step for exposed communication and",
        "--pipeline's bubble. zero2, zero3 and hsdp overlap communication with computation, except the embedding",
        "table's; ddp, --tensor, --context and --pipeline wait.",
        f"Assumed: {config.mfu:.0%} of the peak in large micro-batches (--mfu), {config.link:g} GB/s between GPUs of a",
        f"machine (--link), {config.network:g} GB/s between machines (--network); formulas: measure/step_time.py.",
        "",
    )


def steps(best, too_large, refused, config):
    """The choice, in the order of planner.py."""
    c, memory, time = best.config, best.memory, best.time
    reasons = {}
    for mode, reason in refused.items():
        reasons.setdefault(reason, []).append(mode)
    fit = f"{planner.describe(best)} takes {memory.peak / 2**30:.1f} of {config.memory:g} GB"
    for mode, layout in too_large.items():
        fit += f"; {mode} alone takes {layout.memory.peak / 2**30:.1f} GB or more"
    micro_steps = accumulation_steps(c.batch_warmup_steps, c, best.distributed.data_size)
    batch = f"{c.micro_batch_size} sequences × {c.seq_len:,} tokens × {micro_steps} accumulated × "
    batch += f"{data_ranks(best.distributed)} = {c.total_batch_size:,} tokens"
    throughput = (
        f"the simplest within {planner.EQUAL - 1:.0%} of the fastest; {time.sent / time.total:.1%} of a step is "
    )
    throughput += f"communication, {time.communication / time.total:.1%} is waited for"
    if c.pipeline > 1:
        throughput += f"; stages of {' + '.join(map(str, blocks_of_stages(c)))} blocks"
    return (
        *(f"{', '.join(modes)} alone: refused, {reason}" for reason, modes in reasons.items()),
        f"1. Fit one step: {fit}",
        f"2. Reach the batch: {batch}",
        f"3. Raise throughput: {throughput}",
    )


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


if __name__ == "__main__":
    run(main)
