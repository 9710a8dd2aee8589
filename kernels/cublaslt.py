"""GEMMs by cuBLASLt, through nvmath-python, for two features that PyTorch does not expose:

- GELU and its gradient in a GEMM's epilogue, while the result is still in registers (kernels/mlp.py).
- The choice of the algorithm: the first call with new shapes times the algorithms that cuBLASLt proposes and keeps the
  fastest one that gives the same bits as cuBLASLt's first proposal. So two ranks, or a run and its continuation, may
  choose different algorithms. The choice makes a step with --fp8 1.5% faster, in bf16 up to 1%.

Documentation: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api, and of the bindings:
https://docs.nvidia.com/cuda/nvmath-python/latest/bindings/index.html
"""

import functools
import statistics
from contextlib import suppress

import numpy as np
import torch

try:
    from nvmath import CudaDataType
    from nvmath.bindings import cublas, cublasLt
    from nvmath.bindings.cublasLt import Epilogue, MatmulDescAttribute, MatmulPreferenceAttribute
except ImportError:  # there is no nvmath-python for macOS
    cublasLt = None

TYPES = {
    torch.float32: "CUDA_R_32F",
    torch.float16: "CUDA_R_16F",
    torch.bfloat16: "CUDA_R_16BF",
    torch.float8_e4m3fn: "CUDA_R_8F_E4M3",
}
WORKSPACE_BYTES = 32 << 20
ALIGNMENT = 256  # bytes that cuBLASLt's heuristic assumes for every pointer
MAX_ALGORITHMS = 16
TIMING_ROUNDS = 5
# A changed summation order shows in about 2 of 10,000 bf16 results; smaller outputs may show no difference.
MIN_TUNED_SIZE = 1 << 20


def data_type(dtype):
    return CudaDataType[TYPES[dtype]]


@functools.cache
def handle(device):
    with torch.cuda.device(device):
        return cublasLt.create()


@functools.cache
def preference():
    pointer, size = cublasLt.matmul_preference_create(), np.array([WORKSPACE_BYTES], np.uint64)
    attribute = MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
    cublasLt.matmul_preference_set_attribute(pointer, attribute, size.ctypes.data, size.nbytes)
    return pointer


@functools.cache
def attribute_type(attribute):
    return cublasLt.get_matmul_desc_attribute_dtype(attribute)


@functools.cache
def float32(value):
    """An array in host memory."""
    return np.array([value], np.float32)


def create_layout(x):
    """cuBLASLt's column-major layout: of xᵀ if x is row-major, of x if x is a transposed view."""
    rows, columns, leading = (*x.shape[::-1], x.stride(0)) if x.stride(1) == 1 else (*x.shape, x.stride(1))
    return cublasLt.matrix_layout_create(data_type(x.dtype), rows, columns, leading)


class Plan:
    """The layouts, the descriptor and the algorithm for out = a b with given shapes, strides, dtypes and epilogue.

    algorithm is None where cuBLASLt has none. The arguments are those of `gemm`; `pointers` is (bias, aux, scale_a,
    scale_b).
    """

    def __init__(self, a, b, out, epilogue, fast_accumulation, pointers):
        # cuBLASLt is column-major, PyTorch row-major: out = a b is outᵀ = bᵀ aᵀ to cuBLASLt. The third layout is of the
        # matrix to add: out, or with the factor 0 none.
        self.layouts = [create_layout(x) for x in (b, a, out, out)]
        self.epilogue = epilogue
        self.descriptor = cublasLt.matmul_desc_create(cublas.ComputeType.COMPUTE_32F, CudaDataType.CUDA_R_32F)
        self.set("TRANSA", b.stride(1) != 1)
        self.set("TRANSB", a.stride(1) != 1)
        self.set("FAST_ACCUM", fast_accumulation)
        bias, *others = pointers
        if bias is not None:  # a bias of zeros, as at the start of training, hides how an algorithm rounds the sum
            bias = torch.linspace(-1, 1, len(bias), dtype=bias.dtype, device=bias.device)
        self.set_pointers(bias, *others)
        self.algorithm = self.choose(a, b, out)

    def set(self, name, value):
        attribute = MatmulDescAttribute[name]
        value = np.array([value], attribute_type(attribute))
        cublasLt.matmul_desc_set_attribute(self.descriptor, attribute, value.ctypes.data, value.nbytes)

    def set_pointers(self, bias, aux, scale_a, scale_b):
        """Set the addresses of this call's tensors; None for a tensor that the GEMM does not have."""
        if bias is not None:
            self.set("BIAS_DATA_TYPE", data_type(bias.dtype))
            self.set("BIAS_POINTER", bias.data_ptr())
        if aux is not None:
            self.set("EPILOGUE_AUX_LD", aux.stride(0))
            self.set("EPILOGUE_AUX_POINTER", aux.data_ptr())
        if scale_a is not None:
            self.set("A_SCALE_POINTER", scale_b.data_ptr())
            self.set("B_SCALE_POINTER", scale_a.data_ptr())

    def proposals(self, device):
        """The algorithms that cuBLASLt's heuristic proposes, best guess first.

        With a bias, also those for the GEMM without a bias that support a bias: some are faster.
        """
        proposed = []
        for epilogue in dict.fromkeys((self.epilogue & ~Epilogue.BIAS or Epilogue.DEFAULT, self.epilogue)):
            self.set("EPILOGUE", epilogue)
            results, count = np.zeros(MAX_ALGORITHMS, cublasLt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
            with suppress(cublasLt.cuBLASLtError):  # there is none
                cublasLt.matmul_algo_get_heuristic(
                    handle(device), self.descriptor, *self.layouts, preference(), MAX_ALGORITHMS, results.ctypes.data,
                    count.ctypes.data,
                )  # fmt: skip
            proposed = [results[i : i + 1] for i in range(count[0])] + proposed
        valid = {}
        for result in proposed:
            if result["state"] == 0 and result["workspace_size"] <= WORKSPACE_BYTES:
                valid.setdefault(result["algo"].tobytes(), result)
        return list(valid.values())

    def choose(self, a, b, out):
        """The fastest of the proposals that give the same bits as the first that runs. None where none runs."""
        runnable = (each for each in self.proposals(out.device) if self.runs(each, a, b, out))
        first = next(runnable, None)
        if first is None or out.numel() < MIN_TUNED_SIZE or not out.isfinite().all():
            return first
        expected = out.clone()
        # `runnable` is lazy: when it yields an algorithm, `out` holds the result of that algorithm
        candidates = [first, *(each for each in runnable if torch.equal(out, expected))]
        events = []
        for candidate in candidates * TIMING_ROUNDS:
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
            self.launch(candidate, a, b, out)
            events[-1][1].record()
        torch.cuda.synchronize(out.device)
        times = [start.elapsed_time(end) for start, end in events]
        medians = [statistics.median(times[i :: len(candidates)]) for i in range(len(candidates))]
        return candidates[medians.index(min(medians))]

    def runs(self, algorithm, a, b, out):
        """Launch an algorithm; False if cuBLASLt refuses it, for example one that has no bias."""
        with suppress(cublasLt.cuBLASLtError):
            self.launch(algorithm, a, b, out)
            return True
        return False

    def launch(self, algorithm, a, b, out, add=False):
        """Start out = a b, with `add` out += a b, on the current stream. Raises cuBLASLtError if cuBLASLt refuses."""
        workspace = torch.empty(algorithm["workspace_size"].item(), dtype=torch.uint8, device=out.device)
        b_layout, a_layout, added_layout, out_layout = self.layouts
        cublasLt.matmul(
            handle(out.device), self.descriptor, float32(1).ctypes.data, b.data_ptr(), b_layout, a.data_ptr(), a_layout,
            float32(add).ctypes.data, out.data_ptr(), added_layout, out.data_ptr(), out_layout, algorithm.ctypes.data,
            workspace.data_ptr(), workspace.numel(), torch.cuda.current_stream(out.device).cuda_stream,
        )  # fmt: skip


plans = {}


def gemm(a, b, out, epilogue=None, bias=None, aux=None, scale_a=None, scale_b=None, fast_accumulation=False, add=False):
    """out = scale_a scale_b (a b) + bias, with an optional epilogue. Returns whether cuBLASLt supports this GEMM.

    a (N, K) and b (K, M) bf16, fp16, or float8 with a float32 scale each. Each of a and b is row-major or a transposed
    view of a row-major matrix. out (N, M) row-major. bias (M,) 16 bits.
    epilogue: "GELU_AUX" writes the result to aux and gelu(result) to out. "DGELU" multiplies the result by the
    derivative of gelu at aux. aux (N, M) 16 bits; gelu is the tanh form.
    fast_accumulation: sum float8 products in fewer bits, at a higher rate. add: add the result to out.
    False means that nothing is computed: nvmath-python is missing, a tensor is not on an NVIDIA GPU, not aligned or of
    another dtype, or cuBLASLt has no algorithm. Raises cuBLASLtError for an error of cuBLASLt.
    """
    tensors = [x for x in (a, b, out, bias, aux) if x is not None]
    fits = all(x.is_cuda and x.data_ptr() % ALIGNMENT == 0 and x.dtype in TYPES for x in tensors)
    if not fits or a.dtype == torch.float32 or torch.version.hip or cublasLt is None:
        return False
    parts = [epilogue] * (epilogue is not None) + ["BIAS"] * (bias is not None)
    epilogue = Epilogue["_".join(parts) or "DEFAULT"]
    pointers = bias, aux, scale_a, scale_b
    key = a.device, epilogue, fast_accumulation, *((x.dtype, x.shape, x.stride()) for x in (a, b, out))
    if key not in plans:
        plans[key] = Plan(a, b, torch.empty_like(out) if add else out, epilogue, fast_accumulation, pointers)
    plan = plans[key]
    if plan.algorithm is None:
        return False
    plan.set_pointers(*pointers)
    plan.launch(plan.algorithm, a, b, out, add)
    return True
