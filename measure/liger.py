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
from measure.child_run import SPEED, begin, finish, gain_texts, speed
from measure.operations import liger_head, missing
from measure.turns import ROUNDS, measure
from watch.hardware import installed_version

NOTE = (
    "× before: tokens/sec over those of the run before, in turn, with its 95% interval; ≈: the interval holds 1. A "
    "step is one micro-batch. Liger's head is not compiled, and counts the padding of the vocabulary as tokens."
)


@dataclass
class Liger:
    """How long each run is timed."""

    TITLE = "liger"

    seconds: float = flag(5.0, at_least=0)
    """About how many seconds each run is timed, in turn with the run before."""


@dataclass
class LigerConfig(Config, Liger):
    """Time Liger's kernels in the training step, in turn with PyTorch's and this program's.

    Takes every flag of train_gpt2.py.
    """


def main():
    config, typed = read_command_line(LigerConfig)
    if problem := missing("liger", torch.device(choose_device_type(config.device))):
        raise UserError(f"measure.liger: {problem}")
    size = config.micro_batch_size or 64  # the logits of 64 sequences fit into memory as a whole
    own = replace(config, micro_batch_size=size, fused_cross_entropy=True, fp8_head=False, cuda_graphs=False)
    runs = (
        ("library_head", "PyTorch's head", replace(own, fused_cross_entropy=False), None),
        ("liger_head", "Liger's head", own, use_liger_head),
        ("own_head", "--fused_cross_entropy", own, None),
        ("liger_layer_norm", "the same, Liger's LayerNorm", own, use_liger_layer_norm),
    )
    note = f"{NOTE} liger-kernel {installed_version('liger-kernel')}."
    results = begin(config, "liger", ("run", *SPEED, "× before", "95%"), typed, goes_on=False)
    before = None
    for name, label, changed, prepare in runs:
        options = dict(accumulates=False, prepare=prepare)
        timed, row = measure(changed, 1, results, name, config.seconds, ROUNDS, before, **options)
        results.add(row | dict(run=label), [label, *speed(row), *gain_texts(row.get("gain"))], note)
        if timed:
            if before:
                before.close()
            before = timed
    if before:
        before.close()
    finish(results)


def use_liger_head():
    """In this process --fused_cross_entropy computes by Liger, outside of compiled graphs: PyTorch 2.15's Inductor does
    not compile its torch.addmm with out_dtype. The padding of the vocabulary counts."""
    from kernels import cross_entropy  # needs Triton

    @torch.compiler.disable
    def mean_cross_entropy(summed, x, weight, targets, vocab_size):
        return liger_head(x.flatten(0, -2), weight, targets.flatten())

    cross_entropy.mean_cross_entropy = mean_cross_entropy


def use_liger_layer_norm():
    """In this process nn.LayerNorm computes by Liger."""
    from liger_kernel.transformers.functional import liger_layer_norm

    nn.LayerNorm.forward = lambda layer, x: liger_layer_norm(x, layer.weight, layer.bias, layer.eps)


if __name__ == "__main__":
    run(main)
