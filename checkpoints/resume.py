"""Where a run starts: the checkpoint that --resume means, and restoring everything but the weights from it."""

import os
from dataclasses import dataclass
from pathlib import Path

from checkpoints import load, pieces
from checkpoints.run_folder import TRAINING, checkpoints_of, facts_of, folder_of, goes_on, run_of
from checkpoints.save import modules_with_scales
from common.cli import flags_with, from_here
from common.device import fill
from common.errors import Note, UserError, word
from data.shards import MANIFEST, first_difference
from data.tasks import join_tasks, split_tasks
from model import GPTConfig
from optim.optimizer import named_state
from parallel.tensor import order_by_rank


@dataclass
class Start:
    """Where a run starts."""

    resumed: Path | None  # the checkpoint that it continues from
    training: dict | None  # its training.json
    weights: str | Path | None  # a checkpoint, a Hugging Face folder, ...; None: random weights
    sizes: GPTConfig | None  # of these weights
    goes_on: bool = False  # whether it continues the run of that checkpoint; else it is a new one, or a branch

    def __post_init__(self):
        so_far = dict(step=0, tokens=0, trained_seconds=0.0, rolled_back=[], health=None) | (self.training or {})
        self.step, self.tokens, self.trained_seconds = (so_far[name] for name in ("step", "tokens", "trained_seconds"))
        self.rollbacks, self.health = so_far["rolled_back"], so_far["health"]  # before this start: watch/rollback.py
        self.position = position_of(self.tokens, self.rollbacks)
        self.lost_seconds = sum(rollback["lost_seconds"] for rollback in self.rollbacks)  # of steps rolled back


def position_of(tokens, rollbacks):
    """Where in the data a run continues that has trained on so many tokens, after these rollbacks: past all that it has
    read or skipped, also from a checkpoint before the one that the last rollback went back to."""
    if not rollbacks:
        return tokens
    return rollbacks[-1]["position"] + max(0, tokens - rollbacks[-1]["tokens"])


def find_start(config, distributed):
    """The Start that --resume and --init_from select. A collective.

    If no run is named, config's run_name and log_dir become those of the run that continues.

    Raises UserError for a path without a checkpoint, and if all checkpoints are damaged.
    """
    weights = resumed = find_checkpoint(config, distributed)
    if not resumed and config.init_from != "scratch":
        weights = distributed.broadcast(distributed.on_main(lambda: load.locate(config.init_from)))
    training, own = load.read_training(resumed) if resumed else None, False
    if training:  # the run's own file has the rollbacks since, too; a branch has those before the checkpoint
        own = goes_on(resumed, folder_of(config.log_dir, config.run_name))
        training["rolled_back"] = (own and facts_of(run_of(resumed)) or training["run"]).get("rolled_back", [])
    sizes = load.load_config(weights) if weights is not None else None
    return Start(resumed, training, weights, sizes, own)


def find_checkpoint(config, distributed):
    """The checkpoint, verified, that a run continues from, or None; the rest is as of find_start."""
    path = None if config.resume in ("auto", "never") else Path(config.resume)
    if path and not (path / TRAINING).is_file() and not checkpoints_of(path):
        raise UserError(
            f"--resume {path}: there is no checkpoint{load.models_near(path)}; give a checkpoint, a run that has one, "
            "auto or never"
        )
    if path:
        run = run_of(path).absolute()
        if config.run_name is None:
            config.log_dir, config.run_name = str(from_here(run.parent)), run.name
        find_data(config, Path(facts_of(run).get("started_in", "")))
    again = distributed.broadcast(distributed.on_main(lambda: continues(config)))
    if again or (path and restarted(distributed)):
        if found := load.newest(Path(config.log_dir) / config.run_name, distributed):
            return found
    if path and (path / TRAINING).is_file():
        distributed.on_main(lambda: load.verify(path))
        return path
    return path and load.newest(path, distributed)


def find_data(config, folder):
    """Let config's relative paths of data lead from the folder in which the run was started, if only that exists."""

    def found(path):
        return str(folder / path) if path and not Path(path).exists() and (folder / path).exists() else path

    config.data_dir = found(config.data_dir)
    config.tasks = join_tasks({task: found(path) for task, path in split_tasks(config.tasks).items()})


def continues(config):
    """Whether a run continues from its own newest checkpoint: with --resume auto, and if a command that began a branch
    (--resume, another --run_name) is repeated."""
    if config.run_name is None:
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise UserError("torchrun --max-restarts needs --run_name: a restart continues the run of that name")
        return False
    folder = folder_of(config.log_dir, config.run_name)
    return config.resume == "auto" or (config.resume != "never" and facts_of(folder).get("resume") == config.resume)


def restarted(distributed):
    """Whether torchrun --max-restarts has started the processes of any machine again. A collective."""
    return distributed.all_reduce(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))[0] > 0


def changed_flags(start, config):
    """Notes about the flags that change a run's results and whose value differs from the checkpoint's."""
    if not start.resumed:
        return []
    before, now = start.training["run"], vars(config)
    length, derived = ("max_minutes", {"max_steps"}) if config.max_minutes else ("max_steps", set())
    if start.rollbacks:
        derived.add("lr")  # watch.rollback.as_left() notes it
    names = flags_with(type(config), report=True) & before.keys() - derived
    changed = [name for name in now if name in names and before[name] != now[name]]
    notes = [Note(name, now[name], f"the checkpoint was made with {word(before[name])}") for name in changed]
    if start.step >= config.max_steps:
        reason = f"the checkpoint is at step {start.step}; raise it to continue"
        notes.append(Note(length, now[length], reason))
    return notes


def check_same(start, config, data):
    """Raises UserError if the optimizer, the start, the data or their order differ from the checkpoint's. data: from
    open_streams."""
    if not start.resumed:
        return
    from_weights = f"start another --run_name from its weights with --init_from {start.resumed}"
    for name in ("optimizer", "seed", "shuffle", "seq_len", "init_from"):
        now = getattr(config, name)
        before = start.training["run"].get(name, now)
        if before != now:
            raise UserError(
                f"{start.resumed} was trained with --{name}={word(before)}: continue with it instead of {word(now)}, "
                f"or {from_weights}"
            )
    difference = first_difference(start.training["shards"], data["shards"])
    for name, text in (("manifest", f"{MANIFEST} is not the same"), ("sample", "the shards have other tokens")):
        before, now = start.training.get(name), data[name]
        if not difference and before and now and before != now:
            difference = text
    if difference:
        raise UserError(
            f"{start.resumed} was trained on other data than {config.data_dir}: {difference}; continue with the same "
            f"data, or {from_weights}"
        )


def initialize(model, name):
    """Fill the weights of a GPT that parallel.place.place() returned, by load.load_weights(name), or with random ones
    if there is no name. Every rank calls this. Raises what load_weights raises."""
    if name:
        load.load_weights(name, model)
    else:
        model.init_weights(fill)
    order_by_rank(model.named_parameters())


def restore(start, model, optimizer, scaler, distributed):
    """Restore everything but the weights: optimizer state, loss scale, fp8 scales.

    fp8 scales stay as they are if the checkpoint has none, or those of other modules. Raises UserError for the state of
    another model or optimizer.
    """
    state, names = named_state(model, optimizer), [f"scales.{distributed.rank}", "scales.0"]
    files = [name for name in start.training["sha256"] if name.endswith(".safetensors")]
    with load.explained(start.resumed, expected="another checkpoint"):
        if start.training["scaler"] and scaler.is_enabled():
            scaler.load_state_dict(start.training["scaler"])
        found = pieces.load(start.resumed, files, state, optional=names)
    order_by_rank(state.items())
    scales, modules = next((found[name] for name in names if name in found), None), modules_with_scales(model)
    lengths = [len(module.scales) for module in modules]
    if scales is not None and scales.shape == (sum(lengths),):
        for module, own in zip(modules, scales.split(lengths)):
            module.scales[:, 0].copy_(own)
