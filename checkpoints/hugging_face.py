"""GPT-2 in Hugging Face's format: a folder, or a name on the hub, with config.json and model.safetensors."""

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from checkpoints.formats import plain_names, read, stored_layout
from common.device import fill, local
from common.files import read_json
from data.tokenizer import VOCAB_SIZE
from model import GPTConfig

WEIGHTS = "model.safetensors"
PADDED_VOCAB_SIZE = 50304  # a vocabulary up to this size is GPT-2's with padding, or with a few special tokens

# Options of config.json with the only values that GPT implements, which are also their defaults
OPTIONS = dict(
    model_type="gpt2",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
)


def read_config(name):
    """The GPTConfig of the model in a folder, or by its name on the hub: gpt2, gpt2-medium, gpt2-large, gpt2-xl, ...

    Raises OSError when it cannot be read or downloaded, ValueError when it is not a GPT-2.
    """
    from common.hub import find_file  # no resumed run needs it before

    sizes = read_json(find_file(name, "config.json"))
    if sizes.get("activation_function") == "gelu_pytorch_tanh":
        sizes["activation_function"] = "gelu_new"  # two names of one function
    for option, value in OPTIONS.items():
        if sizes.get(option, value) != value:
            raise ValueError(f"{option} is {sizes[option]!r:.99} in config.json, this GPT-2 needs {value!r}")
    names = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")  # in the order of GPTConfig's fields
    for name in names:
        if type(sizes.get(name)) is not int or not 0 < sizes[name] < 2**24:
            raise ValueError(f"{name} is {sizes.get(name)} in config.json")
    if VOCAB_SIZE < sizes["vocab_size"] <= PADDED_VOCAB_SIZE:
        sizes["vocab_size"] = VOCAB_SIZE
    return GPTConfig(*(sizes[name] for name in names))


def write_config(config, folder):
    """Write a GPTConfig as config.json, which `transformers` reads. The folder must exist."""
    description = dict(
        **OPTIONS,
        tie_word_embeddings=True,
        architectures=["GPT2LMHeadModel"],
        n_positions=config.seq_len,
        n_ctx=config.seq_len,  # llama.cpp reads this name
        vocab_size=config.vocab_size,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=config.vocab_size - 1,
        eos_token_id=config.vocab_size - 1,
    )
    (Path(folder) / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def write(model, folder, weights=None):
    """Write config.json and model.safetensors as `transformers` reads them. The folder must exist.

    weights: a result of host_weights(model); by default the current weights.
    """
    write_config(model.config, folder)
    path = Path(folder) / WEIGHTS
    save_file(weights or host_weights(model), path, metadata={"format": "pt"})
    shutil.copymode(Path(folder) / "config.json", path)  # safetensors leaves it readable to its owner alone


def host_weights(model):
    """Copies of the weights in host memory, by Hugging Face's names, without padding and without the tied head."""
    weights = {}
    for name, parameter in model.named_parameters():
        weight = stored_layout(name, parameter.detach())
        if name.endswith("wte.weight"):
            weight = weight[: model.config.vocab_size]
        weights[name] = to_host(weight)
    return weights


def read_weights(name):
    """The weights of the model in a folder or on the hub, {name: tensor}: in one file, or in those of an index.

    Raises OSError, SafetensorError or ValueError if they cannot be read.
    """
    from common.hub import find_file

    for file in (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        try:
            path = find_file(name, file)
        except FileNotFoundError:
            continue
        if path.suffix != ".json":
            return read(path)
        files = sorted(set(map(str, read_json(path, weight_map=dict)["weight_map"].values())))
        return {key: tensor for part in files for key, tensor in read(find_file(name, part)).items()}
    raise FileNotFoundError(f"it has no {WEIGHTS} and no pytorch_model.bin")


@torch.no_grad()
def fill_weights(model, weights):
    """Copy a dict like host_weights' into a model, which may be sharded; plain_names() says which names it may have.

    Raises ValueError when a weight is missing or has another shape.
    """
    weights = plain_names(weights)
    for name, parameter in model.named_parameters():
        weight = weights.get(name.removeprefix("transformer."))
        if weight is None:
            raise ValueError(f"the weights lack {name}")
        weight, padding = stored_layout(name, weight), 0
        if name.endswith("wte.weight"):
            weight = weight[: model.config.vocab_size]
            padding = model.config.table_rows - model.config.vocab_size
        shape = (len(parameter) - padding, *parameter.shape[1:])
        if weight.shape != shape:
            raise ValueError(f"{name} is {tuple(weight.shape)} in the weights, {shape} in the model")
        fill(parameter, F.pad(weight, (0, 0, 0, padding)) if padding else weight)


def to_host(tensor):
    """A contiguous copy in host memory, page-locked if it comes from a GPU: the copy is then several times faster.
    A DTensor stays a DTensor, with its shard copied."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.contiguous_format)
    local(copy).copy_(local(tensor))
    return copy
