"""The axes of `ladder.py --sweep`: a flag and its values each."""

import typing

from common.cli import UserError, read_value

EVALUATIONS = ("val_every", "hellaswag_every", "sample_every", "checkpoint_every")  # off in a measurement
# Flags that a measurement sets itself, or that have no effect in it
NOT_SWEPT = {
    *EVALUATIONS,
    *"""
    demo ladder config resume rungs ladder_steps max_steps batch_warmup_steps log_dir run_name
    wandb wandb_group wandb_project peak_tflops val_tokens hellaswag_data hellaswag_limit
    profile memory_snapshot keep_checkpoints allow_other_data
""".split(),
}


def read_axis(text, config_class):
    """ "micro_batch_size=8,16" as ("micro_batch_size", [8, 16]). Raises UserError for a bad flag or bad values.

    config_class: Config.
    """
    name, _, values = text.partition("=")
    if name in NOT_SWEPT:
        raise UserError(f"--sweep {text}: a sweep sets or ignores {name}")
    types = typing.get_type_hints(config_class) | {"gpus": int}
    if name not in types or not values:
        raise UserError(f"--sweep {text}: it takes a flag of train_gpt2.py, or gpus, and values, as gpus=1,2")
    try:
        converted = [read_value(name, types[name], value) for value in values.split(",")]
    except UserError as error:
        raise UserError(f"--sweep {text}: {error}") from error
    if name == "gpus" and min(converted) < 1:
        raise UserError(f"--sweep {text}: gpus must be at least 1")
    if len(set(converted)) < len(converted):
        raise UserError(f"--sweep {text} names a value twice")
    return name, converted
