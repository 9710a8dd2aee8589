"""Flash attention on q, k and v packed in one tensor, as the GEMM of c_attn writes them, by cuDNN's front end.

F.scaled_dot_product_attention runs the same cuDNN kernels but returns the gradients of q, k and v as three tensors,
which a copy must then pack for the backward of c_attn. Here cuDNN reads q, k and v from, and writes their gradients to,
strided views of (B, T, 3C) tensors.

Documentation of the front end: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

import functools
import math

import cudnn
import torch

from common.cli import UserError, first_line

TYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}


@torch.library.custom_op("gpt2::packed_qkv", mutates_args=())
def packed_qkv(qkv: torch.Tensor, n_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, stats) of causal attention with n_head heads. qkv (B, T, 3C) bf16 or fp16.

    y (B, T, C); stats (B, H, T, 1) float32, the log-sum-exp of each softmax, which backward needs.
    Raises UserError where cuDNN does not support the sizes, ValueError for another dtype.
    """
    qkv = qkv.contiguous()
    B, T, C = *qkv.shape[:2], qkv.size(2) // 3
    y = qkv.new_empty(B, T, C)
    stats = qkv.new_empty(B, n_head, T, 1, dtype=torch.float32)
    execute(B, T, n_head, C // n_head, [*qkv.split(C, dim=2), y, stats])
    return y, stats


@packed_qkv.register_fake
def _(qkv, n_head):
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(B, n_head, T, 1, dtype=torch.float32)


@torch.library.custom_op("gpt2::packed_qkv_backward", mutates_args=())
def packed_qkv_backward(
    dy: torch.Tensor, qkv: torch.Tensor, y: torch.Tensor, stats: torch.Tensor, n_head: int
) -> torch.Tensor:
    """The gradient of qkv, (B, T, 3C), for dy (B, T, C)."""
    qkv = qkv.contiguous()
    B, T, C = y.shape
    dqkv = torch.empty_like(qkv)
    tensors = [*qkv.split(C, dim=2), y, stats, dy, *dqkv.split(C, dim=2)]
    execute(B, T, n_head, C // n_head, tensors, backward=True)
    return dqkv


@packed_qkv_backward.register_fake
def _(dy, qkv, y, stats, n_head):
    return torch.empty_like(qkv)


def save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], *output)
    ctx.n_head = inputs[1]
    ctx.set_materialize_grads(False)


def backward(ctx, dy, _):
    return packed_qkv_backward(dy.contiguous(), *ctx.saved_tensors, ctx.n_head), None


packed_qkv.register_autograd(backward, setup_context=save_for_backward)


# ----------------------------------------------------------------------------------------------------------------------
# cuDNN's graphs


def execute(B, T, H, D, tensors, backward=False):
    """Run cuDNN's graph for these sizes on the current stream; `plan` gives the tensors' order."""
    if tensors[0].dtype not in TYPES:
        raise ValueError(f"packed_qkv takes bfloat16 or float16, not {tensors[0].dtype}: use autocast")
    device = tensors[0].device
    try:
        graph, graph_tensors = plan(B, T, H, D, tensors[0].dtype, device, backward)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
        raise UserError(
            f"cuDNN has no attention for {H} heads of width {D}, {B} sequences of {T} tokens ({first_line(error)}): "
            "use --no_packed_qkv"
        ) from error
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    cudnn.set_stream(handle(device), torch.cuda.current_stream(device).cuda_stream)
    graph.execute(dict(zip(graph_tensors, tensors)), workspace, handle=handle(device))


@functools.cache
def handle(device):
    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.cache
def plan(B, T, H, D, dtype, device, backward):
    """cuDNN's graph for these sizes, and its tensors: q, k, v, y, stats, and for backward dy, dq, dk, dv.

    Raises RuntimeError or cudnn.cudnnGraphNotSupportedError where cuDNN has no kernel for the sizes.
    """
    graph = cudnn.pygraph(
        io_data_type=TYPES[dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle(device),
    )
    size = [B, H, T, D]
    # strides of (B, H, T, D) views of (B, T, 3C) and of (B, T, C)
    packed, plain = ([T * width, D, width, 1] for width in (3 * H * D, H * D))
    q, k, v = (graph.tensor(name=name, dim=size, stride=packed, data_type=TYPES[dtype]) for name in "qkv")
    options = dict(attn_scale=1 / math.sqrt(D), use_causal_mask=True)
    if backward:
        y, dy = (graph.tensor(name=name, dim=size, stride=plain, data_type=TYPES[dtype]) for name in ("y", "dy"))
        stats = graph.tensor(name="stats", dim=[B, H, T, 1], stride=[H * T, T, 1, 1], data_type=cudnn.data_type.FLOAT)
        options["use_deterministic_algorithm"] = torch.are_deterministic_algorithms_enabled()
        gradients = graph.sdpa_backward(name="backward", q=q, k=k, v=v, o=y, dO=dy, stats=stats, **options)
        for gradient in gradients:
            gradient.set_output(True).set_dim(size).set_stride(packed)
        tensors = [q, k, v, y, stats, dy, *gradients]
    else:
        y, stats = graph.sdpa(name="forward", q=q, k=k, v=v, generate_stats=True, **options)
        y.set_output(True).set_dim(size).set_stride(plain)
        stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
        tensors = [q, k, v, y, stats]
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, tensors
