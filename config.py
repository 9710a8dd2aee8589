"""Config: every flag of train_gpt2.py with its default; the GPT-2 sizes; and how flags fit together."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from cli import UserError
from device import choose_micro_batch_size, fit_attention, fit_device, nearest_multiples
from parallel import averaging_rate, row_length

# flags that the model has too
MODEL_SWITCHES = ("flash", "pad_vocab", "bf16_residual", "fused_loss", "fused_gelu", "packed_attention")
# Bytes/s from which gradients are averaged after backward: 498 MB then take the 5 ms that torch.compile's cuts cost
FAST_LINKS = 100e9
# what interrupts training now and then
EVALUATIONS = ("val_every", "hellaswag_every", "sample_every", "checkpoint_every")
# steps that are not measured: compilation, the allocator's growth, the clock's settling
SETTLING_STEPS = 5

# layers, heads, width (Radford et al. 2019, table 2; heads as in OpenAI's released weights)
SIZES = {
    "gpt2": (12, 12, 768),  # 124M parameters
    "gpt2-medium": (24, 16, 1024),  # 355M
    "gpt2-large": (36, 20, 1280),  # 774M
    "gpt2-xl": (48, 25, 1600),  # 1558M
}


@dataclass
class Config:
    """Train GPT-2. Without flags: GPT-2 124M on FineWeb-Edu 10BT, as fast as the hardware allows.

    On several GPUs: torchrun --standalone --nproc_per_node=8 train_gpt2.py [flags]
    """

    demo: bool = False
    """Train a small GPT-2 for a few minutes on text that comes with Python: no GPU, no network, no FineWeb needed."""

    model: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """The model's size: 124M, 355M, 774M or 1558M parameters."""
    n_layer: int | None = None
    """Layers, in place of the model's own."""
    n_head: int | None = None
    """Attention heads, in place of the model's own."""
    n_embd: int | None = None
    """Embedding width, in place of the model's own."""
    seq_len: int = 1024
    """Tokens in a sequence."""
    init_from: str = "scratch"
    """Initial weights: scratch, a checkpoint, a Hugging Face folder, or a name on its hub such as gpt2."""

    data_dir: str = "edu_fineweb10B"
    """The folder of shards that fineweb.py writes."""
    shuffle: bool = True
    """Take documents in an order drawn from the seed, anew each epoch; --no_shuffle reads the shards as they lie."""
    log_dir: str = "log"
    """Runs are folders in here."""
    run_name: str | None = None
    """The run's folder and its name on wandb; by default the model and the time of day."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto takes a GPU where there is one."""
    seed: int = 1337
    """Fixes the initial weights, the order of the data, and the samples."""
    deterministic: bool = False
    """The same bits each time on the same kind of device, for a price; without it a GPU adds in varying order."""

    parallel: Literal["ddp", "zero2", "zero3", "hsdp"] = "ddp"
    """What each of several GPUs holds. ddp: everything. zero2: all weights in bf16, and its part of what AdamW needs.
    zero3: its part of all. hsdp: its part of a copy that each machine has."""
    shard_ranks: int | None = None
    """The ranks over which hsdp spreads a copy; by default those of a machine."""
    overlap_gradients: Literal["auto", "on", "off"] = "auto"
    """Average gradients over the GPUs while backward still computes, for which torch.compile cuts its graph; off, after
    it. auto measures how fast the links between the GPUs are."""
    bf16_gradients: bool = False
    """Average gradients over the GPUs in bf16: half the bytes to send."""
    activation_checkpointing: Literal["off", "full", "selective"] = "off"
    """Compute a block again in backward instead of keeping what it computed: all of it, or only what is cheap."""

    micro_batch_size: int | None = None
    """Sequences a device takes at once; by default what fits it. Changes speed and memory, not the result (but see
    batch_warmup_steps)."""
    total_batch_size: int = 524288
    """Tokens in a step, over all devices and accumulated micro-batches."""
    max_steps: int = 19073
    """Steps of training; the default is one epoch of 10B tokens."""

    tf32: bool = True
    """TensorFloat-32 tensor cores for products in float32; with autocast none are left."""
    autocast: Literal["bf16", "fp16", "off"] = "bf16"
    """Mixed precision; fp16 scales its gradients and is for GPUs without bf16."""
    compile: bool = True
    """torch.compile: fused kernels instead of one launch an operation."""
    flash: bool = True
    """Flash attention, through F.scaled_dot_product_attention; off, attention is written out."""
    pad_vocab: bool = True
    """Pad the vocabulary from 50257 to 50304, which tensor-core tiles divide."""
    fused_adamw: bool = True
    """AdamW's update of all parameters in one kernel."""
    bf16_residual: bool = True
    """Keep the residual stream in bf16, as --autocast bf16 does its products."""
    fused_loss: bool = True
    """The head, the cross-entropy and their gradients for a part of the batch at a time, by a Triton kernel."""
    fused_gelu: bool = True
    """GELU and its gradient within the MLP's products, by cuBLASLt."""
    packed_attention: bool = True
    """Flash attention through cuDNN's front end, which leaves the gradients of q, k and v side by side."""
    autotune: bool = True
    """Time cuBLASLt's algorithms in the first step, for the products of fused_loss, fused_gelu and fp8, and take the
    fastest of those that give the same bits."""
    fp8: bool = False
    """The blocks' products in 8-bit floating point, for Hopper and newer. The loss then differs by more than rounding
    does in bf16."""

    lr: float = 6e-4
    """Highest learning rate."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this fraction of lr."""
    warmup_steps: int = 715
    """Steps in which the learning rate rises linearly; the default is GPT-3's 375M tokens."""
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    """What the learning rate does after its warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    grad_clip: float = 1.0
    """Scale the gradient down to this norm; 0 is off."""
    batch_warmup_steps: int = 0
    """Steps in which the batch grows from one micro-batch a device to its full size, as GPT-3's did; 0 is off."""

    val_every: int = 250
    """Steps between validations; 0 is off. These, HellaSwag, samples and checkpoints also come after the last step."""
    val_steps: int = 20
    """Validate on this many times total_batch_size tokens, or all there are."""
    hellaswag_every: int = 250
    """Steps between HellaSwag evaluations; 0 is off."""
    hellaswag_data: str | None = None
    """HellaSwag's validation set as a local .jsonl file; by default it is downloaded."""
    sample_every: int = 250
    """Steps between samples; 0 is off."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; 0 is off."""
    keep_checkpoints: int = 3
    """The newest checkpoints that stay, beside the one with the lowest validation loss."""
    resume: str = "auto"
    """auto goes on from the newest checkpoint of the run that --run_name names, if it has one; never does not; a path
    is that of a checkpoint, or of a run, which goes on from its newest."""
    max_bad_steps: int = 10
    """Stop after this many steps in a row whose loss or gradient is not finite; each of them is skipped."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is online where wandb is logged in, and offline otherwise."""
    wandb_project: str = "gpt2"
    """The project that runs go to on wandb."""
    wandb_group: str | None = None
    """A group of runs on wandb that this one belongs to."""
    peak_tflops: float | None = None
    """The device's dense bf16 peak, for MFU; known for common GPUs."""

    ladder: bool = False
    """Measure what each optimization buys: a short run with all of them off, then one more with each turned on."""
    rungs: str = "all"
    """The ladder's rungs, with commas, in the order to climb; a+b is one rung that turns on both. What isn't named
    stays off. They are tf32, bf16, compile, flash, pad_vocab, fused_adamw, recipe, accumulation, micro_batch,
    bf16_residual, fused_loss, fused_gelu, packed_attention, autotune, fp8 (among all only with --fp8), ddp."""
    ladder_steps: int = 20
    """Steps measured on each rung, and in each cell of a sweep, after a few that warm up. They take the place of
    max_steps, and there are no evaluations and no checkpoints."""
    profile: int = 0
    """Trace this many steps with PyTorch's profiler, once the first are over, and print where their time went; 0 is
    off."""


# A small model that learns something on two CPU cores within two minutes. Nearly all of its time goes into the
# vocabulary of 50257, so micro-batches are small enough for their logits to stay in the cache.
DEMO = Config(
    demo=True,
    n_layer=4,
    n_head=4,
    n_embd=128,
    seq_len=128,
    data_dir="demo_data",
    total_batch_size=1024,
    max_steps=200,
    compile=False,
    lr=2e-3,
    warmup_steps=20,
    val_every=50,
    val_steps=8,
    hellaswag_every=0,
    sample_every=100,
    checkpoint_every=100,
)


def defaults(arguments):
    """The defaults that a command line asks for: DEMO for --demo, and for a --ladder where there is no GPU, unless it
    says what to train on what."""
    if {"--help", "-h"} & set(arguments):
        return Config()
    if "--demo" in arguments:
        return dataclasses.replace(DEMO, compile="--ladder" in arguments)
    if (
        "--ladder" in arguments
        and not {"data_dir", "device", "model", "init_from"} & given(arguments)
        and not torch.cuda.is_available()
    ):
        return dataclasses.replace(DEMO, compile=True)
    return Config()


def given(arguments):
    """The names of the flags on a command line, in which tyro takes - for _ too."""
    return {flag.partition("=")[0][2:].replace("-", "_") for flag in arguments if flag.startswith("--")}


def flags(config):
    """The command line, as a list, that parses into this config."""
    base = dataclasses.asdict(DEMO if config.demo else Config())
    result = ["--demo"] if config.demo else []
    for name, default in base.items():
        value = getattr(config, name)
        if value == default or value is None:
            continue
        result += [f"--{name}" if value else f"--no_{name}"] if isinstance(default, bool) else [f"--{name}", str(value)]
    return result


def resolve(config, ranks, pretrained=None, resumed=None, step=0):
    """Fill in what follows from the other flags and the device, and check that it all fits together.

    pretrained is the GPTConfig of the model that --init_from names, or the checkpoint `resumed`, if there is one,
    which is at `step`.
    Returns the complete Config and a list of lines that say what was chosen or changed, and why.
    Raises UserError, with what to do, for flags that contradict each other.
    """
    new = dataclasses.replace(config)
    reasons = []

    check_bounds(new)
    if new.rungs != "all":
        raise UserError("--rungs chooses rungs of the ladder: add --ladder")
    traced = range(step + SETTLING_STEPS, step + SETTLING_STEPS + new.profile)
    if new.profile and new.max_steps < traced.stop:
        raise UserError(
            f"--profile {new.profile} starts after {SETTLING_STEPS} steps: use --max_steps {traced.stop} or more"
        )
    for name in EVALUATIONS:
        every = getattr(new, name)
        if every and any(step % every == 0 for step in traced):
            raise UserError(f"--{name} {every} falls among the steps that --profile traces: use --{name} 0")
    if new.init_from == "scratch":
        for name, of_size in zip(("n_layer", "n_head", "n_embd"), SIZES[new.model]):
            if getattr(new, name) is None:
                setattr(new, name, of_size)
        if new.n_embd % new.n_head:
            heads = min((h for h in range(1, new.n_embd + 1) if new.n_embd % h == 0), key=lambda h: abs(h - new.n_head))
            raise UserError(f"--n_embd {new.n_embd} cannot be divided into {new.n_head} heads: try --n_head {heads}")
        for name in ("n_layer", "n_head", "n_embd", "seq_len") if resumed else ():
            if getattr(new, name) != getattr(pretrained, name):
                raise UserError(
                    f"--{name} {getattr(new, name)}, but {resumed} has {getattr(pretrained, name)}: leave the model's "
                    "flags as they were, or start a new run under another --run_name"
                )
    else:
        if new.n_layer or new.n_head or new.n_embd or new.model != "gpt2":
            raise UserError(
                "--init_from brings the model's sizes with it: leave out --model, --n_layer, --n_head, --n_embd, --demo"
            )
        new.n_layer, new.n_head, new.n_embd = pretrained.n_layer, pretrained.n_head, pretrained.n_embd
        if new.seq_len > pretrained.seq_len:
            raise UserError(
                f"--seq_len {new.seq_len}, but {new.init_from} knows {pretrained.seq_len} positions: "
                f"use --seq_len {pretrained.seq_len}"
            )
    if new.device == "auto":
        new.device = ranks.device.type
    fit_ranks(new, ranks, reasons)
    fit_device(new, ranks.device, reasons)
    if new.parallel != "ddp" and new.autocast == "fp16":
        raise UserError(f"--autocast fp16 scales its gradients, which goes with --parallel ddp, not {new.parallel}")

    share = new.seq_len * ranks.world_size  # tokens in one sequence on every rank
    if new.micro_batch_size is None:
        new.micro_batch_size, reason = choose_micro_batch_size(new, ranks)
        reasons.append(reason)
    elif new.total_batch_size % (new.micro_batch_size * share):
        sequences = new.total_batch_size // share
        fits = [b for b in range(1, sequences + 1) if new.total_batch_size % (b * share) == 0]
        nearest = nearest_multiples(new.total_batch_size, new.micro_batch_size * share)
        hint = f"--micro_batch_size {min(fits, key=lambda b: abs(b - new.micro_batch_size))} or " if fits else ""
        raise UserError(
            f"--total_batch_size {new.total_batch_size} is not a multiple of micro_batch_size {new.micro_batch_size} "
            f"× seq_len {new.seq_len} × {ranks.world_size} ranks: try {hint}--total_batch_size {nearest}"
        )
    fit_attention(new, ranks.device, reasons)
    if new.fp8 and (new.n_embd % 16 or new.micro_batch_size * new.seq_len % 16):
        raise UserError(
            f"--fp8 needs multiples of 16: n_embd is {new.n_embd}, and a micro-batch has {new.micro_batch_size} × "
            f"{new.seq_len} tokens"
        )
    if new.batch_warmup_steps and new.total_batch_size == new.micro_batch_size * share:
        reasons.append("batch_warmup_steps has nothing to do: one micro-batch on each device is the full batch")
    if new.warmup_steps >= new.max_steps:
        reasons.append(
            f"lr never gets to {new.lr:g}: its warm-up takes {new.warmup_steps} steps, the run {new.max_steps}"
        )
    if new.run_name is None:
        kind = "demo" if new.demo else new.model if new.init_from == "scratch" else Path(new.init_from).name
        new.run_name = ranks.share(f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}")
    return new, reasons


def fit_ranks(config, ranks, reasons):
    """Settle, in place, how the model is spread over this many ranks. Raises UserError where that cannot be."""
    if config.shard_ranks and config.parallel != "hsdp":
        raise UserError(f"--shard_ranks is for --parallel hsdp, this is {config.parallel}")
    if ranks.world_size == 1:
        if config.parallel != "ddp":
            config.parallel, config.shard_ranks = "ddp", None
            reasons.append("parallel is off: there is one rank (torchrun starts several)")
        if config.bf16_gradients:
            config.bf16_gradients = False
            reasons.append("bf16_gradients is off: there is one rank")
    if config.bf16_gradients and config.parallel == "ddp" and ranks.device.type != "cuda":
        config.bf16_gradients = False
        reasons.append(f"bf16_gradients is off: NCCL alone averages in bf16, this is {ranks.device.type}")
    averaged = config.compile and config.parallel == "ddp" and ranks.world_size > 1
    if config.overlap_gradients == "on" and not averaged:
        config.overlap_gradients = "off"
        reasons.append("overlap_gradients is off: it goes with --compile, --parallel ddp and several ranks")
    if config.overlap_gradients == "auto" and averaged:
        config.overlap_gradients = "on"
        if ranks.device.type == "cuda":
            rate = averaging_rate(ranks)
            config.overlap_gradients = "on" if rate < FAST_LINKS else "off"
            reasons.append(
                f"overlap_gradients {config.overlap_gradients}: the GPUs average {rate / 1e9:.0f} GB of gradients/s"
            )
    if config.parallel == "hsdp":
        config.shard_ranks = row_length(config, ranks)
        if ranks.sum(config.shard_ranks - ranks.min(config.shard_ranks))[0]:
            raise UserError("the machines have different numbers of ranks: say how many hold a copy, --shard_ranks")
        if ranks.world_size % config.shard_ranks:
            fits = [size for size in range(2, ranks.world_size + 1) if ranks.world_size % size == 0]
            raise UserError(
                f"--shard_ranks {config.shard_ranks} does not divide the {ranks.world_size} ranks: try one of {fits}"
            )
        if ranks.world_size == config.shard_ranks:
            reasons.append("hsdp is zero3 here: one copy takes all ranks")
        if config.shard_ranks == 1:
            reasons.append("hsdp spreads nothing here: each rank holds a copy, as with ddp")


def check_given(arguments, reasons):
    """Raises UserError for a flag on the command line that does nothing on this device: one of resolve's reasons."""
    for reason in reasons:
        name, off, why = reason.partition(" is off: ")
        if off and name in given(arguments):
            raise UserError(f"--{name} does nothing here: {why}; leave it out")


def check_bounds(config):
    """Raises UserError for a number that no run can have."""
    lowest = dict.fromkeys(("n_layer", "n_head", "n_embd", "seq_len", "micro_batch_size", "total_batch_size"), 1)
    lowest |= dict.fromkeys(("max_steps", "val_steps", "ladder_steps", "keep_checkpoints", "max_bad_steps"), 1)
    lowest["shard_ranks"] = 1
    lowest |= dict.fromkeys((*EVALUATIONS, "seed", "profile"), 0)
    lowest |= dict.fromkeys(
        ("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "grad_clip", "batch_warmup_steps"), 0
    )
    for name, bound in lowest.items():
        value = getattr(config, name)
        if value is not None and not value >= bound:
            raise UserError(f"--{name} {value}: it must be at least {bound}")
    if config.peak_tflops is not None and not config.peak_tflops > 0:
        raise UserError(f"--peak_tflops {config.peak_tflops}: it must be above 0")
    if config.seed >= 2**63:
        raise UserError(f"--seed {config.seed}: it must be below 2^63")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"--{name} {getattr(config, name)}: it must be at least 0 and below 1")
