"""Norms by layer: of weights, gradients and activations. They show where a run diverges."""

import functools

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from common.cli import progress
from common.device import full_tensor
from data.loader import Loader
from parallel import gradients
from parallel.fsdp import is_sharded


def norms_by_layer(run, tokens):
    """Print a table of the run's last step, of so many tokens: forward and backward again, one sequence at a time.
    Returns its rows on rank 0: [{layer, weights, gradients, activations}], as text.

    Norms are L2 norms of a layer's weights and gradients, activations the largest root mean square of a sequence's. Of
    several ranks the largest value is shown. Gradients are those of the weights after the step, before clipping.

    run: train_gpt2.Run. A collective. There is no table, but None, with --pipeline and --context, where no rank has all
    of a sequence.
    """
    trainer, distributed, model = run.trainer, run.trainer.distributed, run.trainer.model
    config = trainer.config
    if config.pipeline > 1 or config.context > 1:
        return None
    layers = dict(embedding=model.transformer.wte, positions=model.transformer.wpe)
    layers |= {f"block {i}": block for i, block in enumerate(model.transformer.h)}
    layers["last LayerNorm"] = model.transformer.ln_f
    squares, last_tokens = {name: [] for name in layers}, []

    def keep(name, layer, inputs, output):
        output = full_tensor(output.detach()).float()
        squares[name].append(output.square().mean())
        if name == "last LayerNorm":
            last_tokens.append(output[:, -1])  # (1, C)

    hooks = [layer.register_forward_hook(functools.partial(keep, name)) for name, layer in layers.items()]
    loader = Loader(run.loader.stream, 1, config.seq_len, distributed, run.loader.position - tokens)
    sequences = tokens // (config.seq_len * distributed.data_size)
    for i in progress(range(sequences), "norms by layer"):
        batch = loader.next_batch()
        with gradients.accumulation(trainer, last=is_sharded(config) and i == sequences - 1):
            with trainer.autocast:
                loss = model(*batch) / sequences
            loss.backward()
    for hook in hooks:
        hook.remove()
    if distributed.world_size > 1 and not is_sharded(config):  # the model was called without DDP
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.div_(distributed.world_size))
    head = full_tensor(model.transformer.wte.weight.detach()).float()
    logits = (torch.cat(last_tokens) @ head.T).abs().amax()  # of the last token of each sequence
    values = [logits, *(value for name, layer in layers.items() for value in norms(layer, squares[name]))]
    values = torch.stack(distributed.all_gather(torch.stack([value.cpu() for value in values]))).amax(0)  # NaN stays
    gradients.zero(trainer)
    if not distributed.is_main:
        return None
    names = ("weights", "gradients", "activations")
    rows = [[f"{value:.4g}" for value in row] for row in values[1:].view(-1, 3).tolist()]
    table = [dict(layer=layer) | dict(zip(names, row)) for layer, row in zip(layers, rows)]
    table.append(dict(layer="largest logit", activations=f"{values[0].item():.4g}"))
    for row in (dict(zip(names, names), layer="largest of all ranks"), *table):
        print(f"{row['layer']:20s} " + " ".join(f"{row.get(name, ''):>12s}" for name in names))
    return table


@torch.no_grad()
def norms(layer, squares):
    """(weights', gradients', activations') of a layer, each () float32."""
    parameters = list(layer.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = [full_tensor(get_total_norm(tensors)) for tensors in (parameters, gradients)]
    return *own, torch.stack(squares).amax().sqrt()
