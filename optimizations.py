"""The optimizations, one row each.

The rows define the boolean flags, what a device cannot run, the model's switches, the ladder's rungs, the flags that a
resumed run may change without notice, the operators that selective activation checkpointing keeps, and the README's
table (dev/tables.py). An optimization also has one place in the code that applies it, a paragraph in
docs/optimizations.md or docs/recipes.md, and a case in tests/test_optimizations.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from common.errors import Note, UserError
from kernels import needs
from kernels.attention import CAN_USE, SDPA_OPERATORS
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
    on: tuple = ()  # the values of its flag that have it on; by default all but that of `off`
    in_model: bool = False  # GPTConfig has a field for its flag
    changes: Literal["nothing", "rounding", "recipe"] = "nothing"  # "nothing": only the order of sums
    saves: tuple = ()  # operators whose outputs selective activation checkpointing keeps
    default: bool = True

    @property
    def flag(self):
        return next(iter(self.off))

    @property
    def is_switch(self):
        """Whether it is one boolean flag of its own, which config.py takes from this row."""
        return self.off.get(self.name) is False

    def is_on(self, config):
        if self.on:
            return getattr(config, self.flag) in self.on
        return any(getattr(config, flag) != value for flag, value in self.off.items())


def switch(name, help, **facts):
    return Optimization(name, {name: False} | facts.pop("off", {}), help=help, **dict(rung=name) | facts)


OPTIMIZATIONS = (
    switch("tf32", "float32 GEMMs on tensor cores in TensorFloat-32", needs=needs.ampere, changes="rounding"),
    Optimization(
        "bf16", dict(autocast="off"), "autocast {autocast}", "GEMMs and attention in 16 bits",
        needs=needs.bf16_instructions, changes="rounding",
    ),
    switch("compile", "fused kernels, and no Python between them, by torch.compile", needs=needs.inductor),
    switch(
        "flash", "attention that never writes the T x T matrix, by F.scaled_dot_product_attention",
        off=dict(attention="written_out"), saves=SDPA_OPERATORS,
    ),
    Optimization(
        "attention_kernel", dict(attention="sdpa"), None,
        "one kernel, flash, efficient, cudnn or triton, instead of PyTorch's choice",
        needs=needs.attention_kernel, on=(*CAN_USE, "triton"), saves=("gpt2::flash_triton",), default=False,
    ),
    switch("pad_vocab", "the vocabulary padded to 50304 rows, a multiple of 128", in_model=True),
    switch("fused_adamw", "the optimizer's update of all parameters in one kernel", needs=fused_update),
    switch(
        "cuda_graphs", "small micro-batches as CUDA graphs, launched as a whole",
        rung=None, needs=needs.fixed_addresses,
    ),
    # without GPT-3's recipe: the defaults of torch.optim.AdamW at a constant learning rate of 3e-4, without clipping
    Optimization(
        "recipe", dict(lr_schedule="constant", lr=3e-4, warmup_steps=0, beta2=0.999, weight_decay=0.01, grad_clip=0.0),
        "{lr_schedule}, β₂ {beta2:g}, clipping", "GPT-3's warm-up, cosine, β₂, weight decay and clipping",
        changes="recipe",
    ),
    Optimization(
        "micro_batch", dict(micro_batch_size=None), "micro-batch of {micro_batch_size}",  # None: the first rung's
        "the largest micro-batch that fits, up to 128",
    ),
    switch(
        "bf16_residual", "the residual stream in bf16: half the bytes of additions and LayerNorms",
        needs=needs.bf16_gpu, in_model=True, changes="rounding",
    ),
    switch("tuned_gemms", "compiled graphs' GEMMs by cuBLASLt's fastest algorithms", needs=needs.compiled_cublaslt),
    switch(
        "fused_cross_entropy", "head and cross-entropy for 4,096 tokens at a time, by a Triton kernel",
        needs=needs.triton_and_whole_head, in_model=True,
    ),
    switch(
        "fused_gelu", "GELU in the epilogues of the MLP's GEMMs, by cuBLASLt",
        needs=needs.cublaslt_epilogues, in_model=True, saves=("gpt2::mlp",),
    ),
    Optimization(
        "flash4", dict(attention="sdpa"), "flash4", "on Hopper: attention by cuDNN, its backward by FlashAttention-4",
        needs=needs.flash_attention_4, on=("auto", "flash4"), in_model=True, saves=("gpt2::flash4",),
    ),
    switch(
        "mask_documents", "a token attends within its own document",
        in_model=True, changes="recipe", saves=("torch_attn::_varlen_attn",), default=False,
    ),
    switch(
        "fp8", "the blocks' GEMMs in 8 bits, on Hopper and newer",
        needs=needs.hopper, changes="rounding", saves=("gpt2::fp8_linear", "gpt2::fp8_mlp"), default=False,
    ),
    switch(
        "fp8_head", "with --fp8: the head's GEMMs too",
        needs=needs.fp8_and_fused_head, in_model=True, changes="rounding", default=False,
    ),
    Optimization(
        "accumulation", dict(total_batch_size=None), "{total_batch_size:,} tokens a step",  # None: one micro-batch
        "gradient accumulation over micro-batches, to 0.5M tokens a step", changes="recipe",
    ),
    Optimization(
        "ddp", dict(parallel="ddp", tensor=1, context=1, pipeline=1), "{parallel} × {world_size}",
        "every GPU computes a share of the batch; gradients are averaged once a step", needs=needs.several_ranks,
    ),
    switch(
        "overlap_gradients", "average DDP's gradients during backward, for slow links",
        rung=None, needs=needs.compiled_ddp, default=False,
    ),
    switch(
        "bf16_gradients", "average gradients in bf16: half the bytes to send",
        rung=None, needs=needs.bf16_all_reduce, changes="rounding", default=False,
    ),
    Optimization(
        "activation_checkpointing", dict(activation_checkpointing="off"), None,
        "recompute activations in backward: less memory, up to a third more work", default=False,
    ),
)  # fmt: skip

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
    if not config.flash or config.attention == "written_out":  # two ways to say the same
        config = replace(config, flash=False, attention="written_out")
    for row in OPTIMIZATIONS:
        if row.is_on(config) and (reason := row.needs(config, distributed)):
            changed = {flag: value for flag, value in row.off.items() if getattr(config, flag) != value}
            config = replace(config, **changed)
            notes += [Note(flag, value, reason) for flag, value in changed.items()]
    if config.attention == "auto":
        config = replace(config, attention="flash4")
    return config, notes


def refuse_unavailable_flags(typed, notes):
    """Raises UserError if a flag on the command line, {name: value}, was turned off."""
    off = [item for row in OPTIMIZATIONS for item in row.off.items()]
    for note in notes:
        value = typed.get(note.flag, "auto")
        if value != "auto" and (note.flag, note.value) in off:
            name = note.flag if isinstance(value, bool) else f"{note.flag} {value}"
            raise UserError(f"--{name} does nothing here: {note.reason}; leave it out")


def model_switches(config):
    """The fields of GPTConfig that are optimizations, with their values."""
    return {row.flag: getattr(config, row.flag) for row in OPTIMIZATIONS if row.in_model}


def plan_switches(config):
    """{optimization: whether it is on}, for the plan. Rows that are off by default appear only when they are on."""
    switches = {}
    for row in OPTIMIZATIONS:
        on = row.is_on(config)
        if (row.is_switch or row.on or row.off[row.flag] == "off") and (on or row.default):
            switches[row.name if row.is_switch or not on else f"{row.flag} {getattr(config, row.flag)}"] = on
    return switches


def saved_operators():
    """Operators, besides GEMMs, whose outputs selective activation checkpointing keeps."""
    return [name for row in OPTIMIZATIONS for name in row.saves]
