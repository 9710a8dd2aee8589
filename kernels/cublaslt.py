"""Matrix products by cuBLASLt: with GELU at their end, and with autotune in the fastest algorithm.

torch.mm takes the algorithm that cuBLAS guesses to be best from the sizes. With autotune the first call with new sizes
times all that it names, on the tensors at hand, and keeps the fastest of those that give the same bits as its guess.
Where cuBLASLt is missing or cannot, PyTorch's own operations compute the same.

Documentation: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

import ctypes
import functools
import statistics
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof

import torch
import torch.nn.functional as F

# The numbers of cublasLt.h and library_types.h
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
COMPUTE_IN_FLOAT32 = 68
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS, AUX, AUX_STRIDE = 3, 4, 7, 8, 11, 12
SCALE_A, SCALE_B, FAST_ACCUMULATION, BIAS_TYPE = 17, 18, 25, 26
NOTHING, ADD_BIAS, GELU, GELU_BACKWARD = 1, 4, 160, 192  # epilogues; GELU's keep and take what came before it, in AUX
MAX_WORKSPACE = 1

ALGORITHMS = 16  # to ask for
WORKSPACE_BYTES = 32 << 20

autotune = False
ROUNDS = 5  # of timing
# Another order of summing changes two bf16 numbers in ten thousand: few might not show it, and take no time anyway
MIN_NUMBERS = 1 << 20


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@functools.cache
def library():
    """cuBLASLt as PyTorch has loaded it, or None."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}") if torch.version.cuda else None
    except OSError:
        return None


def create(kind, *arguments):
    made = c_void_p()
    if status := getattr(library(), f"cublasLt{kind}Create")(byref(made), *arguments):
        raise RuntimeError(f"cublasLt{kind}Create ended with status {status}")
    return made


def put(kind, made, attribute, value):
    if status := getattr(library(), f"cublasLt{kind}SetAttribute")(
        made, c_int(attribute), byref(value), c_size_t(sizeof(value))
    ):
        raise RuntimeError(f"cublasLt{kind}SetAttribute({attribute}) ended with status {status}")


@functools.cache
def handle(device):
    with torch.cuda.device(device):
        return create("")


@functools.cache
def preference():
    made = create("MatmulPreference")
    put("MatmulPreference", made, MAX_WORKSPACE, c_uint64(WORKSPACE_BYTES))
    return made


def layout(x):
    """A matrix one of whose strides is 1, as cuBLAS has them: columns first."""
    rows, columns, stride = (*x.shape[::-1], x.stride(0)) if x.stride(1) == 1 else (*x.shape, x.stride(1))
    return create("MatrixLayout", c_int(TYPES[x.dtype]), c_uint64(rows), c_uint64(columns), c_int64(stride))


class Plan:
    """How to compute out = a b for tensors of these sizes and types, with what launch takes besides."""

    def __init__(self, a, b, out, epilogue, fast, addresses):
        # our rows are cuBLAS's columns: to it, this is outᵀ = bᵀ aᵀ
        self.layouts = [layout(x) for x in (b, a, out, out)]  # the last two: what is added, times 0, and the result
        self.epilogue = epilogue
        self.description = create("MatmulDesc", c_int(COMPUTE_IN_FLOAT32), c_int(TYPES[torch.float32]))
        self.put(TRANSPOSE_A, c_int32(b.stride(1) != 1))
        self.put(TRANSPOSE_B, c_int32(a.stride(1) != 1))
        self.put(FAST_ACCUMULATION, c_int8(fast))
        bias, *others = addresses
        if bias is not None:  # at first it is 0, which would not show how it is added
            bias = torch.linspace(-1, 1, len(bias), dtype=bias.dtype, device=bias.device)
        self.point(bias, *others)
        self.algorithm = self.choose(a, b, out)

    def put(self, attribute, value):
        put("MatmulDesc", self.description, attribute, value)

    def point(self, bias, aux, scale_a, scale_b):
        """Say where a call has these tensors; None where it has none."""
        if bias is not None:
            self.put(BIAS_TYPE, c_int32(TYPES[bias.dtype]))
            self.put(BIAS, c_void_p(bias.data_ptr()))
        if aux is not None:
            self.put(AUX_STRIDE, c_int64(aux.stride(0)))
            self.put(AUX, c_void_p(aux.data_ptr()))
        if scale_a is not None:
            self.put(SCALE_A, c_void_p(scale_b.data_ptr()))
            self.put(SCALE_B, c_void_p(scale_a.data_ptr()))

    def algorithms(self, device):
        """Those that cuBLASLt names, its guess first, and those that it names without the bias but can add it too."""
        named = []
        for epilogue in dict.fromkeys((self.epilogue & ~ADD_BIAS or NOTHING, self.epilogue)):
            self.put(EPILOGUE, c_uint32(epilogue))
            found, number = (Algorithm * ALGORITHMS)(), c_int()
            library().cublasLtMatmulAlgoGetHeuristic(
                handle(device), self.description, *self.layouts, preference(), c_int(ALGORITHMS), found, byref(number)
            )
            named = found[: number.value] + named
        possible = {}
        for each in named:
            status = library().cublasLtMatmulAlgoCheck(
                handle(device), self.description, *self.layouts, byref(each.algorithm), byref(each)
            )
            if status == each.status == 0 and each.workspace <= WORKSPACE_BYTES:
                possible.setdefault(bytes(each.algorithm), each)
        return list(possible.values())

    def choose(self, a, b, out):
        """The first algorithm that can, or with autotune the fastest that gives the same bits; None if none can."""
        able = (algorithm for algorithm in self.algorithms(out.device) if not self.run(algorithm, a, b, out))
        first = next(able, None)
        if first is None or not autotune or out.numel() < MIN_NUMBERS or not out.isfinite().all():
            return first
        expected = out.clone()
        # able runs them one by one: out is what the latest has made
        same = [first, *(algorithm for algorithm in able if torch.equal(out, expected))]
        events = []
        for algorithm in same * ROUNDS:
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
            self.run(algorithm, a, b, out)
            events[-1][1].record()
        torch.cuda.synchronize(out.device)
        times = [start.elapsed_time(end) for start, end in events]
        medians = [statistics.median(times[i :: len(same)]) for i in range(len(same))]
        return same[medians.index(min(medians))]

    def run(self, algorithm, a, b, out):
        """Start it. Returns cuBLAS's status, 0 if all is well."""
        workspace = torch.empty(algorithm.workspace, dtype=torch.uint8, device=out.device)
        b, a, out_at, work_at = (c_void_p(x.data_ptr()) for x in (b, a, out, workspace))
        b_layout, a_layout, added, result = self.layouts
        return library().cublasLtMatmul(
            handle(out.device), self.description, byref(c_float(1)), b, b_layout, a, a_layout, byref(c_float(0)),
            out_at, added, out_at, result, byref(algorithm.algorithm), work_at, c_size_t(algorithm.workspace),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )  # fmt: skip


plans = {}


def launch(a, b, out, gelu=0, bias=None, aux=None, scale_a=None, scale_b=None, fast=False):
    """out = a b + bias, then GELU or GELU_BACKWARD with aux; or nothing, and False, where cuBLASLt does not have it.

    a (N, K) and b (K, M), one of each one's strides 1, in 16 bits, or in 8 with a scale each: fast sums those in fewer
    bits. bias (M,) and aux (N, M) in 16 bits. out (N, M), row by row.
    """
    tensors = [x for x in (a, b, out, bias, aux) if x is not None]
    fit = all(x.is_cuda and x.data_ptr() % 256 == 0 and x.dtype in TYPES for x in tensors)
    if not fit or a.dtype == torch.float32 or library() is None:
        return False
    epilogue = gelu | (ADD_BIAS if bias is not None else 0) or NOTHING
    addresses = bias, aux, scale_a, scale_b
    key = a.device, epilogue, fast, *((x.dtype, x.shape, x.stride()) for x in (a, b, out))
    if key not in plans:
        plans[key] = Plan(a, b, out, epilogue, fast, addresses)
    plan = plans[key]
    if plan.algorithm is None:
        return False
    plan.point(*addresses)
    if status := plan.run(plan.algorithm, a, b, out):
        raise RuntimeError(f"cublasLtMatmul ended with status {status}")
    return True


def product(a, b, out=None, bias=None):
    """a b + bias (M,), in out if it is given."""
    out = a.new_empty(len(a), b.size(1)) if out is None else out
    if not launch(a, b, out, bias=bias):
        torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    return out


def add_product_(out, a, b):
    """out (float32) += aᵀ b, summed in float32 also where a and b have 16 bits."""
    if a.dtype == torch.float32 or not a.is_cuda:
        out.addmm_(a.t().float(), b.float())
    else:
        torch.addmm(out, a.t(), b, out_dtype=torch.float32, out=out)


# ----------------------------------------------------------------------------------------------------------------------
# The MLP. GELU, and in backward its gradient, are computed on what a product still has in registers


def fused_mlp(x, fc, proj, keep=True):
    """proj(gelu(fc(x))), with GELU in its tanh form, for two nn.Linear. x (..., C).

    keep: whether GELU's output stays in memory for backward, or is computed anew.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    w1, b1, w2, b2 = (parameter.to(dtype) for parameter in (fc.weight, fc.bias, proj.weight, proj.bias))
    return mlp(x.flatten(0, -2).to(dtype).contiguous(), w1, b1, w2, b2, keep)[0].view_as(x)


@torch.library.custom_op("gpt2::mlp", mutates_args=())
def mlp(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gelu(h) w2ᵀ + b2 for h = x w1ᵀ + b1; then h and, if it is to be kept, gelu(h).

    x (N, C), w1 (4C, C), w2 (C, 4C). b2 is added before the result is rounded to 16 bits. Added after it, together with
    the residual stream, it would meet a sum of two bf16 numbers, which often lies exactly between two others: then the
    smallest bias decides which way all of them are rounded.
    """
    h = x.new_empty(len(x), len(w1))
    a = torch.empty_like(h)
    if not launch(x, w1.t(), a, GELU, b1, h):
        torch.addmm(b1, x, w1.t(), out=h)
        a = F.gelu(h, approximate="tanh")
    return product(a, w2.t(), bias=b2), h, a if keep else a.new_empty(0)


@mlp.register_fake
def _(x, w1, b1, w2, b2, keep):
    h = x.new_empty(len(x), len(w1))
    return x.new_empty(len(x), len(w2)), h, torch.empty_like(h) if keep else h.new_empty(0)


@torch.library.custom_op("gpt2::mlp_backward", mutates_args=())
def mlp_backward(
    dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, h: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients to x, w1, b1 and w2."""
    a = a if len(a) else F.gelu(h, approximate="tanh")
    dh = torch.empty_like(h)
    if not launch(dy, w2, dh, GELU_BACKWARD, aux=h):
        dh = torch.ops.aten.gelu_backward(dy @ w2, h, approximate="tanh")
    db1 = torch.mm(dh.new_ones(1, len(dh)), dh)[0]  # sums of columns as a product: they read as fast as memory gives
    return product(dh, w1), torch.mm(dh.t(), x), db1, torch.mm(dy.t(), a)


@mlp_backward.register_fake
def _(dy, x, w1, w2, h, a):
    return tuple(each.new_empty(each.shape) for each in (x, w1, w1[:, 0], w2))


def keep_for_mlp(ctx, inputs, output):
    x, w1, _, w2, _, _ = inputs
    ctx.save_for_backward(x, w1, w2, *output[1:])
    ctx.set_materialize_grads(False)


def mlp_gradients(ctx, dy, *_):
    return *mlp_backward(dy.contiguous(), *ctx.saved_tensors), dy.sum(0), None


mlp.register_autograd(mlp_gradients, setup_context=keep_for_mlp)
