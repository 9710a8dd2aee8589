"""The operations that measure.kernels times, at every level from eager PyTorch to kernels written by hand."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from common.device import missing_compiler, missing_package
from measure import nvrtc
from watch.hardware import installed_version

EPSILON = 1e-5  # of LayerNorm


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
    dtype = torch.promote_types(logits.dtype, torch.float32)  # as under autocast
    return F.cross_entropy(logits.to(dtype), targets)


def library_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)


def triton_cross_entropy(logits, targets):
    """By the kernel of --fused_cross_entropy: forward also writes the gradient, over the logits."""
    from kernels.cross_entropy import cross_entropy_  # needs Triton

    return cross_entropy_(logits.detach(), targets, logits.size(1)).mean()


def gelu_by_hand(language, x):
    from measure import gelu  # needs Triton

    return gelu.GELU.apply(x, dict(triton=gelu.by_triton, cuda=gelu.by_cuda)[language])


def library_head(x, weight, targets):
    return library_cross_entropy(F.linear(x, weight.to(x.dtype)), targets)


def chunked_head(x, weight, targets):
    """By PyTorch, 4,096 tokens at a time, as --fused_cross_entropy; the loss has the dtype of x."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4096)
    return F.linear_cross_entropy(x, weight.to(x.dtype), targets, options=options)


def liger_head(x, weight, targets):
    """By Liger, at GPT-2's sizes 4,096 of 65,536 tokens at a time."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    options = dict(accum_dtype=torch.float32, chunk_mem_const=4)
    return liger_fused_linear_cross_entropy(x, weight.to(x.dtype), targets, **options)


def quack_head(x, weight, targets):
    """By quack, 4,096 tokens at a time, in 16 bits."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(x, weight.to(x.dtype), targets)


def triton_head(x, weight, targets):
    """By --fused_cross_entropy: forward also computes both gradients, as in the three above."""
    from kernels.cross_entropy import fused_cross_entropy  # needs Triton

    return fused_cross_entropy(x, weight, targets, len(weight))


# Mode of torch.compile; without CUDA graphs, which save launches: here one kernel takes longer than its launch
MODES = {"compiled": None, "max-autotune": "max-autotune-no-cudagraphs"}

# kernel: {level: its function}; the levels of MODES compile the library's, which model.py calls
LEVELS = dict(
    cross_entropy=dict(eager=cross_entropy, library=library_cross_entropy, triton=triton_cross_entropy),
    gelu=dict(eager=gelu, library=partial(F.gelu, approximate="tanh")),
    layer_norm=dict(eager=layer_norm, library=library_layer_norm),
    head=dict(library=library_head, chunked=chunked_head, liger=liger_head, quack=quack_head, triton=triton_head),
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
    if level in ("max-autotune", "liger", "quack", "triton") and device.type != "cuda":
        return f"it is for GPUs, not {device.type}"
    if level == "liger" and not installed_version("liger-kernel"):
        return "it needs Liger: pip install liger-kernel"
    module = dict(quack="quack.linear_cross_entropy", triton="triton").get(level)
    return missing_package(module) if module else None


def function_of(kernel, level):
    """The function of a kernel's inputs at a level."""
    function = LEVELS[kernel][level]
    if level not in MODES:
        return function
    torch.compiler.reset()  # another mode compiles the same function again
    return torch.compile(function, mode=MODES[level], dynamic=False)
