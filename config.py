"""Config: every flag with its default and one line of help; the GPT-2 sizes; and how flags fit together."""

import dataclasses
import math
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from checkpoints.run_folder import flags_file_of
from common import flag_file
from common.cli import check_bounds, flag, given, parse
from common.errors import Note, UserError
from data.shards import open_shards
from kernels.needs import small_micro_batch
from model import GPTConfig
from optim import schedules
from optimizations import SWITCHES, model_switches, refuse_unavailable_flags, turn_off_unavailable
from parallel import place

# layers, heads, width (Radford et al. 2019, table 2; heads as in OpenAI's released weights)
SIZES = {
    "gpt2": (12, 12, 768),  # 124M parameters
    "gpt2-medium": (24, 16, 1024),  # 355M
    "gpt2-large": (36, 20, 1280),  # 774M
    "gpt2-xl": (48, 25, 1600),  # 1558M
    "tiny": (4, 4, 128),  # 7M, nearly all in the vocabulary
}
SETTLING_STEPS = 5  # steps that no measurement counts: compilation, the allocator's growth, the clock's settling
# Steps between evaluations or checkpoints
INTERVALS = ("val_every", "hellaswag_every", "sample_every", "checkpoint_every")


# Facts of a flag, beside its bounds. report=True: a resumed run reports its change, since results change by more than
# the order of sums. one_start=True: it belongs to one start of a run, and is not in the run's flags.yaml. sweep=False:
# a measurement sets it, or it has no effect there. sweep="axis" or "recipe": only measure.sweep, or only a recipe of
# measure.to_loss, may vary it.


@dataclass
class Basics:
    """The flags that most people need."""

    TITLE = "basic"
    demo: bool = flag(False, sweep=False)
    """--model tiny on text that comes with Python: a few minutes on a CPU; no network, no FineWeb needed."""
    model: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny"] = flag("gpt2", report=True)
    """124M, 355M, 774M or 1558M parameters; tiny, 7M, changes defaults to suit a CPU (--model tiny --help)."""
    data_dir: str = "edu_fineweb10B"
    """Folder of shards that fineweb.py wrote."""
    max_steps: int = flag(19073, at_least=1, report=True, sweep="recipe")
    """Training steps; the default is one epoch of 10B tokens."""
    max_minutes: float | None = flag(None, above=0, report=True, sweep=False)
    """Train this long instead of --max_steps, without compilation and evaluations. The schedule ends with the time."""
    micro_batch_size: int | None = flag(None, at_least=1)
    """Sequences in one forward pass of a device; by default, what fits. Changes speed and memory, not the batch."""
    lr: float = flag(6e-4, at_least=0, report=True)
    """Peak learning rate."""
    run_name: str | None = flag(None, one_start=True, sweep=False)
    """Folder of the run in log_dir, and its name on wandb; by default the model, date and time."""
    resume: str = flag("auto", one_start=True, sweep=False)
    """auto: the newest checkpoint of --run_name, if any; never; PATH: a run or a checkpoint, with its flags."""
    config: str | None = flag(None, one_start=True, sweep=False)
    """Take defaults from this YAML file, {flag: value}, such as a run's flags.yaml."""
    wandb: Literal["auto", "online", "offline", "disabled"] = flag("auto", sweep=False)
    """auto: online if wandb is logged in, else offline."""
    ladder: bool = flag(False, one_start=True, sweep=False)
    """Measure what each optimization buys: a short run with all off, then one run for each optimization added."""


@dataclass
class Model:
    """The model, the weights it starts from, and the order of the data."""

    TITLE = "model and data"
    n_layer: int | None = flag(None, at_least=1, report=True)
    """Layers, instead of the model's own."""
    n_head: int | None = flag(None, at_least=1, report=True)
    """Attention heads, instead of the model's own."""
    n_embd: int | None = flag(None, at_least=1, report=True)
    """Embedding width, instead of the model's own."""
    seq_len: int = flag(1024, at_least=1, report=True)
    """Sequence length in tokens."""
    init_from: str = "scratch"
    """Initial weights: scratch, a run, a checkpoint, a Hugging Face folder, a name on the hub (gpt2), a .pt."""
    seed: int = flag(1337, at_least=0, below=2**63, report=True, sweep="axis")
    """Seed of the initial weights, the data order and the samples."""
    shuffle: bool = flag(True, report=True)
    """Shuffle documents by the seed, anew each epoch; --no_shuffle reads the shards in order."""


def switch(row):
    """The field of an optimization that is a boolean flag, for make_dataclass()."""
    help = tyro.conf.arg(help=f"{row.help[0].upper()}{row.help[1:]}.")
    return row.name, Annotated[bool, help], flag(row.default, report=row.changes != "nothing")


Switches = make_dataclass("Switches", map(switch, SWITCHES))


@dataclass
class Speed(Switches):
    """The optimizations of optimizations.py, and the device."""

    TITLE = "precision and speed"
    autocast: Literal["bf16", "fp16", "off"] = flag("bf16", report=True)
    """Mixed precision; fp16 uses loss scaling and is for GPUs without bf16."""
    attention: Literal["auto", "written_out", "sdpa", "flash", "efficient", "cudnn", "flash4", "triton"] = "auto"
    """What computes attention. auto: flash4 where it runs, else sdpa; written_out: as --no_flash;
    sdpa: PyTorch's choice of flash, efficient and cudnn; flash4: cuDNN's forward, FlashAttention-4's backward;
    triton: a kernel to be read."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto: a GPU if there is one."""
    deterministic: bool = False
    """Bitwise reproducible on the same kind of device, and slower; otherwise a GPU sums in varying order."""


@dataclass
class Recipe:
    """The batch size and the optimizer's hyperparameters."""

    TITLE = "recipe"
    optimizer: Literal["adamw", "muon", "normuon"] = flag("adamw", report=True)
    """muon and normuon update the blocks' matrices, AdamW the rest; they change the defaults of --lr and schedule."""
    total_batch_size: int = flag(524288, at_least=1, report=True)
    """Tokens in a step, over all devices and accumulated micro-batches."""
    min_lr_ratio: float = flag(0.1, at_least=0, at_most=1, report=True)
    """The schedule ends at this fraction of the peak learning rate."""
    warmup_steps: int = flag(715, at_least=0, report=True)
    """Steps of linear learning-rate warm-up; the default is GPT-3's 375M tokens."""
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = flag("cosine", report=True)
    """Learning rate after the warm-up: cosine or linear decay; wsd: constant, then linear decay; or constant."""
    cooldown_ratio: float = flag(0.5, at_least=0, at_most=1, report=True)
    """With wsd: the fraction of all steps in which the learning rate decays."""
    weight_decay: float = flag(0.1, at_least=0, report=True)
    """Weight decay of matrices and embeddings."""
    beta2: float = flag(0.95, at_least=0, below=1, report=True)
    """AdamW's decay rate of the second moment."""
    adamw_lr: float = flag(3.6e-3, at_least=0, report=True)
    """With muon and normuon: AdamW's peak learning rate, for embeddings, biases, LayerNorms; --lr is the matrices'."""
    batch_warmup_ratio: float = flag(0.0, at_least=0, at_most=1, report=True, sweep="recipe")
    """The share of all steps on small batches: a quarter, then half, at √¼ and √½ of the learning rates."""
    grad_clip: float = flag(1.0, at_least=0, report=True)
    """Clip the gradient to this norm; 0 is off."""


@dataclass
class SeveralGPUs:
    """How the model is spread over several GPUs, and memory."""

    TITLE = "several GPUs"
    parallel: Literal["ddp", "zero1", "zero2", "zero3", "hsdp"] = "ddp"
    """What a GPU holds. ddp: everything. zero3: a shard of everything. hsdp: zero3 in each machine.
    zero2: as zero3, but weights stay gathered during a step. zero1: as zero2, with whole gradients until its end."""
    tensor: int = flag(1, at_least=1, sweep="axis")
    """Split every layer over this many adjacent ranks: heads, columns of the MLP, rows of the embedding table."""
    context: int = flag(1, at_least=1, sweep="axis")
    """Split every training sequence over this many adjacent ranks, for sequences too long for one GPU."""
    pipeline: int = flag(1, at_least=1, sweep="axis")
    """Divide the blocks over this many groups of ranks, which work on different micro-batches at the same time."""
    activation_checkpointing: Literal["off", "full", "selective"] = "off"
    """Recompute activations in backward: full, all of a block; selective, all but GEMM and attention outputs."""


@dataclass
class Evaluation:
    """Validation, HellaSwag and samples. All, and checkpoints, also run after the last step."""

    TITLE = "evaluation"
    val_every: int = flag(250, at_least=0, sweep=False)
    """Steps between validations; 0 is off."""
    val_tokens: int = flag(10485760, at_least=1, sweep=False)
    """Validation tokens, at most all there are."""
    hellaswag_every: int = flag(250, at_least=0, sweep=False)
    """Steps between HellaSwag evaluations; 0 is off."""
    tasks: str | None = flag(None, sweep=False, is_path=False)
    """Also evaluated, whenever HellaSwag is: names of arc_easy, piqa, lambada and winogrande. They are downloaded;
    hellaswag=FILE.jsonl,piqa=FILE.jsonl takes local files with the same columns."""
    sample_every: int = flag(250, at_least=0, sweep=False)
    """Steps between samples; 0 is off."""


@dataclass
class Output:
    """Checkpoints, logs, wandb and the profiler."""

    TITLE = "checkpoints and logs"
    checkpoint_every: int = flag(1000, at_least=0, sweep=False)
    """Steps between checkpoints; 0 is off. Unless --rollbacks is 0, a new run or branch also begins with one."""
    keep_checkpoints: int = flag(3, at_least=1, sweep=False)
    """Newest checkpoints to keep; also kept: the best one, and the newest one whose next step was well."""
    rollbacks: int = flag(3, at_least=0, sweep=False)
    """How often a diverged run goes back to a checkpoint, at half the learning rate and past the data; 0: never."""
    log_dir: str = flag("log", sweep=False)
    """Folder of all runs."""
    profile: int = flag(0, at_least=0, one_start=True, sweep=False)
    """Trace this many steps with PyTorch's profiler and print where their time went; 0 is off."""
    memory_snapshot: int = flag(0, at_least=0, one_start=True, sweep=False)
    """Record this many steps' allocations on a GPU, for PyTorch's memory viewer; 0 is off."""


@dataclass
class Config(Output, Evaluation, SeveralGPUs, Recipe, Speed, Model, Basics):  # the fields of the last base come first
    """Train GPT-2. Without flags: GPT-2 124M on FineWeb-Edu 10BT, as fast as the hardware allows.

    On several GPUs: torchrun --standalone --nproc_per_node=8 train_gpt2.py [flags]
    """


def read_command_line(flags_type=Config, **implied):
    """(flags, typed): an instance of flags_type, a Config; the flags that are on the command line, {name: value}."""
    typed = given(flags_type)
    return parse(flags_type, flags_type(**vars(defaults(typed | implied)))), typed


def defaults(typed):
    """The default Config for the flags on the command line, {name: value}: the recipes of --demo, --model tiny and
    --optimizer, overridden by the flags of --resume's run, then by --config's.

    Without a GPU --ladder uses the demo, unless there is --no_demo or a flag that names data, model, weights or device;
    it compiles tiny models.
    Raises UserError for a file without flags.
    """
    in_files = {}
    if path := flags_file_of(typed):
        in_files |= flag_file.read(path, Config, of_a_run=True)
    if path := typed.get("config"):
        in_files |= flag_file.read(path, Config)
    chosen = in_files | typed
    if typed.get("ladder") and not {"data_dir", "device", "model", "init_from"} & chosen.keys():
        chosen.setdefault("demo", not torch.cuda.is_available())
    values = schedules.recipe_defaults(chosen) | in_files
    if typed.get("ladder") and values.get("model") == "tiny":
        values["compile"] = True
    return Config(**values)


def chosen_flags(config):
    """{flag: value}, from which defaults() makes this config: what chooses its recipe, and what differs from it."""
    recipe = schedules.recipe_defaults(vars(config))
    usual = vars(Config(**recipe))
    of_recipe = {name: recipe[name] for name in ("demo", "model", "optimizer") if name in recipe}
    return of_recipe | {name: getattr(config, name) for name in usual if getattr(config, name) != usual[name]}


def command_line(config):
    """The command line, as a list, that parses into this config; without --config and --resume."""
    arguments = []
    for name, value in chosen_flags(dataclasses.replace(config, config=None, resume=Config.resume)).items():
        arguments += [f"--{name}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no_'}{name}"]
    return arguments


# ----------------------------------------------------------------------------------------------------------------------
# How flags fit together


def resolve(config, distributed, free_memory=None, start=None, typed=None):
    """Fill in the flags that depend on the device or on other flags, and check all of them.

    free_memory: bytes, from parallel.memory. start: a checkpoints.resume.Start, or None for random weights at step 0.
    typed: the flags on the command line, {name: value}. Returns the complete Config, and Notes of what was chosen or
    changed. Raises UserError for flags that contradict each other, and for a typed one that is unavailable here.
    """
    check_bounds(config)
    if config.max_minutes and "max_steps" in (typed or {}):
        raise UserError("--max_minutes sets the number of steps: leave out --max_steps")
    check_traced_steps(config, start.step if start else 0, distributed.device)
    new = dataclasses.replace(config)
    set_sizes(new, start, typed or {})
    if new.device == "auto":
        new.device = distributed.device.type
    if not new.flash and new.attention not in ("auto", "written_out"):
        raise UserError(f"--attention {new.attention} needs --flash: leave out --no_flash")
    new, notes = turn_off_unavailable(new, distributed)
    place.check(new, distributed, free_memory, notes)
    schedules.check_flags(new, distributed, notes)
    smallest = schedules.micro_batches(0, new, distributed.data_size)[1]  # sequences
    if new.fp8 and (new.n_embd % 16 or smallest * new.seq_len % (16 * new.context)):
        raise UserError(
            f"--fp8 needs multiples of 16: n_embd is {new.n_embd}, and a micro-batch has {smallest} × "
            f"{new.seq_len // new.context} tokens on a rank"
        )
    if new.cuda_graphs and "cuda_graphs" not in (typed or {}) and not small_micro_batch(new):
        new.cuda_graphs = False
        notes.append(Note("cuda_graphs", False, "micro-batches are so large that the GPU does not wait for the host"))
    if new.tasks and not new.hellaswag_every:
        notes.append(Note("tasks", new.tasks, "nothing of it is evaluated, since hellaswag_every is 0"))
    refuse_unavailable_flags(typed or {}, notes)
    return new, notes


def gpt_config(config, weights=None):
    """The GPTConfig of a resolved Config; weights: that of the weights to start from, which sets the sizes."""
    sizes = weights or GPTConfig(config.seq_len, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    rows = math.lcm(128, config.tensor)  # whole tensor-core tiles on every rank
    return dataclasses.replace(sizes, pad_to=rows, **model_switches(config))


def check_traced_steps(config, step, device):
    """Raises UserError if a run at `step` ends before --profile or --memory_snapshot has traced its steps, or evaluates
    among them, and for a memory snapshot of another device than a GPU."""
    if config.profile and config.memory_snapshot:
        raise UserError("--profile and --memory_snapshot would slow each other down: use one at a time")
    if config.memory_snapshot and device.type != "cuda":
        raise UserError(f"--memory_snapshot records a GPU's allocations, and this is {device.type}: leave it out")
    steps, name = (config.memory_snapshot, "memory_snapshot") if config.memory_snapshot else (config.profile, "profile")
    traced = range(step + SETTLING_STEPS, step + SETTLING_STEPS + steps)
    if steps and config.max_steps < traced.stop:
        raise UserError(f"--{name} {steps} starts after {SETTLING_STEPS} steps: use --max_steps {traced.stop} or more")
    for interval in INTERVALS:
        every = getattr(config, interval)
        if every and any(step % every == 0 for step in traced):
            raise UserError(f"--{interval} {every} falls among the steps that --{name} traces: use --{interval} 0")


def set_sizes(config, start, typed=()):
    """Set the model's sizes, in place. With --init_from, unless they are set, also seq_len, to the weights' positions
    at most, and total_batch_size, so that an epoch has ten to twenty steps. Raises UserError if flags contradict the
    weights."""
    pretrained, resumed = (start.sizes, start.resumed) if start else (None, None)
    sizes = ("n_layer", "n_head", "n_embd")
    if config.init_from != "scratch":
        named = (0, 0, 0) if config.demo or config.model == "gpt2" else SIZES[config.model]
        for name, size in zip(sizes, named):
            own, size = getattr(pretrained, name), getattr(config, name) or size
            if size not in (0, own):
                raise UserError(
                    f"--init_from sets the model's sizes: {name} is {own} in {config.init_from}, the flags "
                    f"say {size}; leave out --model, --n_layer, --n_head and --n_embd"
                )
            setattr(config, name, own)
        chosen = {name for name in vars(config) if name in typed or getattr(config, name) != getattr(Config, name)}
        if "seq_len" not in chosen:
            config.seq_len = min(config.seq_len, pretrained.seq_len)
        if config.seq_len > pretrained.seq_len:
            raise UserError(
                f"--seq_len {config.seq_len}, but {config.init_from} has {pretrained.seq_len} positions: "
                f"use --seq_len {pretrained.seq_len}"
            )
        if "total_batch_size" in chosen:
            return
        if resumed:  # what the run began with
            config.total_batch_size = start.training["run"].get("total_batch_size", config.total_batch_size)
        else:
            tokens = min(config.total_batch_size, sum(map(len, open_shards(config.data_dir, "train"))) // 10)
            config.total_batch_size = config.seq_len * 2 ** (max(1, tokens // config.seq_len).bit_length() - 1)
        return
    for name, size in zip(sizes, SIZES[config.model]):
        setattr(config, name, getattr(config, name) or size)
    if config.n_embd % config.n_head:
        divisors = [n for n in range(1, config.n_embd + 1) if config.n_embd % n == 0]
        heads = min(divisors, key=lambda n: abs(n - config.n_head))
        raise UserError(f"--n_embd {config.n_embd} cannot be divided into {config.n_head} heads: try --n_head {heads}")
    for name in (*sizes, "seq_len") if resumed else ():
        if getattr(config, name) != getattr(pretrained, name):
            raise UserError(
                f"{name} is {getattr(config, name)}, but {getattr(pretrained, name)} in {resumed}: --resume "
                f"{Path(resumed).parent} continues with that run's flags; a new run needs another --run_name"
            )
