"""Flags and their values in arguments: the axes of measure.sweep, and the --recipes of measure.to_loss."""

from dataclasses import make_dataclass

from common.cli import complaints, flags_with, given
from common.errors import UserError
from config import Config

WithGpus = make_dataclass("WithGpus", [("gpus", int, 1)], bases=(Config,))


def read_axis(text):
    """ "micro_batch_size=8,16" as ("micro_batch_size", [8, 16]). Raises UserError for a bad flag or bad values."""
    form = "a flag of train_gpt2.py, or gpus, and values, as gpus=1,2"
    name, values = read_values(text, text, WithGpus, flags_with(Config, sweep=False), form)
    if name == "gpus" and min(values) < 1:
        raise UserError(f"{text}: gpus must be at least 1")
    if len(set(values)) < len(values):
        raise UserError(f"{text} names a value twice")
    return name, values


def read_recipe(text):
    """ "optimizer=muon lr=1e-3" as {"optimizer": "muon", "lr": 0.001}. Raises UserError as read_axis does."""
    where = f"--recipes {text!r}"
    form = 'flags of train_gpt2.py with one value each, as "lr=1e-3 fp8=on"'
    excluded = flags_with(Config, sweep=False) | flags_with(Config, sweep="axis")
    axes = [read_values(part, where, Config, excluded, form) for part in text.split()]
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
    fields = flags_type.__dataclass_fields__
    if values and name not in fields:
        raise UserError(f"{where}: {next(complaints([f'--{name}'], fields))}")
    if not values:
        raise UserError(f"{where}: it takes {form}")
    try:
        return name, [given(flags_type, arguments=[f"--{name}={value}"])[name] for value in values.split(",")]
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
