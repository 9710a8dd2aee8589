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

from kernels import cublaslt, fp8_cast
from kernels.cross_entropy import IGNORE_INDEX, cross_entropy_, save_gradients, scale_gradients
from kernels.fp8 import FP8_MAX, float8_gemm

LOGIT_ROWS = 8192  # rows of logits in memory at a time, 0.8 GB in bf16 and as much in float8; 4096 take 1.06 x the time
QUADS, COLUMNS = fp8_cast.QUADS, fp8_cast.COLUMNS


def fp8_cross_entropy(x, weight, targets, vocab_size):
    """The mean cross-entropy in nats of the logits x weightᵀ, over all targets but IGNORE_INDEX; a float32 scalar.

    x (..., C), weight (V_padded, C), targets (...) int64; the number of targets and V_padded are multiples of 16. Rows
    of weight from vocab_size on are padding.
    """
    rows = x.flatten(0, -2).bfloat16().contiguous()  # (N, C)
    total = summed_cross_entropy(rows, weight, targets.flatten().contiguous(), vocab_size)[0]
    return total / (targets != IGNORE_INDEX.value).sum()


@torch.library.custom_op("gpt2::fp8_summed_cross_entropy", mutates_args=())
def summed_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, dx, dweight): the float32 sum of the cross-entropies of the logits x weightᵀ, and its gradients.

    x (N, C) bf16, weight (V_padded, C), targets (N,) int64. Each gradient has the shape and dtype of its tensor.
    """
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
        gemm(softmax8, weight8_t, softmax_scale, weight_scale, dx_chunk)
        gemm(softmax8_t, x8_t, softmax_scale, x_scale, dweight, add=True)
        del logits, softmax8, softmax8_t  # the next chunk takes their memory
    losses = torch.cat(losses)
    targets = targets.where(targets != IGNORE_INDEX.value, 0)  # without a target the loss is 0, and so is its entry
    entry = torch.expm1(-losses)[:, None]  # p - 1
    dx.addcmul_(F.embedding(targets, weight.to(x.dtype)), entry.to(x.dtype))
    dweight += torch.ops.aten.embedding_dense_backward(x * entry, targets, len(weight), -1, False)
    return losses.sum(), dx, dweight.to(weight.dtype)


@summed_cross_entropy.register_fake
def _(x, weight, targets, vocab_size):
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(weight)


summed_cross_entropy.register_autograd(scale_gradients, setup_context=save_gradients)


def amax(x):
    """The largest absolute value of a tensor, as a float32 scalar."""
    return torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)


def gemm(a8, b8, scale_a, scale_b, out, add=False):
    """out = scale_a scale_b (a bᵀ), or with `add` out +=, for float8 a (N, K) and b (M, K), and out (N, M)."""
    if not cublaslt.gemm(a8, b8.t(), out, scale_a=scale_a, scale_b=scale_b, add=add):
        product = torch._scaled_mm(a8, b8.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out.dtype)
        out.copy_(out + product if add else product)


def softmax_float8(logits, targets, vocab_size, scale):
    """(losses, softmax8, softmax8_t) of logits (N, V_padded): the cross-entropies (N,) float32, and softmax / scale in
    float8, (N, V_padded) and transposed (V_padded, N).

    N is a multiple of 4. targets (N,) int64. Softmax is 0 at the targets, in the columns from vocab_size on and in rows
    without a target.
    """
    N, V_padded = logits.shape
    log_sum_exps = torch.empty(N, dtype=torch.float32, device=logits.device)
    losses = cross_entropy_(logits, targets, vocab_size, log_sum_exps)
    softmax8, softmax8_t = fp8_cast.empty_float8_pair(logits)
    cross_entropy_softmax_kernel[(triton.cdiv(N, 4 * QUADS), triton.cdiv(V_padded, COLUMNS))](
        logits, targets, log_sum_exps, softmax8, fp8_cast.as_words(softmax8_t), scale, N, N // 4, vocab_size, V_padded,
        QUADS=QUADS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return losses, softmax8, softmax8_t


@triton.jit
def cross_entropy_softmax_kernel(
    logits, targets, log_sum_exps, out, out_t, scale, N, N_quads, V, V_padded,
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
