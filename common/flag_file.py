"""Flags in a YAML file: --config reads one, and every run writes its own."""

import dataclasses

import yaml

from common.cli import given
from common.errors import UserError, first_line
from common.files import atomic_write, regular_file


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
    for name, text in content.items():
        if name in ("config", "resume", "ladder"):
            raise UserError(f"{path}: {name} is for the command line: --{name}")
        if not isinstance(text, str):
            raise UserError(f"{path}: {name} must be one value, not {text}")
    try:
        return given(flags_type, [f"--{name}={text}" for name, text in content.items()])
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
