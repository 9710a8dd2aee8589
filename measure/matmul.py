"""A lesson of matrix multiplication: CUDA kernels in float32, their TFLOP/s and their share of cuBLAS.

    python -m measure.matmul
    ncu --section WarpStateStats -k 'regex:one_each|tiled|coarsened' python -m measure.matmul --repeats 1  # stalls

C = A B has 2·n³ FLOPs on 3·n² numbers, so arithmetic can be its limit. Here it is what a kernel reads for each FLOP:

- **naive:** a thread computes one number of C. The 32 threads of a warp have 32 rows of A, so one load reads from 32
  places, and memory sends 32 bytes for each 4.
- **coalesced:** the 32 threads have adjacent columns, so a load of B reads 128 adjacent bytes, of A one number for all.
- **tiled:** a block of threads copies 32 × 32 tiles of A and B to shared memory, and reads each number 32 times there.
- **coarsened:** a thread computes 8 × 8 numbers of C in registers: 64 multiplications for 16 numbers of shared memory,
  where the other kernels read 128.

A warp runs one instruction at a time. If its threads take both sides of a branch (divergence), it runs both, each for a
part of them. `tiled` has a branch whose sides are equal work: taken by warps, a warp runs one side; by threads, both.
"""

import common.interrupt  # first: Ctrl-C during the other imports

from dataclasses import dataclass
from functools import partial

import torch

from common.cli import parse
from common.errors import UserError, out_of_memory, run
from measure import nvrtc
from measure.timing import TimingFlags, forward_and_backward, time_all
from parallel.process_group import start_alone

SIZE = 4096
SOURCE = r"""
// C = A B, each (n, n), row by row in memory

template <bool COALESCED> __global__ void one_each(const float* A, const float* B, float* C, int n) {
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;  // a warp's threads differ in x
    int row = COALESCED ? y : x, column = COALESCED ? x : y;
    float sum = 0;
    for (int k = 0; k < n; k++) sum += A[row * n + k] * B[k * n + column];
    C[row * n + column] = sum;
}

enum Branch { NONE, BY_WARP, BY_THREAD };

template <Branch BRANCH> __global__ void tiled(const float* A, const float* B, float* C, int n) {
    __shared__ float a[32][32], b[32][32];
    int x = threadIdx.x, y = threadIdx.y;
    int row = blockIdx.y * 32 + y, column = blockIdx.x * 32 + x;
    bool down = BRANCH == BY_WARP && y % 2 || BRANCH == BY_THREAD && x % 2;
    float sum = 0;
    for (int k = 0; k < n; k += 32) {
        a[y][x] = A[row * n + k + x];
        b[y][x] = B[(k + y) * n + column];
        __syncthreads();  // the tiles are complete
        if (down)
            for (int i = 31; i >= 0; i--) sum += a[y][i] * b[i][x];
        else
            for (int i = 0; i < 32; i++) sum += a[y][i] * b[i][x];
        __syncthreads();  // the tiles have been read
    }
    C[row * n + column] = sum;
}

// 256 threads compute 128 x 128 numbers of C, each 2 x 2 groups of 4 x 4
__global__ void coarsened(const float* A, const float* B, float* C, int n) {
    __shared__ alignas(16) float a[8][128], b[8][128];  // a transposed: a thread's rows of A are adjacent
    int t = threadIdx.x, x = t % 16 * 4, y = t / 16 * 4;
    A += blockIdx.y * 128 * n;
    B += blockIdx.x * 128;
    C += blockIdx.y * 128 * n + blockIdx.x * 128;
    float sum[8][8] = {};
    for (int k = 0; k < n; k += 8) {
        for (int j = 0; j < 4; j++) {
            a[t % 2 * 4 + j][t / 2] = A[t / 2 * n + k + t % 2 * 4 + j];
            b[t / 32][t % 32 * 4 + j] = B[(k + t / 32) * n + t % 32 * 4 + j];
        }
        __syncthreads();
        for (int i = 0; i < 8; i++)
            for (int row = 0; row < 8; row++)
                for (int column = 0; column < 8; column++)
                    sum[row][column] += a[i][y + row % 4 + row / 4 * 64] * b[i][x + column % 4 + column / 4 * 64];
        __syncthreads();
    }
    for (int row = 0; row < 8; row++)
        for (int column = 0; column < 8; column++)
            C[(y + row % 4 + row / 4 * 64) * n + x + column % 4 + column / 4 * 64] = sum[row][column];
}
"""
# {name: (kernel, rows and columns of C that a block computes, threads of a block)}
KERNELS = {
    "naive": ("one_each<false>", 32, (32, 32, 1)),
    "coalesced": ("one_each<true>", 32, (32, 32, 1)),
    "tiled": ("tiled<NONE>", 32, (32, 32, 1)),
    "tiled, branch by warp": ("tiled<BY_WARP>", 32, (32, 32, 1)),
    "tiled, branch by thread": ("tiled<BY_THREAD>", 32, (32, 32, 1)),
    "coarsened": ("coarsened", 128, (256, 1, 1)),
}


@dataclass
class Flags(TimingFlags):
    """Time matrix multiplications in CUDA C++, and cuBLAS, in float32."""


def main():
    flags = parse(Flags)
    device = start_alone(flags.device, "this times one device")
    if problem := nvrtc.missing(device):
        raise UserError(problem)
    cases = [dict(name=name) for name in (*KERNELS, "cuBLAS")]
    with out_of_memory("another program may have the GPU's memory"):
        measure_one = partial(measure, *torch.randn(2, SIZE, SIZE, device=device), flags.repeats)
        note, limit = f"n = {SIZE:,}, float32; cuBLAS is the limit", measure_one("cuBLAS")["rate"]
    time_all("matmul", flags, device, cases, measure_one, "TFLOP/s", limit, note, passes=("forward",))


def multiply(name, A, B):
    """A B by one of KERNELS, or cuBLAS. A and B (n, n) float32, n a multiple of 128."""
    if name == "cuBLAS":
        return A @ B
    kernel, tile, threads = KERNELS[name]
    C = torch.empty_like(A)
    blocks = len(A) // tile
    nvrtc.kernel(SOURCE, kernel)((blocks, blocks, 1), threads, A, B, C, len(A))
    return C


def measure(A, B, repeats, name):
    """{forward_ms, ..., rate in TFLOP/s} of A B by a kernel. Raises AssertionError if it differs from float64's."""
    n = len(A)
    exact = A.double() @ B.double()
    torch.testing.assert_close(multiply(name, A, B).double(), exact, rtol=0, atol=1e-4 * n**0.5)  # entries: about √n
    times = forward_and_backward(A.device, partial(multiply, name, A, B), [], repeats)
    return times | dict(rate=2 * n**3 / times["forward_ms"] / 1e9)


if __name__ == "__main__":
    run(main)
