"""Reading checkpoints and models: find the newest, verify it, load its weights.

Nothing in a checkpoint can execute when it is loaded.
"""

import contextlib
import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from checkpoints import formats, pieces
from checkpoints.run_folder import checkpoints_of
from checkpoints.save import STATE, TRAINING, WEIGHTS
from common.cli import UserError, first_line, hub_errors
from common.files import digest
from data.tokenizer import VOCAB_SIZE
from model import GPT, GPTConfig, find_file, stored_layout
from parallel.fsdp import fill

LOADER = dict(position=int, total=int, seed=int, shuffle=bool)  # types of the loader's state


def newest(folder, distributed):
    """The newest undamaged checkpoint of a run, or None if it has no checkpoint. Prints each damaged one.

    A collective: rank 0 hashes the files. Raises UserError if all are damaged.
    """

    def look():
        found = checkpoints_of(folder)
        for path in found:
            try:
                verify(path)
                return path.name
            except UserError as error:
                print(f"{error}: trying the previous one")
        if found:
            raise UserError(
                f"every checkpoint in {folder} is damaged: choose another --run_name (--init_from loads weights only)"
            )

    name = distributed.broadcast(distributed.on_main(look))
    return name and Path(folder) / name


def read_training(folder):
    """The content of a checkpoint's training.json. Raises UserError if it is missing or incomplete."""
    path = Path(folder) / TRAINING
    try:
        training = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{folder} is not a checkpoint to resume from: {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{folder} is damaged: {path.name} is not JSON ({error})") from error
    kinds = dict(step=int, tokens=int, loader=dict, scaler=dict, run=dict, sha256=dict)
    if not (
        isinstance(training, dict)
        and all(isinstance(training.get(name), kind) for name, kind in kinds.items())
        and training["step"] >= 0
        and all(type(training["loader"].get(name)) is kind for name, kind in LOADER.items())
        and "config.json" in training["sha256"]
        and (training["sha256"].keys() >= {WEIGHTS, STATE} or any(map(pieces.is_piece, training["sha256"])))
    ):
        raise UserError(f"{folder} has no training state to resume from: train from its weights with --init_from")
    return training


def verify(folder):
    """Raises UserError if a file of a checkpoint does not have the SHA-256 it was written with."""
    compare(folder, read_training(folder)["sha256"])


def compare(folder, hashes):
    """Raises UserError if one of a folder's files, {name: SHA-256}, is missing or has another hash."""
    for name, expected in hashes.items():
        path = Path(folder) / name
        try:
            found = digest(path)
        except OSError as error:
            raise UserError(f"{folder} is damaged: {name}: {error.strerror}") from error
        if found != expected:
            raise UserError(f"{folder} is damaged: {name} is not what was written")


def hashes_of(folder):
    """A checkpoint's files and their SHA-256. Empty for any other folder, whose weights load unverified."""
    try:
        hashes = json.loads((Path(folder) / TRAINING).read_text())["sha256"]
        return hashes if isinstance(hashes, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


# ----------------------------------------------------------------------------------------------------------------------
# The model alone


def load_model(name, **options):
    """The GPT in a checkpoint, in a Hugging Face folder, on the hub, or in a .pt of nanoGPT or build-nanogpt.

    options: fields of GPTConfig other than sizes. Raises UserError if it cannot be read or is damaged.
    """
    config = dataclasses.replace(load_config(name), **options)
    with explained(name):
        model = GPT.empty(config)
    verify_weights(name)
    load_weights(name, model)
    return model


def verify_weights(name):
    """Raises UserError if a checkpoint's weights do not have the SHA-256 they were written with."""
    sharded = in_pieces(name)
    compare(name, {file: value for file, value in hashes_of(name).items() if sharded or file == WEIGHTS})


def in_pieces(name):
    return any(pieces.is_piece(path.name) for path in Path(name).glob("*"))


def load_weights(name, model):
    """Copy weights, from anything that load_model takes, into a GPT of the same sizes, which may be sharded.

    Every rank calls this, so hashes are not compared: see verify_weights. Raises what load_model raises.
    """
    with explained(name):
        if formats.is_torch_file(name):
            model.load_hugging_face(formats.load(name)[1], fill)
        elif in_pieces(name):
            pieces.load(name, {own: stored_layout(own, each.detach()) for own, each in model.named_parameters()})
        else:
            model.load_hugging_face(load_file(find_file(name, WEIGHTS)), fill)


def load_config(name):
    """The GPTConfig of what load_model would load. Raises UserError if it cannot be read or is no GPT-2."""
    if found := checkpoints_of(name):
        raise UserError(f"{name} is a run's folder: give one of its checkpoints, such as {found[0]}")
    with explained(name):
        if formats.is_torch_file(name):
            return GPTConfig(**formats.load(name)[0])
        config = GPT.pretrained_config(name)
    if config.vocab_size != VOCAB_SIZE:
        raise UserError(f"{name} has a vocabulary of {config.vocab_size}, but GPT-2's has {VOCAB_SIZE}")
    return config


@contextlib.contextmanager
def explained(name):
    """Turns errors of reading a model into a UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # not the file's fault
    except (*hub_errors(), KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"cannot load {name} ({type(error).__name__}: {first_line(error)}); give a checkpoint, a Hugging Face "
            "folder, gpt2, gpt2-medium, gpt2-large or gpt2-xl, or a .pt of nanoGPT or build-nanogpt"
        ) from error
