"""Triton kernels for what PyTorch and its compiler do in more passes over memory or more launches than needed.

torch.compile leaves them whole. Computation is in float32 whatever the tensors are; sums are in float32 and in a fixed
order, so they repeat bit by bit.
"""

import torch
import triton
import triton.language as tl

from kernels import cublaslt

IGNORED = tl.constexpr(-1)  # a target that has no loss
ROWS_OF_LOGITS = 4096  # that exist at a time: 0.4 GB in 16 bits
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # on a CPU, for tests


# ----------------------------------------------------------------------------------------------------------------------
# The head: logits, their softmax cross-entropy, and both gradients, a part of the rows at a time


@triton.jit
def cross_entropy_kernel(logits, targets, losses, stride, V, V_padded, BLOCK: tl.constexpr):
    """A row's loss, and in the logits' place its gradient: softmax minus one-hot, 0 in the padding.

    Two passes: one sums the exponentials, one makes the gradient and finds the row, 100 kB, still in the cache. What a
    softmax subtracts may be any number near the maximum. Here that is the target's logit, which saves a reduction in
    every block, and the maximum itself only where that overflows: where a word is e^88 times likelier than the target.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    offsets = tl.arange(0, BLOCK)
    whole = V // BLOCK * BLOCK  # whole blocks need no mask
    tail = tl.load(logits + whole + offsets, mask=whole + offsets < V, other=float("-inf")).to(tl.float32)
    target = tl.load(targets + row)
    counts = target != IGNORED
    chosen = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    shift = chosen
    sums = tl.exp(tail - shift)
    for start in range(0, whole, BLOCK):
        sums += tl.exp(tl.load(logits + start + offsets).to(tl.float32) - shift)
    total = tl.sum(sums, 0)
    if total == float("inf"):
        largest = tail
        for start in range(0, whole, BLOCK):
            largest = tl.maximum(largest, tl.load(logits + start + offsets).to(tl.float32))
        shift = tl.max(largest, 0)
        sums = tl.exp(tail - shift)
        for start in range(0, whole, BLOCK):
            sums += tl.exp(tl.load(logits + start + offsets).to(tl.float32) - shift)
        total = tl.sum(sums, 0)
    log_sum = shift + tl.log(total)
    tl.store(losses + row, tl.where(counts, log_sum - chosen, 0.0))
    log_sum = tl.where(counts, log_sum, float("inf"))  # no gradient where there is no target
    tl.store(logits + whole + offsets, tl.exp(tail - log_sum), mask=whole + offsets < V_padded)
    for start in range(0, whole, BLOCK):
        x = tl.load(logits + start + offsets).to(tl.float32)
        tl.store(logits + start + offsets, tl.exp(x - log_sum))
    tl.debug_barrier()  # all have stored before one takes the one-hot off
    tl.store(logits + target, tl.exp(chosen - log_sum) - 1, mask=counts)


def cross_entropy_(logits, targets, vocab_size):
    """Losses (N,) float32 of logits (N, V_padded), which are overwritten by their gradient. targets (N,) int64."""
    N, V_padded = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    block = min(8192, max(128, triton.next_power_of_2(vocab_size)))  # a multiple of 128, as the padding makes rows
    cross_entropy_kernel[(N,)](
        logits, targets, losses, logits.stride(0), vocab_size, V_padded, BLOCK=block, num_warps=16
    )
    return losses


@torch.library.custom_op("gpt2::head_loss", mutates_args=())
def head_loss(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, chunks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of the logits x weightᵀ, and its gradients to x and weight, in one go.

    x (N, C) and weight (V_padded, C) in 16 bits or float32, targets (N,) int64, IGNORED where none. The logits of
    N / chunks rows exist at a time, and are never read again once their gradient has left (as in Liger-Kernel's fused
    linear cross-entropy, Hsu et al. 2024). Returns a float32 scalar, (N, C) as x, (V_padded, C) as weight.
    """
    cast = weight.to(x.dtype)
    x_gradient = torch.empty_like(x)
    weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    for rows, part, gradient in zip(x.chunk(chunks), targets.chunk(chunks), x_gradient.chunk(chunks)):
        logits = cublaslt.product(rows, cast.t())  # (N / chunks, V_padded)
        loss += cross_entropy_(logits, part, vocab_size).sum()
        cublaslt.product(logits, cast, out=gradient)
        cublaslt.add_product_(weight_gradient, logits, rows)
    return loss, x_gradient, weight_gradient.to(weight.dtype)


@head_loss.register_fake
def _(x, weight, targets, vocab_size, chunks):
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(weight)


def keep_gradients(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def scale_gradients(ctx, gradient, *_):
    """The loss came with its gradients: they only wait for the factor that the loss is multiplied with."""
    x_gradient, weight_gradient = ctx.saved_tensors
    return x_gradient * gradient, weight_gradient * gradient, None, None, None


head_loss.register_autograd(scale_gradients, setup_context=keep_gradients)


def mean_loss(x, weight, targets, vocab_size):
    """The mean cross-entropy in nats of the logits x weightᵀ over all targets but IGNORED; x (..., C)."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    chunks = -(-targets.numel() // ROWS_OF_LOGITS)
    total = head_loss(x.flatten(0, -2).contiguous(), weight, targets.flatten().contiguous(), vocab_size, chunks)[0]
    return total / (targets != IGNORED.value).sum()


# ----------------------------------------------------------------------------------------------------------------------
# For products in 8 bits: casts, and GELU with its bias

ROWS, BLOCK = 16, 64  # of a tile: fours of rows, columns


@triton.jit
def load_four(source, four, column, N, C):
    """Rows 4 four, ..., 4 four + 3 of a matrix (N, C), as a tile each: all loads are under way before one is needed."""
    at = source + four.to(tl.int64)[:, None] * (4 * C) + column[None, :]
    row, inside = (4 * four)[:, None], (column < C)[None, :]
    a = tl.load(at, mask=inside & (row < N), other=0.0).to(tl.float32)
    b = tl.load(at + C, mask=inside & (row + 1 < N), other=0.0).to(tl.float32)
    c = tl.load(at + 2 * C, mask=inside & (row + 2 < N), other=0.0).to(tl.float32)
    d = tl.load(at + 3 * C, mask=inside & (row + 3 < N), other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def store_four(a, b, c, d, out, out_t, scale, peak, four, column, N, fours, C):
    """The same rows divided by scale in 8 bits, to a matrix (N, C) and transposed to out_t (C, N).

    float8e4nv reaches 448 and keeps 3 bits after the leading one (Micikevicius et al. 2022, "FP8 Formats for Deep
    Learning"). peak becomes at least the largest |value|. Transposed, four rows' bytes of a column are one word, of
    fours = N / 4 in a row.
    """
    if peak is not None:
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        tl.atomic_max(peak, tl.max(largest), sem="relaxed")
    inverse = 1 / tl.load(scale)
    a = tl.clamp(a * inverse, -448.0, 448.0)
    b = tl.clamp(b * inverse, -448.0, 448.0)
    c = tl.clamp(c * inverse, -448.0, 448.0)
    d = tl.clamp(d * inverse, -448.0, 448.0)
    words = pack(a, b, c, d)
    at = out + four.to(tl.int64)[:, None] * (4 * C) + column[None, :]
    row, inside = (4 * four)[:, None], (column < C)[None, :]
    tl.store(at, a.to(out.dtype.element_ty), mask=inside & (row < N))
    tl.store(at + C, b.to(out.dtype.element_ty), mask=inside & (row + 1 < N))
    tl.store(at + 2 * C, c.to(out.dtype.element_ty), mask=inside & (row + 2 < N))
    tl.store(at + 3 * C, d.to(out.dtype.element_ty), mask=inside & (row + 3 < N))
    at = out_t + column.to(tl.int64)[:, None] * fours + four[None, :]
    tl.store(at, words.trans(), mask=(column < C)[:, None] & (four < fours)[None, :])


@triton.jit
def pack(a, b, c, d):
    """Four numbers in 8 bits as one word, the first in its lowest byte.

    In PTX, since the cast's result must not be read twice: ptxas 12.8 mixes up the halves of its registers then.
    """
    if INTERPRETED:
        low = a.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        low |= b.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        low |= c.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        return low | (d.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 24)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        args=[a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def quantize_kernel(
    x, out, out_t, scale, peak, sums, N, fours, C, SUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """x in 8 bits, both ways around, and with SUM this tile's part of its column sums: sums (rows of programs, C)."""
    four = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = load_four(x, four, column, N, C)
    if SUM:
        tl.store(sums + tl.program_id(0) * C + column, tl.sum((a + b) + (c + d), 0), mask=column < C)
    store_four(a, b, c, d, out, out_t, scale, peak, four, column, N, fours, C)


def quantize(x, scale, peak=None, column_sums=False, out=None):
    """x / scale in float8_e4m3fn, (N, C) and transposed (C, N), and the sums of x's columns if asked for, (C,) float32.

    x (N, C), N a multiple of 4; scale and peak float32 scalars; peak becomes, in place, the largest |x| or stays above.
    out: the pair of float8_pair to write into.
    """
    x = x.contiguous()
    N, C = x.shape
    grid = (triton.cdiv(N, 4 * ROWS), triton.cdiv(C, BLOCK))
    x8, x8_t = out or float8_pair(x)
    sums = torch.empty(grid[0], C, dtype=torch.float32, device=x.device) if column_sums else None
    quantize_kernel[grid](
        x, x8, words(x8_t), scale, peak, sums, N, N // 4, C, SUM=column_sums, ROWS=ROWS, BLOCK=BLOCK, num_warps=4
    )
    return x8, x8_t, sums.sum(0) if column_sums else None


def float8_pair(x):
    """Memory for x (N, C) in 8 bits and for its transpose."""
    return tuple(torch.empty(size, dtype=torch.float8_e4m3fn, device=x.device) for size in (x.shape, x.shape[::-1]))


@triton.jit
def gelu_and_slope(x):
    """GELU in its tanh form, which is x sigmoid(2u) with u = √(2/π) (x + 0.044715 x³), and its derivative."""
    sigmoid = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
    slope = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)  # of 2u
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid) * slope)


@triton.jit
def bias_gelu_kernel(h, bias, out, out_t, scale, peak, N, fours, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """gelu(h + bias), a tile of 4 ROWS × BLOCK, as store_four has it."""
    four = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(bias + column, mask=column < C, other=0.0)[None, :]
    a, b, c, d = load_four(h, four, column, N, C)
    a, _ = gelu_and_slope(a + shift)
    b, _ = gelu_and_slope(b + shift)
    c, _ = gelu_and_slope(c + shift)
    d, _ = gelu_and_slope(d + shift)
    store_four(a, b, c, d, out, out_t, scale, peak, four, column, N, fours, C)


@triton.jit
def bias_gelu_backward_kernel(
    h, bias, out_gradient, gradient, gradient_t, scale, peak, sums, N, fours, C, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradient to h, and this tile's part of the bias's: sums (rows of programs, C)."""
    four = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(bias + column, mask=column < C, other=0.0)[None, :]
    a, b, c, d = load_four(h, four, column, N, C)
    da, db, dc, dd = load_four(out_gradient, four, column, N, C)
    _, slope = gelu_and_slope(a + shift)
    da *= slope
    _, slope = gelu_and_slope(b + shift)
    db *= slope
    _, slope = gelu_and_slope(c + shift)
    dc *= slope
    _, slope = gelu_and_slope(d + shift)
    dd *= slope
    tl.store(sums + tl.program_id(0) * C + column, tl.sum((da + db) + (dc + dd), 0), mask=column < C)
    store_four(da, db, dc, dd, gradient, gradient_t, scale, peak, four, column, N, fours, C)


def gelu(h, bias, scale, peak=None):
    """gelu(h + bias) / scale, in the tanh form: the pair of quantize. h (N, C), bias (C,)."""
    h = h.contiguous()
    N, C = h.shape
    out, out_t = float8_pair(h)
    bias_gelu_kernel[(triton.cdiv(N, 4 * ROWS), triton.cdiv(C, BLOCK))](
        h, bias, out, words(out_t), scale, peak, N, N // 4, C, ROWS=ROWS, BLOCK=BLOCK, num_warps=4
    )
    return out, out_t


def gelu_backward(h, bias, out_gradient, scale, peak=None):
    """The gradients of gelu: to h the pair of quantize, to bias (C,) float32."""
    h, out_gradient = h.contiguous(), out_gradient.contiguous()
    N, C = h.shape
    gradient, gradient_t = float8_pair(h)
    sums = torch.empty(triton.cdiv(N, 4 * ROWS), C, dtype=torch.float32, device=h.device)
    bias_gelu_backward_kernel[(len(sums), triton.cdiv(C, BLOCK))](
        h, bias, out_gradient, gradient, words(gradient_t), scale, peak, sums, N, N // 4, C, ROWS=ROWS, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
    return (gradient, gradient_t), sums.sum(0)


def words(x):
    """Bytes as 32-bit words, which store_four writes."""
    return x.view(torch.int32)


# ----------------------------------------------------------------------------------------------------------------------
# One token of a few texts, for generation, in five kernels a layer


@triton.jit
def token_linear_kernel(
    x, weight, bias, scale, shift, added, y, N, K, count, GELU: tl.constexpr, TEXTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS columns of y (count, N) = added + gelu(norm(x) weightᵀ + bias), where all but the product may be None."""
    text = tl.arange(0, TEXTS)[:, None]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros((TEXTS, ROWS), tl.float32)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < N) & (column < K)
        w = tl.load(weight + row.to(tl.int64)[:, None] * K + column, mask=inside, other=0.0)
        each = tl.load(x + text * K + column, mask=(text < count) & (column < K), other=0.0)
        if scale is not None:  # a block is the whole of x then
            each = tl.where(column < K, each - tl.sum(each, 1, keep_dims=True) / K, 0.0)
            each /= tl.sqrt(tl.sum(each * each, 1, keep_dims=True) / K + 1e-5)
            each *= tl.load(scale + column, mask=column < K, other=0.0)
            each += tl.load(shift + column, mask=column < K, other=0.0)
        sums += tl.sum(each[:, None, :] * w[None, :, :], 2)
    row = row[None, :]
    inside = (row < N) & (text < count)
    if bias is not None:
        sums += tl.load(bias + row, mask=row < N, other=0.0)
    if GELU:
        sums, _ = gelu_and_slope(sums)
    if added is not None:
        sums += tl.load(added + text * N + row, mask=inside, other=0.0)
    tl.store(y + text * N + row, sums, mask=inside)


def token_linear(x, weight, bias=None, norm=None, gelu=False, added=None):
    """added + gelu(norm(x) weightᵀ + bias) for x (B, K), weight (N, K), added (B, N), all float32.

    norm: an nn.LayerNorm with its default eps. Every program reads x whole, for a few rows of weight: for small B.
    """
    (B, K), N = x.shape, len(weight)
    y = x.new_empty(B, N)
    rows = 4 if N > K else 2
    scale, shift = (norm.weight, norm.bias) if norm else (None, None)
    token_linear_kernel[(triton.cdiv(N, rows),)](
        x, weight, bias, scale, shift, added, y, N, K, B, GELU=gelu, TEXTS=triton.next_power_of_2(B), ROWS=rows,
        BLOCK=triton.next_power_of_2(K) if norm else 1024,
    )  # fmt: skip
    return y


@triton.jit
def token_attention_kernel(
    qkv, keys, values, place, y, capacity, H, D, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """A head of a text: its new key and value go to the cache, and its query attends to them and those before."""
    head = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    wide = column < D
    new = qkv + head // H * (3 * H * D) + head % H * D + column
    q = tl.load(new, mask=wide, other=0.0) * factor
    k = tl.load(new + H * D, mask=wide, other=0.0)
    v = tl.load(new + 2 * H * D, mask=wide, other=0.0)
    length = tl.load(place).to(tl.int32)
    keys += head.to(tl.int64) * capacity * D + column[None, :]
    values += head.to(tl.int64) * capacity * D + column[None, :]
    tl.store(keys + length * D, k[None, :], mask=wide[None, :])
    tl.store(values + length * D, v[None, :], mask=wide[None, :])
    # the softmax of what has been seen so far: the largest score, the sum of exponentials, and that of values
    largest, total, out = tl.sum(q * k, 0), 1.0, v
    for start in range(0, length, BLOCK):
        row = start + tl.arange(0, BLOCK)[:, None]
        inside = (row < length) & wide[None, :]
        old_k = tl.load(keys + row * D, mask=inside, other=0.0)
        old_v = tl.load(values + row * D, mask=inside, other=0.0)
        scores = tl.where(row < length, tl.sum(q[None, :] * old_k, 1, keep_dims=True), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores))
        scores = tl.exp(scores - new_largest)
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(scores)
        out = out * shrink + tl.sum(scores * old_v, 0)
        largest = new_largest
    tl.store(y + head * D + column, out / total, mask=wide)


def token_attention(qkv, keys, values, place):
    """Attention of one new token a text: qkv (B, 3C) float32; returns (B, C).

    keys and values (B, H, capacity, D) hold those before and take in the new ones, at place (1,) int64, in place.
    """
    B, H, capacity, D = keys.shape
    y = qkv.new_empty(B, H * D)
    token_attention_kernel[(B * H,)](
        qkv, keys, values, place, y, capacity, H, D, D**-0.5, WIDTH=triton.next_power_of_2(D), BLOCK=256, num_warps=8
    )
    return y
