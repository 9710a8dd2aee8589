"""Attention on packed q, k and v by cuDNN.

F.scaled_dot_product_attention returns the gradients of q, k and v as three tensors, which a copy must then pack for the
backward of c_attn. Through its front end cuDNN reads q, k and v from, and writes their gradients to, strided views of
(B, T, 3C) tensors, as the GEMM of c_attn writes and reads them.

Documents are "ragged" sequences of the same tensors: an offset for each, and a length.

The backward is cuDNN's, or FlashAttention-4's (kernels/flash4.py).

Documentation of the front end: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

import functools
import math

import torch
from torch import Tensor

from common.errors import UserError, first_line


@torch.library.custom_op("gpt2::packed_qkv", mutates_args=())
def packed_qkv(
    qkv: Tensor, n_head: int, offsets: Tensor | None = None, flash4_backward: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, stats) of causal attention with n_head heads. qkv (B, T, 3C) bf16 or fp16.

    offsets, of kernels.documents.Documents: a token attends within its own document.
    flash4_backward: the backward is FlashAttention-4's, for Hopper; needs flash-attn-4.
    y (B, T, C); stats (B, H, T, 1) float32, with documents (B, T, H): the log-sum-exp of each softmax, for backward.
    Raises UserError where cuDNN does not support the sizes.
    """
    qkv = qkv.contiguous()
    B, T, C = *qkv.shape[:2], qkv.size(2) // 3
    y = qkv.new_empty(B, T, C)
    stats = new_stats(qkv, n_head, offsets)
    execute(B, T, n_head, C // n_head, [*qkv.split(C, dim=2), y, stats], offsets)
    return y, stats


def new_stats(qkv, n_head, offsets):
    B, T, _ = qkv.shape
    return qkv.new_empty((B, n_head, T, 1) if offsets is None else (B, T, n_head), dtype=torch.float32)


@packed_qkv.register_fake
def _(qkv, n_head, offsets=None, flash4_backward=False):
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width // 3), new_stats(qkv, n_head, offsets)


@torch.library.custom_op("gpt2::packed_qkv_backward", mutates_args=())
def packed_qkv_backward(
    dy: Tensor, qkv: Tensor, y: Tensor, stats: Tensor, n_head: int, offsets: Tensor | None, flash4_backward: bool
) -> Tensor:
    """The gradient of qkv, (B, T, 3C), for dy (B, T, C)."""
    qkv = qkv.contiguous()
    B, T, C = y.shape
    dqkv = torch.empty_like(qkv)
    if flash4_backward:
        from kernels import flash4

        flash4.backward(dy, qkv, y, stats, n_head, dqkv, offsets)
        return dqkv
    tensors = [*qkv.split(C, dim=2), y, stats, dy, *dqkv.split(C, dim=2)]
    execute(B, T, n_head, C // n_head, tensors, offsets, backward=True)
    return dqkv


@packed_qkv_backward.register_fake
def _(dy, qkv, y, stats, n_head, offsets, flash4_backward):
    return torch.empty_like(qkv)


def save_for_backward(ctx, inputs, output):
    qkv, ctx.n_head, offsets, ctx.flash4_backward = inputs
    ctx.save_for_backward(qkv, *output, offsets)
    ctx.set_materialize_grads(False)


def backward(ctx, dy, _):
    qkv, y, stats, offsets = ctx.saved_tensors
    dqkv = packed_qkv_backward(dy.contiguous(), qkv, y, stats, ctx.n_head, offsets, ctx.flash4_backward)
    return dqkv, None, None, None


packed_qkv.register_autograd(backward, setup_context=save_for_backward)


# ----------------------------------------------------------------------------------------------------------------------
# cuDNN's graphs


def execute(B, T, H, D, tensors, offsets, backward=False):
    """Run cuDNN's graph for these sizes on the current stream. tensors: in the order that `plan` returns them."""
    import cudnn

    device = tensors[0].device
    sequences, ragged = B, 0
    if offsets is not None:
        sequences, ragged = len(offsets) - 1, B * T
        tensors = [*tensors, *ragged_tensors(offsets, H, D)]
    try:
        graph, graph_tensors = plan(sequences, T, H, D, tensors[0].dtype, device, backward, ragged)
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
        raise UserError(
            f"cuDNN has no attention for {H} heads of width {D}, {sequences} sequences of {T} tokens "
            f"({first_line(error)}): use --attention sdpa"
        ) from error
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    cudnn.set_stream(handle(device), torch.cuda.current_stream(device).cuda_stream)
    graph.execute(dict(zip(graph_tensors, tensors)), workspace, handle=handle(device))


def ragged_tensors(offsets, H, D):
    """The tensors of RAGGED for documents at these offsets, in tokens; cuDNN's are in elements of each tensor."""
    lengths = offsets.diff()
    packed, plain, stats = offsets * row_widths(H, D, offsets.device)
    return lengths, lengths, packed, packed, packed, plain, stats


@functools.cache
def row_widths(H, D, device):
    """Elements of a token in (B, T, 3C), (B, T, C) and (B, T, H) tensors, (3, 1) int64."""
    return torch.tensor([[3 * H * D], [H * D], [H]], device=device)


@functools.cache
def handle(device):
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


RAGGED = ("length_q", "length_kv", "offset_q", "offset_k", "offset_v", "offset_y", "offset_stats")


@functools.cache
def plan(B, T, H, D, dtype, device, backward, ragged=0):
    """cuDNN's graph for these sizes, and its tensors: q, k, v, y, stats, and for backward dy, dq, dk, dv.

    ragged: with documents, the tokens of them all; B then counts documents, and the tensors end with those of RAGGED.
    Raises RuntimeError or cudnn.cudnnGraphNotSupportedError where cuDNN has no kernel for the sizes.
    """
    import cudnn

    own_type = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
    FLOAT, INT32, INT64 = cudnn.data_type.FLOAT, cudnn.data_type.INT32, cudnn.data_type.INT64
    graph = cudnn.pygraph(
        io_data_type=own_type, intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle(device)
    )
    size = [B, H, T, D]
    # strides of (B, H, T, D) views of (B, T, 3C) and of (B, T, C)
    packed, plain = ([T * width, D, width, 1] for width in (3 * H * D, H * D))
    stats_size, stats_stride = [B, H, T, 1], [H * T, 1, H, 1] if ragged else [H * T, T, 1, 1]
    options = dict(attn_scale=1 / math.sqrt(D), use_causal_mask=True)
    inputs = {}
    for name in RAGGED if ragged else ():
        rows, kind = (B, INT32) if name.startswith("length") else (B + 1, INT64)
        inputs[name] = graph.tensor(name=name, dim=[rows, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind)
    if ragged:
        options |= dict(use_padding_mask=True, seq_len_q=inputs["length_q"], seq_len_kv=inputs["length_kv"])

    def tensor(name, stride, offset, size=size, kind=own_type):
        place = dict(ragged_offset=inputs[offset]) if ragged else {}
        return graph.tensor(name=name, dim=size, stride=stride, data_type=kind, **place)

    def output(tensor, stride, offset, size=size, kind=own_type):
        tensor.set_output(True).set_dim(size).set_stride(stride).set_data_type(kind)
        if ragged:
            tensor.set_ragged_offset(inputs[offset])

    q, k, v = (tensor(name, packed, f"offset_{name}") for name in "qkv")
    if backward:
        y, dy = (tensor(name, plain, "offset_y") for name in ("y", "dy"))
        stats = tensor("stats", stats_stride, "offset_stats", stats_size, FLOAT)
        options["use_deterministic_algorithm"] = torch.are_deterministic_algorithms_enabled()
        if ragged:  # else the workspace is for B * T tokens; cuDNN wants multiples of 64
            options |= dict.fromkeys(("max_total_seq_len_q", "max_total_seq_len_kv"), -(-ragged // 64) * 64)
        gradients = graph.sdpa_backward(name="backward", q=q, k=k, v=v, o=y, dO=dy, stats=stats, **options)
        for name, gradient in zip("qkv", gradients):
            output(gradient, packed, f"offset_{name}")
        tensors = [q, k, v, y, stats, dy, *gradients]
    else:
        y, stats = graph.sdpa(name="forward", q=q, k=k, v=v, generate_stats=True, **options)
        output(y, plain, "offset_y")
        output(stats, stats_stride, "offset_stats", stats_size, FLOAT)
        tensors = [q, k, v, y, stats]
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, [*tensors, *inputs.values()]
