"""Checkpoints: a Hugging Face folder (config.json, model.safetensors, the tokenizer) with a training.json of ours."""

import contextlib
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from cli import UserError
from model import GPT
from tokenizer import VOCAB_SIZE, save_tokenizer


def save(folder, model, training):
    """Write the model and `training`, a JSON-able dictionary, to a new folder, which appears whole or not at all."""
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    model.save_pretrained(unfinished)
    save_tokenizer(unfinished)
    (unfinished / "training.json").write_text(json.dumps(training, indent=2) + "\n")
    for path in [*unfinished.iterdir(), unfinished]:
        flush_to_disk(path)
    unfinished.rename(folder)
    flush_to_disk(folder.parent)
    return folder


def flush_to_disk(path):
    """Return when the file, or the folder's list of names, would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_model(name, **options):
    """The GPT in a checkpoint, in a Hugging Face folder, or on the hub; options are GPT.from_pretrained's.

    Raises UserError when there is none.
    """
    load_config(name)
    with explained(name):
        return GPT.from_pretrained(name, **options)


def load_config(name):
    """The GPTConfig of what load_model would load. Raises UserError when there is none, or another vocabulary."""
    if checkpoints := sorted(Path(name).glob("checkpoint_*")):
        raise UserError(f"{name} is a run's folder: give one of its checkpoints, such as {checkpoints[-1]}")
    with explained(name):
        config = GPT.pretrained_config(name)
    if config.vocab_size != VOCAB_SIZE:
        raise UserError(f"{name} has a vocabulary of {config.vocab_size}, but GPT-2's has {VOCAB_SIZE}")
    return config


@contextlib.contextmanager
def explained(name):
    """Errors of reading a model, as a UserError."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise UserError(
            f"cannot load {name} ({type(error).__name__}: {reason}); give a checkpoint, a Hugging Face folder, or "
            "gpt2, gpt2-medium, gpt2-large or gpt2-xl"
        ) from error
