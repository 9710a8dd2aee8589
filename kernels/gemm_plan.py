"""The plan of one of cuBLASLt's GEMMs, through nvmath-python's bindings: layouts, descriptor, and the tuned algorithm.

This file needs nvmath-python and an NVIDIA GPU: kernels/cublaslt.py imports it where it can be used.

Documentation: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api, and of the bindings:
https://docs.nvidia.com/cuda/nvmath-python/latest/
"""

import functools
import statistics
from contextlib import suppress

import numpy as np
import torch
from nvmath import CudaDataType
from nvmath.bindings import cublas, cublasLt
from nvmath.bindings.cublasLt import Epilogue, MatmulDescAttribute, MatmulPreferenceAttribute

from kernels.cublaslt import MIN_TUNED_SIZE, TYPES

WORKSPACE_BYTES = 32 << 20
MAX_ALGORITHMS = 16
TIMING_ROUNDS = 5


def data_type(dtype):
    return CudaDataType[TYPES[dtype]]


@functools.cache
def create_handle(device):
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
    """A number that cuBLASLt reads through a pointer: an array that stays in host memory."""
    return np.array([value], np.float32)


def create_layout(x):
    """cuBLASLt's column-major layout: of xᵀ if x is row-major, of x if x is a transposed view."""
    rows, columns, leading = (*x.shape[::-1], x.stride(0)) if x.stride(1) == 1 else (*x.shape, x.stride(1))
    return cublasLt.matrix_layout_create(data_type(x.dtype), rows, columns, leading)


class Plan:
    """The layouts, the descriptor and the algorithm for out = a b with given shapes, strides, dtypes and epilogue.

    algorithm is None where cuBLASLt has none. is_final is False where the results were not finite, as in fp16 while the
    loss scale is too large: nothing could be compared, and the next call should choose again. The arguments are those
    of `gemm`; `pointers` is (bias, aux, scale_a, scale_b).
    """

    def __init__(self, a, b, out, epilogue, fast_accumulation, pointers):
        # cuBLASLt is column-major, PyTorch row-major: out = a b is outᵀ = bᵀ aᵀ to cuBLASLt. The third layout is of the
        # matrix to add: out, or with the factor 0 none.
        self.layouts = [create_layout(x) for x in (b, a, out, out)]
        bias, *others = pointers
        parts = [epilogue] * (epilogue is not None) + ["BIAS"] * (bias is not None)
        self.epilogue = Epilogue["_".join(parts) or "DEFAULT"]
        self.descriptor = cublasLt.matmul_desc_create(cublas.ComputeType.COMPUTE_32F, CudaDataType.CUDA_R_32F)
        self.set("TRANSA", b.stride(1) != 1)
        self.set("TRANSB", a.stride(1) != 1)
        self.set("FAST_ACCUM", fast_accumulation)
        if bias is not None:  # a bias of zeros, as at the start of training, hides how an algorithm rounds the sum
            bias = torch.linspace(-1, 1, len(bias), dtype=bias.dtype, device=bias.device)
        self.set_pointers(bias, *others)
        self.is_final = True
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

        With a bias, also those proposed without one: some run with a bias, and are faster.
        """
        handle, limits, proposed = create_handle(device), preference(), []
        for epilogue in dict.fromkeys((self.epilogue & ~Epilogue.BIAS or Epilogue.DEFAULT, self.epilogue)):
            self.set("EPILOGUE", epilogue)
            results, count = np.zeros(MAX_ALGORITHMS, cublasLt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
            with suppress(cublasLt.cuBLASLtError):  # cuBLASLt has no algorithm for these sizes
                cublasLt.matmul_algo_get_heuristic(
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
        if not torch.stack(out.aminmax()).isfinite().all():  # out.isfinite() would make temporary tensors
            self.is_final = False
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
        handle, stream = create_handle(out.device), torch.cuda.current_stream(out.device).cuda_stream
        b_layout, a_layout, added_layout, out_layout = self.layouts
        cublasLt.matmul(
            handle, self.descriptor, float32(1).ctypes.data, b.data_ptr(), b_layout, a.data_ptr(), a_layout,
            float32(add).ctypes.data, out.data_ptr(), added_layout, out.data_ptr(), out_layout, algorithm.ctypes.data,
            workspace.data_ptr(), workspace.numel(), stream,
        )  # fmt: skip
