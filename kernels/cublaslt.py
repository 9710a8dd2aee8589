"""GEMMs by cuBLASLt, for two features that PyTorch does not expose:

- GELU and its gradient in a GEMM's epilogue, while the result is still in registers (kernels/mlp.py).
- The choice of the algorithm: the first call with new shapes times the algorithms that cuBLASLt proposes and keeps the
  fastest that gives the same bits as the first that runs: another choice, on another rank or after a restart, changes
  no result. kernels/tuned_gemms.py calls it for the GEMMs of compiled graphs.

kernels/gemm_plan.py makes the calls, through nvmath-python.
"""

import functools

import torch

from common.errors import first_line

# Each dtype's name in cudaDataType_t
TYPES = {
    torch.float32: "CUDA_R_32F",
    torch.float16: "CUDA_R_16F",
    torch.bfloat16: "CUDA_R_16BF",
    torch.float8_e4m3fn: "CUDA_R_8F_E4M3",
}
ALIGNMENT = 256  # bytes that cuBLASLt's heuristic assumes for every pointer
# A changed summation order shows in about 2 of 10,000 bf16 results; smaller outputs may show no difference.
MIN_TUNED_SIZE = 1 << 20


@functools.cache
def missing():
    """Why cuBLASLt cannot be called, or None."""
    if torch.version.cuda is None:
        return "this PyTorch is not built for NVIDIA GPUs"
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()  # finds the library that PyTorch has loaded
    except ImportError as error:
        return f"nvmath-python cannot be imported ({first_line(error)}): pip install -r requirements.txt"
    except Exception as error:  # releases that do not fit each other, no library
        return f"nvmath-python cannot be used ({first_line(error)})"


plans = {}


def gemm(a, b, out, epilogue=None, bias=None, aux=None, scale_a=None, scale_b=None, fast_accumulation=False, add=False):
    """out = scale_a scale_b (a b) + bias, with an optional epilogue. Returns whether cuBLASLt supports this GEMM.

    a (N, K) and b (K, M) bf16, fp16, or float8 with a float32 scale each. Each of a and b is row-major or a transposed
    view of a row-major matrix. out (N, M) row-major. bias (M,) 16 bits.
    epilogue: "GELU_AUX" writes the result to aux and gelu(result) to out. "DGELU" multiplies the result by the
    derivative of gelu at aux, and takes no bias. aux (N, M) 16 bits; gelu is the tanh form.
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
        from kernels.gemm_plan import Plan  # needs nvmath-python

        plan = Plan(a, b, torch.empty_like(out) if add else out, epilogue, fast_accumulation, pointers)
        if plan.is_final:
            plans[key] = plan
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
