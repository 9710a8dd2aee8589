"""The blocks' matrix products in 8-bit floating point: forward, and both gradients.

Tensor cores multiply float8 at twice the rate of bf16. It has 3 bits after the leading one and a range of 2^18, so
every tensor is divided by a scale first. A weight's comes from the weight itself, once a step. An activation's or a
gradient's comes from the largest values in the micro-batches of the step before, their mean on each rank by itself, so
that whatever makes it can write it in 8 bits at once (delayed scaling: Micikevicius et al. 2022, "FP8 Formats for Deep
Learning"; NVIDIA's Transformer Engine). Embedding, head, attention, LayerNorm and residual stream stay as they are; so
do AdamW's weights, gradients, and evaluations.

A product on Hopper reads both factors along the summed dimension, and each tensor is summed over two dimensions, one in
forward and one in backward. So whatever is cast is written twice, as it is and transposed, by one kernel.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import cublaslt, triton_kernels

LARGEST = torch.finfo(torch.float8_e4m3fn).max
MARGIN = 2.0  # room above the largest value of the step before; what is larger still becomes the largest there is
FIRST_INPUT = 16.0  # until they are measured: the largest activation,
FIRST_GRADIENT = 8.0  # and the largest gradient, if the loss were a sum over the targets


def product(a, b, scale_a, scale_b, dtype, bias=None, fast=False):
    """a bᵀ for a (N, K) and b (M, K). fast adds up in fewer bits: good enough in forward, not over many tokens."""
    out = torch.empty(len(a), len(b), dtype=dtype, device=a.device)
    scales = dict(scale_a=scale_a, scale_b=scale_b, bias=bias)
    if cublaslt.launch(a, b.t(), out, fast=fast, **scales):
        return out
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=dtype, use_fast_accum=fast)


# ----------------------------------------------------------------------------------------------------------------------
# A linear layer. scales: of x, dy, w. found: the largest |x| and |dy|. A part of that is known in backward only, so all
# of it leaves there, as if it were the gradient of `peaks`: it adds up over micro-batches like any other


@torch.library.custom_op("gpt2::fp8_linear", mutates_args=())
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, w8: torch.Tensor, w8_t: torch.Tensor,
    scales: torch.Tensor, peaks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x weightᵀ + bias, x transposed in 8 bits, and what was found.

    x (N, K) bf16; weight (M, K) float32, here only to get a gradient, w8 and w8_t the same in 8 bits; bias (M,).
    """
    x_scale, _, w_scale = scales[:, 0]
    found = torch.zeros_like(peaks)
    x8, x8_t, _ = triton_kernels.quantize(x, x_scale, found[0])
    return product(x8, w8, x_scale, w_scale, x.dtype, bias.to(x.dtype), fast=True), x8_t, found


@linear.register_fake
def _(x, weight, bias, w8, w8_t, scales, peaks):
    return x.new_empty(len(x), len(weight)), w8.new_empty(x.shape[::-1]), torch.empty_like(peaks)


@torch.library.custom_op("gpt2::fp8_linear_backward", mutates_args=())
def linear_backward(
    dy: torch.Tensor, x8_t: torch.Tensor, w8_t: torch.Tensor, scales: torch.Tensor, found: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients to x, weight and bias, and what was found."""
    x_scale, dy_scale, w_scale = scales[:, 0]
    found = found.clone()
    dy8, dy8_t, db = triton_kernels.quantize(dy, dy_scale, found[1], column_sums=True)
    dx = product(dy8, w8_t, dy_scale, w_scale, dy.dtype)
    return dx, product(dy8_t, x8_t, dy_scale, x_scale, torch.float32), db, found


@linear_backward.register_fake
def _(dy, x8_t, w8_t, scales, found):
    (N, M), K = dy.shape, len(x8_t)
    return dy.new_empty(N, K), scales.new_empty(M, K), scales.new_empty(M), torch.empty_like(found)


def keep_for_linear(ctx, inputs, output):
    *_, w8_t, scales, _ = inputs
    _, x8_t, found = output
    ctx.save_for_backward(x8_t, w8_t, scales, found)
    ctx.set_materialize_grads(False)


def linear_gradients(ctx, dy, *_):
    dx, dw, db, found = linear_backward(dy, *ctx.saved_tensors)
    return dx, dw, db, None, None, None, found


linear.register_autograd(linear_gradients, setup_context=keep_for_linear)


# ----------------------------------------------------------------------------------------------------------------------
# The MLP, whose hidden layer after GELU exists in 8 bits only. scales: of x, a = gelu(h), dy, dh, w1, w2


@torch.library.custom_op("gpt2::fp8_mlp", mutates_args=())
def mlp(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, w1_8: torch.Tensor,
    w1_8t: torch.Tensor, w2_8: torch.Tensor, w2_8t: torch.Tensor, scales: torch.Tensor, peaks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """gelu(x w1ᵀ + b1) w2ᵀ + b2; then what backward needs. x (N, C) bf16, w1 (4C, C) and w2 (C, 4C) float32."""
    x_scale, a_scale, _, _, w1_scale, w2_scale = scales[:, 0]
    found = torch.zeros_like(peaks)
    x8, x8_t, _ = triton_kernels.quantize(x, x_scale, found[0])
    h = product(x8, w1_8, x_scale, w1_scale, x.dtype, fast=True)  # b1 comes with GELU
    a8, a8_t = triton_kernels.gelu(h, b1, a_scale, found[1])
    return product(a8, w2_8, a_scale, w2_scale, x.dtype, b2.to(x.dtype), fast=True), x8_t, h, a8_t, found


@mlp.register_fake
def _(x, w1, b1, w2, b2, w1_8, w1_8t, w2_8, w2_8t, scales, peaks):
    (N, C), D = x.shape, len(w1)
    return x.new_empty(N, C), w1_8.new_empty(C, N), x.new_empty(N, D), w1_8.new_empty(D, N), torch.empty_like(peaks)


@torch.library.custom_op("gpt2::fp8_mlp_backward", mutates_args=())
def mlp_backward(
    dy: torch.Tensor, x8_t: torch.Tensor, h: torch.Tensor, a8_t: torch.Tensor, b1: torch.Tensor, w1_8t: torch.Tensor,
    w2_8t: torch.Tensor, scales: torch.Tensor, found: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients to x, w1, b1, w2 and b2, and what was found."""
    x_scale, a_scale, dy_scale, dh_scale, w1_scale, w2_scale = scales[:, 0]
    found = found.clone()
    dy8, dy8_t, db2 = triton_kernels.quantize(dy, dy_scale, found[2], column_sums=True)
    dw2 = product(dy8_t, a8_t, dy_scale, a_scale, torch.float32)
    da = product(dy8, w2_8t, dy_scale, w2_scale, dy.dtype)
    (dh8, dh8_t), db1 = triton_kernels.gelu_backward(h, b1, da, dh_scale, found[3])
    dw1 = product(dh8_t, x8_t, dh_scale, x_scale, torch.float32)
    return product(dh8, w1_8t, dh_scale, w1_scale, dy.dtype), dw1, db1, dw2, db2, found


@mlp_backward.register_fake
def _(dy, x8_t, h, a8_t, b1, w1_8t, w2_8t, scales, found):
    C, D = dy.size(1), h.size(1)
    weights = scales.new_empty(D, C), scales.new_empty(D), scales.new_empty(C, D), scales.new_empty(C)
    return dy.new_empty(dy.shape), *weights, torch.empty_like(found)


def keep_for_mlp(ctx, inputs, output):
    _, _, b1, _, _, _, w1_8t, _, w2_8t, scales, _ = inputs
    _, x8_t, h, a8_t, found = output
    ctx.save_for_backward(x8_t, h, a8_t, b1, w1_8t, w2_8t, scales, found)
    ctx.set_materialize_grads(False)


def mlp_gradients(ctx, dy, *_):
    *gradients, found = mlp_backward(dy, *ctx.saved_tensors)
    return *gradients, None, None, None, None, None, found


mlp.register_autograd(mlp_gradients, setup_context=keep_for_mlp)


# ----------------------------------------------------------------------------------------------------------------------
# The same as modules, in the place of plain ones and with their parameters


class Float8(nn.Module):
    """What both have. None of it is a buffer: each rank has its own, and DDP would send rank 0's to all."""

    def prepare(self, weights, peaks):
        """weights: those to have in 8 bits; peaks: the largest values of the other tensors to expect at first."""
        device = weights[0].device
        self.weights = weights
        self.small = [triton_kernels.float8_pair(weight) for weight in weights]  # as it is, and transposed
        # four apart: cuBLAS takes a scale from an address that is a multiple of 16 bytes
        self.scales = torch.zeros(len(peaks) + len(weights), 4, device=device)
        self.scales[: len(peaks), 0] = torch.tensor(peaks) * (MARGIN / LARGEST)
        # where backward leaves the largest values that it met, as a gradient
        self.peaks = torch.zeros(len(peaks), device=device, requires_grad=True)


class Linear(Float8):
    """nn.Linear in 8 bits; gradient is the largest to expect at first."""

    def __init__(self, plain, gradient):
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.prepare([self.weight], [FIRST_INPUT, gradient])

    def forward(self, x):
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        rows = x.flatten(0, -2).bfloat16()
        y = linear(rows, self.weight, self.bias, *self.small[0], self.scales, self.peaks)[0]
        return y.unflatten(0, x.shape[:-1])


class MLP(Float8):
    """model.MLP in 8 bits; gradient is the largest to expect at first."""

    def __init__(self, plain, gradient):
        super().__init__()
        self.c_fc, self.c_proj = plain.c_fc, plain.c_proj
        self.prepare([self.c_fc.weight, self.c_proj.weight], [FIRST_INPUT, FIRST_INPUT, gradient, gradient])

    def forward(self, x):
        one, two = self.c_fc, self.c_proj
        if not torch.is_grad_enabled():
            return two(F.gelu(one(x), approximate="tanh"))
        rows = x.flatten(0, -2).bfloat16()
        (w1, w1_t), (w2, w2_t) = self.small
        parameters = one.weight, one.bias, two.weight, two.bias
        return mlp(rows, *parameters, w1, w1_t, w2, w2_t, self.scales, self.peaks)[0].view_as(x)


def convert(model, targets):
    """Let a GPT's blocks compute in 8 bits.

    The model is on its device; what trains it is a mean over `targets` in the first step.
    """
    gradient = FIRST_GRADIENT / targets
    for block in model.transformer.h:
        block.attn.c_attn = Linear(block.attn.c_attn, gradient)
        block.attn.c_proj = Linear(block.attn.c_proj, gradient)
        block.mlp = MLP(block.mlp, gradient)
    quantize_weights(modules(model))


@torch.no_grad()
def follow(model, micro_steps):
    """After a step: scales from its largest values, a mean over the micro-batches; the new weights in 8 bits."""
    all_peaks = [module.peaks.grad for module in modules(model)]
    all_scales = [module.scales[: len(module.peaks), 0] for module in modules(model)]
    found, before = torch.cat(all_peaks) * (MARGIN / LARGEST / micro_steps), torch.cat(all_scales)
    found = torch.where(found.isfinite() & (found > 0), found, before)  # a step gone wrong changes nothing
    torch._foreach_copy_(all_scales, list(found.split([len(peaks) for peaks in all_peaks])))
    torch._foreach_zero_(all_peaks)
    quantize_weights(modules(model))


@torch.no_grad()
def quantize_weights(modules):
    """All weights in 8 bits, as they are now."""
    weights = [weight for module in modules for weight in module.weights]
    scales = [scale for module in modules for scale in module.scales[len(module.peaks) :, 0]]
    torch._foreach_copy_(scales, torch._foreach_div(torch._foreach_norm(weights, float("inf")), LARGEST))
    for weight, scale, pair in zip(weights, scales, (pair for module in modules for pair in module.small)):
        triton_kernels.quantize(weight, scale, out=pair)


def modules(model):
    return [module for module in model.modules() if isinstance(module, Float8)]
