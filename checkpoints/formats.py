"""Weights from nanoGPT's ckpt.pt and build-nanogpt's log/model_*.pt, read without executing pickled code.

nanoGPT computes the exact GELU; this model its tanh approximation, as OpenAI's code does, so logits differ slightly.
"""

import pickle
import zipfile

import torch

from common.files import regular_file
from data.tokenizer import VOCAB_SIZE


class Sizes:
    """Stand-in for build-nanogpt's GPTConfig, which is pickled with the weights; it only holds attributes."""


def load(path):
    """(sizes, weights): GPTConfig's sizes as a dictionary, and GPT-2's weights by Hugging Face's names.

    Layers without biases get zero biases; embedding rows beyond GPT-2's vocabulary are dropped.
    Raises OSError if the file cannot be read, ValueError if it is no such checkpoint.
    """
    stand_ins = [(Sizes, f"{module}.GPTConfig") for module in ("__main__", "train_gpt2", "model")]
    if not zipfile.is_zipfile(regular_file(path)):
        raise ValueError("it is not a file of torch.save")
    try:
        with torch.serialization.safe_globals(stand_ins):
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        state, config = saved["model"], saved.get("model_args") or vars(saved["config"])
        for wrapper in ("_orig_mod.", "module."):  # torch.compile's and DDP's
            state = {name.removeprefix(wrapper): weight.detach() for name, weight in state.items()}
        C, T = state["transformer.wte.weight"].size(1), state["transformer.wpe.weight"].size(0)
        layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("transformer.h."))
        V = min(len(state["transformer.wte.weight"]), VOCAB_SIZE)  # more rows are padding
        sizes = dict(seq_len=T, vocab_size=V, n_layer=layers, n_head=int(config["n_head"]), n_embd=C)
        if sizes["n_head"] < 1:
            raise KeyError("n_head")
    except pickle.UnpicklingError as error:
        raise ValueError("it holds more than weights and settings: pickled code, which is not executed") from error
    except (RuntimeError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it is neither nanoGPT's nor build-nanogpt's ({type(error).__name__}: {error})") from error
    weights, biases = {}, {}
    for name, weight in state.items():
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the tied embedding, and the causal mask
        if name == "transformer.wte.weight":
            weight = weight[:VOCAB_SIZE]
        elif name.endswith(".weight") and name != "transformer.wpe.weight":
            biases[name.removesuffix("weight") + "bias"] = torch.zeros(len(weight))  # for a layer without one
            weight = weight.t()  # Hugging Face stores linear weights as OpenAI did, (in, out)
        weights[name] = weight
    return sizes, biases | weights
