"""GEMMs by cuBLASLt, for two features that PyTorch does not expose:

- GELU and its gradient in a GEMM's epilogue, while the result is still in registers (kernels/mlp.py).
- The choice of the algorithm: the first call with new shapes times the algorithms that cuBLASLt proposes and keeps the
  fastest that gives the same bits as the first that runs: another choice, on another rank or after a restart, changes
  no result. kernels/tuned_gemms.py calls it for the GEMMs of compiled graphs.

The calls go through nvmath-python, which is imported where it is first needed: not every machine has it.

Documentation: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api, and of the bindings:
https://docs.nvidia.com/cuda/nvmath-python/latest/
"""

import functools
import statistics
from contextlib import suppress

import numpy as np
import torch

from common.device import missing_package
from common.errors import first_line

# Each dtype's name in cudaDataType_t
TYPES = {
    torch.float32: "CUDA_R_32F",
    torch.bfloat16: "CUDA_R_16BF",
    torch.float8_e4m3fn: "CUDA_R_8F_E4M3",
}
ALIGNMENT = 256  # bytes that cuBLASLt's heuristic assumes for every pointer
# A changed summation order shows in about 2 of 10,000 bf16 results; smaller outputs may show no difference.
MIN_TUNED_SIZE = 1 << 20
WORKSPACE_BYTES = 32 << 20
MAX_ALGORITHMS = 16
TIMING_ROUNDS = 5
ZERO, ONE = np.zeros(1, np.float32), np.ones(1, np.float32)  # factors, which cuBLASLt reads through pointers


@functools.cache
def missing():
    """Why cuBLASLt cannot be called, or None."""
    if problem := missing_package("nvmath.bindings.cublasLt"):
        return problem
    try:
        library().get_version()  # finds the library that PyTorch has loaded
    except Exception as error:
        return f"nvmath cannot be used ({first_line(error)})"


plans = {}


def gemm(a, b, out, epilogue=None, bias=None, aux=None, scale_a=None, scale_b=None, fast_accumulation=False, add=False):
    """out = scale_a scale_b (a b) + bias, with an optional epilogue. Returns whether cuBLASLt supports this GEMM.

    a (N, K) and b (K, M) bf16, or float8 with a float32 scale each. Each of a and b is row-major or a transposed
    view of a row-major matrix. out (N, M) row-major. bias (M,) bf16.
    epilogue: "GELU_AUX" writes the result to aux and gelu(result) to out. "DGELU" multiplies the result by the
    derivative of gelu at aux, and takes no bias. aux (N, M) bf16; gelu is the tanh form.
    fast_accumulation: sum float8 products in fewer bits, at a higher rate. add: add the result to out.
    False means that nothing is computed: `missing` has a reason, a tensor is not on a GPU, not aligned or of another
    dtype or layout, or cuBLASLt has no algorithm. Raises cuBLASLtError for an error of cuBLASLt.
    """
    tensors = [x for x in (a, b, out, bias, aux) if x is not None]
    fits = all(x.is_cuda and x.data_ptr() % ALIGNMENT == 0 and x.dtype in TYPES and 1 in x.stride() for x in tensors)
    if not fits or a.dtype == torch.float32 or missing():
        return False
    pointers = bias, aux, scale_a, scale_b
    key = a.device, epilogue, bias is None, fast_accumulation, *((x.dtype, x.shape, x.stride()) for x in (a, b, out))
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = Plan(a, b, torch.empty_like(out) if add else out, epilogue, fast_accumulation, pointers)
    if plan.algorithm is None:
        return False
    plan.set_pointers(*pointers)
    plan.launch(plan.algorithm, a, b, out, add)
    return True


def mm(a, b, bias=None, out=None):
    """a b + bias by `gemm` where it supports this GEMM, else by PyTorch. As torch.mm and torch.addmm."""
    out = a.new_empty(len(a), b.size(1)) if out is None else out
    if not gemm(a, b, out, bias=bias):
        torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# The plan of one GEMM: layouts, descriptor, and the tuned algorithm


@functools.cache
def library():
    """nvmath-python's module of cuBLASLt's functions."""
    from nvmath.bindings import cublasLt

    return cublasLt


@functools.cache
def data_type(dtype):
    from nvmath import CudaDataType

    return CudaDataType[TYPES[dtype]]


@functools.cache
def create_handle(device):
    with torch.cuda.device(device):
        return library().create()


@functools.cache
def preference():
    pointer, size = library().matmul_preference_create(), np.array([WORKSPACE_BYTES], np.uint64)
    attribute = library().MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
    library().matmul_preference_set_attribute(pointer, attribute, size.ctypes.data, size.nbytes)
    return pointer


@functools.cache
def descriptor_attribute(name):
    """(the number, the NumPy dtype) of one of cublasLtMatmulDescAttributes_t."""
    attribute = library().MatmulDescAttribute[name]
    return attribute, library().get_matmul_desc_attribute_dtype(attribute)


def create_layout(x):
    """cuBLASLt's column-major layout: of xᵀ if x is row-major, of x if x is a transposed view."""
    rows, columns, leading = (*x.shape[::-1], x.stride(0)) if x.stride(1) == 1 else (*x.shape, x.stride(1))
    return library().matrix_layout_create(data_type(x.dtype), rows, columns, leading)


class Plan:
    """The layouts, the descriptor and the algorithm for out = a b with given shapes, strides, dtypes and epilogue.

    algorithm is None where cuBLASLt has none. The arguments are those of `gemm`; `pointers` is (bias, aux, scale_a,
    scale_b).
    """

    def __init__(self, a, b, out, epilogue, fast_accumulation, pointers):
        from nvmath.bindings import cublas

        # cuBLASLt is column-major, PyTorch row-major: out = a b is outᵀ = bᵀ aᵀ to cuBLASLt. The third layout is of the
        # matrix to add: out, or with the factor 0 none.
        self.layouts = [create_layout(x) for x in (b, a, out, out)]
        bias, *others = pointers
        parts = [epilogue] * (epilogue is not None) + ["BIAS"] * (bias is not None)
        self.epilogue = library().Epilogue["_".join(parts) or "DEFAULT"]
        self.descriptor = library().matmul_desc_create(cublas.ComputeType.COMPUTE_32F, data_type(torch.float32))
        self.set("TRANSA", b.stride(1) != 1)
        self.set("TRANSB", a.stride(1) != 1)
        self.set("FAST_ACCUM", fast_accumulation)
        if bias is not None:  # a bias of zeros, as at the start of training, hides how an algorithm rounds the sum
            bias = torch.linspace(-1, 1, len(bias), dtype=bias.dtype, device=bias.device)
        self.set_pointers(bias, *others)
        self.algorithm = self.choose(a, b, out)

    def set(self, name, value):
        attribute, dtype = descriptor_attribute(name)
        value = np.array([value], dtype)
        library().matmul_desc_set_attribute(self.descriptor, attribute, value.ctypes.data, value.nbytes)

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

        With a bias, also those proposed without one: some run with a bias, and are faster.
        """
        handle, limits, proposed = create_handle(device), preference(), []
        lt, kinds = library(), library().Epilogue
        for epilogue in dict.fromkeys((self.epilogue & ~kinds.BIAS or kinds.DEFAULT, self.epilogue)):
            self.set("EPILOGUE", epilogue)
            results, count = np.zeros(MAX_ALGORITHMS, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
            with suppress(lt.cuBLASLtError):  # cuBLASLt has no algorithm for these sizes
                lt.matmul_algo_get_heuristic(
                    handle, self.descriptor, *self.layouts, limits, MAX_ALGORITHMS, results.ctypes.data,
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
        if first is None or out.numel() < MIN_TUNED_SIZE:
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
        with suppress(library().cuBLASLtError):
            self.launch(algorithm, a, b, out)
            return True
        return False

    def launch(self, algorithm, a, b, out, add=False):
        """Start out = a b, with `add` out += a b, on the current stream. Raises cuBLASLtError if cuBLASLt refuses."""
        factor = ONE if add else ZERO
        workspace = torch.empty(algorithm["workspace_size"].item(), dtype=torch.uint8, device=out.device)
        handle, stream = create_handle(out.device), torch.cuda.current_stream(out.device).cuda_stream
        b_layout, a_layout, added_layout, out_layout = self.layouts
        library().matmul(
            handle, self.descriptor, ONE.ctypes.data, b.data_ptr(), b_layout, a.data_ptr(), a_layout,
            factor.ctypes.data, out.data_ptr(), added_layout, out.data_ptr(), out_layout, algorithm.ctypes.data,
            workspace.data_ptr(), workspace.numel(), stream,
        )  # fmt: skip
