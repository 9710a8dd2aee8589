"""What follows from the device: which optimizations it has, and the micro-batch that fits it."""

import importlib
import os
import shutil
import sysconfig
from pathlib import Path

import torch

import products
from cli import UserError, first_line
from parallel import blocks_together, row_length
from tokenizer import VOCAB_SIZE


def nearest_multiples(number, factor):
    """The multiples of factor below and above number, in words."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def fit_device(config, device, reasons):
    """Turn off, in place, what the device does not have, saying so in `reasons`: lines that begin with the flag."""
    fit_precision(config, device, reasons)
    if config.bf16_residual and config.autocast != "bf16":
        config.bf16_residual = False
        reasons.append("bf16_residual is off: it goes with --autocast bf16")
    if not config.bf16_residual and config.autocast == "bf16" and config.parallel != "ddp":
        config.bf16_residual = True
        reasons.append(f"bf16_residual is on: {config.parallel} gathers the embeddings in bf16")
    if config.bf16_residual and device.type == "cpu" and config.parallel == "ddp":
        config.bf16_residual = False
        reasons.append("bf16_residual is off: it is for GPUs, a CPU's LayerNorm and additions are faster in float32")
    for name in ("fused_loss", "fused_gelu", "packed_attention", "fp8", "autotune"):
        if getattr(config, name) and (reason := missing_for(name, config, device)):
            setattr(config, name, False)
            reasons.append(f"{name} is off: {reason}")
    if config.compile and device.type == "mps":
        config.compile = False
        reasons.append("compile is off: torch.compile is not ready for Apple GPUs")
    if config.compile and (missing := missing_compiler(device)):
        config.compile = False
        reasons.append(f"compile is off: torch.compile needs {missing}, and this machine has none")


def fit_precision(config, device, reasons):
    """fit_device's part that is about arithmetic."""
    if device.type == "cuda":
        generation = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        if generation < (8, 0) and config.autocast == "bf16":
            config.autocast = "fp16"
            reasons.append(f"autocast is fp16, with scaled gradients: {name} has no bf16")
        if generation < (8, 0) and config.tf32:
            config.tf32 = False
            reasons.append(f"tf32 is off: {name} does not have it")
        return
    if config.tf32:
        config.tf32 = False
        reasons.append(f"tf32 is off: it is for NVIDIA GPUs, this is {device.type}")
    if device.type == "cpu" and config.autocast == "bf16":
        abilities = torch.cpu.get_capabilities()
        if not any(abilities.get(ability) for ability in ("avx512_bf16", "amx_bf16", "bf16")):
            config.autocast = "off"
            reasons.append("autocast is off: this processor has no bf16 instructions")


def missing_for(name, config, device):
    """What keeps an optimization with kernels of its own from running here, or None."""
    if device.type != "cuda" or torch.version.hip:
        return f"it is for NVIDIA GPUs, this is {'AMD' if torch.version.hip else device.type}"
    generation, gpu = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if name == "packed_attention":
        if config.autocast == "off" or not config.flash:
            return "it goes with --flash and --autocast"
        if generation < (8, 0):
            return f"{gpu} is older than Ampere"
        return import_error("attention", "nvidia-cudnn-frontend")
    if name == "fp8" and generation < (9, 0):
        return f"{gpu} is older than Hopper"
    if name == "fp8" and config.autocast != "bf16":
        return "it goes with --autocast bf16"
    if name == "fp8" and config.parallel != "ddp":
        return "it goes with --parallel ddp"
    if name == "autotune" and not (config.fused_loss or config.fused_gelu or config.fp8):
        return "it goes with --fused_loss, --fused_gelu or --fp8"
    if name in ("fused_gelu", "autotune"):
        if config.autocast == "off" or generation < (8, 0):
            return "it goes with --autocast, on Ampere or newer"
        return None if products.library() else "PyTorch has no cuBLASLt here"
    if missing := missing_compiler(device):
        return f"Triton needs {missing}, and this machine has none"
    return import_error("kernels", "triton")


def import_error(module, package):
    """Why a file of this project, which needs the package, cannot be imported here, or None."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{error} (pip install {package})"
    return None


def fit_attention(config, device, reasons):
    """Turn packed_attention off where cuDNN does not have it for this model's heads and this micro-batch."""
    if not config.packed_attention:
        return
    import attention

    sizes = (config.micro_batch_size, config.seq_len, config.n_head, config.n_embd // config.n_head)
    try:
        for backward in (False, True):
            attention.plan(*sizes, torch.bfloat16 if config.autocast == "bf16" else torch.float16, device, backward)
    except (RuntimeError, attention.NotSupported) as error:
        config.packed_attention = False
        reasons.append(f"packed_attention is off: cuDNN says {first_line(error)}")


def missing_compiler(device):
    """What torch.compile lacks here, or None: a C compiler under Triton, a C++ compiler on a CPU, Python's headers."""
    if device.type == "cuda" and not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        return "a C compiler (gcc)"
    if device.type != "cuda" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "a C++ compiler (g++)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton has it, for Debian
    headers = Path(sysconfig.get_path("include", scheme), "Python.h")
    return None if headers.exists() else "Python's headers (python3-dev)"


def choose_micro_batch_size(config, ranks):
    """The largest power of two, 64 at most, that fits the device and divides the batch; and the reason in words.

    Raises UserError when no micro-batch size divides the batch.
    """
    share = config.seq_len * ranks.world_size
    if config.total_batch_size % share:
        nearest = nearest_multiples(config.total_batch_size, share)
        raise UserError(
            f"--total_batch_size {config.total_batch_size} cannot be divided into sequences of {config.seq_len} tokens "
            f"over {ranks.world_size} ranks: try {nearest}"
        )
    if ranks.device.type == "cuda":
        free = torch.cuda.mem_get_info(ranks.device)[0]
        room = 0.85 * free - bytes_of_weights(config, ranks)
        if config.fused_loss:
            # 4096 rows of logits; the table in their type, and its gradient
            room -= VOCAB_SIZE * ((2 if config.autocast != "off" else 4) * (4096 + config.n_embd) + 4 * config.n_embd)
        limit = room / (config.seq_len * bytes_per_token(config))
        fits = f"fits the {free / 2**30:.0f} GB that are free"
        where = fits if limit >= 1 else f"the least there is, though more than what {fits}"
    else:
        # a CPU: logits of 128 tokens, 25 MB, stay in the cache or near it
        limit = (128 if ranks.device.type == "cpu" else 1024) / config.seq_len
        where = f"suits a {ranks.device.type}"
    size = 1
    while size * 2 <= min(limit, 64) and config.total_batch_size % (size * 2 * share) == 0:
        size *= 2
    size = int(ranks.min(size))  # the same on every rank, also where one GPU has less room
    return size, f"micro_batch_size is {size}: {where}"


def less_memory(micro_batch_size=1):
    """What to do, for a person, when memory runs out; without micro_batch_size where that does not matter."""
    if micro_batch_size > 1:
        return f"use --micro_batch_size {max(b for b in range(1, micro_batch_size) if micro_batch_size % b == 0)}"
    return "use --parallel zero3 on several GPUs, --activation_checkpointing full, or a smaller --model or --seq_len"


def be_deterministic():
    """Sums whose order a GPU leaves open, as those of its attention's gradients, are made in a fixed one from now on.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's part of it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # what is empty is written before it is read


def count_params(config):
    return 12 * config.n_layer * config.n_embd**2 + (VOCAB_SIZE + config.seq_len) * config.n_embd


def bytes_of_weights(config, ranks):
    """What a rank holds: in float32 weights, gradients and AdamW's two moments; and weights to compute with."""
    weights = count_params(config)
    if config.parallel == "ddp":
        return 18 * weights  # 20 when backward is done and accumulates, but by then the activations are gone
    block = 12 * config.n_embd**2
    unit, embeddings = blocks_together(config) * block, weights - config.n_layer * block
    gathered = weights if config.parallel == "zero2" else embeddings + 2 * unit  # one computes, one is on its way
    width = 4 if config.autocast == "off" else 2
    leaving = (width + 4) * max(unit, embeddings)  # gradients, as they are computed and as the float32 that is sent
    return 16 * weights / row_length(config, ranks) + width * gathered + leaving


# Bytes of forward and backward a token: (in each layer, per unit of width), (in the head, per vocabulary entry), (for
# attention written out, per score in each layer), fitted to peaks measured for GPT-2 124M on an H200 with PyTorch 2.11
PEAK_BYTES = {
    # (compile, 16 bits)
    (True, True): (33, 2.7, 4),
    (True, False): (44, 8, 4),
    (False, True): (45, 9, 6),
    (False, False): (64, 12, 4),
}


def bytes_per_token(config):
    """Peak memory for each token of a micro-batch: of forward and backward, or of evaluation, if that takes more."""
    small = config.autocast != "off"
    layer, head, score = PEAK_BYTES[config.compile, small]
    layer = config.n_embd * layer + (0 if config.flash else config.n_head * config.seq_len * score)
    layers = config.n_layer * layer
    if config.activation_checkpointing != "off":
        # of every block its input, with "selective" the ten numbers of its products as well; all of one under way
        kept = 2 if config.bf16_residual else 4
        if config.activation_checkpointing == "selective":
            kept += 20 if small else 40
        layers = config.n_layer * config.n_embd * kept + layer
    training = layers + (0 if config.fused_loss else VOCAB_SIZE * head)
    # evaluation wants each token's loss and makes all logits: 2 bytes each compiled, eager 11 with float32 copies
    evaluation = VOCAB_SIZE * (2 if config.compile else 11) * (1 if small else 2)
    return max(training, evaluation)
