"""Flags and their values in the arguments of ladder.py: the axes of --sweep, and the rungs of --recipes."""

import dataclasses

from common.cli import flags_with, given
from common.errors import UserError
from config import INTERVALS

OFF = dict.fromkeys((*INTERVALS, "batch_warmup_steps"), 0)  # in a measurement


def read_axis(text, config_class):
    """ "micro_batch_size=8,16" as ("micro_batch_size", [8, 16]). Raises UserError for a bad flag or bad values.

    config_class: Config.
    """
    axes = dataclasses.make_dataclass("Axes", [("gpus", int, 1)], bases=(config_class,))
    form = "a flag of train_gpt2.py, or gpus, and values, as gpus=1,2"
    name, values = read_values(text, f"--sweep {text}", axes, flags_with(axes, sweep=False), form)
    if name == "gpus" and min(values) < 1:
        raise UserError(f"--sweep {text}: gpus must be at least 1")
    if len(set(values)) < len(values):
        raise UserError(f"--sweep {text} names a value twice")
    return name, values


def read_recipe(text, config_class):
    """ "optimizer=muon lr=1e-3" as {"optimizer": "muon", "lr": 0.001}. Raises UserError as read_axis does."""
    where = f"--recipes {text!r}"
    form = 'flags of train_gpt2.py with one value each, as "lr=1e-3 fp8=on"'
    excluded = flags_with(config_class, sweep=False) | flags_with(config_class, sweep="axis")
    axes = [read_values(part, where, config_class, excluded, form) for part in text.split()]
    recipe = {name: values[0] for name, values in axes}
    if not recipe or len(recipe) < sum(len(values) for _, values in axes):
        raise UserError(f"{where}: it takes {form}")
    return recipe


def read_values(text, where, flags_type, excluded, form):
    """(name, values) from "name=value,value". excluded: flags of flags_type that are refused. Error messages begin with
    `where`, the argument, and `form` says what the argument must be."""
    name, _, values = text.partition("=")
    if name in excluded:
        raise UserError(f"{where}: {name} is the same in all runs, or has no effect")
    if name not in flags_type.__dataclass_fields__ or not values:
        raise UserError(f"{where}: it takes {form}")
    try:
        return name, [given(flags_type, arguments=[f"--{name}={value}"])[name] for value in values.split(",")]
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def print_unused(given_flags):
    """Name the flags of the command line that a measurement of some steps does not use. given_flags: {name: value}."""
    if unused := sorted({"max_steps", *OFF} & given_flags.keys()):
        print(f"not used: --{', --'.join(unused)} (--ladder_steps sets the steps; nothing is evaluated or saved)")
