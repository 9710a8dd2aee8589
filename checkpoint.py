"""Checkpoints: a Hugging Face folder (config.json, model.safetensors) with training.json beside them."""

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from cli import UserError
from model import GPT


def save(folder, model, training):
    """Write the model and `training`, a JSON-able dictionary, to a new folder, which appears whole or not at all."""
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model.save_pretrained(unfinished)
    (unfinished / "training.json").write_text(json.dumps(training, indent=2) + "\n")
    for path in [*unfinished.iterdir(), unfinished]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    unfinished.rename(folder)
    return folder


def load_model(name, **options):
    """The GPT in a checkpoint, in a Hugging Face folder, or on the hub; options are GPT.from_pretrained's.

    Raises UserError when there is none.
    """
    try:
        return GPT.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot load {name} ({type(error).__name__}: {reason}); give a checkpoint, a Hugging Face folder, or "
            "gpt2, gpt2-medium, gpt2-large or gpt2-xl"
        ) from error
