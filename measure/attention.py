"""Attention side by side: time and memory of every kernel that this device has, against the sequence length.

    python -m measure.attention                                         # T from 512 to 32,768, heads 64 and 128 wide
    python -m measure.attention --lengths 1024 4096 --widths 64 --tokens 16384
    python -m measure.attention --documents 1000                        # within documents, as --mask_documents

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
from tqdm import tqdm

from common.cli import flag, parse
from common.device import missing_package
from common.errors import UserError, first_line, is_out_of_memory, run
from kernels import flash4
from kernels.attention import PACKED, packed_qkv
from kernels.documents import NO_BOUNDARIES, Documents, document_attention, find_hidden, find_offsets
from measure import figures, roofline
from measure.child_run import OUT_OF_MEMORY
from measure.results import Results
from measure.tables import align, markdown_table
from measure.timing import TimingFlags, dtype_of_activations, forward_and_backward
from model import GPTConfig, causal_attention
from parallel.process_group import start_alone
from watch.hardware import peak_flops

LENGTHS = tuple(512 * 2**i for i in range(7))
# Backends of F.scaled_dot_product_attention. PyTorch's own FlashAttention is version 2. Besides these: cudnn_packed,
# cuDNN's kernels through its front end, and flash4, the same forward with FlashAttention-4's backward.
SDPA = dict(
    efficient=SDPBackend.EFFICIENT_ATTENTION,
    FlashAttention=SDPBackend.FLASH_ATTENTION,
    cuDNN=SDPBackend.CUDNN_ATTENTION,
)
COLUMNS = ("attention", "D", "T", "forward ms", "backward ms", "TFLOP/s", "of roof", "peak GB")
COLUMN_WIDTHS = (16, 4, 6, 11, 12, 8, 8, 8)


@dataclass
class Flags(TimingFlags):
    """Time every attention kernel that this device has, forward and backward."""

    tokens: int | None = flag(None, at_least=1)
    """Tokens in each measurement, B × T; by default 65,536 on a GPU, 1,024 elsewhere."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths T, divisors of --tokens; by default the powers of two from 512 to 32,768, --tokens at most."""
    widths: tuple[int, ...] = (64, 128)
    """Widths D of a head, divisors of --n_embd."""
    n_embd: int = flag(768, at_least=1)
    """Embedding width C; the number of heads is C / D."""
    documents: int = flag(0, at_least=0)
    """Mean length of random documents; a token attends within its own, as with --mask_documents. 0: whole rows."""


def main():
    flags = parse(Flags)
    device = start_alone(flags.device, "this times one device")
    if flags.tokens is None:
        flags.tokens = 65536 if device.type == "cuda" else 1024
    flags.lengths = tuple(sorted(flags.lengths)) or tuple(T for T in LENGTHS if T <= flags.tokens)
    check(flags)
    files = Results(flags.log_dir, flags.run_name, "attention", device)
    print(f"results: {files.folder}/")
    peaks = roofline.gpu_peaks(device, peak_flops(device))
    names = candidates(device, flags)
    grid = [(name, D, T) for D in flags.widths for T in flags.lengths for name in names]
    results = []
    print(align(COLUMNS, COLUMN_WIDTHS))
    with tqdm(total=len(grid), unit="kernel", leave=False, disable=None) as bar:
        for name, D, T in grid:
            bar.set_description(f"{name}, D {D}, T {T}")
            result = dict(name=name, D=D, T=T, facts=files.environment) | time_kernel(name, D, T, flags, device)
            results.append(result | rate(result, flags, peaks))
            bar.write(align(cells(results[-1]), COLUMN_WIDTHS))
            bar.update()
            files.save(results, markdown(results, flags), partial(figures.attention, results))
    print(files)


def check(flags):
    """Raises UserError for sizes that cannot be measured."""
    if not flags.lengths or not flags.widths:
        raise UserError(f"no sequence length up to {flags.tokens} tokens, or no head width: use --lengths and --widths")
    if min(*flags.lengths, *flags.widths) < 1:
        raise UserError("--lengths and --widths must be at least 1")
    for name, of, whole, parts in (
        ("tokens", "lengths", flags.tokens, flags.lengths),
        ("n_embd", "widths", flags.n_embd, flags.widths),
    ):
        if wrong := [part for part in parts if whole % part]:
            raise UserError(f"--{name} {whole} is not a multiple of {wrong[0]}, one of --{of}: change one of the two")


# ----------------------------------------------------------------------------------------------------------------------
# The kernels


def candidates(device, flags):
    """Names of the kernels to try; a kernel that does not take a size says so when it is measured."""
    if device.type != "cuda":
        return ["written out", "FlashAttention"] if device.type == "cpu" else ["written out"]
    names = ["written out", "FlashAttention"] if flags.documents else ["written out", *SDPA]
    packed = missing_package("cudnn") is None
    has_flash4 = flash4.missing() is None
    names += ["cudnn_packed"] * packed + ["FlashAttention-4"] * has_flash4
    return names + ["flash4"] * (packed and has_flash4)


def attend(name, qkv, H, documents):
    """Causal attention within Documents, (B, T, C) or (B, H, T, D), by one kernel. qkv (B, T, 3C)."""
    if name in PACKED:
        return packed_qkv(qkv, H, documents.offsets, name == "flash4")[0]
    if documents.offsets is not None:
        return document_attention(qkv, H, documents.offsets)[0]
    q, k, v = (part.unflatten(2, (H, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2))  # (B, H, T, D)
    if name == "written out":
        return causal_attention(q, k, v, documents.hidden)
    if documents.hidden is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~documents.hidden)
    with sdpa_kernel(SDPA[name.removesuffix("-4")]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def time_kernel(name, D, T, flags, device):
    """{status, ...}: "done" with medians forward_ms and backward_ms, and peak_gb on a GPU; else a reason."""
    try:
        if name == "FlashAttention-4":
            torch.nn.attention.activate_flash_attention_impl("FA4")
        return dict(status="done") | measure(name, D, T, flags, device)
    except Exception as error:
        if is_out_of_memory(error):
            return dict(status="skipped", reason=OUT_OF_MEMORY)
        refusals = ("No available kernel", "No viable backend", "unsupported", "FlashAttention ")
        # UserError: cuDNN's front end has no kernel; FlashAttention-4's releases do not all fit PyTorch's call
        refused = isinstance(error, UserError | ImportError) or any(words in str(error) for words in refusals)
        if refused or name == "FlashAttention-4":
            return dict(status="skipped", reason=first_line(error))
        raise
    finally:
        if name == "FlashAttention-4":
            torch.nn.attention.restore_flash_attention_impl()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(name, D, T, flags, device):
    """{forward_ms, backward_ms, peak_gb, share}: share: the part of the causal half within documents."""
    B, C = flags.tokens // T, flags.n_embd
    documents, share = NO_BOUNDARIES, 1.0
    if flags.documents:
        starts = torch.rand(B, T, generator=torch.Generator().manual_seed(T)) < 1 / flags.documents
        offsets = find_offsets(starts, True)
        share = (offsets.diff().double() ** 2).sum().item() / (flags.tokens * T)
        if device.type != "cuda" or name == "written out":
            documents = Documents(hidden=find_hidden(starts.to(device), True))
        else:
            documents = Documents(offsets=offsets.to(device))
    dtype = dtype_of_activations(device)
    qkv = torch.randn(B, T, 3 * C, device=device, dtype=dtype, requires_grad=True)

    def forward():
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return attend(name, qkv, C // D, documents)

    return forward_and_backward(device, forward, [qkv], flags.repeats) | dict(share=share)


# ----------------------------------------------------------------------------------------------------------------------
# What the times mean


def rate(result, flags, peaks):
    """{tflops, of_roof} of forward and backward together; of_roof is None where the device's peaks are unknown.

    The FLOPs are those of flash attention over the causal half of the scores: the same for every kernel, also for
    those that compute all scores, or backward's scores from memory.
    """
    if result["status"] != "done":
        return {}
    config = GPTConfig(n_layer=1, n_head=flags.n_embd // result["D"], n_embd=flags.n_embd)
    flops, least_bytes = roofline.work(config, result["T"], flags.tokens)["attention"]
    flops *= result["share"]
    per_second = flops / (1e-3 * (result["forward_ms"] + result["backward_ms"]))
    roof = peaks and min(peaks[0], peaks[1] * flops / least_bytes)
    return dict(tflops=per_second / 1e12, of_roof=per_second / roof if roof else None)


def cells(result):
    texts = [result["name"], str(result["D"]), f"{result['T']:,}"]
    if result["status"] != "done":
        return [*texts, result["reason"]]
    share, peak = result["of_roof"], result["peak_gb"]
    texts += [f"{result['forward_ms']:.3f}", f"{result['backward_ms']:.3f}", f"{result['tflops']:.4g}"]
    return [*texts, "–" if share is None else f"{share:.0%}", "–" if peak is None else f"{peak:.2f}"]


def markdown(results, flags):
    text = f"{flags.tokens:,} tokens, C = {flags.n_embd}. FLOPs are those of the causal half: 7·T·C a token"
    text += f", times the share within documents (mean {flags.documents:,} tokens). " if flags.documents else ". "
    return f"{text}A GB is 2^30 bytes.\n\n{markdown_table(COLUMNS, [cells(result) for result in results])}"


if __name__ == "__main__":
    run(main)
