"""Attention: the kernels that --attention names, and the choice of F.scaled_dot_product_attention's."""

import torch
from torch.backends import cuda

# The kernels that F.scaled_dot_product_attention can be limited to, with PyTorch's answer to whether it has them
CAN_USE = dict(
    flash=cuda.can_use_flash_attention,
    efficient=cuda.can_use_efficient_attention,
    cudnn=cuda.can_use_cudnn_attention,
)
# their forward operators, whose outputs selective activation checkpointing keeps
SDPA_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)


def missing_sdpa_kernel(name, device, dtype, head_width):
    """Why one of CAN_USE cannot compute causal attention and its backward here, or None."""
    if device.type != "cuda":
        return f"on {device.type} PyTorch has one kernel for attention"
    q = torch.empty(1, 1, 128, head_width, device=device, dtype=dtype, requires_grad=True)
    if not CAN_USE[name](cuda.SDPAParams(q, q, q, None, 0.0, True, False)):
        return f"PyTorch has no {name} kernel here for {dtype} and heads of width {head_width}"


def limit_sdpa(attention):
    """Limit F.scaled_dot_product_attention to one of CAN_USE, or PyTorch's math where that has no kernel, in the whole
    process. attention: a value of --attention; with the others PyTorch chooses."""
    chosen = [attention] if attention in CAN_USE else CAN_USE
    cuda.enable_flash_sdp("flash" in chosen)
    cuda.enable_mem_efficient_sdp("efficient" in chosen)
    cuda.enable_cudnn_sdp("cudnn" in chosen)


def has_varlen_attention(device, head_width):
    """Whether FlashAttention-2 takes documents by their offsets (varlen_attn) under the present autocast."""
    if device.type != "cuda" or torch.version.hip or not torch.is_autocast_enabled("cuda"):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_width % 8 == 0 and head_width <= 256
