"""Files of weights: safetensors, and torch.save's without executing pickled code; nanoGPT's ckpt.pt and build-nanogpt's
log/model_*.pt.

nanoGPT computes the exact GELU; this model its tanh approximation, as OpenAI's code does, so logits differ slightly.
"""

import pickle
import re
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.errors import first_line
from common.files import regular_file
from data.tokenizer import VOCAB_SIZE

GIT_LFS = b"version https://git-lfs"

# Linear weights that OpenAI's code, and so Hugging Face, stores as (in, out); nn.Linear stores (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class Sizes:
    """Stand-in for build-nanogpt's GPTConfig, which is pickled with the weights; it only holds attributes."""


def read(path):
    """The content of a .safetensors file or one of torch.save. Raises OSError, SafetensorError or ValueError."""
    with regular_file(path).open("rb") as file:
        if file.read(len(GIT_LFS)) == GIT_LFS:
            raise ValueError(f"{path} is a Git LFS pointer: git lfs pull replaces it by the file")
    if Path(path).suffix == ".safetensors":
        return load_file(path)
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no zip file, as torch.save writes since PyTorch 1.6: if it is older, save it anew")
    stand_ins = [(Sizes, f"{module}.GPTConfig") for module in ("__main__", "train_gpt2", "model")]
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError("it holds more than weights and settings: pickled code, which is not executed") from error
    except Exception as error:  # a torn or crafted file raises any
        raise ValueError(f"{path} is damaged: {first_line(error)}") from error


def plain_names(weights):
    """Weights by their names without the prefixes of GPT-2's parts and of wrappers (DDP's, torch.compile's), and with
    one table for the embedding and the head. Raises ValueError if these differ, and for anything but a dictionary
    of tensors."""
    if not isinstance(weights, dict) or not all(map(torch.is_tensor, weights.values())):
        raise ValueError("it is not a dictionary of tensors by name")
    weights = {re.sub(r"^(module\.|_orig_mod\.|transformer\.)*", "", str(name)): weights[name] for name in weights}
    head = weights.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, weights.setdefault("wte.weight", head)):
        raise ValueError("lm_head.weight differs from wte.weight: this GPT-2's head is tied to its embedding")
    return weights


def stored_layout(name, weight):
    """Convert a weight to the layout of OpenAI's files, or back."""
    return weight.mT if name.endswith(TRANSPOSED) and weight.dim() == 2 else weight


def load(path):
    """(sizes, weights) of a .pt of nanoGPT or build-nanogpt: GPTConfig's sizes as a dictionary, and GPT-2's weights by
    Hugging Face's names.

    Layers without biases get zero biases; embedding rows beyond GPT-2's vocabulary are padding.
    Raises OSError if the file cannot be read, ValueError if it is no such checkpoint.
    """
    saved = read(path)
    try:
        weights = plain_names({name: weight.detach() for name, weight in saved["model"].items()})
        config = saved.get("model_args") or vars(saved["config"])
        (V, C), T = weights["wte.weight"].shape, len(weights["wpe.weight"])
        layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("h."))
        sizes = dict(seq_len=T, vocab_size=min(V, VOCAB_SIZE), n_layer=layers, n_head=int(config["n_head"]), n_embd=C)
        if sizes["n_head"] < 1:
            raise KeyError("n_head")
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it is neither nanoGPT's nor build-nanogpt's ({type(error).__name__}: {error})") from error
    linear = [name for name in weights if name.endswith(".weight") and not name.startswith(("wte", "wpe"))]
    biases = {f"{name.removesuffix('weight')}bias": torch.zeros(len(weights[name])) for name in linear}
    return sizes, biases | {name: stored_layout(name, weight) for name, weight in weights.items()}
