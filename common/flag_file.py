"""Flags in a YAML file: --config reads one, and every run writes its own."""

import dataclasses

import yaml

from common.cli import given
from common.errors import UserError, first_line
from common.files import atomic_write, open_regular

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


def read(path, flags_type, hints):
    """The flags in a file: {name: value}; one without a value has its default. flags_type, hints: of common.cli.given.

    Raises UserError if the file cannot be read, has flags that do not exist, or values that do not fit.
    """
    try:
        with open_regular(path) as file:
            content = yaml.load(file, Loader=yaml.BaseLoader)  # all values as text: `off` is one of some flags' values
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
        return given(flags_type, hints, [f"--{name}={text}" for name, text in content.items()])
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
