"""The optimizations, one row each.

The rows define the boolean flags, what a device cannot run, the model's switches, the ladder's rungs, the flags that a
resumed run may change without notice, the operators that selective activation checkpointing keeps, and the README's
table (`python optimizations.py` prints it). An optimization also has one place in the code that applies it, a paragraph
in docs/optimizations.md or docs/recipes.md, and a case in tests/test_optimizations.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from common.errors import Note
from kernels import needs, sdpa
from optim.optimizer import fused_update

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
    changes: Literal["nothing", "rounding", "recipe"] = "nothing"  # "nothing": only the order of sums
    saves: tuple = ()  # operators whose outputs selective activation checkpointing keeps
    default: bool = True

    @property
    def is_switch(self):
        """Whether it is one boolean flag of its own, which config.py takes from this row."""
        return self.off == {self.name: False}


def switch(name, help, **facts):
    return Optimization(name, {name: False}, help=help, **dict(rung=name) | facts)


OPTIMIZATIONS = (
    switch("tf32", "float32 GEMMs on tensor cores in TensorFloat-32", needs=needs.tf32_gpu, changes="rounding"),
    Optimization(
        "bf16",
        dict(autocast="off"),
        "autocast {autocast}",
        "GEMMs and attention in 16 bits",
        needs.bf16_instructions,
        changes="rounding",
    ),
    switch("compile", "fused kernels, and no Python between them, by torch.compile", needs=needs.inductor),
    switch(
        "flash",
        "attention that never writes the T x T matrix, by F.scaled_dot_product_attention or cuDNN",
        needs=needs.tiled_attention,
        in_model=True,
        saves=sdpa.OPERATORS,
    ),
    Optimization(
        "attention_backend",
        dict(attention_backend="auto"),
        None,
        "the kernel of --flash, instead of the fastest known for the GPU",
        needs.attention_backend,
        default=False,
    ),
    switch("pad_vocab", "the vocabulary padded to 50304 rows, a multiple of 128", in_model=True),
    switch("fused_adamw", "the optimizer's update of all parameters in one kernel", needs=fused_update),
    # without GPT-3's recipe: the defaults of torch.optim.AdamW at a constant learning rate of 3e-4, without clipping
    Optimization(
        "adamw",
        dict(beta2=0.999, weight_decay=0.01),
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
        "the largest micro-batch that fits, up to 128",
    ),
    switch(
        "bf16_residual",
        "the residual stream in bf16: half the bytes of additions and LayerNorms",
        needs=needs.bf16_gpu,
        in_model=True,
        changes="rounding",
    ),
    switch(
        "tuned_gemms",
        "compiled graphs' GEMMs by the fastest of cuBLASLt's algorithms",
        needs=needs.compiled_cublaslt,
    ),
    switch(
        "fused_cross_entropy",
        "head and cross-entropy for 4,096 tokens at a time, by a Triton kernel",
        needs=needs.triton_and_whole_head,
        in_model=True,
    ),
    switch(
        "fused_gelu",
        "GELU in the epilogues of the MLP's GEMMs, by cuBLASLt",
        needs=needs.cublaslt_epilogues,
        in_model=True,
        saves=("gpt2::mlp",),
    ),
    switch(
        "packed_qkv",
        "attention by cuDNN on packed qkv, on Hopper and data-center Blackwell",
        needs=needs.cudnn_frontend,
        in_model=True,
        saves=("gpt2::packed_qkv",),
    ),
    switch(
        "flash4_backward",
        "with packed_qkv on Hopper: FlashAttention-4's backward",
        needs=needs.flash_attention_4,
        in_model=True,
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
        needs=needs.hopper,
        changes="rounding",
        saves=("gpt2::fp8_linear", "gpt2::fp8_mlp"),
        default=False,
    ),
    switch(
        "fp8_head",
        "with --fp8: the head's GEMMs too",
        needs=needs.fp8_and_fused_head,
        in_model=True,
        changes="rounding",
        default=False,
    ),
    Optimization(
        "ddp",
        dict(parallel="ddp", shard_ranks=None, tensor=1, context=1, pipeline=1, stages_per_rank=1),
        "{parallel} × {world_size}",
        "every GPU computes a share of the batch; gradients are averaged once a step",
        needs=needs.several_ranks,
    ),
    switch(
        "overlap_gradients",
        "average DDP's gradients during backward, for slow links",
        rung=None,
        needs=needs.compiled_ddp,
        default=False,
    ),
    switch(
        "bf16_gradients",
        "average gradients in bf16: half the bytes to send",
        rung=None,
        needs=needs.bf16_all_reduce,
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


def readme_table():
    lines = ["flag | what it does", "--- | ---"]
    for row in OPTIMIZATIONS:
        flag = "torchrun" if row.name == "ddp" else f"--{next(iter(row.off))}"
        lines.append(f"`{flag}` | {row.help}{'' if row.default else ' (off)'}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(readme_table())
