"""The ways to spread a step over several GPUs, what they take, and the command of the fastest: an estimate.

python -m measure.plan --model gpt2-xl --gpus 16 --memory 80
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
import shlex
from dataclasses import dataclass, replace
from typing import Literal

import torch

from common.cli import flag
from common.errors import UserError, run
from config import Config, command_line, read_command_line, set_sizes
from measure.child_run import run_config
from measure.results import align
from measure.step_time import step_time
from parallel import place
from parallel.fsdp import shard_group_size
from parallel.memory import USABLE, peak_bytes
from parallel.process_group import Distributed
from watch.hardware import PEAK_TFLOPS

COLUMNS = ("mode", "B", "peak GB", "ms a step", "tokens/sec", "waits")
CHOSEN = ("parallel", "tensor", "context", "pipeline", "activation_checkpointing", "micro_batch_size")


@dataclass
class Plan:
    """A plan for several GPUs. It is an estimate, and needs no GPU."""

    TITLE = "plan"

    gpus: int = flag(8, at_least=1)
    """GPUs in all."""
    gpus_per_machine: int = flag(8, at_least=1)
    """GPUs of one machine."""
    gpu: Literal[tuple(PEAK_TFLOPS)] = "H100"
    """Kind of GPU, for its peak."""
    memory: float = flag(80.0, above=0)
    """Memory of a GPU, in GB (2^30 bytes)."""
    mfu: float = flag(0.54, above=0, at_most=1)
    """MFU of a GPU alone with large micro-batches; 0.52 to 0.57 are measured on H200s for 124M and 1558M."""
    link: float = flag(300.0, above=0)
    """GB (10^9 bytes) a second that a GPU sends inside a machine; NVLink between H200s: 300, measured."""
    network: float = flag(400.0, above=0)
    """GB (10^9 bytes) a second that a machine sends to others; 8 × 400 Gb/s InfiniBand: 400, 100 Gb/s: 12.5."""


@dataclass
class PlanConfig(Config, Plan):
    """Print which --parallel, --tensor, ... fit, their memory and time, and the best command. Those given are kept.

    Takes every flag of train_gpt2.py.
    """


@dataclass
class Layout:
    """One way to spread a step over the GPUs."""

    config: PlanConfig  # with all sizes and micro_batch_size
    peak: float  # bytes of a GPU's memory
    seconds: float  # of a step
    waits: float  # share of it

    def __str__(self):
        c = self.config
        sizes = dict(tensor=c.tensor, context=c.context, pipeline=c.pipeline)
        words = [c.parallel, *(f"{name} {size}" for name, size in sizes.items() if size > 1)]
        if c.activation_checkpointing != "off":
            words.append(f"{c.activation_checkpointing} checkpointing")
        return ", ".join(words)


def main():
    config, typed = read_command_line(PlanConfig)
    if config.gpus > config.gpus_per_machine and config.gpus % config.gpus_per_machine:
        raise UserError(f"--gpus {config.gpus} is not a multiple of --gpus_per_machine {config.gpus_per_machine}")
    slow = config.autocast == "off" or not config.flash or typed.get("compile") is False
    if slow or config.fp8 or config.overlap_gradients or config.init_from != "scratch":
        unknown = "--fp8, --autocast off, --no_compile, --no_flash, --overlap_gradients, --init_from"
        raise UserError(f"a plan does not know {unknown}: leave them out")
    sized = replace(config)
    set_sizes(sized, None)
    if config.gpu in ("V100", "T4"):
        sized.autocast = "fp16"  # they have no bf16
    kept = {*typed, *(name for name in CHOSEN if getattr(config, name) != getattr(Config, name))}  # also of --config
    layouts = fastest(find_layouts(sized, kept), config.memory)
    batch = f"{config.total_batch_size:,} tokens a step in sequences of {config.seq_len:,}"
    print(f"{batch}, on {config.gpus} × {config.gpu} with {config.memory:g} GB\n\n{align(COLUMNS, COLUMNS, 42)}")
    for layout in layouts[:10]:
        B, peak, rate = layout.config.micro_batch_size, layout.peak / 2**30, config.total_batch_size / layout.seconds
        numbers = str(B), f"{peak:.1f}", f"{1000 * layout.seconds:,.0f}", f"{rate:,.0f}", f"{layout.waits:.1%}"
        print(align((str(layout), *numbers), COLUMNS, 42))
    print("\nThis is an estimate. B: sequences of a micro-batch. Waits: for communication and pipeline. The fastest:\n")
    chosen = {name: getattr(layouts[0].config, name) for name in CHOSEN}
    machines = max(1, config.gpus // config.gpus_per_machine)
    launcher = ["torchrun", f"--nnodes={machines}", f"--nproc_per_node={config.gpus // machines}"]
    if config.gpus == 1:
        launcher = ["python"]
    if machines > 1:
        launcher += ["--rdzv_backend=c10d", "--rdzv_endpoint=FIRST_MACHINE:29500", "--rdzv_id=gpt2"]
    print(shlex.join([*launcher, "train_gpt2.py", *command_line(run_config(config, **chosen))]))


def find_layouts(config, typed):
    """All Layouts that the flags allow. Those that are in `typed` keep their value.

    config: a PlanConfig with its sizes. Raises UserError, that of the simplest layout, if no layout is allowed.
    """
    machine = min(config.gpus, config.gpus_per_machine)
    divisors = [n for n in range(1, config.gpus + 1) if config.gpus % n == 0]
    in_machine = [n for n in divisors if machine % n == 0]
    modes = ("ddp", "zero1", "zero2", "zero3", "hsdp")
    values = dict(parallel=modes, tensor=in_machine, context=in_machine, pipeline=divisors)
    values["activation_checkpointing"] = ("off", "selective", "full")
    values |= {name: [getattr(config, name)] for name in values if name in typed}
    layouts, error = [], None
    for choice in itertools.product(*values.values()):
        c = replace(config, **dict(zip(values, choice)))
        c.fused_cross_entropy &= c.tensor == 1
        # the device need not exist
        distributed = Distributed(0, c.gpus, torch.device("cuda"), c.tensor, c.context, c.pipeline, machine)
        try:
            place.check(c, distributed, c.memory * 2**30, [])
        except UserError as refusal:
            error = error or refusal
            continue
        shards = shard_group_size(c, distributed)
        same = c.parallel != "ddp" and shards == 1 or c.parallel == "hsdp" and shards == distributed.data_context_size
        if "parallel" in typed or not same:  # the same: as ddp, or zero3 (faster, if in one unit)
            layouts.append(Layout(c, peak_bytes(c, distributed), *step_time(c, distributed)))
    if not layouts:
        raise error
    return layouts


def fastest(layouts, memory):
    """The Layouts that fit `memory` GB, the fastest of each mode and combination of splits, the fastest first.

    Raises UserError if none fits.
    """
    kinds = {}
    for layout in sorted(layouts, key=lambda layout: layout.seconds):
        c = layout.config
        if layout.peak <= USABLE * memory * 2**30:
            kinds.setdefault((c.parallel, c.tensor, c.context, c.pipeline), layout)
    if not kinds:
        least = min(layouts, key=lambda layout: layout.peak)
        needed = f"{least} takes {least.peak / 2**30:.1f} GB a GPU"
        raise UserError(f"nothing fits {memory:g} GB, {needed}: use more --gpus, or a smaller --model or --seq_len")
    return list(kinds.values())


if __name__ == "__main__":
    run(main)
