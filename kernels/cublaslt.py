"""GEMMs by cuBLASLt, through ctypes, for two features that PyTorch does not expose:

- GELU and its gradient in a GEMM's epilogue, while the result is still in registers (kernels/mlp.py).
- The choice of the algorithm: the first call with new shapes times the algorithms that cuBLASLt proposes and keeps the
  fastest one that gives the same bits as cuBLASLt's first proposal. So two ranks, or a run and its continuation, may
  choose different algorithms. The choice makes a step with --fp8 1.5% faster, in bf16 up to 1%.

Documentation: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

import ctypes
import functools
import statistics
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof

import torch

# Constants of library_types.h and cublasLt.h
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}  # cudaDataType_t
COMPUTE_32F = 68  # cublasComputeType_t
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 3, 4, 7, 8, 11, 12  # cublasLtMatmulDescAttributes_t
A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM, BIAS_DATA_TYPE = 17, 18, 25, 26
DEFAULT, BIAS, GELU_AUX, DGELU = 1, 4, 160, 192  # cublasLtEpilogue_t
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t

WORKSPACE_BYTES = 32 << 20
ALIGNMENT = 256  # bytes that cuBLASLt's heuristic assumes for every pointer
MAX_ALGORITHMS = 16
TIMING_ROUNDS = 5
# A changed summation order shows in about 2 of 10,000 bf16 results; smaller outputs may show no difference.
MIN_TUNED_SIZE = 1 << 20


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm that cuBLASLt proposes."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace_size", c_size_t),
        ("status", c_int),
        ("waves_count", c_float),
        ("reserved", c_int * 4),
    ]


@functools.cache
def library():
    """The cuBLASLt library that PyTorch has loaded, or None."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}") if torch.version.cuda else None
    except OSError:
        return None


def check(status, function):
    if status:
        raise RuntimeError(f"{function} returned status {status}")


def create(kind, *arguments):
    """A new cuBLASLt object: "MatmulDesc", "MatrixLayout", "MatmulPreference", or "" for a handle."""
    pointer = c_void_p()
    check(getattr(library(), f"cublasLt{kind}Create")(byref(pointer), *arguments), f"cublasLt{kind}Create")
    return pointer


def set_attribute(kind, pointer, attribute, value):
    """Set an attribute of a cuBLASLt object to a ctypes value."""
    function = f"cublasLt{kind}SetAttribute"
    check(getattr(library(), function)(pointer, c_int(attribute), byref(value), c_size_t(sizeof(value))), function)


@functools.cache
def handle(device):
    with torch.cuda.device(device):
        return create("")


@functools.cache
def preference():
    pointer = create("MatmulPreference")
    set_attribute("MatmulPreference", pointer, MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES))
    return pointer


def create_layout(x):
    """cuBLASLt's column-major layout: of xᵀ if x is row-major, of x if x is a transposed view."""
    rows, columns, leading = (*x.shape[::-1], x.stride(0)) if x.stride(1) == 1 else (*x.shape, x.stride(1))
    return create("MatrixLayout", c_int(TYPES[x.dtype]), c_uint64(rows), c_uint64(columns), c_int64(leading))


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
        self.descriptor = create("MatmulDesc", c_int(COMPUTE_32F), c_int(TYPES[torch.float32]))
        self.set(TRANSA, c_int32(b.stride(1) != 1))
        self.set(TRANSB, c_int32(a.stride(1) != 1))
        self.set(FAST_ACCUM, c_int8(fast_accumulation))
        bias, *others = pointers
        if bias is not None:  # a bias of zeros, as at the start of training, hides how an algorithm rounds the sum
            bias = torch.linspace(-1, 1, len(bias), dtype=bias.dtype, device=bias.device)
        self.set_pointers(bias, *others)
        self.algorithm = self.choose(a, b, out)

    def set(self, attribute, value):
        set_attribute("MatmulDesc", self.descriptor, attribute, value)

    def set_pointers(self, bias, aux, scale_a, scale_b):
        """Set the addresses of this call's tensors; None for a tensor that the GEMM does not have."""
        if bias is not None:
            self.set(BIAS_DATA_TYPE, c_int32(TYPES[bias.dtype]))
            self.set(BIAS_POINTER, c_void_p(bias.data_ptr()))
        if aux is not None:
            self.set(AUX_LD, c_int64(aux.stride(0)))
            self.set(AUX_POINTER, c_void_p(aux.data_ptr()))
        if scale_a is not None:
            self.set(A_SCALE_POINTER, c_void_p(scale_b.data_ptr()))
            self.set(B_SCALE_POINTER, c_void_p(scale_a.data_ptr()))

    def proposals(self, device):
        """The algorithms that cuBLASLt's heuristic proposes, best guess first.

        With a bias, also those for the GEMM without a bias that support a bias: some are faster.
        """
        proposed = []
        for epilogue in dict.fromkeys((self.epilogue & ~BIAS or DEFAULT, self.epilogue)):
            self.set(EPILOGUE, c_uint32(epilogue))
            results, count = (HeuristicResult * MAX_ALGORITHMS)(), c_int()
            library().cublasLtMatmulAlgoGetHeuristic(
                handle(device), self.descriptor, *self.layouts, preference(), c_int(MAX_ALGORITHMS), results,
                byref(count),
            )  # fmt: skip
            proposed = results[: count.value] + proposed
        valid = {}
        for result in proposed:
            status = library().cublasLtMatmulAlgoCheck(
                handle(device), self.descriptor, *self.layouts, byref(result.algorithm), byref(result)
            )
            if status == result.status == 0 and result.workspace_size <= WORKSPACE_BYTES:
                valid.setdefault(bytes(result.algorithm), result)
        return list(valid.values())

    def choose(self, a, b, out):
        """The fastest of the proposals that give the same bits as the first that runs. None where none runs."""
        runnable = (each for each in self.proposals(out.device) if self.launch(each, a, b, out) == 0)
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

    def launch(self, algorithm, a, b, out, factor=0.0):
        """Start out = a b + factor out on the current stream. Returns cuBLASLt's status: 0 is success."""
        workspace = torch.empty(algorithm.workspace_size, dtype=torch.uint8, device=out.device)
        b_pointer, a_pointer, out_pointer, workspace_pointer = (c_void_p(x.data_ptr()) for x in (b, a, out, workspace))
        b_layout, a_layout, added_layout, out_layout = self.layouts
        return library().cublasLtMatmul(
            handle(out.device), self.descriptor, byref(c_float(1)), b_pointer, b_layout, a_pointer, a_layout,
            byref(c_float(factor)), out_pointer, added_layout, out_pointer, out_layout, byref(algorithm.algorithm),
            workspace_pointer, c_size_t(algorithm.workspace_size),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )  # fmt: skip


plans = {}


def gemm(a, b, out, epilogue=0, bias=None, aux=None, scale_a=None, scale_b=None, fast_accumulation=False, add=False):
    """out = scale_a scale_b (a b) + bias, with an optional epilogue. Returns whether cuBLASLt supports this GEMM.

    a (N, K) and b (K, M) bf16, fp16, or float8 with a float32 scale each. Each of a and b is row-major or a transposed
    view of a row-major matrix. out (N, M) row-major. bias (M,) 16 bits.
    epilogue: GELU_AUX writes the result to aux and gelu(result) to out. DGELU multiplies the result by the derivative
    of gelu at aux. aux (N, M) 16 bits; gelu is the tanh form.
    fast_accumulation: sum float8 products in fewer bits, at a higher rate. add: add the result to out.
    False means that nothing is computed: cuBLASLt is missing, a tensor is not on a GPU, not aligned or of another
    dtype, or cuBLASLt has no algorithm. Raises RuntimeError for an error of cuBLASLt.
    """
    tensors = [x for x in (a, b, out, bias, aux) if x is not None]
    fits = all(x.is_cuda and x.data_ptr() % ALIGNMENT == 0 and x.dtype in TYPES for x in tensors)
    if not fits or a.dtype == torch.float32 or library() is None:
        return False
    epilogue = epilogue | (BIAS if bias is not None else 0) or DEFAULT
    pointers = bias, aux, scale_a, scale_b
    key = a.device, epilogue, fast_accumulation, *((x.dtype, x.shape, x.stride()) for x in (a, b, out))
    if key not in plans:
        plans[key] = Plan(a, b, torch.empty_like(out) if add else out, epilogue, fast_accumulation, pointers)
    plan = plans[key]
    if plan.algorithm is None:
        return False
    plan.set_pointers(*pointers)
    check(plan.launch(plan.algorithm, a, b, out, float(add)), "cublasLtMatmul")
    return True
