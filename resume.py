"""Where training goes on: the checkpoint that --resume means, and everything but the weights put back in its place."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file

import checkpoint
from cli import UserError

# Flags that may differ between a run and its continuation without a word: they change neither data nor updates
FREE = set(
    "demo data_dir log_dir run_name device deterministic init_from resume micro_batch_size compile flash pad_vocab "
    "fused_adamw fused_loss fused_gelu packed_attention val_every val_steps hellaswag_every hellaswag_data "
    "sample_every checkpoint_every keep_checkpoints max_bad_steps wandb wandb_project wandb_group peak_tflops ladder "
    "rungs ladder_steps profile".split()
)


def find(config, ranks):
    """The checkpoint to go on from, or None for a new run. Where no run is named, sets run_name and log_dir to its.

    Raises UserError for a path without one, or when all are damaged.
    """
    if restarted := ranks.share(ranks.on_main(lambda: restarted_run(config))):
        config.run_name = restarted
        return checkpoint.newest(Path(config.log_dir) / restarted, ranks)
    if config.resume == "never":
        return None
    if config.resume != "auto":
        path = Path(config.resume)
        if (path / checkpoint.TRAINING).is_file():
            ranks.on_main(lambda: checkpoint.read_verified(path))
            found = path
        else:
            found = checkpoint.newest(path, ranks)
            if found is None:
                raise UserError(
                    f"--resume {path}: there is no checkpoint; give one, or the folder of a run that has one"
                )
        if config.run_name is None:
            config.log_dir, config.run_name = str(found.absolute().parent.parent), found.absolute().parent.name
        return found
    return checkpoint.newest(Path(config.log_dir) / config.run_name, ranks) if config.run_name else None


def launch():
    """What torchrun's restarts of one launch have in common, or None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}"


def restarted_run(config):
    """The name of the run that this launch of torchrun began before it restarted its processes, or None."""
    if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        return None
    for path in Path(config.log_dir).glob("*/config.json"):
        try:
            if json.loads(path.read_text()).get("launch") == launch():
                return path.parent.name
        except (OSError, ValueError):
            continue  # another program's, or half written
    return None


def differences(config, training):
    """Lines that say which flags of the run changed, of those that change what it computes."""
    before = training["run"]
    return [
        f"{name} is {value}, the checkpoint was made with {before[name]}"
        for name, value in vars(config).items()
        if name not in FREE and name in before and before[name] != value
    ]


def restore(folder, training, model, optimizer, scaler, loader, ranks):
    """Put everything but the weights, which load_model has loaded, where training left it.

    Raises UserError for data in another order.
    """
    loader.restore(training["loader"])
    if training["scaler"] and scaler.is_enabled():
        scaler.load_state_dict(training["scaler"])
    state = load_file(Path(folder) / checkpoint.STATE)
    for name, parameter in model.named_parameters():
        own = optimizer.state[parameter]
        # where AdamW itself has it: on the device when it is fused
        own["step"] = state["adamw_steps"].to(parameter.device if optimizer.defaults["fused"] else "cpu", copy=True)
        for moment in checkpoint.MOMENTS:
            own[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            checkpoint.without_padding(name, own[moment], model).copy_(state[f"{moment}.{name}"])
    scales = state.get(f"scales.{ranks.rank}", state.get("scales.0"))
    scaled = checkpoint.scaled_modules(model)
    for module, own in zip(
        scaled, scales.split([len(module.scales) for module in scaled]) if scales is not None else ()
    ):
        module.scales[:, 0].copy_(own)
    if f"random.{ranks.rank}" in state:
        checkpoint.set_random_state(state[f"random.{ranks.rank}"], ranks.device)
