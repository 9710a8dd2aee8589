"""Write a model as a Hugging Face folder (config, weights, tokenizer) for `transformers` and evaluation harnesses.

    python export.py log/RUN my-gpt2                    # the newest checkpoint of a run
    python export.py out/ckpt.pt my-gpt2                # a checkpoint of nanoGPT or build-nanogpt

A checkpoint of this project is such a folder already; the export leaves out the training state. Other benchmarks are
lm_eval's (pip install lm_eval):

    lm_eval --model hf --model_args pretrained=my-gpt2 --tasks arc_easy,piqa,lambada_openai
"""

import common.interrupt  # first: Ctrl-C during the other imports

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from safetensors import SafetensorError

from checkpoints import hugging_face
from checkpoints.load import load_model
from common.cli import parse
from common.errors import UserError, first_line, out_of_memory, run
from data.tokenizer import save_tokenizer


@dataclass
class Flags:
    """Write a GPT-2 as a Hugging Face folder."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run's folder (its newest checkpoint), a checkpoint, a Hugging Face folder, a name on the hub such as gpt2, or a
    .pt of nanoGPT or build-nanogpt."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """The folder to write."""


def main():
    flags = parse(Flags)
    out = Path(flags.out)
    if out.exists():
        raise UserError(f"{out} already exists: choose another name, or delete it")
    with out_of_memory("use a machine with more memory"):
        model = load_model(flags.model)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as unfinished:
            complete = Path(unfinished, out.name)
            complete.mkdir()
            hugging_face.write(model, complete)
            save_tokenizer(complete, model.config.seq_len)
            complete.rename(out)  # so that OUT is never half written
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {getattr(error, 'strerror', None) or first_line(error)}") from error
    print(f"{out}: {model.num_params():,} parameters")
    print(f'Next: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
    print(f"Next, other benchmarks: lm_eval --model hf --model_args pretrained={out} --tasks arc_easy,piqa")


if __name__ == "__main__":
    run(main)
