"""Flags in a YAML file: --config reads one, and every run writes its own; flags of older versions and of others."""

import dataclasses

import yaml

from common.cli import given
from common.errors import UserError, first_line
from common.files import atomic_write, regular_file

# What to use in place of flags that do not exist here: nanoGPT's and build-nanogpt's names, and former names
HINTS = {
    # commands of their own, and flags of one of them
    "sweep": "run python -m measure.sweep FLAG=VALUE,VALUE ...",
    "to_loss": "run python -m measure.to_loss",
    "plan": "run python -m measure.plan",
    "rungs": "it chooses rungs of the ladder: add --ladder",
    "ladder_steps": "it is for the ladder: add --ladder",
    # nanoGPT and build-nanogpt
    "batch_size": "use --micro_batch_size (sequences on a device) or --total_batch_size (tokens in a step)",
    "gradient_accumulation_steps": "use --total_batch_size, the tokens in a step",
    "block_size": "use --seq_len",
    "dropout": "GPT-2 is trained without dropout here",
    "bias": "every linear layer has a bias, as in OpenAI's GPT-2",
    "learning_rate": "use --lr",
    "max_lr": "use --lr",
    "min_lr": "use --min_lr_ratio, a fraction of --lr",
    "warmup_iters": "use --warmup_steps",
    "max_iters": "use --max_steps",
    "dtype": "use --autocast bf16, fp16 or off",
    "dataset": "use --data_dir, a folder of shards that fineweb.py wrote",
    "eval_interval": "use --val_every",
    "out_dir": "use --log_dir",
    # former names
    "attention_backend": "use --attention",
    "packed_qkv": "use --attention",
    "flash4_backward": "use --attention",
    "adamw_states": "use --optimizer adamw_8bit",
}

# Flags that are in the files of older versions' runs, each with the value that changes nothing; None: none does
FORMER = {
    "max_bad_steps": "10",
    "rungs": "all",
    "ladder_steps": "20",
    "attention_backend": "auto",
    "packed_qkv": "true",
    "flash4_backward": "true",
    "adamw_states": "float32",
    "stages_per_rank": "1",
    "wandb_group": None,
    "peak_tflops": None,
}


def read(path, flags_type):
    """The flags in a file: {name: value}; one without a value has its default.

    Raises UserError if the file cannot be read, has flags that do not exist, or values that do not fit.
    """
    try:
        # all values as text: `off` is one of some flags' values
        content = yaml.load(regular_file(path).read_bytes(), Loader=yaml.BaseLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the flags in {path}: {first_line(error)}") from error
    if not isinstance(content or {}, dict):
        raise UserError(f"{path} has no flags: each line must be NAME: VALUE, such as lr: 6e-4")
    content = {name: text for name, text in (content or {}).items() if text not in ("", "null")}
    for name, default in FORMER.items():
        if content.get(name) == default or default is None:
            content.pop(name, None)
    if (content.get("optimizer"), content.get("adamw_states")) == ("adamw", "int8"):  # of an older version
        content["optimizer"] = "adamw_8bit"
        del content["adamw_states"]
    for name, text in content.items():
        if name in ("config", "resume", "ladder"):
            raise UserError(f"{path}: {name} is for the command line: --{name}")
        if not isinstance(text, str):
            raise UserError(f"{path}: {name} must be one value, not {text}")
    try:
        return given(flags_type, HINTS, [f"--{name}={text}" for name, text in content.items()])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def write(path, values, sections):
    """Write flags, {name: value}, but those of one start, by sections: dataclasses with a TITLE. Raises OSError."""
    lines = [f"# the flags of this run; to repeat it: train_gpt2.py --config {path}"]
    for group in sections:
        names = [field.name for field in dataclasses.fields(group) if not field.metadata.get("one_start")]
        own = {name: values[name] for name in names if values.get(name) is not None}
        if own:
            lines += ["", f"# {group.TITLE}", yaml.safe_dump(own, sort_keys=False, allow_unicode=True).strip()]
    with atomic_write(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
