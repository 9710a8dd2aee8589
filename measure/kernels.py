"""One operation at every level: eager PyTorch, PyTorch's own kernel, torch.compile, Triton, CUDA C++.

    python -m measure.kernels                                        # cross-entropy, GELU and LayerNorm
    python -m measure.kernels --kernel gelu
    TORCH_LOGS=output_code python -m measure.kernels --kernel gelu --levels compiled        # the compiler's code

These operations compute little for each byte, so memory bandwidth is their limit. GB/s are the bytes that forward and
backward together must move at least, over their time: the same bytes for every level, so that a level that moves more
has fewer GB/s. docs/measuring.md says what to learn from the figures.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from common.cli import flag
from common.device import missing_compiler, missing_package
from common.errors import UserError, run
from measure import nvrtc
from measure.timing import KernelFlags, dtype_of_activations, forward_and_backward, start, time_all

EPSILON = 1e-5  # of LayerNorm
Level = Literal["eager", "library", "compiled", "max-autotune", "triton", "cuda"]


@dataclass
class Flags(KernelFlags):
    """Time cross-entropy, GELU and LayerNorm at every level, from eager PyTorch to a kernel of one's own.

    GELU's input has 4C columns.
    """

    kernel: tuple[Literal["cross_entropy", "gelu", "layer_norm"], ...] = ("cross_entropy", "gelu", "layer_norm")
    """Operations to time."""
    levels: tuple[Level, ...] = get_args(Level)
    """Levels to time; some operations lack some."""
    vocab_size: int = flag(50304, at_least=1)
    """Columns V of the logits."""


def main():
    flags, device = start(Flags)
    cases = [dict(name=name, level=level) for name in flags.kernel for level in flags.levels if level in LEVELS[name]]
    if not cases:
        raise UserError("no operation has these levels: use --kernel and --levels, see --help")
    dtype = str(dtype_of_activations(device)).removeprefix("torch.")
    note = f"{flags.tokens:,} tokens, C = {flags.n_embd}, V = {flags.vocab_size:,}, {dtype}"
    time_all("kernels", flags, device, cases, partial(measure, flags, device), "GB/s", memory_bandwidth(device), note)


def memory_bandwidth(device):
    """GB/s of a GPU's memory by its clock and bus width, or None if they are unknown."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, bits
    return 2 * clock * 1e3 * width / 8 / 1e9 or None  # double data rate: two transfers per clock


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


def library_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)


def triton_cross_entropy(logits, targets):
    """By the kernel of --fused_cross_entropy: forward also writes the gradient, over the logits."""
    from kernels.cross_entropy import cross_entropy_  # needs Triton

    return cross_entropy_(logits.detach(), targets, logits.size(1)).mean()


def gelu_by_hand(language, x):
    from measure import gelu  # needs Triton

    return gelu.GELU.apply(x, dict(triton=gelu.by_triton, cuda=gelu.by_cuda)[language])


# Mode of torch.compile; without CUDA graphs, which save launches: here one kernel takes longer than its launch
MODES = {"compiled": None, "max-autotune": "max-autotune-no-cudagraphs"}

# kernel: {level: its function}; the levels of MODES compile the library's, which model.py calls
LEVELS = dict(
    cross_entropy=dict(eager=cross_entropy, library=library_cross_entropy, triton=triton_cross_entropy),
    gelu=dict(eager=gelu, library=partial(F.gelu, approximate="tanh")),
    layer_norm=dict(eager=layer_norm, library=library_layer_norm),
)
LEVELS["gelu"] |= {language: partial(gelu_by_hand, language) for language in ("triton", "cuda")}
for levels in LEVELS.values():
    levels |= dict.fromkeys(MODES, levels["library"])


def missing(level, device):
    """What a level lacks on this device, or None."""
    if level == "cuda":
        return nvrtc.missing(device)
    if level in MODES and (problem := missing_compiler(device)):
        return problem
    if level in ("max-autotune", "triton") and device.type != "cuda":
        return f"it is for GPUs, not {device.type}"
    return missing_package("triton") if level == "triton" else None


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


def check(flags, device, name, level):
    """Compare a kernel at a level with PyTorch's in float64, on 1,024 rows: its value and gradients.

    Raises AssertionError if they differ by more than rounding.
    """
    leaves, others = make_inputs(name, replace(flags, tokens=min(flags.tokens, 1024)), device)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = (F.cross_entropy if name == "cross_entropy" else LEVELS[name]["library"])(*exact, *others)
    result = function_of(name, level)(*leaves, *others)
    pairs = [(result, expected)]
    if result.requires_grad:
        gradient = torch.randn_like(result)
        result.backward(gradient)
        expected.backward(gradient.double())
        pairs += [(leaf.grad, other.grad) for leaf, other in zip(leaves, exact)]
    rounding = 1e-5 if leaves[0].dtype == torch.float32 else 5e-2
    for found, expected in pairs:
        atol = rounding * expected.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=atol)


def measure(flags, device, name, level):
    """{forward_ms, backward_ms, peak_gb, rate in GB/s} of a kernel at a level. Raises UserError if the device lacks it.

    The bytes are those that forward and backward must move together. Cross-entropy reads logits and writes their
    gradient: a row fits into on-chip memory, so one pass can do both. GELU and LayerNorm read x and write y in forward,
    read x and dy and write dx in backward, since the rest of the model is computed in between.
    """
    if reason := missing(level, device):
        raise UserError(reason)
    if level not in MODES:  # those would compile for another shape
        check(flags, device, name, level)
    leaves, others = make_inputs(name, flags, device)
    function = partial(function_of(name, level), *leaves, *others)
    times = forward_and_backward(device, function, leaves, flags.repeats)
    moved = leaves[0].nbytes * (2 if name == "cross_entropy" else 5)
    return times | dict(rate=moved / (times["forward_ms"] + times["backward_ms"]) / 1e6)


if __name__ == "__main__":
    run(main)
