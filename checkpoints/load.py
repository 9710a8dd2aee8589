"""Reading checkpoints and models: find the newest, verify it, load its weights.

Nothing in a checkpoint can execute when it is loaded.
"""

import contextlib
import fnmatch
import os
from pathlib import Path

import torch
from safetensors import SafetensorError

from checkpoints import formats, pieces
from checkpoints.hugging_face import WEIGHTS, fill_weights, read_config, read_weights
from checkpoints.run_folder import STATE, TRAINING, checkpoints_of, facts_of
from common.cli import progress
from common.errors import UserError, first_line
from common.files import digest, json_digest, read_json
from data.tokenizer import VOCAB_SIZE
from model import GPT, GPTConfig

# What a run resumes from, in training.json
FIELDS = dict(step=int, tokens=int, scaler=dict, run=dict, shards=dict, manifest=str | None)


def newest(folder, distributed):
    """The newest undamaged checkpoint of a run, or None if it has no checkpoint. Prints each damaged one.

    A collective: rank 0 hashes the files. Raises UserError if all are damaged.
    """

    def look():
        found = checkpoints_of(folder)
        path = first_intact(found)
        if found and not path:
            raise UserError(
                f"every checkpoint in {folder} is damaged: choose another --run_name (--init_from loads weights only)"
            )
        return path

    return distributed.broadcast(distributed.on_main(look))


def first_intact(folders, weights_only=False):
    """The first undamaged one of checkpoints, or None. Prints each damaged one before it. Raises UserError for one that
    may not be read: its permissions can change, so an older one must not take its place."""
    for path in folders:
        try:
            (verify_weights if weights_only else verify)(path)
            return path
        except UserError as error:
            if isinstance(error.__cause__, PermissionError):
                raise
            print(f"{error}: not used")


def read_training(folder, **fields):
    """The content of a checkpoint's training.json without the hash of that content. Raises UserError if it is missing,
    damaged, or without one of the fields, {name: type}."""
    try:
        training = read_json(Path(folder) / TRAINING, sha256=dict, **fields)
        if training["sha256"].pop(TRAINING, None) != json_digest(training):
            raise ValueError("it is not what was written")
        if foreign := [name for name in training["sha256"] if Path(name).name != name]:
            raise ValueError(f"it lists {foreign[0]}, which is not a file's name")
    except OSError as error:
        raise UserError(f"{folder} is not a checkpoint to resume from: {TRAINING}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{folder} is damaged: {TRAINING}: {error}; without that file its weights load") from error
    return training


def verify(folder):
    """Raises UserError if a file of a checkpoint does not have the SHA-256 it was written with."""
    compare(folder, read_training(folder, **FIELDS)["sha256"])


def compare(folder, hashes):
    """Raises UserError if one of a folder's files, {name: SHA-256}, is missing or has another hash."""
    for name, expected in progress(hashes.items(), "verifying"):
        path = Path(folder) / name
        try:
            found = digest(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if found != expected:
            raise UserError(f"{folder} is damaged: {name} is not what was written")


# ----------------------------------------------------------------------------------------------------------------------
# The model alone


def load_model(name):
    """The GPT in a checkpoint, a run's newest one, a Hugging Face folder, on the hub, or in a .pt of nanoGPT or
    build-nanogpt.

    Raises UserError if it cannot be read or is damaged.
    """
    return load_located(locate(name))


def load_located(name):
    """load_model() of what locate() found, whose hashes are compared already."""
    config = load_config(name)
    with explained(name):
        with torch.device("meta"):  # no weights are drawn that others replace
            model = GPT(config)
        model.to_empty(device=torch.get_default_device())
    load_weights(name, model)
    return model


def locate(name):
    """The newest checkpoint of a run whose weights are undamaged, given its folder; else `name`. Raises UserError for a
    run without one, and for a checkpoint whose weights are damaged."""
    if found := checkpoints_of(name):
        if intact := first_intact(found, weights_only=True):
            return intact
        raise UserError(f"every checkpoint in {name} is damaged: give another model")
    if "finished" in facts_of(Path(name)):
        raise UserError(f"{name} is a run without checkpoints: give another model")
    verify_weights(name)
    return name


def verify_weights(name):
    """Raises UserError if a checkpoint's weights do not have the SHA-256 they were written with. Without training.json
    they are not verified."""
    if (Path(name) / TRAINING).is_file():
        hashes = read_training(name)["sha256"]
        compare(name, {file: hashes[file] for file in hashes if file != STATE})


def pieces_of(name):
    """The files of a sharded checkpoint, of another one none. Where there is a training.json, only what it lists."""
    listed = (Path(name) / TRAINING).is_file()
    files = read_training(name)["sha256"] if listed else [path.name for path in Path(name).glob("*.safetensors")]
    return [] if WEIGHTS in files else sorted(fnmatch.filter(files, "shard-*.safetensors"))


def load_weights(name, model, alone=False):
    """Copy weights, from anything that load_model takes, into a GPT of the same sizes, which may be sharded.

    Every rank calls this, unless `alone`. Hashes are not compared: see verify_weights. Raises what load_model raises.
    """
    with explained(name):
        if files := pieces_of(name):
            targets = {own: formats.stored_layout(own, each.detach()) for own, each in model.named_parameters()}
            pieces.load(name, files, targets, alone=alone)
        else:
            fill_weights(model, formats.load(name)[1] if is_torch_file(name) else read_weights(name))


def is_torch_file(name):
    return Path(name).suffix in (".pt", ".pth")


def load_config(name):
    """The GPTConfig of what load_model would load. Raises UserError if it cannot be read or is no GPT-2."""
    with explained(name):
        config = GPTConfig(**formats.load(name)[0]) if is_torch_file(name) else read_config(name)
    if config.vocab_size != VOCAB_SIZE:
        raise UserError(f"{name} has a vocabulary of {config.vocab_size}, but GPT-2's has {VOCAB_SIZE}")
    return config


MODELS = (
    "a run, a checkpoint, a Hugging Face folder, gpt2, gpt2-medium, gpt2-large or gpt2-xl, or a .pt of nanoGPT or "
    "build-nanogpt"
)


@contextlib.contextmanager
def explained(name, expected=MODELS):
    """Turns errors of reading a model or a checkpoint into a UserError, which asks for what is expected."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"cannot load {name} ({reason}){models_near(name)}; give {expected}") from error


def models_near(name):
    """In words, the newest models in a folder that is none itself, or in the folder of a path that does not exist."""
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    found = [each for each in sorted(folder.glob("*")) if is_torch_file(each) or os.path.exists(each / "config.json")]
    found.sort(key=lambda each: each.lstat().st_mtime)
    models = [each.name for each in found if each.suffix != ".unfinished"]
    if not models or folder == Path() or path.is_file() or os.path.exists(path / "config.json"):
        return ""
    more = f" and {len(models) - 5} more" if len(models) > 5 else ""
    return f"; {folder} has {', '.join(models[-5:])}{more}"
