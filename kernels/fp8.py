"""The GEMMs of the blocks in float8, in forward and backward.

Why. Hopper's tensor cores multiply float8 at twice the rate of bf16.

The format. float8_e4m3fn has 4 exponent bits and 3 mantissa bits. Its largest value is 448, its smallest positive value
2^-9, and rounding moves a value by up to 6%. Over the hundreds of terms of a dot product the errors mostly cancel.

Scales. The range, 2^18, is too small to cast tensors as they are, so every tensor has a float32 scale: the GEMM
multiplies x / scale_x by w / scale_w, and its result by scale_x scale_w. A scale follows from the amax of a tensor, the
largest absolute value.
- Weights: amax / 448, from the weight itself, once per optimizer step.
- Activations and gradients: delayed scaling. The amax of this step gives the scale of the next step, so the kernel that
  computes a tensor can write float8 at once, without a pass that looks for the amax first. A tensor may grow from step
  to step: 2x headroom over the last amax; values beyond it saturate. The last amax is the mean over the micro-batches,
  on each rank by itself.

How the amax leaves the graph. Some of the amax values exist only during backward. Each operator takes a leaf tensor
`amax`. The amax comes back as a gradient of that leaf, so autograd accumulates it over micro-batches, together with a 1
that counts them. After the optimizer step, `update_scales` turns the mean into scales.

Transposes. On Hopper a float8 GEMM reads both inputs along the dimension that it sums over, and each tensor is summed
over one dimension in forward and over the other one in backward. So each cast writes float8 twice, row-major and
transposed, in one kernel (kernels/fp8_cast.py).

Not in float8: the embedding, the head (but for --fp8_head), attention, LayerNorm, the residual stream, the master
weights, the gradients of the weights, the optimizer state, and evaluation.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; NVIDIA's Transformer Engine for delayed scaling.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from kernels import cublaslt, fp8_cast

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
PER_TENSOR = F.ScalingType.TensorWise
HEADROOM = 2.0
# initial amax of an activation, and of a gradient times the number of targets (the loss is a mean)
INITIAL_ACTIVATION_AMAX = 16.0
INITIAL_GRADIENT_AMAX = 8.0


def convert(model, optimizer, targets):
    """Make float8 modules of the linear layers and MLPs in a GPT's blocks; their scales follow each optimizer step.

    model: on the device it trains on, with its weights; the modules keep their parameters and hooks. optimizer: the
    model's. targets: the number of targets that the loss of one step is a mean over.
    """
    gradient_amax = INITIAL_GRADIENT_AMAX / targets
    modules = []
    for block in model.transformer.h:
        mlp = block.mlp
        for layer in (block.attn.c_attn, block.attn.c_proj):
            layer.__class__ = Linear
            layer.add_scales([layer.weight], [INITIAL_ACTIVATION_AMAX, gradient_amax])
        mlp.__class__ = MLP
        mlp.add_scales([mlp.c_fc.weight, mlp.c_proj.weight], [INITIAL_ACTIVATION_AMAX] * 2 + [gradient_amax] * 2)
        modules += [block.attn.c_attn, block.attn.c_proj, mlp]
    quantize_weights(modules)
    optimizer.register_step_post_hook(lambda *_: update_scales(modules))


@torch.no_grad()
def update_scales(modules):
    """After an optimizer step: new scales from the mean amax of its micro-batches, and the new weights in float8.

    A scale stays as it is where the amax is 0, infinite or NaN.
    """
    sums = [module.amax.grad for module in modules]
    all_scales = [module.scales[: len(each) - 1, 0] for module, each in zip(modules, sums)]
    mean_amax = torch.cat([each[:-1] for each in sums]) / sums[0][-1]
    new_scales, old_scales = mean_amax * (HEADROOM / FP8_MAX), torch.cat(all_scales)
    new_scales = torch.where(new_scales.isfinite() & (new_scales > 0), new_scales, old_scales)
    torch.foreach.copy_(all_scales, new_scales.split([len(scales) for scales in all_scales]))
    torch.foreach.zero_(sums)
    quantize_weights(modules)


@torch.no_grad()
def quantize_weights(modules):
    """Update the scales and the float8 copies of all weights."""
    weights = [weight for module in modules for weight in module.weights]
    scales = [scale for module in modules for scale in module.scales[-len(module.weights) :, 0]]
    pairs = [pair for module in modules for pair in module.weights_fp8]
    torch.foreach.copy_(scales, torch.foreach.div(torch.foreach.norm(weights, ord=float("inf")), FP8_MAX))
    for weight, scale, pair in zip(weights, scales, pairs):
        fp8_cast.quantize(weight, scale, out=pair)


# ----------------------------------------------------------------------------------------------------------------------
# Modules


class ScaledModule(nn.Module):
    """The float8 state of a module. No tensor is a buffer: DDP broadcasts buffers, and each rank has its own.

    weights: the parameters that GEMMs read in float8.
    weights_fp8: for each weight its float8 copy, row-major and transposed.
    scales (S, 4) float32: column 0 has the scales, first of activations and gradients, then of the weights. Rows are 16
    bytes, because cuBLASLt reads a scale from an address that is a multiple of 16.
    amax: a leaf tensor with one entry for each activation and gradient, 0, and a last one, 1: what an operator starts
    its measurement from. amax.grad accumulates the measured values, and in the last entry counts the micro-batches.
    """

    def add_scales(self, weights, initial_amax):
        device = weights[0].device
        self.weights = weights
        self.weights_fp8 = [fp8_cast.empty_float8_pair(weight) for weight in weights]
        self.scales = torch.zeros(len(initial_amax) + len(weights), 4, device=device)
        self.scales[: len(initial_amax), 0] = torch.tensor(initial_amax) * (HEADROOM / FP8_MAX)
        self.amax = torch.tensor([0.0] * len(initial_amax) + [1.0], device=device, requires_grad=True)
        self.amax.grad = torch.zeros_like(self.amax)


class Linear(ScaledModule, nn.Linear):
    """nn.Linear in float8. Without gradients, as in evaluation, it is plain nn.Linear."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        rows = x.flatten(0, -2).bfloat16()
        y = linear(rows, self.weight, self.bias, *self.weights_fp8[0], self.scales, self.amax)[0]
        return y.unflatten(0, x.shape[:-1])


class MLP(ScaledModule):
    """model.MLP in float8. Without gradients, as in evaluation, it is the plain MLP."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        rows = x.flatten(0, -2).bfloat16()
        (w1_8, w1_8t), (w2_8, w2_8t) = self.weights_fp8
        parameters = self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias
        return mlp(rows, *parameters, w1_8, w1_8t, w2_8, w2_8t, self.scales, self.amax)[0].view_as(x)


# ----------------------------------------------------------------------------------------------------------------------
# Operators. Names with 8 are float8 tensors, with 8_t or 8t their transposes. `measured` holds the amax values of this
# micro-batch: forward measures the activations', backward the gradients', and returns all as the gradient of `amax`


def float8_gemm(a8, b8, scale_a, scale_b, dtype, bias=None, fast_accumulation=False, out=None, add=False):
    """scale_a scale_b (a bᵀ) + bias in dtype, for float8 a (N, K) and b (M, K).

    fast_accumulation sums in fewer bits: accurate enough for activations, not for gradients. out (N, M): the tensor to
    write, or with `add` to add to.
    """
    if out is None:
        out = torch.empty(len(a8), len(b8), dtype=dtype, device=a8.device)
    options = dict(scale_a=scale_a, scale_b=scale_b, bias=bias)
    if not cublaslt.gemm(a8, b8.t(), out, fast_accumulation=fast_accumulation, add=add, **options):
        options |= dict(output_dtype=dtype, use_fast_accum=fast_accumulation)
        product = F.scaled_mm(a8, b8.t(), scale_recipe_a=PER_TENSOR, scale_recipe_b=PER_TENSOR, **options)
        out.copy_(out + product if add else product)
    return out


@torch.library.custom_op("gpt2::fp8_linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, bias: Tensor, w8: Tensor, w8_t: Tensor, scales: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(x weightᵀ + bias, x8_t, measured). scales and amax are in the order x, dy, and for scales weight.

    x (N, K) bf16; weight (M, K) float32 takes part only to receive a gradient, its values come from w8 and w8_t;
    bias (M,).
    """
    x_scale, _, w_scale = scales[:, 0]
    measured = amax.detach().clone()
    x8, x8_t, _ = fp8_cast.quantize(x, x_scale, measured[0])
    y = float8_gemm(x8, w8, x_scale, w_scale, x.dtype, bias.to(x.dtype), fast_accumulation=True)
    return y, x8_t, measured


@linear.register_fake
def _(x, weight, bias, w8, w8_t, scales, amax):
    return x.new_empty(len(x), len(weight)), w8.new_empty(x.shape[::-1]), torch.empty_like(amax)


@torch.library.custom_op("gpt2::fp8_linear_backward", mutates_args=())
def linear_backward(
    dy: Tensor, x8_t: Tensor, w8_t: Tensor, scales: Tensor, measured: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias, and the complete measured amax."""
    x_scale, dy_scale, w_scale = scales[:, 0]
    measured = measured.clone()
    dy8, dy8_t, db = fp8_cast.quantize(dy, dy_scale, measured[1], column_sums=True)
    dx = float8_gemm(dy8, w8_t, dy_scale, w_scale, dy.dtype)
    return dx, float8_gemm(dy8_t, x8_t, dy_scale, x_scale, torch.float32), db, measured


@linear_backward.register_fake
def _(dy, x8_t, w8_t, scales, measured):
    (N, M), K = dy.shape, len(x8_t)
    return dy.new_empty(N, K), scales.new_empty(M, K), scales.new_empty(M), torch.empty_like(measured)


def save_for_linear_backward(ctx, inputs, output):
    *_, w8_t, scales, _ = inputs
    _, x8_t, measured = output
    ctx.save_for_backward(x8_t, w8_t, scales, measured)
    ctx.set_materialize_grads(False)


def backward_of_linear(ctx, dy, *_):
    dx, dw, db, measured = linear_backward(dy, *ctx.saved_tensors)
    return dx, dw, db, None, None, None, measured


linear.register_autograd(backward_of_linear, setup_context=save_for_linear_backward)


@torch.library.custom_op("gpt2::fp8_mlp", mutates_args=())
def mlp(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w1_8: Tensor, w1_8t: Tensor, w2_8: Tensor,
    w2_8t: Tensor, scales: Tensor, amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, x8_t, h, a8_t, measured): h = x w1ᵀ (N, 4C) bf16, a = gelu(h + b1) in float8 only, y = a w2ᵀ + b2 (N, C).

    scales and amax are in the order x, a, dy, dh, and for scales w1, w2. x (N, C) bf16; w1 (4C, C) and w2 (C, 4C)
    float32 take part only to receive gradients.
    """
    x_scale, a_scale, _, _, w1_scale, w2_scale = scales[:, 0]
    measured = amax.detach().clone()
    x8, x8_t, _ = fp8_cast.quantize(x, x_scale, measured[0])
    h = float8_gemm(x8, w1_8, x_scale, w1_scale, x.dtype, fast_accumulation=True)  # the GELU kernel adds b1
    a8, a8_t = fp8_cast.gelu(h, b1, a_scale, measured[1])
    y = float8_gemm(a8, w2_8, a_scale, w2_scale, x.dtype, b2.to(x.dtype), fast_accumulation=True)
    return y, x8_t, h, a8_t, measured


@mlp.register_fake
def _(x, w1, b1, w2, b2, w1_8, w1_8t, w2_8, w2_8t, scales, amax):
    (N, C), D = x.shape, len(w1)
    return x.new_empty(N, C), w1_8.new_empty(C, N), x.new_empty(N, D), w1_8.new_empty(D, N), torch.empty_like(amax)


@torch.library.custom_op("gpt2::fp8_mlp_backward", mutates_args=())
def mlp_backward(
    dy: Tensor, x8_t: Tensor, h: Tensor, a8_t: Tensor, b1: Tensor, w1_8t: Tensor, w2_8t: Tensor, scales: Tensor,
    measured: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, w1, b1, w2 and b2, and the complete measured amax."""
    x_scale, a_scale, dy_scale, dh_scale, w1_scale, w2_scale = scales[:, 0]
    measured = measured.clone()
    dy8, dy8_t, db2 = fp8_cast.quantize(dy, dy_scale, measured[2], column_sums=True)
    dw2 = float8_gemm(dy8_t, a8_t, dy_scale, a_scale, torch.float32)
    da = float8_gemm(dy8, w2_8t, dy_scale, w2_scale, dy.dtype)
    (dh8, dh8_t), db1 = fp8_cast.gelu_backward(h, b1, da, dh_scale, measured[3])
    dw1 = float8_gemm(dh8_t, x8_t, dh_scale, x_scale, torch.float32)
    return float8_gemm(dh8, w1_8t, dh_scale, w1_scale, dy.dtype), dw1, db1, dw2, db2, measured


@mlp_backward.register_fake
def _(dy, x8_t, h, a8_t, b1, w1_8t, w2_8t, scales, measured):
    C, D = dy.size(1), h.size(1)
    weights = scales.new_empty(D, C), scales.new_empty(D), scales.new_empty(C, D), scales.new_empty(C)
    return dy.new_empty(dy.shape), *weights, torch.empty_like(measured)


def save_for_mlp_backward(ctx, inputs, output):
    _, _, b1, _, _, _, w1_8t, _, w2_8t, scales, _ = inputs
    _, x8_t, h, a8_t, measured = output
    ctx.save_for_backward(x8_t, h, a8_t, b1, w1_8t, w2_8t, scales, measured)
    ctx.set_materialize_grads(False)


def backward_of_mlp(ctx, dy, *_):
    *gradients, measured = mlp_backward(dy, *ctx.saved_tensors)
    return *gradients, None, None, None, None, None, measured


mlp.register_autograd(backward_of_mlp, setup_context=save_for_mlp_backward)
