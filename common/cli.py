"""The command line: flags from a dataclass, commands to type, and progress."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import math
import operator
import os
import shlex
import sys
import typing
from pathlib import Path

from tqdm import tqdm

from common.errors import UserError

ROOT = Path(__file__).parent.parent


# ----------------------------------------------------------------------------------------------------------------------
# Flags


SWITCH_VALUES = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
HELP = {"--help", "-h"}
PATH_FLAGS = ("input", "data_dir", "resume")  # that a path without a flag may be for
# nanoGPT's flags, whose names here are too different for difflib
NANOGPT = dict(batch_size="micro_batch_size", block_size="seq_len", dataset="data_dir", dtype="autocast")
NANOGPT |= dict(eval_interval="val_every", gradient_accumulation_steps="total_batch_size", learning_rate="lr")
NANOGPT |= dict(max_iters="max_steps", lr_decay_iters="max_steps", decay_lr="lr_schedule")
NANOGPT |= dict(num_samples="count", start="prompt")


def flag(default, **facts):
    """A field of a dataclass of flags, with facts about it; check_bounds() reads at_least, at_most, above and below."""
    return dataclasses.field(default=default, metadata=facts)


def flags_with(flags_type, **facts):
    """The names of the flags with any of these facts."""
    return {f.name for f in dataclasses.fields(flags_type) if facts.items() & f.metadata.items()}


def check_bounds(flags):
    """Raises UserError for a number that is not finite, or outside the bounds of its field."""
    bounds = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{field.name} {value}: it must be finite")
        for fact, holds in bounds.items():
            if fact in field.metadata and value is not None and not holds(value, field.metadata[fact]):
                raise UserError(f"--{field.name} {value}: it must be {fact.replace('_', ' ')} {field.metadata[fact]}")


def parse(flags_type, default=None):
    """Read the command line into a dataclass: each field is a flag, --no_NAME turns a boolean one off.

    default: an instance; by default the dataclass's own defaults. Each base dataclass with a TITLE gets one section of
    --help, the last base the first.
    Raises UserError for a flag that does not exist, a value that does not fit its flag, or one out of bounds.
    """
    if HELP & set(sys.argv):
        show_help(flags_type, default)
    flags = given(flags_type)
    for field in dataclasses.fields(flags_type):
        if field.default is field.default_factory is dataclasses.MISSING and not flags.get(field.name):
            raise UserError(f"{field.name.upper()} is missing; see --help")
    flags = flags_type(**(vars(default) if default else {}) | flags)
    check_bounds(flags)
    return flags


def given(flags_type, arguments=None):
    """The flags on the command line, {name: value}; "-" counts as "_" in a name, and "~" at the beginning of a value is
    the home folder, unless the flag has the fact is_path=False. flags_type: a dataclass.

    arguments: another command line, as a list. Raises UserError as parse().
    """
    import tyro  # slow to import

    kinds = typing.get_type_hints(flags_type)
    marked = typing.get_type_hints(flags_type, include_extras=True)
    arguments = sys.argv[1:] if arguments is None else arguments
    arguments = [spell_switch(argument, kinds) for argument in arguments if argument not in HELP]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            flags, rest = tyro.cli(
                typing.TypedDict("Flags", marked, total=False),  # has only the flags that are given
                args=arguments,
                use_underscores=True,
                add_help=False,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(message_in_box(printed.getvalue())) from None
    if rest:
        raise UserError(f"{'; '.join(complaints(rest, kinds))}; see --help")
    texts = {name for name, value in flags.items() if isinstance(value, str)}
    paths = texts - flags_with(flags_type, is_path=False)
    return flags | {name: os.path.expanduser(flags[name]) for name in paths}  # a shell leaves --NAME=~/FILE as it is


def spell_switch(argument, kinds):
    """--compile=False, as sweeps of wandb spell it, as --no_compile. kinds: {flag: type}."""
    name, equals, value = argument.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if not (argument.startswith("--") and equals and kinds.get(name) is bool):
        return argument
    if value.lower() not in SWITCH_VALUES:
        raise UserError(f"{argument}: it must be on or off")
    return f"--{name}" if SWITCH_VALUES[value.lower()] else f"--no_{name}"


def message_in_box(text):
    """The message in a box that tyro printed: the lines between its title and the next rule or empty line."""
    lines = [line.strip(" │|╭╮╰╯+─") for line in text.splitlines()]
    is_text = lambda line: line.strip("-") != ""  # noqa: E731
    below_title = itertools.dropwhile(lambda line: not is_text(line), lines[1:])  # in ASCII a rule is below it
    message = " ".join(itertools.takewhile(is_text, below_title))
    return f"{message.removeprefix('Error parsing ').rstrip('.')}; see --help"


def complaints(arguments, flags):
    """What is wrong with each of the arguments that are neither flags nor flags' values. flags: {name: type}."""
    value_may_follow = False
    for argument in arguments:
        spelled, equals, _ = argument.partition("=")
        name = spelled.lstrip("-").replace("-", "_")
        if argument.startswith("--"):
            near = [NANOGPT[name]] if NANOGPT.get(name) in flags else difflib.get_close_matches(name, flags, 1, 0.65)
            yield f"{spelled}: there is no such flag{f', did you mean --{near[0]}?' if near else ''}"
        elif not value_may_follow and os.path.exists(argument):
            owners = [f"--{name}" for name in PATH_FLAGS if name in flags]
            hint = f": put {' or '.join(owners)} before it" if owners else ""
            pattern = f", or put a pattern in quotes, such as '*{Path(argument).suffix}'" if "input" in flags else ""
            yield f"{argument} is one path too many{hint}{pattern}"
            return
        elif not value_may_follow:
            yield f"{argument!r} is neither a flag nor its value"  # such as --compile False
        value_may_follow = argument.startswith("--") and not equals


def show_help(flags_type, default):
    """Print --help, and end the process."""
    import tyro

    if groups := [base for base in reversed(flags_type.__mro__) if "TITLE" in vars(base)]:
        values = vars(default or flags_type())
        sections = [group(**{f.name: values[f.name] for f in dataclasses.fields(group)}) for group in groups]
        title = lambda group: tyro.conf.arg(name=group.TITLE)  # noqa: E731
        marked = [(g.__name__, typing.Annotated[tyro.conf.OmitArgPrefixes[g], title(g)]) for g in groups]
        nested = dataclasses.make_dataclass("Flags", marked)
        nested.__doc__, flags_type, default = flags_type.__doc__, nested, nested(*sections)
    # on a terminal a Console would escape its colors
    stdout = getattr(sys.stdout, "stream", sys.stdout) if sys.stdout.isatty() else sys.stdout
    with contextlib.redirect_stdout(stdout):
        module = sys.modules["__main__"].__spec__  # of python -m
        prog = f"python -m {module.name}" if module else None
        tyro.cli(flags_type, args=["--help"], default=default, use_underscores=True, prog=prog)


# ----------------------------------------------------------------------------------------------------------------------
# Commands to type


def python_command(script, *arguments):
    """The command line that runs one of the project's scripts, or with "-m" a module, by the Python that this process
    was started with, in its folder."""
    script = script if script == "-m" else ROOT / script
    return shlex.join(map(str, (from_here(sys.orig_argv[0]), from_here(script), *arguments)))


def from_here(path):
    """A path as it is typed in the current folder: relative if it lies below."""
    path, here = Path(path), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


# ----------------------------------------------------------------------------------------------------------------------
# Progress


def progress(iterable, title, total=None, **options):
    """Iterate with a progress bar of rank 0 on standard error: on a terminal from the second second on, erased at the
    end; in a pipe or a file a line every 30 seconds. options: tqdm's."""
    own = dict(delay=2, leave=False)
    if not sys.stderr.isatty():
        own = dict(delay=30, mininterval=30, maxinterval=30, bar_format="{l_bar}{bar}{r_bar}\n")
    return tqdm(iterable, title, total, disable=os.environ.get("RANK", "0") != "0", **own | options)


def print_over_bar(line):
    """Print a line in one write, so that it does not mix with another thread's, in the place of a progress bar."""
    erase = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{erase}{line}\n", end="")
