"""Writing a checkpoint: a Hugging Face folder (config.json, model.safetensors, the tokenizer) that also holds
optimizer.safetensors (optimizer state, fp8 scales) and training.json (everything else).

A sharded model writes shard-*.safetensors in place of both .safetensors files; export.py merges the model's.
A checkpoint appears atomically: it is written under another name, flushed to disk and renamed.
"""

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from checkpoints import hugging_face, pieces
from checkpoints.formats import stored_layout
from checkpoints.hugging_face import host_weights, to_host
from checkpoints.run_folder import STATE, TRAINING
from common.files import digest, flush_to_disk, json_digest
from data.tokenizer import save_tokenizer
from optim.optimizer import named_state
from parallel.tensor import in_gpt2_order


def snapshot(model, optimizer, distributed):
    """Host copies of a checkpoint's tensors. A collective: every rank calls it.

    Rank 0 gets two dictionaries, weights and state, and the other ranks None. Of a sharded model every rank gets one
    dictionary with its own shards.
    """
    if pieces.has_dtensors(model):
        copies = {}
        for name, parameter in model.named_parameters():
            copies[name] = to_host(stored_layout(name, in_gpt2_order(name, parameter.detach())))
        for name, state in named_state(model, optimizer).items():
            copies[name] = to_host(in_gpt2_order(name, state))
        return copies
    state = {}
    if scaled := modules_with_scales(model):
        scales = torch.cat([module.scales[:, 0] for module in scaled])
        state = {f"scales.{rank}": each for rank, each in enumerate(distributed.all_gather(scales))}
    if not distributed.is_main:
        return None
    for name, tensor in named_state(model, optimizer).items():
        is_table = name.endswith("wte.weight") and tensor.dim() == 2
        state[name] = tensor[: model.config.vocab_size] if is_table else tensor  # pad_vocab's rows are zeros
    return host_weights(model), {name: to_host(tensor.detach()) for name, tensor in state.items()}


def modules_with_scales(model):
    """The fp8 modules, whose scales each rank has for itself; by attribute, since kernels/fp8.py needs Triton."""
    return [module for module in model.modules() if hasattr(module, "scales")]


def write(folder, model, tensors, training, group=None):
    """Write a snapshot and `training`, a JSON-serializable dictionary, to a new folder, which appears atomically.

    For a sharded model every rank calls this, with a gloo group of all ranks; `training` is rank 0's. Raises OSError.
    """
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    hashes = {}
    if group:
        hashes = pieces.write(unfinished, tensors, group)
        if dist.get_rank(group) > 0:
            return
        if lost := [name for name in hashes if not (unfinished / name).exists()]:
            raise OSError(f"{lost[0]} is not in {unfinished}: all machines must share --log_dir")
        hugging_face.write_config(model.config, unfinished)
    else:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        weights, state = tensors
        hugging_face.write(model, unfinished, weights)
        save_file(state, unfinished / STATE)
        shutil.copymode(unfinished / "config.json", unfinished / STATE)  # safetensors: readable to its owner alone
    save_tokenizer(unfinished, model.config.seq_len)
    hashes |= {path.name: digest(path) for path in sorted(unfinished.iterdir()) if path.name not in hashes}
    training = training | dict(sha256=hashes)
    hashes[TRAINING] = json_digest(training)  # of all but this entry
    (unfinished / TRAINING).write_text(json.dumps(training, indent=2) + "\n")
    for path in [*unfinished.iterdir(), unfinished]:
        flush_to_disk(path)
    unfinished.rename(folder)
    flush_to_disk(folder.parent)
