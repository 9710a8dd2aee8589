"""The roofline model (Williams, Waterman, Patterson 2009): the GPU's peaks, and the FLOPs and bytes of one step.

A kernel reaches at most min(peak FLOP/s, arithmetic intensity × memory bandwidth), its roof; arithmetic intensity is
FLOPs per byte of memory traffic.
"""

import torch


def memory_bandwidth(device):
    """The bytes/s of a GPU's memory by its clock and bus width, or None if they are unknown."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, bits
    return 2 * clock * 1e3 * width / 8 or None  # double data rate: two transfers per clock


def gpu_peaks(device, peak_flops):
    """(FLOP/s, bytes/s) of a GPU with `peak_flops`, or None if one of the two is unknown."""
    bandwidth = memory_bandwidth(device)
    return (peak_flops, bandwidth) if peak_flops and bandwidth else None


def work(c, T, tokens):
    """{category: (FLOPs, bytes)} of one step on `tokens` tokens in sequences of T; c: GPTConfig. Forward and backward.

    Bytes are the least possible traffic: each operation reads its inputs once and writes its outputs once. An element
    takes 2 bytes in an activation, 4 in the optimizer, and 4 in the residual stream without bf16_residual. The GEMMs'
    weights are left out: 1% of the bytes for a micro-batch of 64 × 1024 tokens.
    FLOPs are exact for GEMMs and flash attention, and rough for the other categories; those are limited by bandwidth,
    where FLOPs cancel out of the share of the roof. Without flash, attention's GEMMs count as "matrix products", as
    their kernels do. mask_documents leaves out scores between documents; they are counted here.
    """
    L, C, H, V = c.n_layer, c.n_embd, c.n_head, c.vocab_size
    activation = 2  # bytes
    stream = 2 if c.bf16_residual else 4  # bytes

    # Each linear layer has three GEMMs of equal size: output, gradient of the input, gradient of the weight. Each of
    # them reads or writes one activation of n_in and one of n_out elements per token.
    linears = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)] * L + [(C, V)]  # (n_in, n_out)
    gemm_flops = sum(3 * 2 * tokens * n_in * n_out for n_in, n_out in linears)
    gemm_bytes = sum(3 * activation * tokens * (n_in + n_out) for n_in, n_out in linears)

    hidden = 4 * C * L * tokens  # elements in all MLPs' hidden layers
    if c.fused_gelu:
        # GELU runs in the GEMMs' epilogues: forward also writes GELU's input, backward also reads it
        gemm_bytes += 2 * activation * hidden
        gelu_bytes = 0
    else:
        # forward reads input, writes output; backward reads input and gradient, writes gradient
        gelu_bytes = 5 * activation * hidden

    if c.attention != "written_out":
        # 2 GEMMs forward and 5 backward (Dao 2023, FlashAttention-2) of 2·T·C FLOPs per token, half of which the causal
        # mask skips. Forward reads q, k, v, writes y; backward reads q, k, v, y, dy, writes dq, dk, dv.
        attention = (7 * tokens * T * C * L, 12 * activation * tokens * C * L)
    else:
        # 2 GEMMs forward and 4 backward over all T × T scores; each moves one (T, T) and two (T, C / H) matrices per
        # head. What is left is the softmax: forward reads scores, writes probabilities; backward reads probabilities
        # and gradient, writes gradient.
        gemm_flops += 6 * 2 * tokens * T * C * L
        gemm_bytes += 6 * activation * tokens * (H * T + 2 * C) * L
        attention = (9 * tokens * H * T * L, 5 * activation * tokens * H * T * L)

    # The loss reads the logits for the log-sum-exp, reads them again (from cache with fused_cross_entropy) and writes
    # their gradient.
    loss_accesses = 2 if c.fused_cross_entropy else 3

    # LayerNorm with the residual addition before it. Forward reads stream and branch, writes stream and normalized
    # stream; backward reads stream, gradient of the stream and gradient of the normalized stream, writes the gradient
    # of the stream. With a float32 stream backward also writes that gradient in 16 bits, for the branch's GEMMs.
    norms = 2 * L + 1
    norm_bytes = 5 * stream + 3 * activation + (activation if stream > activation else 0)  # per element

    parameters = 12 * L * C * C + (V + T) * C
    # gradient clipping reads the gradient; AdamW reads weight, gradient and two moments, writes all but the gradient
    optimizer_bytes = 4 * (1 + 4 + 3)  # per parameter

    return {
        "matrix products": (gemm_flops, gemm_bytes),
        "attention": attention,
        "loss": (8 * tokens * V, loss_accesses * activation * tokens * V),
        "normalization": (20 * tokens * C * norms, norm_bytes * tokens * C * norms),
        "element-wise": (20 * hidden, gelu_bytes),
        "optimizer": (16 * parameters, optimizer_bytes * parameters),
    }
