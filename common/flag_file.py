"""Flags in a YAML file: --config reads one, and every run writes its own."""

import typing

import yaml

from common.cli import read_value, unknown
from common.errors import UserError, first_line
from common.files import atomic_write, open_regular

# not written: they belong to one start of a run, and do not define what it trains
OF_ONE_RUN = "config", "resume", "run_name", "allow_other_data", "ladder", "profile", "memory_snapshot"


def read(path, flags_type, hints):
    """The flags in a file: {name: value}; one without a value has its default. flags_type, hints: of common.cli.parse.

    Raises UserError if the file cannot be read, has flags that do not exist, or values that do not fit.
    """
    try:
        with open_regular(path) as file:
            content = yaml.load(file, Loader=yaml.BaseLoader)  # all values as text: `off` is one of some flags' values
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the flags in {path}: {first_line(error)}") from error
    if not isinstance(content or {}, dict):
        raise UserError(f"{path} has no flags: each line must be NAME: VALUE, such as lr: 6e-4")
    kinds = typing.get_type_hints(flags_type)
    values = {}
    for name, text in (content or {}).items():
        if name not in kinds:
            raise UserError(f"{path}: {unknown(f'--{name}', kinds, hints)}")
        if name in ("config", "resume", "ladder"):
            raise UserError(f"{path}: {name} is for the command line: --{name}")
        if text in ("", "null"):
            continue
        if not isinstance(text, str):
            raise UserError(f"{path}: {name} must be one value, not {text}")
        try:
            values[name] = read_value(name, kinds[name], text)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    return values


def write(path, flags):
    """Write a Config's flags, by its GROUPS, without those in OF_ONE_RUN. Raises OSError."""
    lines = [f"# the flags of this run; to repeat it: train_gpt2.py --config {path}"]
    for group in flags.GROUPS:
        names = [name for name in group.__dataclass_fields__ if name not in OF_ONE_RUN]
        values = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
        lines += ["", f"# {group.TITLE}", yaml.safe_dump(values, sort_keys=False, allow_unicode=True).strip()]
    with atomic_write(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
