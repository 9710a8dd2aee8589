"""The head and its cross-entropy as in kernels/cross_entropy.py, with all three GEMMs in float8.

The gradient of the logits is softmax - one-hot. As a whole it does not survive 8 bits: rounding the target's entry,
near -1, by up to 6% moves the gradient further than all the other entries together. So the operator splits it. The
entries of the other tokens, from 0 to 1, are cast to float8_e4m3fn with the scale 1/448. The target's entry, p - 1, is
not cast: (1 - p) times the target's row of weight is subtracted from the gradient of x, and (1 - p) times x from the
target's row of the gradient of weight. Entries below 2.2e-6 round to 0, so the most unlikely tokens get no gradient
except as targets.

x and weight are cast once per micro-batch, with scales from their own amax: a pass over either takes 1% of the GEMMs'
time, so delayed scaling (kernels/fp8.py) would gain nothing here, and the operator has no state.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import cross_entropy, fp8_cast
from kernels.fp8 import FP8_MAX, float8_gemm

LOGIT_ROWS = 8192  # rows of logits in memory at a time, 0.8 GB in bf16 and as much in float8; 4096 take 1.06 x the time


def fp8_cross_entropy(x, weight, targets, vocab_size):
    """As fused_cross_entropy. The number of targets and V_padded are multiples of 16."""
    return cross_entropy.mean_cross_entropy(summed_cross_entropy, x.bfloat16(), weight, targets, vocab_size)


@torch.library.custom_op("gpt2::fp8_summed_cross_entropy", mutates_args=())
def summed_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels.cross_entropy.summed_cross_entropy, with x in bf16."""
    x_scale, weight_scale = (amax(tensor) / FP8_MAX for tensor in (x, weight))
    softmax_scale = torch.full((), 1 / FP8_MAX, device=x.device)
    weight8, weight8_t = fp8_cast.quantize(weight, weight_scale)[:2]
    dx = torch.empty_like(x)
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    losses = []
    for x_chunk, targets_chunk, dx_chunk in zip(*(tensor.split(LOGIT_ROWS) for tensor in (x, targets, dx))):
        x8, x8_t, _ = fp8_cast.quantize(x_chunk, x_scale)
        logits = float8_gemm(x8, weight8, x_scale, weight_scale, x.dtype, fast_accumulation=True)
        losses_chunk, softmax8, softmax8_t = softmax_float8(logits, targets_chunk, vocab_size, softmax_scale)
        losses.append(losses_chunk)
        float8_gemm(softmax8, weight8_t, softmax_scale, weight_scale, dx.dtype, out=dx_chunk)
        float8_gemm(softmax8_t, x8_t, softmax_scale, x_scale, torch.float32, out=dweight, add=True)
        del logits, softmax8, softmax8_t  # the next chunk takes their memory
    losses = torch.cat(losses)
    # without a target the loss is 0, and so is its entry
    targets = targets.where(targets != cross_entropy.IGNORE_INDEX.value, 0)
    entry = torch.expm1(-losses)[:, None]  # p - 1
    dx.addcmul_(F.embedding(targets, weight.to(x.dtype)), entry.to(x.dtype))
    dweight += torch.ops.aten.embedding_dense_backward(x * entry, targets, len(weight), -1, False)
    return losses.sum(), dx, dweight.to(weight.dtype)


summed_cross_entropy.register_fake(cross_entropy.empty_results)
summed_cross_entropy.register_autograd(cross_entropy.scale_gradients, setup_context=cross_entropy.save_gradients)


def amax(x):
    """The largest absolute value of a tensor, as a float32 scalar."""
    return torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)


def softmax_float8(logits, targets, vocab_size, scale):
    """(losses, softmax8, softmax8_t) of logits (N, V_padded): the cross-entropies (N,) float32, and softmax / scale in
    float8, (N, V_padded) and transposed (V_padded, N).

    N is a multiple of 4. targets (N,) int64. Softmax is 0 at the targets, in the columns from vocab_size on and in rows
    without a target.
    """
    log_sum_exps = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    losses = cross_entropy.cross_entropy_(logits, targets, vocab_size, log_sum_exps)
    out = fp8_cast.empty_float8_pair(logits)
    fp8_cast.launch(cross_entropy_softmax_kernel, [logits, targets, log_sum_exps], out, scale, vocab_size)
    return losses, *out


@triton.jit
def cross_entropy_softmax_kernel(
    logits, targets, log_sum_exps, out, out_t, scale, V, N, N_quads, V_padded,
    QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of softmax without the targets' entries in float8, row-major and transposed (see fp8_cast)."""
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    a, b, c, d = fp8_cast.load_quads(logits, quad, column, N, V_padded)
    a = softmax_without_target(a, targets, log_sum_exps, 4 * quad, column, N, V)
    b = softmax_without_target(b, targets, log_sum_exps, 4 * quad + 1, column, N, V)
    c = softmax_without_target(c, targets, log_sum_exps, 4 * quad + 2, column, N, V)
    d = softmax_without_target(d, targets, log_sum_exps, 4 * quad + 3, column, N, V)
    fp8_cast.store_quads(a, b, c, d, out, out_t, scale, None, quad, column, N, N_quads, V_padded)


@triton.jit
def softmax_without_target(logits, targets, log_sum_exps, row, column, N, V):
    shift = tl.load(log_sum_exps + row, mask=row < N, other=0.0)[:, None]
    target = tl.load(targets + row, mask=row < N, other=0)[:, None]
    return tl.where((column[None, :] < V) & (column[None, :] != target), tl.exp(logits - shift), 0.0)
