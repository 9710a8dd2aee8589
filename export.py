"""A model as a Hugging Face folder: config, weights, tokenizer. `transformers` and evaluation harnesses load it.

    python export.py log/RUN/checkpoint_019073 my-gpt2
    python export.py out/ckpt.pt my-gpt2                # nanoGPT's or build-nanogpt's checkpoint

A checkpoint is such a folder already; this leaves out what only training needs.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro

from checkpoints import checkpoint
from common.cli import UserError, parse, run
from data.tokenizer import save_tokenizer


@dataclass
class Flags:
    """Write a GPT-2 as a Hugging Face folder."""

    model: tyro.conf.Positional[str]
    """A checkpoint, a Hugging Face folder, a name on its hub such as gpt2, or a .pt of nanoGPT or build-nanogpt."""
    out: tyro.conf.Positional[str]
    """The folder to write."""


def main():
    flags = parse(Flags)
    out = Path(flags.out)
    if out.exists():
        raise UserError(f"{out} is there already: choose another name, or delete it")
    model = checkpoint.load_model(flags.model)
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)
        save_tokenizer(unfinished)
        unfinished.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    print(f"{out}: {model.num_params():,} parameters")
    print(f'Next: transformers.AutoModelForCausalLM.from_pretrained("{out}")')


if __name__ == "__main__":
    run(main)
