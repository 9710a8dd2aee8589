"""Liger's kernels in GPT-2's training step, in turn with PyTorch's and this program's.

    pip install liger-kernel
    python -m measure.liger --data_dir SHARDS

Of Liger-Kernel (Hsu et al. 2024) GPT-2 can use the head with its cross-entropy and LayerNorm. Each run is timed in turn
with the run before it: PyTorch's head, Liger's, --fused_cross_entropy, and with that Liger's LayerNorm.
"""

import common.interrupt  # first: Ctrl-C during the other imports

from dataclasses import dataclass, replace

import torch
import torch.nn as nn

from common.cli import flag
from common.device import choose_device_type
from common.errors import UserError, run
from config import Config, read_command_line
from measure.child_run import SPEED, begin, finish, speed
from measure.operations import liger_head, missing
from measure.turns import ROUNDS, measure

NOTE = (
    "× before: tokens/sec over those of the run before, in turn, with its 95% interval; ≈: the interval holds 1. A "
    "step is one micro-batch. Liger's head is not compiled, and counts the padding of the vocabulary as tokens."
)


@dataclass
class Liger:
    """How long each run is timed."""

    TITLE = "liger"

    seconds: float = flag(5.0, at_least=0)
    """Seconds that each run is timed, at least, in turn with the run before."""


@dataclass
class LigerConfig(Config, Liger):
    """Time Liger's kernels in the training step, in turn with PyTorch's and this program's.

    Takes every flag of train_gpt2.py.
    """


def main():
    config, typed = read_command_line(LigerConfig)
    if problem := missing("liger", torch.device(choose_device_type(config.device))):
        raise UserError(f"Liger's kernels do not run here: {problem}")
    own = replace(
        config, micro_batch_size=config.micro_batch_size or 64, cuda_graphs=False
    )  # 64: logits fit as a whole
    runs = {
        "PyTorch's head": (replace(own, fused_cross_entropy=False), None),
        "Liger's head": (own, use_liger_head),
        "--fused_cross_entropy": (own, None),
        "the same, Liger's LayerNorm": (own, use_liger_layer_norm),
    }
    results = begin(config, "liger", ("run", *SPEED, "× before", "95%"), typed, goes_on=False)
    before = None
    for index, (name, (changed, prepare)) in enumerate(runs.items()):
        options = dict(accumulates=False, prepare=prepare)
        timed, row = measure(changed, 1, results, str(index), config.seconds, ROUNDS, before, **options)
        gain = []
        if timed and (ratios := row["gain"]):
            gain = [f"{ratios['ratio']:.3f}{'' if ratios['is_clear'] else ' ≈'}"]
            gain.append(f"{ratios['low']:.3f}–{ratios['high']:.3f}")
        results.add(row | dict(run=name), [name, *speed(row), *gain], NOTE)
        if timed:
            if before:
                before.close()
            before = timed
    if before:
        before.close()
    finish(results)


def use_liger_head():
    """In this process --fused_cross_entropy computes by Liger, outside of compiled graphs: PyTorch 2.15's Inductor does
    not compile its torch.addmm with out_dtype."""
    from kernels import cross_entropy  # needs Triton

    @torch.compiler.disable
    def fused_cross_entropy(x, weight, targets, vocab_size):
        x = x.to(torch.get_autocast_dtype(x.device.type)).flatten(0, -2)
        return liger_head(x, weight, targets.flatten())

    cross_entropy.fused_cross_entropy = fused_cross_entropy


def use_liger_layer_norm():
    """In this process nn.LayerNorm computes by Liger."""
    from liger_kernel.transformers.functional import liger_layer_norm

    nn.LayerNorm.forward = lambda layer, x: liger_layer_norm(x, layer.weight, layer.bias, layer.eps)


if __name__ == "__main__":
    run(main)
