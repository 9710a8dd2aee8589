"""The head and its cross-entropy in one operator: logits, loss and both gradients for LOGIT_ROWS tokens at a time.

The logits, (B T, V), are the largest tensor of GPT-2: 6.6 GB in bf16 for 65,536 tokens. Here they never exist as a
whole. For each chunk of rows one GEMM computes the logits, a Triton kernel computes the loss and overwrites the logits
by their gradient, and two GEMMs turn that gradient into the gradients of the head's input and of its weight. So forward
does the work of backward; backward only multiplies by the gradient of the loss. The idea of chunks is from
Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024).

The kernel computes in float32 for every input dtype, and sums in a fixed order, so results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cublaslt

IGNORE_INDEX = tl.constexpr(-1)  # a target without a loss
LOGIT_ROWS = 4096  # rows of logits in memory at a time: 0.4 GB in 16 bits


def fused_cross_entropy(x, weight, targets, vocab_size):
    """The mean cross-entropy in nats of the logits x weightᵀ, over all targets but IGNORE_INDEX; a float32 scalar.

    x (..., C), weight (V_padded, C), targets (...) int64. Rows of weight from vocab_size on are padding.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return mean_cross_entropy(summed_cross_entropy, x, weight, targets, vocab_size)


def mean_cross_entropy(summed, x, weight, targets, vocab_size):
    """fused_cross_entropy by an operator that sums it."""
    rows = x.flatten(0, -2).contiguous()  # (N, C)
    total = summed(rows, weight, targets.flatten().contiguous(), vocab_size)[0]
    return total / (targets != IGNORE_INDEX.value).sum()


@torch.library.custom_op("gpt2::summed_cross_entropy", mutates_args=())
def summed_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, dweight): the float32 sum of the cross-entropies of the logits x weightᵀ, and its gradients.

    x (N, C) and weight (V_padded, C) in 16 bits or float32, targets (N,) int64. Each gradient has the shape and dtype
    of its tensor; the gradient of weight is summed over the chunks in float32.
    """
    chunks = -(-len(targets) // LOGIT_ROWS)
    cast_weight = weight.to(x.dtype)
    dx = torch.empty_like(x)
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    for x_chunk, targets_chunk, dx_chunk in zip(x.chunk(chunks), targets.chunk(chunks), dx.chunk(chunks)):
        logits = x.new_empty(len(x_chunk), len(weight))  # (N / chunks, V_padded)
        cublaslt.mm(x_chunk, cast_weight.t(), out=logits)
        loss += cross_entropy_(logits, targets_chunk, vocab_size).sum()
        cublaslt.mm(logits, cast_weight, out=dx_chunk)  # the logits are their own gradient now
        if x.is_cuda and x.dtype != torch.float32:
            torch.addmm(dweight, logits.t(), x_chunk, out_dtype=torch.float32, out=dweight)
        else:
            dweight.addmm_(logits.t().float(), x_chunk.float())
        del logits  # the next chunk takes their memory
    return loss, dx, dweight.to(weight.dtype)


@summed_cross_entropy.register_fake
def empty_results(x, weight, targets, vocab_size):
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(weight)


def save_gradients(ctx, inputs, output):
    _, dx, dweight = output
    ctx.save_for_backward(dx, dweight)
    ctx.set_materialize_grads(False)


def scale_gradients(ctx, dloss, *_):
    dx, dweight = ctx.saved_tensors
    return dx * dloss, dweight * dloss, None, None


summed_cross_entropy.register_autograd(scale_gradients, setup_context=save_gradients)


def cross_entropy_(logits, targets, vocab_size, log_sum_exps=None):
    """The cross-entropies (N,) float32 of logits (N, V_padded), in place: logits become their gradient.

    targets (N,) int64. The gradient of the columns from vocab_size on is 0. With log_sum_exps (N,) float32, the kernel
    writes them, inf in ignored rows, and keeps the logits.
    """
    N, V_padded = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    block = min(8192, max(128, triton.next_power_of_2(vocab_size)))  # at least 128: one block covers the tail
    cross_entropy_kernel[(N,)](
        logits, targets, losses, log_sum_exps, logits.stride(0), vocab_size, V_padded, BLOCK=block, num_warps=16
    )
    return losses


@triton.jit
def cross_entropy_kernel(logits, targets, losses, log_sum_exps, stride, V, V_padded, BLOCK: tl.constexpr):
    """One row's loss, and its log-sum-exp or, without log_sum_exps, the row's gradient in place of its logits: softmax
    minus one-hot, 0 in the padding.

    The first pass over the row sums the exponentials. The second computes the gradient and finds the row, 100 kB, still
    in the cache. A softmax may subtract any shift near the row's maximum. The shift here is the target's logit, which
    saves a reduction in every block. The maximum replaces it only where the sum overflows: where some token is e^88
    times likelier than the target.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    offsets = tl.arange(0, BLOCK)
    full = V // BLOCK * BLOCK  # columns in full blocks, which need no mask
    tail = tl.load(logits + full + offsets, mask=full + offsets < V, other=float("-inf")).to(tl.float32)
    target = tl.load(targets + row)
    has_loss = target != IGNORE_INDEX
    target_logit = tl.load(logits + target, mask=has_loss, other=0.0).to(tl.float32)
    shift = target_logit
    sums = tl.exp(tail - shift)
    for start in range(0, full, BLOCK):
        sums += tl.exp(tl.load(logits + start + offsets).to(tl.float32) - shift)
    total = tl.sum(sums, 0)
    if total == float("inf"):
        maxima = tail
        for start in range(0, full, BLOCK):
            maxima = tl.maximum(maxima, tl.load(logits + start + offsets).to(tl.float32))
        shift = tl.max(maxima, 0)
        sums = tl.exp(tail - shift)
        for start in range(0, full, BLOCK):
            sums += tl.exp(tl.load(logits + start + offsets).to(tl.float32) - shift)
        total = tl.sum(sums, 0)
    log_sum_exp = shift + tl.log(total)
    tl.store(losses + row, tl.where(has_loss, log_sum_exp - target_logit, 0.0))
    log_sum_exp = tl.where(has_loss, log_sum_exp, float("inf"))  # without a target the gradient is 0
    if log_sum_exps is not None:
        tl.store(log_sum_exps + row, log_sum_exp)
    else:
        tl.store(logits + full + offsets, tl.exp(tail - log_sum_exp), mask=full + offsets < V_padded)
        for start in range(0, full, BLOCK):
            x = tl.load(logits + start + offsets).to(tl.float32)
            tl.store(logits + start + offsets, tl.exp(x - log_sum_exp))
        tl.debug_barrier()  # every thread stores its part of softmax before one thread overwrites the target's entry
        tl.store(logits + target, tl.exp(target_logit - log_sum_exp) - 1, mask=has_loss)
