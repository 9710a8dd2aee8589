"""GPUs by their data sheets, and the speed of GPT-2 124M's step on them by the roofline model.

    python -m measure.hardware

The roofline model (Williams et al. 2009): either the tensor cores' peak limits an operation or the memory's bandwidth.
Its time on an H200 (dev/records/profile.json) is scaled by the ratio of the peaks, or of the bandwidths. No power limit
and no missing kernel is modelled: V100 and T4 have neither bf16 nor flash attention of PyTorch's.
"""

import common.interrupt  # first: Ctrl-C during the other imports

from dataclasses import dataclass

from common.cli import parse
from common.errors import run
from measure.results import markdown_table
from watch.hardware import PEAK_TFLOPS


@dataclass
class Flags:
    """Print GPUs with their peaks, memory, links, and tokens/sec of GPT-2 124M: computed and published."""


# By NVIDIA's data sheets and white papers, SXM, without sparsity: TFLOP/s of float32 outside tensor cores, of TF32, of
# 8 bits; GB; GB/s of memory; GB/s of NVLink or PCIe, both directions together
CARDS = {
    "T4": (8.1, None, None, 16, 320, 32),
    "V100": (15.7, None, None, 32, 900, 300),
    "RTX 4090": (82.6, 82.6, 330.3, 24, 1008, 64),
    "A100": (19.5, 156, None, 80, 2039, 600),
    "H100": (67, 494.7, 1978.9, 80, 3350, 900),
    "H200": (67, 494.7, 1978.9, 141, 4800, 900),
}
NAMES = {"V100": "V100, 16 in a DGX-2"}
# Of each of 8 A100s, T = 1,024: https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking, 43.15%
# MFU; https://github.com/karpathy/llm.c/discussions/481, 10B tokens in 90 minutes
PUBLISHED = {"A100": "156,468 MPT-125M, 231,000 llm.c"}
# Milliseconds of 524,288 tokens on an H200, 857 in all (dev/records/profile.json), scaled to bench.py's 834
SCALE = 834 / 857
COMPUTING = SCALE * (615.5 + 128.3)  # GEMMs and attention: 64 and 27% of the tensor cores' peak
MOVING = SCALE * (44.4 + 35.2 + 20.0 + 2.9 + 1.3)  # the other kernels: their roof is the bandwidth
IDLE = SCALE * 9.6
TOKENS = 524_288


def tokens_per_second(gpu):
    """Of GPT-2 124M's default step, T = 1,024, by the roofline model."""
    peak, bandwidth = PEAK_TFLOPS["H200"] / PEAK_TFLOPS[gpu], CARDS["H200"][4] / CARDS[gpu][4]
    return 1000 * TOKENS / (COMPUTING * peak + MOVING * bandwidth + IDLE)


def rows():
    """The cards as {column: text}."""
    for gpu, (fp32, tf32, fp8, memory, bandwidth, link) in CARDS.items():
        numbers = {"fp32": fp32, "TF32": tf32, "16 bits": PEAK_TFLOPS[gpu], "fp8": fp8, "GB": memory}
        yield {
            "GPU": NAMES.get(gpu, gpu),
            **{name: f"{number:g}" if number else "" for name, number in numbers.items()},
            "GB/s": f"{bandwidth:,}",
            "link": str(link),
            "computed": f"{round(tokens_per_second(gpu), -3):,.0f}",
            "published": PUBLISHED.get(gpu, ""),
        }


def main():
    parse(Flags)
    table = [*rows()]
    print(markdown_table(table[0], [[*row.values()] for row in table]))
    print("\nTFLOP/s; GB; GB/s of memory and link; tokens/sec of GPT-2 124M, computed and published.")


if __name__ == "__main__":
    run(main)
