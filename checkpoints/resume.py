"""Where training goes on: the checkpoint that --resume means, and everything but the weights put back in its place."""

import errno
import fcntl
import json
import os
from pathlib import Path

import torch

from checkpoints import checkpoint, pieces
from common.cli import UserError

# Flags, and the number of ranks, which may differ between a run and its continuation without a word: they change no
# data and no updates
FREE = set(
    "demo data_dir log_dir run_name device deterministic init_from resume parallel shard_ranks overlap_gradients "
    "activation_checkpointing micro_batch_size compile flash pad_vocab fused_adamw fused_loss fused_gelu "
    "packed_attention autotune val_every val_steps hellaswag_every hellaswag_data sample_every "
    "checkpoint_every keep_checkpoints max_bad_steps wandb wandb_project wandb_group peak_tflops ladder rungs "
    "ladder_steps profile world_size".split()
)
LOCK = "lock"  # in the run's folder; see lock()


def find(config, distributed):
    """The checkpoint to go on from, or None for a new run. Where no run is named, sets run_name and log_dir to its.

    Raises UserError for a path without one, when all of a run's are damaged, and when another process writes the run.
    """
    config.run_name, goes_on = distributed.broadcast(distributed.on_main(lambda: run_before(config)))
    if goes_on and (found := checkpoint.newest(Path(config.log_dir) / config.run_name, distributed)):
        return found
    if config.resume in ("auto", "never"):
        return None
    path = Path(config.resume)
    if (path / checkpoint.TRAINING).is_file():
        distributed.on_main(lambda: checkpoint.verify(path))
        found = path
    else:
        found = checkpoint.newest(path, distributed)
        if found is None:
            raise UserError(
                f"--resume {path}: there is no checkpoint; give auto, never, a checkpoint's folder, or that of a run"
            )
    if config.run_name is None:
        config.log_dir, config.run_name = str(found.absolute().parent.parent), found.absolute().parent.name
    return found


def run_before(config):
    """The run's name, and whether it goes on from its own newest checkpoint, if it has one.

    It does with --resume auto, after torchrun has restarted its processes, and when it began as a branch of another run
    and the same command is given again. Raises UserError when another process is writing it.
    """
    restarted = restarted_run(config)
    name = config.run_name or restarted
    if name is None:
        return None, False
    folder = Path(config.log_dir) / name
    try:
        if folder.exists():
            lock(folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write the run's folder {folder}: {error.strerror}; choose another --log_dir"
        ) from error
    branch = config.resume not in ("auto", "never") and folder.resolve() not in Path(config.resume).resolve().parents
    again = branch and facts_of(folder).get("resume") == config.resume
    return name, config.resume == "auto" or name == restarted or again


def lock(folder):
    """A file that is locked while this process lives, or until it is closed: two would write over each other's run.

    Raises UserError when another process has it.
    """
    file = open(folder / LOCK, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{folder} is being written by another process: choose another --run_name") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # a file system without locks
            raise
    return file


def facts_of(folder):
    """A run's config.json, or an empty dictionary where there is none that can be read."""
    try:
        facts = json.loads((folder / "config.json").read_text())
        return facts if isinstance(facts, dict) else {}
    except (OSError, ValueError):
        return {}  # another program's, or half written


def launch():
    """What torchrun's restarts of one launch have in common, or None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]  # proc(5): starttime
    except OSError:
        began = ""  # not Linux
    return f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}-{began}"


def restarted_run(config):
    """The name of the run that this launch of torchrun began before it restarted its processes, or None."""
    own = launch()
    if own is None:
        return None
    folders = [path.parent for path in Path(config.log_dir).glob("*/config.json")]
    return next((folder.name for folder in folders if facts_of(folder).get("launch") == own), None)


def differences(config, training, distributed):
    """Lines that say which flags of the run changed, of those that change what it computes."""
    before = training["run"]
    free = FREE - {"micro_batch_size", "world_size"} if config.batch_warmup_steps else FREE  # the batch grows from them
    return [
        f"{name} is {value}, the checkpoint was made with {before[name]}"
        for name, value in (vars(config) | dict(world_size=distributed.world_size)).items()
        if name not in free and name in before and before[name] != value
    ]


def restore(folder, training, model, optimizer, scaler, loader, distributed):
    """Put everything but the weights where training left it.

    Raises UserError for data in another order, or state of another model.
    """
    loader.restore(training["loader"])
    if training["scaler"] and scaler.is_enabled():
        scaler.load_state_dict(training["scaler"])
    moments = {}
    for name, parameter in model.named_parameters():
        for moment in checkpoint.MOMENTS:
            optimizer.state[parameter][moment] = moments[f"{moment}.{name}"] = torch.zeros_like(parameter.detach())
    steps = torch.zeros(())
    state = pieces.load(
        folder,
        moments | dict(adamw_steps=steps),
        optional=[f"random.{distributed.rank}", f"scales.{distributed.rank}", "scales.0"],
    )
    for parameter in model.parameters():
        # where AdamW itself has it: on the device when it is fused
        place = parameter.device if optimizer.defaults["fused"] else "cpu"
        optimizer.state[parameter]["step"] = steps.to(place, copy=True)
    scales = state.get(f"scales.{distributed.rank}", state.get("scales.0"))
    scaled = checkpoint.scaled_modules(model)
    for module, own in zip(
        scaled, scales.split([len(module.scales) for module in scaled]) if scales is not None else ()
    ):
        module.scales[:, 0].copy_(own)
    if f"random.{distributed.rank}" in state:
        checkpoint.set_random_state(state[f"random.{distributed.rank}"], distributed.device)
