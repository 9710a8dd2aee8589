"""Which ways to spread a step over several GPUs fit into their memory, and which of them to use. Needs no GPU.

The order is that of Hugging Face's Ultra-Scale Playbook (2025): fit one step, reach the batch, raise throughput.
"""

import itertools
from dataclasses import dataclass, replace

import torch

from common.errors import UserError
from measure.step_time import StepTime, step_time
from parallel import fsdp, place
from parallel.memory import StepMemory, step_memory
from parallel.process_group import Distributed

# What a plan chooses, the simplest first
PARALLEL = ("ddp", "zero2", "zero3", "hsdp")
CHECKPOINTING = ("off", "selective", "full")
CHOSEN = ("parallel", "tensor", "context", "pipeline", "activation_checkpointing", "micro_batch_size")

EQUAL = 1.02  # times the fastest step: closer than the estimate can tell


@dataclass(frozen=True)
class Layout:
    """One way to spread a step over the GPUs."""

    config: object  # a Config with all sizes and micro_batch_size
    distributed: Distributed
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
    """(all Layouts that the flags allow, the fastest first; {mode: why it is refused} of modes without splits).

    Micro-batches are the largest that fit. config: a Config with its sizes. free: bytes of a GPU's memory. given:
    names of the flags in CHOSEN that keep config's value.
    Raises UserError, that of the simplest layout, if no layout is allowed.
    """
    device = torch.device("cuda")  # which need not exist
    divisors = [n for n in range(1, cluster.gpus + 1) if cluster.gpus % n == 0]
    in_machine = [n for n in divisors if cluster.gpus_per_machine % n == 0]
    values = dict(parallel=PARALLEL, tensor=in_machine, context=in_machine, pipeline=divisors)
    values["activation_checkpointing"] = CHECKPOINTING
    values |= {name: [getattr(config, name)] for name in values if name in given}
    found, errors, refused = [], [], {}
    for choice in itertools.product(*values.values()):
        candidate = replace(config, **dict(zip(values, choice)))
        distributed = Distributed(
            0, cluster.gpus, device, candidate.tensor, candidate.context, candidate.pipeline, cluster.gpus_per_machine
        )
        try:
            if prepare(candidate, distributed, free, given):
                memory = step_memory(candidate, distributed)
                found.append(Layout(candidate, distributed, memory, step_time(candidate, distributed, cluster)))
        except UserError as error:
            errors.append(error)
            if distributed.data_size == cluster.gpus:
                refused.setdefault(candidate.parallel, str(error))
    if not found:
        raise errors[0] if errors else UserError(f"--parallel {config.parallel} needs several GPUs: leave it out")
    return sorted(found, key=lambda layout: layout.time.total), refused


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


def alternatives(layouts, free, best):
    """The best Layout, and for each other mode and combination of splits the fastest that fits; the fastest first."""
    kinds = {}
    for layout in (best, *layouts):
        if layout.memory.fits(free):
            kinds.setdefault((layout.config.parallel, *layout.splits), layout)
    return sorted(kinds.values(), key=lambda layout: layout.time.total)


def too_large(layouts, free):
    """{mode: the Layout without splits that takes the least memory} of the modes that do not fit without splits."""
    least = {}
    for layout in sorted(layouts, key=lambda layout: layout.memory.peak):
        if not layout.splits:
            least.setdefault(layout.config.parallel, layout)
    return {mode: layout for mode, layout in least.items() if not layout.memory.fits(free)}


def describe(layout):
    """A Layout in words."""
    c = layout.config
    words = [c.parallel, *(f"{name} {size}" for name, size in layout.splits.items())]
    if c.activation_checkpointing != "off":
        words.append(f"{c.activation_checkpointing} checkpointing")
    return ", ".join(words)
