"""Attention on q, k and v as their product leaves them, side by side in memory, through cuDNN's front end.

F.scaled_dot_product_attention calls the same cuDNN kernels, but returns the gradients of q, k and v as three tensors,
which have to be copied side by side before the product's own backward. Here cuDNN writes them in place.

Documentation of the front end: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

import functools
import math

import cudnn
import torch

NotSupported = cudnn.cudnnGraphNotSupportedError
TYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}


@functools.cache
def handle(device):
    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.cache
def plan(B, T, H, D, dtype, device, backward):
    """cuDNN's graph for these sizes, and its tensors: q, k, v, y, stats, then for backward dy, dq, dk, dv."""
    graph = cudnn.pygraph(
        io_data_type=TYPES[dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle(device),
    )
    size = [B, H, T, D]
    packed, plain = ([T * width, D, width, 1] for width in (3 * H * D, H * D))  # strides of (B, T, 3C) and (B, T, C)
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


def execute(B, T, H, D, arguments, backward=False):
    """Run the plan on its tensors. Raises ValueError for tensors that do not have 16 bits."""
    if arguments[0].dtype not in TYPES:
        raise ValueError(f"packed attention is for bfloat16 and float16, not {arguments[0].dtype}: use autocast")
    device = arguments[0].device
    graph, tensors = plan(B, T, H, D, arguments[0].dtype, device, backward)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    cudnn.set_stream(handle(device), torch.cuda.current_stream(device).cuda_stream)
    graph.execute(dict(zip(tensors, arguments)), workspace, handle=handle(device))


@torch.library.custom_op("gpt2::packed_attention", mutates_args=())
def packed_qkv(qkv: torch.Tensor, n_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of n_head heads; then the softmax's log-sums, for backward. qkv (B, T, 3C) -> (B, T, C)."""
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


@torch.library.custom_op("gpt2::packed_attention_backward", mutates_args=())
def packed_qkv_backward(
    dy: torch.Tensor, qkv: torch.Tensor, y: torch.Tensor, stats: torch.Tensor, n_head: int
) -> torch.Tensor:
    """The gradient to qkv, (B, T, 3C)."""
    qkv = qkv.contiguous()
    B, T, C = y.shape
    dqkv = torch.empty_like(qkv)
    parts = [*qkv.split(C, dim=2), y, stats, dy, *dqkv.split(C, dim=2)]
    execute(B, T, n_head, C // n_head, parts, backward=True)
    return dqkv


@packed_qkv_backward.register_fake
def _(dy, qkv, y, stats, n_head):
    return torch.empty_like(qkv)


def keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], *output)
    ctx.n_head = inputs[1]
    ctx.set_materialize_grads(False)


def gradient(ctx, dy, _):
    return packed_qkv_backward(dy.contiguous(), *ctx.saved_tensors, ctx.n_head), None


packed_qkv.register_autograd(gradient, setup_context=keep)
