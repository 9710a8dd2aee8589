"""GELU by hand, in Triton and in CUDA C++: the same formula, one pass over memory in each direction, in float32.

A program of Triton computes a block of elements, and the compiler gives each thread its part. In CUDA C++ the part of a
thread is written out: four adjacent elements, one load, so that a warp of 32 threads reads adjacent bytes. GELU's tanh
form is x·σ(2u) with the logistic function σ and u = √(2/π)·(x + 0.044715·x³), since 1 + tanh u = 2·σ(2u).
"""

import torch
import triton
import triton.language as tl

from common.errors import UserError
from measure import nvrtc

SLOPE, CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2·√(2/π)


@triton.jit
def triton_kernel(x, dy, out, n, BLOCK: tl.constexpr):
    """out = gelu(x), or with dy the gradient of x; n elements each."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid((value + value * value * value * CUBIC) * SLOPE)
    result = value * sigmoid
    if dy is not None:
        slope = sigmoid + result * (1 - sigmoid) * (value * value * (3 * CUBIC) + 1) * SLOPE
        result = slope * tl.load(dy + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, result, mask=i < n)


SOURCE = r"""
__device__ float to_float(unsigned short bf16) { return __uint_as_float((unsigned)bf16 << 16); }

// out = gelu(x), or with BACKWARD the gradient of x; n times four elements each, in bf16
template <bool BACKWARD> __global__ void gelu(const ushort4* x, const ushort4* dy, ushort4* out, int n) {
    const float slope = 1.5957691216057308f, cubic = 0.044715f;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    ushort4 input = x[i], gradient = BACKWARD ? dy[i] : input, result;
    for (int j = 0; j < 4; j++) {
        float value = to_float((&input.x)[j]);
        float sigmoid = __fdividef(1.0f, 1.0f + __expf(-slope * (value + cubic * value * value * value)));
        float y = value * sigmoid;
        if (BACKWARD) {
            y = sigmoid + y * (1.0f - sigmoid) * slope * (1.0f + 3.0f * cubic * value * value);
            y *= to_float((&gradient.x)[j]);
        }
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"((&result.x)[j]) : "f"(y));
    }
    out[i] = result;
}
"""


def by_triton(x, dy, out):
    triton_kernel[(triton.cdiv(x.numel(), 1024),)](x, dy, out, x.numel(), BLOCK=1024)


def by_cuda(x, dy, out):
    if x.dtype != torch.bfloat16:
        raise UserError(f"the CUDA C++ kernel is for bf16, not {x.dtype}")
    n = x.numel() // 4
    kernel = nvrtc.kernel(SOURCE, "gelu<false>" if dy is None else "gelu<true>")
    kernel((triton.cdiv(n, 256), 1, 1), (256, 1, 1), x, x if dy is None else dy, out, n)


class GELU(torch.autograd.Function):
    """GELU of a contiguous x, a multiple of four elements, by by_triton or by_cuda."""

    @staticmethod
    def forward(ctx, x, write):
        ctx.save_for_backward(x)
        ctx.write, y = write, torch.empty_like(x)
        write(x, None, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        ctx.write(x, dy.contiguous(), dx)
        return dx, None
