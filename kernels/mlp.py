"""The fused MLP: cuBLASLt computes GELU and its gradient in the epilogues of the MLP's GEMMs.

The hidden layer, (N, 4C), is the largest activation of a block. A separate GELU operator reads and writes that
tensor once more in forward, and reads two and writes one in backward. In the epilogue GELU works on values that are
still in registers. Where cuBLASLt lacks the epilogue, PyTorch's operators compute the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import cublaslt


def fused_mlp(x, c_fc, c_proj, keep_gelu):
    """c_proj(gelu(c_fc(x))) with the tanh form of GELU, for two nn.Linear, C -> 4C -> C. x (..., C).

    keep_gelu: keep GELU's output in memory for backward; otherwise backward computes GELU again.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    w1, b1, w2, b2 = (parameter.to(dtype) for parameter in (c_fc.weight, c_fc.bias, c_proj.weight, c_proj.bias))
    return mlp(x.flatten(0, -2).to(dtype).contiguous(), w1, b1, w2, b2, keep_gelu)[0].view_as(x)


@torch.library.custom_op("gpt2::mlp", mutates_args=())
def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, keep_gelu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, a): h = x w1ᵀ + b1 (N, 4C), a = gelu(h) (N, 4C) or empty without keep_gelu, y = a w2ᵀ + b2 (N, C).

    x (N, C), w1 (4C, C), b1 (4C,), w2 (C, 4C), b2 (C,), one dtype for all.

    The GEMM adds b2 in float32, before it rounds y to 16 bits. If b2 were added to the rounded y together with the
    residual stream, the sum of two bf16 values would often lie halfway between two bf16 values, and a tiny bias would
    decide how all these ties round.
    """
    h = x.new_empty(len(x), len(w1))
    a = torch.empty_like(h)
    if not cublaslt.gemm(x, w1.t(), a, "GELU_AUX", bias=b1, aux=h):
        torch.addmm(b1, x, w1.t(), out=h)
        a = F.gelu(h, approximate="tanh")
    return cublaslt.mm(a, w2.t(), b2), h, a if keep_gelu else a.new_empty(0)


@mlp.register_fake
def _(x, w1, b1, w2, b2, keep_gelu):
    h = x.new_empty(len(x), len(w1))
    return x.new_empty(len(x), len(w2)), h, torch.empty_like(h) if keep_gelu else h.new_empty(0)


@torch.library.custom_op("gpt2::mlp_backward", mutates_args=())
def mlp_backward(
    dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, h: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, w1, b1 and w2. dy (N, C); h and a are outputs of mlp."""
    a = a if len(a) else F.gelu(h, approximate="tanh")
    dh = torch.empty_like(h)
    if not cublaslt.gemm(dy, w2, dh, "DGELU", aux=h):
        dh = torch.ops.aten.gelu_backward(dy @ w2, h, approximate="tanh")
    # A GEMM with a row of ones sums the columns at the full memory bandwidth; cuBLASLt's epilogue for db1, DGELU_BGRAD,
    # takes 2.6 x the time of DGELU.
    db1 = torch.mm(dh.new_ones(1, len(dh)), dh)[0]
    return cublaslt.mm(dh, w1), cublaslt.mm(dh.t(), x), db1, cublaslt.mm(dy.t(), a)


@mlp_backward.register_fake
def _(dy, x, w1, w2, h, a):
    return tuple(each.new_empty(each.shape) for each in (x, w1, w1[:, 0], w2))


def save_for_backward(ctx, inputs, output):
    x, w1, _, w2, _, _ = inputs
    _, h, a = output
    ctx.save_for_backward(x, w1, w2, h, a)
    ctx.set_materialize_grads(False)


def backward(ctx, dy, *_):
    return *mlp_backward(dy.contiguous(), *ctx.saved_tensors), dy.sum(0), None


mlp.register_autograd(backward, setup_context=save_for_backward)
