"""Flags in a YAML file: --config reads one, and every run writes its own."""

import os

import yaml

from common.cli import flags_with, given
from common.errors import UserError, first_line
from common.files import atomic_write, regular_file


def read(path, flags_type, of_a_run=False):
    """The flags in a file: {name: value}; one without a value has its default.

    of_a_run: an older version may have written it, so flags that do not exist are left out, which a line says. Raises
    UserError if the file cannot be read, has values that do not fit or, unless it is of a run, flags that do not exist.
    """
    try:
        # BaseLoader: `off`, some flags' value, stays text
        content = yaml.load(regular_file(path).read_bytes(), yaml.BaseLoader) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"cannot read the flags in {path}, which must be YAML: {first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(text, str) for text in content.values()):
        raise UserError(f"{path}: it must be YAML, NAME: VALUE on each line, such as lr: 6e-4")
    for name in {"config", "resume", "ladder"} & content.keys():
        raise UserError(f"{path}: {name} is for the command line: --{name}")
    former = sorted(content.keys() - flags_type.__dataclass_fields__.keys()) if of_a_run else []
    if former and os.environ.get("RANK", "0") == "0":
        print(f"{path} has flags that no longer exist: {', '.join(former)}")
    content = {name: text for name, text in content.items() if name not in former}
    arguments = [f"--{name}={text}" for name, text in content.items() if text not in ("", "~", "null")]
    try:
        return given(flags_type, arguments)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def write(path, values, flags_type):
    """Write flags, {name: value}, but those of one start. Raises OSError."""
    left_out = flags_with(flags_type, one_start=True)
    own = {name: value for name, value in values.items() if name not in left_out and value is not None}
    text = yaml.safe_dump(own, sort_keys=False, allow_unicode=True) if own else ""
    with atomic_write(path) as file:
        file.write(f"# the flags of this run; train_gpt2.py --config FILE repeats it\n{text}".encode())
