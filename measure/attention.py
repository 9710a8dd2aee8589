"""Attention side by side: time and memory of every kernel that this device has, against the sequence length.

    python -m measure.attention                                         # T from 512 to 32,768, heads 64 and 128 wide
    python -m measure.attention --lengths 1024 4096 --widths 64 --tokens 16384

Tokens and width C are the same in every measurement, so attention's FLOPs grow with T and the other layers' do not. As
in the model, q, k and v are views of one (B, T, 3C) tensor, and their gradients become one tensor, so a kernel that
returns three gradients pays for the copy.
"""

import common.interrupt  # first: Ctrl-C during the other imports

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.device import missing_package
from common.errors import UserError, first_line, is_out_of_memory, run
from kernels import flash4
from measure.timing import KernelFlags, dtype_of_activations, forward_and_backward, start, time_all
from model import causal_attention
from watch.hardware import peak_flops

LENGTHS = tuple(512 * 2**i for i in range(7))
# Backends of F.scaled_dot_product_attention. PyTorch's own FlashAttention is version 2. Besides these: triton, flash4
# (cuDNN's forward with FlashAttention-4's backward), and of version 3 the forward: PyPI's fa3-fwd has no backward.
SDPA = dict(
    efficient=SDPBackend.EFFICIENT_ATTENTION,
    FlashAttention=SDPBackend.FLASH_ATTENTION,
    cuDNN=SDPBackend.CUDNN_ATTENTION,
)


@dataclass
class Flags(KernelFlags):
    """Time every attention kernel that this device has, forward and backward."""

    lengths: tuple[int, ...] = ()
    """Sequence lengths T, divisors of --tokens; by default the powers of two from 512 to 32,768, --tokens at most."""
    widths: tuple[int, ...] = (64, 128)
    """Widths D of a head, divisors of --n_embd; the number of heads is C / D."""


def main():
    flags, device = start(Flags)
    lengths = sorted(flags.lengths) or [T for T in LENGTHS if T <= flags.tokens]
    cases = [dict(name=name, D=D, T=T) for D in flags.widths for T in lengths for name in candidates(device)]
    if not cases or any(c["T"] < 1 or flags.tokens % c["T"] or c["D"] < 1 or flags.n_embd % c["D"] for c in cases):
        raise UserError(
            f"each of --lengths must divide --tokens {flags.tokens}, each of --widths --n_embd {flags.n_embd}"
        )
    note = f"{flags.tokens:,} tokens, C = {flags.n_embd}. FLOPs: of the causal half, 7·T·C a token, forward 2·T·C"
    limit = peak_flops(device) / 1e12
    time_all("attention", flags, device, cases, partial(measure, flags, device), "TFLOP/s", limit, note)


# ----------------------------------------------------------------------------------------------------------------------
# The kernels


def candidates(device):
    """Names of the kernels to try; a kernel that does not take a size says so when it is measured."""
    if device.type != "cuda":
        return ["written out", "FlashAttention"] if device.type == "cpu" else ["written out"]
    names = ["written out", *SDPA, *["triton"] * (missing_package("triton") is None)]
    names += ["FlashAttention-3"] * (missing_package("fa3_fwd_interface") is None)
    return names + ["FlashAttention-4", "flash4"] * (flash4.missing() is None)


def attend(name, qkv, H):
    """Causal attention, (B, T, C), (B, H, T, D) or (B, T, H, D), by one kernel. qkv (B, T, 3C)."""
    if name == "flash4":
        return flash4.flash4(qkv, H)[0]
    if name == "triton":
        from kernels.flash_triton import flash_triton

        return flash_triton(qkv, H)[0]
    if name == "FlashAttention-3":
        from fa3_fwd_interface import flash_attn_func

        return flash_attn_func(*(part.unflatten(2, (H, -1)) for part in qkv.detach().chunk(3, dim=2)), causal=True)
    q, k, v = (part.unflatten(2, (H, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2))  # (B, H, T, D)
    if name == "written out":
        return causal_attention(q, k, v, None)
    with sdpa_kernel(SDPA[name.removesuffix("-4")]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def measure(flags, device, name, D, T):
    """{forward_ms, backward_ms, peak_gb, rate in TFLOP/s} of a kernel. Raises UserError if it refuses these sizes.

    The FLOPs are those of flash attention over the causal half of the scores, 2 GEMMs forward and 5 backward of 2·T·C a
    token (Dao 2023, FlashAttention-2): the same for every kernel, also for those that compute all scores. A kernel
    without backward has forward's alone.
    """
    B, C = flags.tokens // T, flags.n_embd
    dtype = dtype_of_activations(device)
    qkv = torch.randn(B, T, 3 * C, device=device, dtype=dtype, requires_grad=True)

    def forward():
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return attend(name, qkv, C // D)

    try:
        if name == "FlashAttention-4":
            torch.nn.attention.activate_flash_attention_impl("FA4")
        times = forward_and_backward(device, forward, [qkv], flags.repeats)
    except Exception as error:
        refusals = ("No available kernel", "No viable backend", "unsupported", "FlashAttention ")
        # FlashAttention-4's releases do not all fit PyTorch's call
        refused = name == "FlashAttention-4" or any(words in str(error) for words in refusals)
        if refused and not is_out_of_memory(error):
            raise UserError(first_line(error)) from error
        raise
    finally:
        if name == "FlashAttention-4":
            torch.nn.attention.restore_flash_attention_impl()
    flops = (7 if times["backward_ms"] else 2) * T * C * flags.tokens
    return times | dict(rate=flops / (times["forward_ms"] + times["backward_ms"]) / 1e9)


if __name__ == "__main__":
    run(main)
