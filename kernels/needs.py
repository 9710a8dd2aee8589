"""What each optimization needs of the device, of other flags and of packages.

The functions take a Config and a Distributed, and return in words what is missing, or None.
"""

import torch

from common.device import missing_compiler, missing_package
from kernels import attention

GENERATIONS = dict(Ampere=(8, 0), Hopper=(9, 0))  # compute capabilities
GRAPHED_FLOPS = 1.5e12  # of a block, forward and backward: 32 x 1024 tokens of 124M, about 4 ms on an H100


def nvidia_gpu(config, distributed, oldest=None):
    """oldest: a key of GENERATIONS."""
    kind = distributed.device.type
    if kind != "cuda" or torch.version.hip:
        return f"this is {'AMD' if kind == 'cuda' else kind}, not an NVIDIA GPU"
    if oldest and torch.cuda.get_device_capability(distributed.device) < GENERATIONS[oldest]:
        return f"{torch.cuda.get_device_name(distributed.device)} is older than {oldest}"


def ampere(config, distributed):
    return nvidia_gpu(config, distributed, "Ampere")


def bf16_instructions(config, distributed):
    """For CPUs; for a GPU without bf16, turn_off_unavailable selects fp16."""
    if config.autocast == "bf16" and distributed.device.type == "cpu":
        if not any(map(torch.cpu.get_capabilities().get, ("avx512_bf16", "amx_bf16", "bf16"))):
            return "this processor has no bf16 instructions"


def attention_kernel(config, distributed):
    if config.mask_documents and config.attention != "flash":
        return "--mask_documents runs on the kernels flash and flash4, or with sdpa"
    if config.attention == "triton":
        return ampere(config, distributed) or triton(config, distributed) or autocast(config) or triton_width(config)
    dtype = dict(bf16=torch.bfloat16, fp16=torch.float16, off=torch.float32)[config.autocast]
    return attention.missing_sdpa_kernel(config.attention, distributed.device, dtype, head_width(config))


def head_width(config):
    """The width of an attention head. The ladder asks before the model's sizes are known: 64, as in all but tiny."""
    return config.n_embd // config.n_head if config.n_embd and config.n_head else 64


def triton_width(config):
    from kernels.flash_triton import WIDTHS  # needs Triton

    width = head_width(config)
    return None if width in WIDTHS else f"a head is {width} wide, and the kernel needs one of {WIDTHS}"


def inductor(config, distributed):
    if distributed.device.type == "mps":
        return "torch.compile is not ready for Apple GPUs"
    problem = missing_compiler(distributed.device)
    return problem or (missing_package("triton") if distributed.device.type == "cuda" else None)


def autocast(config):
    return "it needs --autocast bf16 or fp16" if config.autocast == "off" else None


def bf16(config):
    return None if config.autocast == "bf16" else "it needs --autocast bf16"


def bf16_gpu(config, distributed):
    if distributed.device.type == "cpu" and not will_be_sharded(config, distributed):
        return nvidia_gpu(config, distributed)  # a CPU computes LayerNorm and additions faster in float32
    return bf16(config)


def triton(config, distributed):
    return nvidia_gpu(config, distributed) or inductor(config, distributed)


def triton_and_whole_head(config, distributed):
    if distributed.tensor > 1:
        return "with --tensor each rank has a part of the head"
    return triton(config, distributed)


def compiled_cublaslt(config, distributed):
    return cublaslt_gemms(config, distributed) or (None if config.compile else "it needs --compile")


def cublaslt_epilogues(config, distributed):
    if distributed.tensor > 1:
        return "with --tensor a collective follows the MLP's GEMMs"
    return cublaslt_gemms(config, distributed)


def cublaslt_gemms(config, distributed):
    from kernels import cublaslt

    return nvidia_gpu(config, distributed) or bf16(config) or cublaslt.missing()


def fixed_addresses(config, distributed):
    """For CUDA graphs, which small_micro_batch() limits to where they gain."""
    if distributed.world_size > 1:
        return "there are several ranks"
    if config.mask_documents:
        return "with --mask_documents every micro-batch has other shapes"
    if problem := nvidia_gpu(config, distributed):
        return problem
    if not config.compile:
        return "it needs --compile"
    if not config.fused_adamw:  # where a step without an update frees gradients
        return "it needs --fused_adamw"


def small_micro_batch(config):
    """Whether the GPU computes a block of a micro-batch in the time in which the host launches its kernels."""
    return 72 * config.n_embd**2 * config.micro_batch_size * config.seq_len <= GRAPHED_FLOPS


def flash_attention_4(config, distributed):
    if problem := nvidia_gpu(config, distributed) or autocast(config):
        return problem
    if torch.cuda.get_device_capability(distributed.device)[0] != 9:
        return f"FlashAttention-4 is used on Hopper, and this is {torch.cuda.get_device_name(distributed.device)}"
    from kernels import flash4

    if (width := head_width(config)) not in flash4.WIDTHS:
        return f"FlashAttention-4 needs a head width of {', '.join(map(str, flash4.WIDTHS))}, and it is {width}"
    return flash4.missing()


def hopper(config, distributed):
    problem = nvidia_gpu(config, distributed, "Hopper") or bf16(config) or triton(config, distributed)
    if not problem and will_be_sharded(config, distributed):
        return "it needs --parallel ddp, without --tensor and --pipeline"
    return problem


def fp8_and_fused_head(config, distributed):
    """The rows before have turned these flags off where they are unavailable."""
    if not (config.fp8 and config.fused_cross_entropy and config.pad_vocab):
        return "it needs --fp8, --fused_cross_entropy and --pad_vocab"


def is_sharded(config):
    """Whether the parameters are FSDP's, not DDP's."""
    return config.parallel != "ddp" or config.tensor > 1 or config.pipeline > 1


def will_be_sharded(config, distributed):
    """is_sharded, once flags that need several ranks are turned off."""
    return distributed.world_size > 1 and is_sharded(config)


def several_ranks(config, distributed):
    if distributed.world_size == 1:
        return "there is one rank (torchrun starts several)"


def compiled_ddp(config, distributed):
    if not config.compile or will_be_sharded(config, distributed) or distributed.world_size == 1:
        return "it needs --compile, --parallel ddp without --tensor and --pipeline, and several ranks"


def bf16_all_reduce(config, distributed):
    if config.parallel == "ddp" and distributed.device.type != "cuda":
        return f"it needs NCCL, not {distributed.device.type}"
    return several_ranks(config, distributed)
