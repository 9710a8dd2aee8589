"""Triton kernels that cast to float8_e4m3fn: plain, after GELU with its bias, and after the gradient of GELU.

Each kernel reads its input once and writes the float8 matrix twice, row-major and transposed: fp8 GEMMs need both (see
kernels/fp8.py). It also records the amax, the largest absolute value before scaling, and where asked the column sums,
which are the gradient of a bias.

A tile is 4 QUADS rows by COLUMNS columns; a quad is four consecutive rows. In the transposed matrix the four values of
a quad in one column are adjacent bytes, so the kernels store them as one 32-bit word.

Arithmetic is float32 whatever the dtype of the tensors, and sums have a fixed order, so results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl

QUADS, COLUMNS = 16, 64  # a tile is 64 x 64
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # Triton's interpreter on a CPU, for tests


def quantize(x, scale, amax=None, column_sums=False, out=None):
    """Cast x / scale to float8, saturating at ±448.

    x (N, C), N a multiple of 4. scale: a float32 scalar on the GPU. amax: a float32 scalar on the GPU, raised in place
    to the largest |x|. out: the pair of tensors to write, from empty_float8_pair; by default a new pair.
    Returns the float8 matrix (N, C), its transpose (C, N), and with column_sums the float32 column sums of x (C,), else
    None.
    """
    out = out or empty_float8_pair(x)
    sums = empty_sums(x) if column_sums else None
    launch(quantize_kernel, [x.contiguous()], out, scale, amax, sums, SUM=column_sums)
    return *out, sums.sum(0) if column_sums else None


def gelu(h, bias, scale, amax):
    """Cast gelu(h + bias) / scale to float8, GELU in its tanh form. h (N, C), bias (C,); the rest as in quantize.

    Returns the float8 matrix (N, C) and its transpose (C, N).
    """
    out = empty_float8_pair(h)
    launch(bias_gelu_kernel, [h.contiguous(), bias], out, scale, amax)
    return out


def gelu_backward(h, bias, da, scale, amax):
    """Cast dh / scale to float8, where dh is the gradient of h for da, the gradient of gelu(h + bias), (N, C).

    Returns the pair of dh, (N, C) and transposed (C, N), and the gradient of bias, (C,) float32.
    """
    out, sums = empty_float8_pair(h), empty_sums(h)
    launch(bias_gelu_backward_kernel, [h.contiguous(), bias, da.contiguous()], out, scale, amax, sums)
    return out, sums.sum(0)


def empty_float8_pair(x):
    """Uninitialized float8 tensors for a matrix x (N, C) and for its transpose (C, N)."""
    return tuple(torch.empty(size, dtype=torch.float8_e4m3fn, device=x.device) for size in (x.shape, x.shape[::-1]))


def empty_sums(x):
    """Uninitialized column sums of each row of tiles of x (N, C)."""
    return torch.empty(triton.cdiv(len(x), 4 * QUADS), x.size(1), dtype=torch.float32, device=x.device)


def launch(kernel, inputs, out, *others, **options):
    """Start a kernel for each tile. inputs: a matrix (N, C) comes first. out: from empty_float8_pair."""
    N, C = inputs[0].shape
    words = out[1].view(torch.int32)  # as store_quads writes them
    kernel[(triton.cdiv(N, 4 * QUADS), triton.cdiv(C, COLUMNS))](
        *inputs, out[0], words, *others, N, N // 4, C, QUADS=QUADS, COLUMNS=COLUMNS, num_warps=4, **options
    )


# ----------------------------------------------------------------------------------------------------------------------
# Kernels. Each program computes one tile; sums (number of tile rows, C) gets the column sums within the tile


@triton.jit
def quantize_kernel(
    x, x8, x8_t, scale, amax, sums, N, N_quads, C, SUM: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr
):
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    a, b, c, d = load_quads(x, quad, column, N, C)
    if SUM:
        tl.store(sums + tl.program_id(0) * C + column, tl.sum((a + b) + (c + d), 0), mask=column < C)
    store_quads(a, b, c, d, x8, x8_t, scale, amax, quad, column, N, N_quads, C)


@triton.jit
def bias_gelu_kernel(h, bias, a8, a8_t, scale, amax, N, N_quads, C, QUADS: tl.constexpr, COLUMNS: tl.constexpr):
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + column, mask=column < C, other=0.0)[None, :]
    a, b, c, d = load_quads(h, quad, column, N, C)
    a, _ = gelu_and_derivative(a + shift)
    b, _ = gelu_and_derivative(b + shift)
    c, _ = gelu_and_derivative(c + shift)
    d, _ = gelu_and_derivative(d + shift)
    store_quads(a, b, c, d, a8, a8_t, scale, amax, quad, column, N, N_quads, C)


@triton.jit
def bias_gelu_backward_kernel(
    h, bias, da, dh8, dh8_t, scale, amax, sums, N, N_quads, C, QUADS: tl.constexpr, COLUMNS: tl.constexpr
):
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + column, mask=column < C, other=0.0)[None, :]
    a, b, c, d = load_quads(h, quad, column, N, C)
    grad_a, grad_b, grad_c, grad_d = load_quads(da, quad, column, N, C)
    _, derivative = gelu_and_derivative(a + shift)
    grad_a *= derivative
    _, derivative = gelu_and_derivative(b + shift)
    grad_b *= derivative
    _, derivative = gelu_and_derivative(c + shift)
    grad_c *= derivative
    _, derivative = gelu_and_derivative(d + shift)
    grad_d *= derivative
    tl.store(sums + tl.program_id(0) * C + column, tl.sum((grad_a + grad_b) + (grad_c + grad_d), 0), mask=column < C)
    store_quads(grad_a, grad_b, grad_c, grad_d, dh8, dh8_t, scale, amax, quad, column, N, N_quads, C)


@triton.jit
def gelu_and_derivative(x):
    """GELU in its tanh form, which is x sigmoid(2u) with u = √(2/π) (x + 0.044715 x³), and its derivative."""
    sigmoid = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
    slope = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)  # the derivative of 2u
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid) * slope)


@triton.jit
def load_quads(source, quad, column, N, C):
    """Rows 4 quad to 4 quad + 3 of a matrix (N, C) as four (QUADS, COLUMNS) float32 tiles; 0 outside the matrix.

    Four independent loads are in flight at a time.
    """
    pointers = source + quad.to(tl.int64)[:, None] * (4 * C) + column[None, :]
    row, inside = (4 * quad)[:, None], (column < C)[None, :]
    a = tl.load(pointers, mask=inside & (row < N), other=0.0).to(tl.float32)
    b = tl.load(pointers + C, mask=inside & (row + 1 < N), other=0.0).to(tl.float32)
    c = tl.load(pointers + 2 * C, mask=inside & (row + 2 < N), other=0.0).to(tl.float32)
    d = tl.load(pointers + 3 * C, mask=inside & (row + 3 < N), other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def store_quads(a, b, c, d, out, out_t, scale, amax, quad, column, N, N_quads, C):
    """Divide the four tiles of load_quads by scale, cast them to float8, and store them in out (N, C) and out_t.

    out_t (C, N_quads): the transposed matrix as 32-bit words. amax is raised to the largest |value|, before scaling.
    """
    if amax is not None:
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        tl.atomic_max(amax, tl.max(largest), sem="relaxed")
    inverse = 1 / tl.load(scale)
    a = tl.clamp(a * inverse, -448.0, 448.0)  # float8_e4m3fn's largest value; values beyond it saturate
    b = tl.clamp(b * inverse, -448.0, 448.0)
    c = tl.clamp(c * inverse, -448.0, 448.0)
    d = tl.clamp(d * inverse, -448.0, 448.0)
    words = pack_float8(a, b, c, d)
    pointers = out + quad.to(tl.int64)[:, None] * (4 * C) + column[None, :]
    row, inside = (4 * quad)[:, None], (column < C)[None, :]
    tl.store(pointers, a.to(out.dtype.element_ty), mask=inside & (row < N))
    tl.store(pointers + C, b.to(out.dtype.element_ty), mask=inside & (row + 1 < N))
    tl.store(pointers + 2 * C, c.to(out.dtype.element_ty), mask=inside & (row + 2 < N))
    tl.store(pointers + 3 * C, d.to(out.dtype.element_ty), mask=inside & (row + 3 < N))
    pointers = out_t + column.to(tl.int64)[:, None] * N_quads + quad[None, :]
    tl.store(pointers, words.trans(), mask=(column < C)[:, None] & (quad < N_quads)[None, :])


@triton.jit
def pack_float8(a, b, c, d):
    """Cast four values to float8 and pack them into one 32-bit word, the first value in the lowest byte.

    Triton code for this would use the results of store_quads' casts a second time, and ptxas 12.8 then mixes up the
    halves of the registers that hold them. PTX casts anew.
    """
    if INTERPRETED:
        word = a.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= b.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= c.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        return word | (d.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 24)
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
