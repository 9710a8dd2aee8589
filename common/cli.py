"""The command line: flags from a dataclass, and one-line messages for errors that a person can fix."""

import dataclasses
import difflib
import errno
import gc
import os
import shlex
import shutil
import signal
import sys
import time
import types
import typing
from pathlib import Path

from common import interrupt
from common.errors import UserError

ROOT = Path(__file__).parent.parent


class Console:
    """Standard output or error that may go away: a closed terminal, a pipe without a reader, a full disk.

    Output from then on is dropped, and the program goes on.
    """

    def __init__(self, stream):
        self._stream = stream

    def write(self, text):
        return self._try(self._stream.write, text)

    def flush(self):
        self._try(self._stream.flush)

    def _try(self, function, *arguments):
        try:
            return function(*arguments)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())  # the stream's buffer is dropped too
            os.close(null)

    def __getattr__(self, name):
        return getattr(self._stream, name)


# ----------------------------------------------------------------------------------------------------------------------
# Flags


SWITCH_VALUES = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def given(arguments):
    """The flags on a command line: {name: text, True for --NAME, False for --no_NAME}; "-" counts as "_" in a name.

    A switch that is spelled --NAME off has the text "off": spell_switches() makes it --no_NAME.
    """
    flags = {}
    for argument, following in zip(arguments, [*arguments[1:], "--"]):
        if argument.startswith("--"):
            name, equals, text = argument[2:].partition("=")
            name = name.replace("-", "_")
            on = not name.startswith("no_")
            flags[name.removeprefix("no_")] = text if equals else on if following.startswith("--") else following
    return flags


def spell_switches(flags_type, arguments):
    """The command line, as a list, with each boolean flag of flags_type, a dataclass, as --NAME or --no_NAME.

    --NAME=off, --NAME False, --NAME 0 and --no-NAME are other spellings of --no_NAME.
    Raises UserError for another value after "=".
    """
    flags = typing.get_type_hints(flags_type)
    spelled, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*spelled, argument, *rest]
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        switch = name if name in flags else name.removeprefix("no_")
        if argument.startswith("--") and flags.get(switch) is bool:
            if not equals:
                value = rest.pop(0) if rest and rest[0].lower() in SWITCH_VALUES else "on"
            on = read_value(name, bool, value) == (name == switch)
            argument = f"--{switch}" if on else f"--no_{switch}"
        spelled.append(argument)
    return spelled


def parse(flags_type, default=None, hints=None):
    """Read the command line into a dataclass: each field is a flag, --no_NAME or --NAME=off turns a boolean one off.

    default: an instance; by default the dataclass's own defaults. hints: {name: what to use instead} for flags that
    do not exist but that people may try. A dataclass with a GROUPS attribute, a tuple of its base dataclasses, gets one
    section of --help for each.
    Raises UserError for a flag that does not exist or a value that does not fit its flag.
    """
    import tyro

    arguments = sys.argv[1:]
    if not {"--help", "-h"} & set(arguments):
        arguments = spell_switches(flags_type, arguments)
        check_arguments(flags_type, arguments, hints or {})
    groups = getattr(flags_type, "GROUPS", None)
    try:
        if groups is None:
            return tyro.cli(flags_type, args=arguments, default=default, use_underscores=True)
        default = vars(default or flags_type())
        sections = {group: group(**{f.name: default[f.name] for f in dataclasses.fields(group)}) for group in groups}
        title = lambda group: tyro.conf.arg(name=group.TITLE)  # noqa: E731
        nested = dataclasses.make_dataclass(
            "Flags",
            [(g.__name__, typing.Annotated[tyro.conf.OmitArgPrefixes[g], title(g)]) for g in groups],
        )
        nested.__doc__ = flags_type.__doc__
        parsed = tyro.cli(nested, args=arguments, default=nested(*sections.values()), use_underscores=True)
    except SystemExit as stop:
        sys.exit(stop.code and 1)  # tyro has printed --help, or an error
    return flags_type(**{name: value for group in vars(parsed).values() for name, value in vars(group).items()})


def check_arguments(flags_type, arguments, hints):
    """Raises UserError for a flag that is not a field of flags_type, a dataclass, or a value of the wrong type.

    arguments: a command line that spell_switches() returned.
    """
    import tyro

    flags = typing.get_type_hints(flags_type)
    marked = typing.get_type_hints(flags_type, include_extras=True)
    names = [name for name, kind in marked.items() if tyro.conf.Positional in getattr(kind, "__metadata__", ())]
    required = [f.name for f in dataclasses.fields(flags_type) if f.name in names and f.default is dataclasses.MISSING]
    several = any(typing.get_origin(flags[name]) is tuple for name in names)
    positional, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            positional += rest
            break
        if not argument.startswith("--") or " " in argument:
            positional.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if flags.get(name) is bool or flags.get(name.removeprefix("no_")) is bool:
            continue
        if name not in flags:
            raise UserError(unknown(argument, flags, hints))
        if typing.get_origin(flags[name]) is tuple:
            while rest and not rest[0].startswith("--"):
                rest.pop(0)
        else:
            if not equals:
                if not rest or (rest[0].startswith("--") and " " not in rest[0]):
                    raise UserError(f"--{name} needs a value; see --help")
                value = rest.pop(0)
            read_value(name, flags[name], value)
    if len(positional) > len(names) and not several:
        raise UserError(unknown(positional[len(names)], flags, hints))
    if len(positional) < len(required):
        raise UserError(f"{required[len(positional)].upper()} is missing; see --help")


def unknown(argument, flags, hints):
    """The error for an argument that is neither a flag nor a flag's value. flags: {name: type}; hints: of parse()."""
    flag, equals, _ = argument.partition("=")
    name = flag.lstrip("-").replace("-", "_").rpartition(".")[2]  # torchtitan has --SECTION.NAME, nanoGPT NAME=VALUE
    hint = hints.get(name) or hints.get(name.removeprefix("no_"))
    meant_as_flag = equals or argument.startswith("-")
    if hint and meant_as_flag:
        return f"{flag}: {hint}"
    if argument.startswith("--"):
        near = difflib.get_close_matches(name, flags, n=1)
        return f"{flag}: there is no such flag{f', did you mean --{near[0]}?' if near else ''}; see --help"
    if name in flags and meant_as_flag:
        return f"{argument}: a flag starts with two dashes: --{argument.lstrip('-')}"
    if "config" in flags and argument.endswith((".py", ".json", ".toml", ".yaml", ".yml")):
        return f"{argument}: flags come from the command line, or from a file: --config FILE.yaml"
    if "input" in flags and Path(argument).exists():
        return f"{argument}: use --input {argument}"
    return f"{argument!r} is neither a flag nor its value; see --help"


def read_value(name, kind, text):
    """A flag's value from text; kind: bool, int, float, str, a Literal, or one of these with "| None".

    Raises UserError for a value that does not fit. Other kinds are left to tyro, and returned as text.
    """
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # Literal | None is the latter
        kind = next(each for each in kind.__args__ if each is not type(None))
        if text == "None":
            return None
    if typing.get_origin(kind) is typing.Literal:
        if text not in kind.__args__:
            raise UserError(f"--{name} {text}: it must be one of {', '.join(kind.__args__)}")
        return text
    if kind is bool:
        kind = lambda word: SWITCH_VALUES[word.lower()]  # noqa: E731
    if typing.get_origin(kind) or not callable(kind):
        return text
    try:
        return kind(text)
    except (ValueError, KeyError) as error:
        expected = {int: "a whole number", float: "a number"}.get(kind, "on or off")
        raise UserError(f"--{name} {text}: it must be {expected}") from error


def arguments(values, defaults):
    """The command line, as a list, of the flags whose value differs from its default. Both arguments: {flag: value}."""
    result = []
    for name, default in defaults.items():
        value = values[name]
        if value == default or value is None:
            continue
        result += [f"--{name}" if value else f"--no_{name}"] if isinstance(default, bool) else [f"--{name}", str(value)]
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Commands to type


def python_command(script, *arguments):
    """The command line that runs one of the project's scripts, or with "-m" a module, in the shell and the folder that
    this process was started from."""
    python = Path(sys.executable)
    on_path = shutil.which(python.name)
    # a virtual environment's python is a link to the system's, so only the folders tell them apart
    if on_path and Path(on_path).parent.resolve() == python.parent.resolve():
        python = python.name
    script = script if script == "-m" else ROOT / script
    return shlex.join(map(str, (from_here(python), from_here(script), *arguments)))


def from_here(path):
    """A path as it is typed in the current folder: relative if it lies below."""
    path, here = Path(path), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


# ----------------------------------------------------------------------------------------------------------------------
# Errors


# What gloo and NCCL say on the ranks that are left
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def run(main):
    """Call main(). A UserError, a full disk or another rank's end prints one line on standard error and ends with exit
    code 1, Ctrl-C with 130."""
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # the caller closed a standard stream, as >&- does: no other file may get its number
    os.close(spare)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        # flush every line, also into a pipe; escape characters that the encoding lacks
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
        setattr(sys, name, Console(stream))
    if signal.getsignal(signal.SIGINT) == interrupt.end:  # the imports are over
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():
        gc.freeze()  # no collection visits the modules, neither in training nor at exit
        gc.enable()
    several_ranks = os.environ.get("WORLD_SIZE", "1") != "1"
    try:
        main()
    except (UserError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError):
            sign = next((sign for sign in PEER_IS_GONE if sign in str(error)), None)
            if sign is None or not several_ranks:
                raise
            error = f"another rank has ended ({sign}): its own output, or torchrun's summary, says why"
        elif isinstance(error, OSError):
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            error = f"cannot write {error.filename or 'a file'}: {error.strerror}"
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(5)  # rank 0 usually prints the same error, and torchrun then ends this rank
        print(f"error{f' (rank {rank})' if rank != '0' else ''}: {error}", file=sys.stderr, flush=True)
        if several_ranks:
            # let gloo's thread release its tensors: during interpreter shutdown that ends with SIGABRT.
            # Destroying the group could wait for ranks that never answer.
            time.sleep(0.2)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT
