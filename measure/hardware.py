"""Machines by their data sheets, and the speed of GPT-2 124M's step on them by the roofline model.

    python -m measure.hardware

The roofline model (Williams et al. 2009): an operation takes its FLOPs over the peak, or its bytes over the bandwidth,
whichever is longer, at the share of that roof that the operation reaches on an H200 (dev/records/profile.json). It
knows no power limit and no missing kernel: V100 and T4 have neither bf16 nor flash attention of PyTorch's.
"""

import common.interrupt  # first: Ctrl-C during the other imports

from dataclasses import dataclass

from common.cli import parse
from common.errors import run
from measure.results import markdown_table
from watch.hardware import PEAK_TFLOPS


@dataclass
class Flags:
    """Print machines with their peaks, memory, links, and tokens/sec of GPT-2 124M: computed and published."""


@dataclass(frozen=True)
class Machine:
    """A GPU, or a machine of several, by NVIDIA's data sheets and white papers; rates without sparsity."""

    name: str
    gpu: str  # in PEAK_TFLOPS, whose 16-bit peak is that of tensor cores with float32 accumulation
    fp32: float  # TFLOP/s outside tensor cores, as all below of one GPU
    tf32: float | None
    fp8: float | None
    memory: int  # GB, as sold
    bandwidth: int  # GB/s
    link: int  # GB/s of NVLink or PCIe, both directions together
    gpus: int = 1


MACHINES = (
    Machine("T4", "T4", 8.1, None, None, 16, 320, 32),
    Machine("V100 SXM2", "V100", 15.7, None, None, 32, 900, 300),
    Machine("DGX-2, 16 × V100", "V100", 15.7, None, None, 32, 900, 300, gpus=16),
    Machine("RTX 4090", "RTX 4090", 82.6, 82.6, 330.3, 24, 1008, 64),
    Machine("A100 SXM", "A100", 19.5, 156, None, 80, 2039, 600),
    Machine("8 × A100", "A100", 19.5, 156, None, 80, 2039, 600, gpus=8),
    Machine("H100 SXM", "H100", 67, 494.7, 1978.9, 80, 3350, 900),
    Machine("H200 SXM", "H200", 67, 494.7, 1978.9, 141, 4800, 900),
)
# {machine: (tokens/sec, whose)}
PUBLISHED = {
    # https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking: T = 1,024, one of 8, 43.15% MFU
    "A100 SXM": (156_468, "MPT-125M"),
    # https://github.com/karpathy/llm.c/discussions/481: 10B tokens in 90 minutes
    "8 × A100": (1_850_000, "llm.c"),
}
# Milliseconds of 524,288 tokens on an H200, 872 in all (dev/records/profile.json), scaled to today's 841
TODAY = 841 / 872
COMPUTING = TODAY * (593.1 + 149.3)  # GEMMs and attention, whose roof is the peak: 66% and 23% of it
MOVING = TODAY * (48.5 + 33.7 + 24.9 + 5.3 + 1.5)  # the other kernels, whose roof is the bandwidth: 55 to 69%
IDLE = TODAY * 15.4
TOKENS = 524_288
SCALING = 0.965  # of several GPUs: ddp on four H200s (docs/scaling.md)


def tokens_per_second(machine):
    """Of GPT-2 124M's default step, T = 1,024, by the roofline model."""
    peak, bandwidth = PEAK_TFLOPS["H200"] / PEAK_TFLOPS[machine.gpu], 4800 / machine.bandwidth
    rate = 1000 * TOKENS / (COMPUTING * peak + MOVING * bandwidth + IDLE)
    return rate * machine.gpus * (SCALING if machine.gpus > 1 else 1)


def rows():
    """The machines as {column: text}."""
    for machine in MACHINES:
        peaks = (machine.fp32, machine.tf32, PEAK_TFLOPS[machine.gpu], machine.fp8)
        rate, whose = PUBLISHED.get(machine.name, ("", ""))
        yield {
            "machine": machine.name,
            **{name: f"{peak:g}" if peak else "" for name, peak in zip(("fp32", "TF32", "16 bits", "fp8"), peaks)},
            "GB": str(machine.memory),
            "GB/s": f"{machine.bandwidth:,}",
            "link": str(machine.link),
            "computed": f"{round(tokens_per_second(machine), -3):,.0f}",
            "published": rate and f"{rate:,} ({whose})",
        }


def main():
    parse(Flags)
    table = [*rows()]
    print(markdown_table(table[0], [[*row.values()] for row in table]))
    print("\nTFLOP/s, GB and GB/s of one GPU; tokens/sec of GPT-2 124M on the machine, computed and published.")


if __name__ == "__main__":
    run(main)
