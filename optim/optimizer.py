"""The optimizers: one row for each, with what other code needs to know; and their state by parameter name."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Row:
    """An optimizer."""

    make: Callable  # of (model, config); each of its groups has its peak learning rate as "peak"
    state_bytes: tuple  # of state for each parameter, (in the blocks, in the embeddings)
    defaults: dict = field(default_factory=dict)  # of the flags whose defaults it changes


def make_optimizer(model, config):
    """The optimizer of a model's parameters. Its state is allocated. Each group's "peak" is its peak learning rate."""
    optimizer = OPTIMIZERS[config.optimizer].make(model, config)
    allocate_state(optimizer)
    return optimizer


def make_muon(model, config, by_rows=False):
    from optim.muon import Muon

    matrices, rest = {}, []  # matrices: Muon's, by shape
    for name, parameter in model.named_parameters():
        if name.startswith("transformer.h.") and parameter.dim() == 2:
            parts = 3 if name.endswith("c_attn.weight") else 1  # q, k and v lie one above the other
            matrices.setdefault((parameter.shape, parts), []).append(parameter)
        else:
            rest.append(parameter)
    adamw = make_adamw(rest, config, config.adamw_lr)
    if not matrices:  # a rank of --pipeline without blocks
        return adamw
    groups = [
        dict(params=parameters, parts=parts, lr=config.lr, weight_decay=config.weight_decay, peak=config.lr)
        for (_, parts), parameters in matrices.items()
    ]
    return Muon(groups, adamw, config.compile, by_rows)


def make_adamw(parameters, config, peak):
    """AdamW with weight decay on matrices and embeddings, none on biases and LayerNorms."""
    parameters = list(parameters)
    groups = [
        dict(params=[p for p in parameters if p.dim() >= 2], weight_decay=config.weight_decay, peak=peak),
        dict(params=[p for p in parameters if p.dim() < 2], weight_decay=0.0, peak=peak),
    ]
    # fused_adamw: one kernel updates all parameters, instead of several launches for each operation
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, config.beta2), eps=1e-8, fused=config.fused_adamw or None)


# dev/LOG.md says how they were chosen
MUON = dict(lr=3.6e-3, adamw_lr=3.6e-3, warmup_steps=10, lr_schedule="wsd", cooldown_ratio=0.4, min_lr_ratio=0.0)
OPTIMIZERS = dict(
    adamw=Row(lambda model, config: make_adamw(model.parameters(), config, config.lr), (8, 8)),
    muon=Row(make_muon, (4, 8), MUON | dict(optimizer="muon")),
    normuon=Row(lambda model, config: make_muon(model, config, by_rows=True), (4, 8), MUON | dict(optimizer="normuon")),
)


def optimizer_defaults(flags):
    """The defaults of --optimizer; none where its value is not an optimizer."""
    name = flags.get("optimizer")
    return OPTIMIZERS[name].defaults if name in OPTIMIZERS else {}


def fused_update(config, distributed):
    """Why --fused_adamw is impossible, or None: a bad step is skipped on the device, by found_inf."""
    if distributed.device.type == "mps":
        return "on Apple GPUs PyTorch does not skip a fused update whose gradients are not finite"


@torch.no_grad()
def allocate_state(optimizer):
    """Allocate an optimizer's state as zeros; weights do not change.

    One step with zero gradients and a learning rate of 0, as torch.distributed.checkpoint does it; then the state
    returns to zero.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def update_if_finite(optimizer, scaler, norm):
    """Update the weights, unless the gradient norm is infinite or NaN: then no weight changes.

    norm: a scalar on the device; with fused AdamW the host does not wait for it.
    """
    finite = torch.isfinite(norm)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    elif optimizer.defaults.get("fused"):
        optimizer.found_inf = (~finite).float()
        optimizer.step()
    else:
        if not finite:
            optimizer.zero_grad()  # to None: step() leaves a parameter without a gradient as it is
        optimizer.step()


def named_state(model, optimizer):
    """The optimizer's tensors as {"KEY.PARAMETER": tensor}, such as "exp_avg.transformer.wte.weight"."""
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
