"""One operation at every level: eager PyTorch, PyTorch's own kernel, torch.compile, Triton, CUDA C++.

    python -m measure.kernels                                        # cross-entropy, GELU and LayerNorm
    python -m measure.kernels --kernel gelu
    python -m measure.kernels --kernel head                          # the head with cross-entropy, by every library
    TORCH_LOGS=output_code python -m measure.kernels --kernel gelu --levels compiled        # the compiler's code

These operations compute little for each byte, so memory bandwidth is their limit. GB/s are the bytes that forward and
backward together must move at least, over their time: the same bytes for every level, so that a level that moves more
has fewer GB/s. Arithmetic limits the head, so its rate is in TFLOP/s. docs/measuring.md says what to learn from the
figures.
"""

import common.interrupt  # first: Ctrl-C during the other imports

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch

from common.cli import flag
from common.errors import UserError, run
from measure.operations import LEVELS, MODES, function_of, missing
from measure.timing import KernelFlags, dtype_of_activations, forward_and_backward, start, time_all
from watch.hardware import installed_version, peak_flops

Level = Literal["eager", "library", "compiled", "max-autotune", "chunked", "liger", "quack", "triton", "cuda"]


@dataclass
class Flags(KernelFlags):
    """Time cross-entropy, GELU, LayerNorm or the head at every level, from eager PyTorch to a kernel of one's own.

    GELU's input has 4C columns.
    """

    kernel: tuple[Literal["cross_entropy", "gelu", "layer_norm", "head"], ...] = ("cross_entropy", "gelu", "layer_norm")
    """Operations to time; the head, its GEMMs with cross-entropy, is timed alone."""
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
    unit, limit = "GB/s", memory_bandwidth(device)
    if "head" in flags.kernel:
        if len(flags.kernel) > 1:
            raise UserError("--kernel head has a rate in TFLOP/s, the others in GB/s: time it alone")
        unit, limit = "TFLOP/s", peak_flops(device) / 1e12
        note += f", liger-kernel {installed_version('liger-kernel') or 'is not installed'}"
    time_all("kernels", flags, device, cases, partial(measure, flags, device), unit, limit, note)


def memory_bandwidth(device):
    """GB/s of a GPU's memory by its clock and bus width, or None if they are unknown."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, bits
    return 2 * clock * 1e3 * width / 8 / 1e9 or None  # double data rate: two transfers per clock


def make_inputs(kernel, flags, device):
    """The inputs of a kernel: those that need gradients, then those that do not."""
    dtype, N, C, V = dtype_of_activations(device), flags.tokens, flags.n_embd, flags.vocab_size
    shapes = dict(cross_entropy=[(N, V)], gelu=[(N, 4 * C)], layer_norm=[(N, C), (C,), (C,)], head=[(N, C), (V, C)])
    leaves = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes[kernel]]
    if kernel == "head":  # the weight: float32, with GPT-2's initial standard deviation
        leaves[1] = leaves[1].detach().float().mul_(0.02).requires_grad_()
    targets = [torch.randint(V, (N,), device=device)] if kernel in ("cross_entropy", "head") else []
    return leaves, targets


def check(flags, device, name, level):
    """Compare a kernel at a level with PyTorch's in float64, on 1,024 rows: its value and the gradients of autograd.

    Raises AssertionError if they differ by more than rounding.
    """
    leaves, others = make_inputs(name, replace(flags, tokens=min(flags.tokens, 1024)), device)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = LEVELS[name]["library"](*exact, *others)
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
    """{forward_ms, backward_ms, peak_gb, rate} of a kernel at a level. Raises UserError if the device lacks it.

    The head's rate is in TFLOP/s, of its three GEMMs; the others' is in GB/s, of the bytes that forward and backward
    must move together. Cross-entropy reads logits and writes their gradient: a row fits into on-chip memory, so one
    pass can do both. GELU and LayerNorm read x and write y in forward, read x and dy and write dx in backward, since
    the rest of the model is computed in between.
    """
    if reason := missing(level, device):
        raise UserError(reason)
    if level not in MODES:  # those would compile for another shape
        check(flags, device, name, level)
    leaves, others = make_inputs(name, flags, device)
    function = partial(function_of(name, level), *leaves, *others)
    times = forward_and_backward(device, function, leaves, flags.repeats)
    ms = times["forward_ms"] + times["backward_ms"]
    if name == "head":
        return times | dict(rate=6 * flags.tokens * flags.n_embd * flags.vocab_size / ms / 1e9)
    moved = leaves[0].nbytes * (2 if name == "cross_entropy" else 5)
    return times | dict(rate=moved / ms / 1e6)


if __name__ == "__main__":
    run(main)
