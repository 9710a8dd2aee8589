"""Flash attention (Dao et al. 2022) in Triton, to be read: causal, forward and backward, on packed q, k and v.

Textbook attention writes the scores S = q kᵀ / √D, (T, T) for each head, to memory, and reads them again for the
softmax and for the product with v. Two ideas avoid it:

**Online softmax** (Milakov and Gimelshein 2018). The softmax of a row divides by the sum l of exponentials, relative to
the row's maximum m. Both can be updated block by block. A block of keys with the scores s and the values v changes

    m' = max(m, max s)      l' = l·exp(m - m') + Σ exp(s - m')      y' = y·exp(m - m') + Σ exp(s - m')·v

The factor exp(m - m') moves the sums so far from the old maximum to the new one; y / l is attention's output. So a
program keeps a block of queries with m, l and y in registers and walks over the keys. No score leaves the chip.

**Recomputation.** Backward needs the probabilities P again. Forward keeps one number of each row, the log-sum-exp
L = m + log l, and backward computes P = exp(S - L) anew, which takes less time than reading P. With dP = dy vᵀ and
δ = Σ dy·y along a row,

    dv = Pᵀ dy      dS = P (dP - δ)      dq = dS k / √D      dk = dSᵀ q / √D

One kernel keeps a block of queries and walks over the keys for dq; another keeps a block of keys and walks over the
queries for dk and dv. So each sum is in one program, in a fixed order, without atomic additions; both kernels compute S
and dP, 7 GEMMs where FlashAttention-2 has 5.

Exponentials are powers of 2, one instruction of the GPU: scores are multiplied by log₂ e, and L is in base 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import UserError

WIDTHS = (16, 32, 64, 128)  # of a head: tl.dot needs 16, tl.arange a power of 2
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def head_of(H, T, D: tl.constexpr):
    """Offsets of this program's head in (B, T, 3C), (B, T, C) and (B, H, T)."""
    head = tl.program_id(1).to(tl.int64)  # of B·H
    row = head // H * T  # of B·T
    column = head % H * D
    return row * 3 * H * D + column, row * H * D + column, head * T


@triton.jit
def tile(start, rows, stride, D: tl.constexpr):
    """Pointers to rows of a (T, D) matrix, `stride` elements apart."""
    return start + rows[:, None] * stride + tl.arange(0, D)[None, :]


@triton.jit
def load(start, rows, T, stride, D: tl.constexpr):
    """(rows, D), 0 beyond T."""
    return tl.load(tile(start, rows, stride, D), mask=rows[:, None] < T, other=0.0)


@triton.jit
def flash_forward(qkv, y, stats, scale, T, H, D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """y and the log-sum-exps of BLOCK queries."""
    packed, plain, row = head_of(H, T, D)
    qkv += packed
    C = H * D
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK  # the last queries have the most keys: they go first
    queries = first + tl.arange(0, BLOCK)
    q = load(qkv, queries, T, 3 * C, D)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, first + BLOCK, STEP):
        keys = start + tl.arange(0, STEP)
        k = load(qkv + C, keys, T, 3 * C, D)
        v = load(qkv + 2 * C, keys, T, 3 * C, D)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(queries[:, None] >= keys[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * correction[:, None])
        maximum = new_maximum
    tl.store(tile(y + plain, queries, C, D), out / total[:, None], mask=queries[:, None] < T)
    tl.store(stats + row + queries, maximum + tl.log2(total), mask=queries < T)


@triton.jit
def flash_dq(qkv, y, dy, stats, deltas, dqkv, scale, T, H, D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """dq of BLOCK queries, and their δ for flash_dk_dv."""
    packed, plain, row = head_of(H, T, D)
    qkv += packed
    C = H * D
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK
    queries = first + tl.arange(0, BLOCK)
    q = load(qkv, queries, T, 3 * C, D)
    dout = load(dy + plain, queries, T, C, D)
    delta = tl.sum(dout.to(tl.float32) * load(y + plain, queries, T, C, D).to(tl.float32), 1)
    tl.store(deltas + row + queries, delta, mask=queries < T)
    log_sum_exp = tl.load(stats + row + queries, mask=queries < T, other=float("inf"))  # beyond T p is 0
    dq = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, first + BLOCK, STEP):
        keys = start + tl.arange(0, STEP)
        k = load(qkv + C, keys, T, 3 * C, D)
        v = load(qkv + 2 * C, keys, T, 3 * C, D)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - log_sum_exp[:, None])
        p = tl.where(queries[:, None] >= keys[None, :], p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(tile(dqkv + packed, queries, 3 * C, D), dq * (scale * LN_2), mask=queries[:, None] < T)


@triton.jit
def flash_dk_dv(qkv, dy, stats, deltas, dqkv, scale, T, H, D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """dk and dv of BLOCK keys. Scores are transposed, (keys, queries)."""
    packed, plain, row = head_of(H, T, D)
    qkv += packed
    C = H * D
    first = tl.program_id(0) * BLOCK
    keys = first + tl.arange(0, BLOCK)
    k = load(qkv + C, keys, T, 3 * C, D)
    v = load(qkv + 2 * C, keys, T, 3 * C, D)
    dk = tl.zeros([BLOCK, D], tl.float32)
    dv = tl.zeros([BLOCK, D], tl.float32)
    for start in range(first, T, STEP):
        queries = start + tl.arange(0, STEP)
        q = load(qkv, queries, T, 3 * C, D)
        dout = load(dy + plain, queries, T, C, D)
        log_sum_exp = tl.load(stats + row + queries, mask=queries < T, other=float("inf"))
        delta = tl.load(deltas + row + queries, mask=queries < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - log_sum_exp[None, :])
        p = tl.where(queries[None, :] >= keys[:, None], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        ds = p * (tl.dot(v, tl.trans(dout)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(tile(dqkv + packed + C, keys, 3 * C, D), dk * (scale * LN_2), mask=keys[:, None] < T)
    tl.store(tile(dqkv + packed + 2 * C, keys, 3 * C, D), dv, mask=keys[:, None] < T)


# ----------------------------------------------------------------------------------------------------------------------
# Operators for autograd and torch.compile


def launch(kernel, qkv, n_head, *tensors):
    """Run a kernel for every block of BLOCK rows of every head. qkv (B, T, 3C). Raises UserError for other WIDTHS."""
    B, T, D = *qkv.shape[:2], qkv.size(2) // 3 // n_head
    if D not in WIDTHS:
        raise UserError(f"--attention triton needs heads of a width in {WIDTHS}, not {D}")
    block, step = min(128, 8192 // D), min(64, 4096 // D)  # what the registers and shared memory of Ampere hold
    grid = triton.cdiv(T, block), B * n_head
    kernel[grid](qkv, *tensors, D**-0.5 / LN_2.value, T, n_head, D=D, BLOCK=block, STEP=step, num_warps=block // 16)


@torch.library.custom_op("gpt2::flash_triton", mutates_args=())
def flash_triton(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor]:
    """(y, stats) of causal attention with n_head heads of a width in WIDTHS. qkv (B, T, 3C) contiguous.

    y (B, T, C); stats (B, H, T) float32: the log-sum-exp of each softmax in base 2, for backward.
    """
    y, stats = empty_results(qkv, n_head)
    launch(flash_forward, qkv, n_head, y, stats)
    return y, stats


@flash_triton.register_fake
def empty_results(qkv, n_head):
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(B, n_head, T, dtype=torch.float32)


@torch.library.custom_op("gpt2::flash_triton_backward", mutates_args=())
def flash_triton_backward(dy: Tensor, qkv: Tensor, y: Tensor, stats: Tensor, n_head: int) -> Tensor:
    """The gradient of qkv, (B, T, 3C), for dy (B, T, C) contiguous."""
    dqkv, deltas = torch.empty_like(qkv), torch.empty_like(stats)
    launch(flash_dq, qkv, n_head, y, dy, stats, deltas, dqkv)
    launch(flash_dk_dv, qkv, n_head, dy, stats, deltas, dqkv)
    return dqkv


@flash_triton_backward.register_fake
def _(dy, qkv, y, stats, n_head):
    return torch.empty_like(qkv)


def save_for_backward(ctx, inputs, output):
    qkv, ctx.n_head = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.set_materialize_grads(False)


def backward(ctx, dy, _):
    return flash_triton_backward(dy.contiguous(), *ctx.saved_tensors, ctx.n_head), None


flash_triton.register_autograd(backward, setup_context=save_for_backward)
