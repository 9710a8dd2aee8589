"""One operation at every level: eager PyTorch, PyTorch's own kernel, torch.compile, Triton, a library.

    python -m measure.kernels                                        # cross-entropy, GELU and LayerNorm
    python -m measure.kernels --kernel gelu
    TORCH_LOGS=output_code python -m measure.kernels --kernel gelu --levels compiled        # the compiler's code

These operations compute little for each byte, so memory bandwidth is their limit. GB/s are the bytes that forward and
backward together must move at least, over their time: the same bytes for every level, so that a level that moves more
has fewer GB/s. docs/measuring.md says what to learn from the figures.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common.cli import flag, parse
from common.device import missing_compiler, missing_package
from common.errors import UserError, first_line, is_out_of_memory, run
from measure import figures
from measure.child_run import OUT_OF_MEMORY
from measure.results import Results
from measure.roofline import memory_bandwidth
from measure.tables import align, markdown_table
from measure.timing import TimingFlags, dtype_of_activations, forward_and_backward
from parallel.process_group import start_alone

COLUMNS = ("operation", "level", "forward ms", "backward ms", "GB/s", "of bandwidth", "× eager", "peak GB")
COLUMN_WIDTHS = (14, 13, 10, 11, 8, 12, 8, 8)
ALL_LEVELS = ("eager", "library", "compiled", "max-autotune", "triton", "liger")
EPSILON = 1e-5  # of LayerNorm


@dataclass
class Flags(TimingFlags):
    """Time cross-entropy, GELU and LayerNorm at every level, from eager PyTorch to a kernel of one's own."""

    kernel: tuple[Literal["cross_entropy", "gelu", "layer_norm"], ...] = ("cross_entropy", "gelu", "layer_norm")
    """Operations to time."""
    levels: tuple[Literal["eager", "library", "compiled", "max-autotune", "triton", "liger"], ...] = ALL_LEVELS
    """Levels to time; some operations lack some."""
    tokens: int | None = flag(None, at_least=1)
    """Tokens, B × T; by default 65,536 on a GPU, 1,024 elsewhere."""
    n_embd: int = flag(768, at_least=1)
    """Embedding width C; GELU's input has 4C columns."""
    vocab_size: int = flag(50304, at_least=1)
    """Columns V of the logits."""


def main():
    flags = parse(Flags)
    device = start_alone(flags.device, "this times one device")
    if flags.tokens is None:
        flags.tokens = 65536 if device.type == "cuda" else 1024
    grid = [(kernel, level) for kernel in flags.kernel for level in flags.levels if level in LEVELS[kernel]]
    if not grid:
        raise UserError("no operation has these levels: use --kernel and --levels, see --help")
    files = Results(flags.log_dir, flags.run_name, "kernels", device)
    print(f"results: {files.folder}/\n{align(COLUMNS, COLUMN_WIDTHS)}")
    results = []
    with tqdm(grid, unit="level", leave=False, disable=None) as bar:
        for kernel, level in bar:
            bar.set_description(f"{kernel}, {level}")
            result = dict(name=kernel, level=level, facts=files.environment) | time_level(kernel, level, flags, device)
            results.append(result | rates(result, flags, device))
            bar.write(align(cells(results[-1], results), COLUMN_WIDTHS))
            draw = partial(figures.kernels, results, memory_bandwidth(device))
            files.save(results, markdown(results, flags, device), draw)
    print(files)


# ----------------------------------------------------------------------------------------------------------------------
# Eager: each line below is one kernel or more, which reads its inputs from memory and writes its output back


def cross_entropy(logits, targets):
    """The mean cross-entropy in float32. logits (N, V), targets (N,) int64."""
    logits = logits.float()
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    log_sum_exp = shifted.exp().sum(-1).log()
    return (log_sum_exp - shifted.gather(1, targets[:, None])[:, 0]).mean()


def gelu(x):
    """GPT-2's GELU, the tanh form of Hendrycks and Gimpel 2016."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x, weight, bias):
    """LayerNorm (Ba et al. 2016) of the last dimension, computed in float32."""
    centered = x.float() - x.float().mean(-1, keepdim=True)
    normalized = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + EPSILON)
    return (normalized * weight.float() + bias.float()).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The other levels


def library_cross_entropy(logits, targets):
    return F.cross_entropy(logits.float(), targets)  # as under autocast


def library_gelu(x):
    return F.gelu(x, approximate="tanh")


def library_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)


def triton_cross_entropy(logits, targets):
    """By the kernel of --fused_cross_entropy: forward also writes the gradient, over the logits."""
    from kernels.cross_entropy import cross_entropy_  # needs Triton

    return cross_entropy_(logits.detach(), targets, logits.size(1)).mean()


def liger_cross_entropy(logits, targets):
    """Liger-Kernel's; forward also writes the gradient, over the logits."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, targets)


def liger_layer_norm(x, weight, bias):
    from liger_kernel.transformers.functional import liger_layer_norm

    return liger_layer_norm(x, weight, bias, EPSILON)


# Mode of torch.compile; without CUDA graphs, which save launches: here one kernel takes longer than its launch
MODES = {"compiled": None, "max-autotune": "max-autotune-no-cudagraphs"}

# kernel: {level: its function}; the levels of MODES compile the library's, which model.py calls
LEVELS = dict(
    cross_entropy=dict(
        eager=cross_entropy, library=library_cross_entropy, triton=triton_cross_entropy, liger=liger_cross_entropy
    ),
    gelu=dict(eager=gelu, library=library_gelu),
    layer_norm=dict(eager=layer_norm, library=library_layer_norm, liger=liger_layer_norm),
)
for levels in LEVELS.values():
    levels |= dict.fromkeys(MODES, levels["library"])


def missing(level, device):
    """What a level lacks on this device, or None."""
    if level in MODES and (compiler := missing_compiler(device)):
        return f"torch.compile needs {compiler}"
    if level in ("max-autotune", "triton", "liger") and device.type != "cuda":
        return f"it is for GPUs, not {device.type}"
    packages = dict(triton=("triton",), liger=("liger_kernel", "liger-kernel"))
    return missing_package(*packages[level]) if level in packages else None


def function_of(kernel, level):
    """The function of a kernel's inputs at a level."""
    function = LEVELS[kernel][level]
    if level not in MODES:
        return function
    torch.compiler.reset()  # another mode compiles the same function again
    return torch.compile(function, mode=MODES[level], dynamic=False)


# ----------------------------------------------------------------------------------------------------------------------
# The measurement


def make_inputs(kernel, flags, device):
    """The inputs of a kernel: those that need gradients, then those that do not."""
    dtype, N, C = dtype_of_activations(device), flags.tokens, flags.n_embd
    shapes = dict(cross_entropy=[(N, flags.vocab_size)], gelu=[(N, 4 * C)], layer_norm=[(N, C), (C,), (C,)])[kernel]
    leaves = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    targets = [torch.randint(flags.vocab_size, (N,), device=device)] if kernel == "cross_entropy" else []
    return leaves, targets


def least_bytes(kernel, flags, device):
    """Bytes that forward and backward together must move: each tensor read once or written once.

    Cross-entropy reads logits and writes their gradient: a row fits into on-chip memory, so one pass can do both. GELU
    and LayerNorm read x and write y in forward, read x and dy and write dx in backward, since the rest of the model is
    computed in between.
    """
    N, C = flags.tokens, flags.n_embd
    elements = dict(cross_entropy=2 * N * flags.vocab_size, gelu=5 * N * 4 * C, layer_norm=5 * N * C)[kernel]
    return elements * dtype_of_activations(device).itemsize


def time_level(kernel, level, flags, device):
    """{status, ...}: "done" with what forward_and_backward measures, or "skipped" with a reason."""
    if reason := missing(level, device):
        return dict(status="skipped", reason=reason)
    try:
        leaves, others = make_inputs(kernel, flags, device)
        function = partial(function_of(kernel, level), *leaves, *others)
        return dict(status="done") | forward_and_backward(device, function, leaves, flags.repeats)
    except (ImportError, RuntimeError) as error:
        if is_out_of_memory(error):
            return dict(status="skipped", reason=OUT_OF_MEMORY)
        if isinstance(error, ImportError):  # a package that a level's package needs
            return dict(status="skipped", reason=first_line(error))
        raise
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def rates(result, flags, device):
    """{gb_per_s, of_bandwidth}: GB/s of 10^9 bytes; of_bandwidth is None where the device's bandwidth is unknown."""
    if result["status"] != "done":
        return {}
    moved = least_bytes(result["name"], flags, device)
    per_second = moved / (1e-3 * (result["forward_ms"] + result["backward_ms"]))
    bandwidth = memory_bandwidth(device)
    return dict(gb_per_s=per_second / 1e9, of_bandwidth=per_second / bandwidth if bandwidth else None)


def cells(result, results):
    """A row of the table. results: those so far, among which the eager one is the reference."""
    texts = [result["name"], result["level"]]
    if result["status"] != "done":
        return [*texts, f"skipped: {result['reason']}"]
    eager = next(
        (r for r in results if (r["name"], r["level"], r["status"]) == (result["name"], "eager", "done")), None
    )
    share, peak = result["of_bandwidth"], result["peak_gb"]
    texts += [f"{result['forward_ms']:.3f}", f"{result['backward_ms']:.3f}" if result["backward_ms"] else "–"]
    texts += [f"{result['gb_per_s']:,.1f}", "–" if share is None else f"{share:.0%}"]
    texts += [f"{result['gb_per_s'] / eager['gb_per_s']:.2f}" if eager else "–"]
    return [*texts, "–" if peak is None else f"{peak:.2f}"]


def markdown(results, flags, device):
    text = markdown_table(COLUMNS, [cells(result, results) for result in results], left=2)
    dtype = str(dtype_of_activations(device)).removeprefix("torch.")
    sizes = [f"{flags.tokens:,} tokens, C = {flags.n_embd}, V = {flags.vocab_size:,}, {dtype}"]
    for kernel in dict.fromkeys(result["name"] for result in results):
        sizes.append(f"{kernel} moves at least {least_bytes(kernel, flags, device) / 1e9:.3g} GB")
    bandwidth = memory_bandwidth(device)
    sizes += [f"memory moves {bandwidth / 1e9:,.0f} GB/s"] if bandwidth else []
    return f"{text}\n\n{'; '.join(sizes)}. GB and GB/s are 10^9 bytes, peak GB 2^30."


if __name__ == "__main__":
    run(main)
