"""The kernels that F.scaled_dot_product_attention chooses from: cuDNN's, FlashAttention-2, memory-efficient attention.

https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend

BACKENDS = dict(
    cudnn=SDPBackend.CUDNN_ATTENTION,
    flash=SDPBackend.FLASH_ATTENTION,
    efficient=SDPBackend.EFFICIENT_ATTENTION,
)
CAN_USE = dict(
    cudnn=cuda.can_use_cudnn_attention,
    flash=cuda.can_use_flash_attention,
    efficient=cuda.can_use_efficient_attention,
)
# their forward operators, whose outputs selective activation checkpointing keeps
OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)


def missing(name, device, dtype, head_width):
    """Why a backend cannot compute causal attention and its backward here, or None."""
    if device.type != "cuda":
        return f"on {device.type} PyTorch has one kernel for attention"
    q = torch.empty(1, 1, 128, head_width, device=device, dtype=dtype, requires_grad=True)
    if not CAN_USE[name](cuda.SDPAParams(q, q, q, None, 0.0, True, False)):
        return f"PyTorch has no {name} kernel here for {dtype} and heads of width {head_width}"


def use_backend(name):
    """Let F.scaled_dot_product_attention choose this one of BACKENDS, or PyTorch's math where it has no kernel, in the
    whole process; any other name: PyTorch chooses."""
    chosen = [name] if name in BACKENDS else BACKENDS
    cuda.enable_cudnn_sdp("cudnn" in chosen)
    cuda.enable_flash_sdp("flash" in chosen)
    cuda.enable_mem_efficient_sdp("efficient" in chosen)
