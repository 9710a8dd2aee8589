"""The optimizations, one row each.

The rows define the boolean flags, what a device cannot run, the model's switches, the ladder's rungs, the flags that a
resumed run may change without notice, the operators that selective activation checkpointing keeps, and the README's
table (`python optimizations.py` prints it). An optimization also has one place in the code that applies it, a paragraph
in docs/optimizations.md, and a case in tests/test_optimizations.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from common.cli import Note
from common.device import missing_compiler, missing_package
from kernels import cublaslt, sdpa

# ----------------------------------------------------------------------------------------------------------------------
# What an optimization needs: functions of a Config and a Distributed that return what is missing, or None


def tf32_gpu(config, distributed):
    if distributed.device.type != "cuda":
        return f"this is {distributed.device.type}, not an NVIDIA GPU"
    if torch.cuda.get_device_capability(distributed.device) < (8, 0):
        return f"{torch.cuda.get_device_name(distributed.device)} has no TF32"


def bf16_instructions(config, distributed):
    """For CPUs; for a GPU without bf16, turn_off_unavailable selects fp16."""
    abilities = torch.cpu.get_capabilities()
    if config.autocast == "bf16" and distributed.device.type == "cpu":
        if not any(abilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):
            return "this processor has no bf16 instructions"


def tiled_attention(config, distributed):
    if config.attention_backend == "written_out":
        return "--attention_backend written_out takes its place"


def attention_backend(config, distributed):
    if config.attention_backend == "written_out":
        return None  # the row of --flash applies it
    if not config.flash:
        return "it needs --flash"
    if config.attention_backend == "efficient" and config.mask_documents:
        return "--mask_documents runs on FlashAttention or cuDNN"
    dtype = dict(bf16=torch.bfloat16, fp16=torch.float16, off=torch.float32)[config.autocast]
    return sdpa.missing(config.attention_backend, distributed.device, dtype, head_width(config))


def head_width(config):
    """The width of an attention head. The ladder asks before the model's sizes are known: 64, as in all sizes."""
    return config.n_embd // config.n_head if config.n_embd and config.n_head else 64


def inductor(config, distributed):
    if distributed.device.type == "mps":
        return "torch.compile is not ready for Apple GPUs"
    if missing := missing_compiler(distributed.device):
        return f"torch.compile needs {missing}, and this machine has none"


def fused_update(config, distributed):
    """A fused update skips a bad step on the device, by found_inf, which PyTorch reads on CUDA and CPUs."""
    if config.adamw_states != "float32":
        return "PyTorch's fused AdamW stores its moments in float32"
    if distributed.device.type == "mps":
        return "on Apple GPUs PyTorch does not skip a fused update whose gradients are not finite"


def bf16_gpu(config, distributed):
    if config.autocast != "bf16":
        return "it needs --autocast bf16"
    if distributed.device.type == "cpu" and not is_sharded(config, distributed):
        return "with ddp it is for GPUs: a CPU computes LayerNorm and additions faster in float32"


def nvidia_gpu(config, distributed):
    if distributed.device.type != "cuda" or torch.version.hip:
        return f"this is {'AMD' if torch.version.hip else distributed.device.type}, not an NVIDIA GPU"


def triton(config, distributed):
    if problem := nvidia_gpu(config, distributed):
        return problem
    if missing := missing_compiler(distributed.device):
        return f"Triton needs {missing}, and this machine has none"
    return missing_package("triton", "triton")


def triton_and_whole_head(config, distributed):
    if distributed.tensor > 1:
        return "with --tensor each rank has a part of the head"
    return triton(config, distributed)


def cublaslt_epilogues(config, distributed):
    if problem := nvidia_gpu(config, distributed):
        return problem
    if distributed.tensor > 1:
        return "with --tensor a collective follows the MLP's GEMMs"
    if config.autocast == "off" or torch.cuda.get_device_capability(distributed.device) < (8, 0):
        return "it needs --autocast bf16 or fp16, and an Ampere GPU or newer"
    return None if cublaslt.library() else "PyTorch has no cuBLASLt here"


def cudnn_frontend(config, distributed):
    if problem := nvidia_gpu(config, distributed):
        return problem
    if config.autocast == "off" or not config.flash:
        return "it needs --flash, and --autocast bf16 or fp16"
    if config.attention_backend not in ("auto", "cudnn"):
        return f"--attention_backend {config.attention_backend} takes its place"
    # A100s, consumer cards: FlashAttention-2, which scaled_dot_product_attention picks there, is the faster one
    generation, _ = torch.cuda.get_device_capability(distributed.device)
    if config.attention_backend == "auto" and generation not in (9, 10):
        name = torch.cuda.get_device_name(distributed.device)
        return f"cuDNN's attention is fast on Hopper and data-center Blackwell, and this is {name}"
    width, widest = head_width(config), 256 if generation == 9 else 128
    if width % 8 or width > widest:
        return f"cuDNN needs a head width that is a multiple of 8, {widest} at most, and it is {width}"
    return missing_package("cudnn", "nvidia-cudnn-frontend")


def hopper(config, distributed):
    if problem := nvidia_gpu(config, distributed):
        return problem
    if torch.cuda.get_device_capability(distributed.device) < (9, 0):
        return f"{torch.cuda.get_device_name(distributed.device)} is older than Hopper"
    if config.autocast != "bf16" or is_sharded(config, distributed):
        return "it needs --autocast bf16 and --parallel ddp, without --tensor and --pipeline"
    return triton(config, distributed)


def fp8_and_fused_head(config, distributed):
    """The rows before have turned these flags off where they are unavailable."""
    if not (config.fp8 and config.fused_cross_entropy and config.pad_vocab):
        return "it needs --fp8, --fused_cross_entropy and --pad_vocab"


def is_sharded(config, distributed):
    """As parallel.fsdp.is_sharded, before flags that need several ranks are turned off."""
    return config.parallel != "ddp" or distributed.model_size > 1


def several_ranks(config, distributed):
    if distributed.world_size == 1:
        return "there is one rank (torchrun starts several)"


def compiled_ddp(config, distributed):
    if not config.compile or is_sharded(config, distributed) or distributed.world_size == 1:
        return "it needs --compile, --parallel ddp without --tensor and --pipeline, and several ranks"


def bf16_all_reduce(config, distributed):
    if config.parallel == "ddp" and distributed.device.type != "cuda":
        return f"it needs NCCL, not {distributed.device.type}"
    return several_ranks(config, distributed)


# ----------------------------------------------------------------------------------------------------------------------
# The rows, in the order of the ladder


@dataclass(frozen=True)
class Optimization:
    name: str  # in --rungs; the flag of a switch
    off: dict  # flag values that turn it off; when it is on, the command line's values apply
    rung: str | None  # its label in the ladder's table, a format string of the run's config; None: no rung
    help: str  # one line for --help and the README
    needs: Callable = lambda config, distributed: None
    in_model: bool = False  # GPTConfig has a field of this name
    changes: Literal["nothing", "rounding", "recipe"] = "nothing"  # "nothing": results agree up to rounding
    saves: tuple = ()  # operators whose outputs selective activation checkpointing keeps
    default: bool = True

    @property
    def is_switch(self):
        """Whether it is one boolean flag of its own, which config.py takes from this row."""
        return self.off == {self.name: False}


def switch(name, help, **facts):
    return Optimization(name, off={name: False}, rung=facts.pop("rung", name), help=help, **facts)


OPTIMIZATIONS = (
    switch("tf32", "float32 GEMMs on tensor cores in TensorFloat-32", needs=tf32_gpu, changes="rounding"),
    Optimization(
        "bf16",
        dict(autocast="off"),
        "autocast {autocast}",
        "GEMMs and attention in 16 bits",
        bf16_instructions,
        changes="rounding",
    ),
    switch("compile", "fused kernels, and no Python between them, by torch.compile", needs=inductor),
    switch(
        "flash",
        "attention that never writes the T x T matrix, by F.scaled_dot_product_attention or cuDNN",
        needs=tiled_attention,
        in_model=True,
        saves=sdpa.OPERATORS,
    ),
    Optimization(
        "attention_backend",
        dict(attention_backend="auto"),
        None,
        "the kernel of --flash, instead of the fastest known for the GPU",
        attention_backend,
        default=False,
    ),
    switch("pad_vocab", "the vocabulary padded to 50304 rows, a multiple of 128", in_model=True),
    switch("fused_adamw", "the optimizer's update of all parameters in one kernel", needs=fused_update),
    # without GPT-3's recipe: the defaults of torch.optim.AdamW at a constant learning rate of 3e-4, without clipping
    Optimization(
        "adamw",
        # float32 moments: bf16 rounds a decay of 0.999 away
        dict(beta2=0.999, weight_decay=0.01, adamw_states="float32"),
        "β₂ {beta2:g}, weight decay {weight_decay:g}",
        "GPT-3's β₂ and weight decay",
        changes="recipe",
    ),
    Optimization(
        "schedule",
        dict(lr_schedule="constant", lr=3e-4, warmup_steps=0),
        "warm-up and {lr_schedule}",
        "GPT-3's learning rate: warm-up, then a cosine",
        changes="recipe",
    ),
    Optimization(
        "clipping",
        dict(grad_clip=0.0),
        "clipping to {grad_clip:g}",
        "gradients clipped to a norm of 1",
        changes="recipe",
    ),
    Optimization(
        "accumulation",
        dict(total_batch_size=None),  # None: one micro-batch
        "{total_batch_size:,} tokens a step",
        "gradient accumulation over micro-batches, to 0.5M tokens a step",
        changes="recipe",
    ),
    Optimization(
        "micro_batch",
        dict(micro_batch_size=None),  # None: the first rung's
        "micro-batch of {micro_batch_size}",
        "the largest micro-batch that fits, up to 64",
    ),
    switch(
        "bf16_residual",
        "the residual stream in bf16: half the bytes of additions and LayerNorms",
        needs=bf16_gpu,
        in_model=True,
        changes="rounding",
    ),
    switch(
        "fused_cross_entropy",
        "head and cross-entropy for 4,096 tokens at a time, by a Triton kernel",
        needs=triton_and_whole_head,
        in_model=True,
    ),
    switch(
        "fused_gelu",
        "GELU in the epilogues of the MLP's GEMMs, by cuBLASLt",
        needs=cublaslt_epilogues,
        in_model=True,
        saves=("gpt2::mlp",),
    ),
    switch(
        "packed_qkv",
        "cuDNN attention with packed q, k and v, on Hopper and data-center Blackwell",
        needs=cudnn_frontend,
        in_model=True,
        saves=("gpt2::packed_qkv",),
    ),
    switch(
        "mask_documents",
        "a token attends within its own document",
        in_model=True,
        changes="recipe",
        saves=("gpt2::document_attention",),
        default=False,
    ),
    switch(
        "fp8",
        "the blocks' GEMMs in 8 bits, on Hopper and newer",
        needs=hopper,
        changes="rounding",
        saves=("gpt2::fp8_linear", "gpt2::fp8_mlp"),
        default=False,
    ),
    switch(
        "fp8_head",
        "with --fp8: the head's GEMMs too",
        needs=fp8_and_fused_head,
        in_model=True,
        changes="rounding",
        default=False,
    ),
    Optimization(
        "ddp",
        dict(parallel="ddp", shard_ranks=None, tensor=1, context=1, pipeline=1, stages_per_rank=1),
        "{parallel} × {world_size}",
        "every GPU computes a share of the batch; gradients are averaged once a step",
        needs=several_ranks,
    ),
    switch(
        "overlap_gradients",
        "average DDP's gradients during backward; for slow links",
        rung=None,
        needs=compiled_ddp,
        default=False,
    ),
    switch(
        "bf16_gradients",
        "average gradients in bf16: half the bytes to send",
        rung=None,
        needs=bf16_all_reduce,
        changes="rounding",
        default=False,
    ),
    Optimization(
        "activation_checkpointing",
        dict(activation_checkpointing="off"),
        None,
        "recompute activations in backward: less memory, up to a third more work",
        default=False,
    ),
)

SWITCHES = tuple(row for row in OPTIMIZATIONS if row.is_switch)
RUNGS = {row.name: row for row in OPTIMIZATIONS if row.rung}


def turn_off_unavailable(config, distributed):
    """(config, notes): the optimizations whose `needs` are not met are turned off."""
    notes = []
    if config.autocast == "bf16" and distributed.device.type == "cuda":
        if torch.cuda.get_device_capability(distributed.device) < (8, 0):
            config = replace(config, autocast="fp16")
            name = torch.cuda.get_device_name(distributed.device)
            notes.append(Note("autocast", "fp16", f"{name} has no bf16; gradients are scaled"))
    for row in OPTIMIZATIONS:
        on = {flag: value for flag, value in row.off.items() if getattr(config, flag) != value}
        if on and (reason := row.needs(config, distributed)):
            config = replace(config, **on)
            notes += [Note(flag, value, reason) for flag, value in on.items()]
    return config, notes


def is_off(note):
    """Whether a Note turned an optimization off."""
    return any(note.flag in row.off and row.off[note.flag] == note.value for row in OPTIMIZATIONS)


def model_switches(config):
    """The fields of GPTConfig that are optimizations, with their values."""
    return {row.name: getattr(config, row.name) for row in OPTIMIZATIONS if row.in_model}


def plan_switches(config):
    """{optimization: whether it is on}, for the plan. Rows that are off by default appear only when they are on."""
    switches = {}
    for row in OPTIMIZATIONS:
        flag, off = next(iter(row.off.items()))
        value = getattr(config, flag)
        if (row.is_switch or off == "off") and (value != off or row.default):
            switches[flag if row.is_switch else f"{flag} {value}"] = value != off
    return switches


def saved_operators():
    """Operators, besides GEMMs, whose outputs selective activation checkpointing keeps."""
    return [name for row in OPTIMIZATIONS for name in row.saves]


def flags_that_change(*kinds):
    """Flags of the rows whose `changes` is one of `kinds`."""
    return {flag for row in OPTIMIZATIONS if row.changes in kinds for flag in row.off}


def readme_table():
    lines = ["flag | what it does", "--- | ---"]
    for row in OPTIMIZATIONS:
        flag = "torchrun" if row.name == "ddp" else f"--{next(iter(row.off))}"
        lines.append(f"`{flag}` | {row.help}{'' if row.default else ' (off)'}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(readme_table())
