"""The optimizer, and its state by parameter name."""

import torch

from optim.low_memory_adamw import LowMemoryAdamW, moment_bytes
from optim.muon import Muon


def state_bytes(config):
    """Bytes of optimizer state per parameter, (in the blocks, in the embeddings): AdamW's moments; Muon's in blocks."""
    moments = moment_bytes(config.adamw_states, config.n_embd)
    return 4 if config.optimizer == "muon" else moments, moments


def make_optimizer(model, config):
    """AdamW with weight decay on matrices and embeddings, none on biases and LayerNorms; or Muon for the matrices of
    the blocks, and AdamW for the rest. Its state is allocated.

    Each group's "peak" is its peak learning rate.
    """
    matrices = {}  # Muon's, by shape
    for name, parameter in model.named_parameters() if config.optimizer == "muon" else ():
        if name.startswith("transformer.h.") and parameter.dim() == 2:
            parts = 3 if name.endswith("c_attn.weight") else 1  # q, k and v lie one above the other
            matrices.setdefault((parameter.shape, parts), []).append(parameter)
    taken = {id(parameter) for each in matrices.values() for parameter in each}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    peak = config.adamw_lr if config.optimizer == "muon" else config.lr
    groups = [
        dict(params=[p for p in rest if p.dim() >= 2], weight_decay=config.weight_decay, peak=peak),
        dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0, peak=peak),
    ]
    settings = dict(lr=peak, betas=(config.beta1, config.beta2), eps=1e-8)
    if config.adamw_states == "float32":
        # fused_adamw: one kernel updates all parameters, instead of several launches for each operation
        optimizer = torch.optim.AdamW(groups, fused=config.fused_adamw or None, **settings)
    else:
        # adamw_states: moments of 2 bytes or 1 instead of 4
        optimizer = LowMemoryAdamW(groups, config.adamw_states, config.compile, **settings)
    if matrices:  # none on a rank of --pipeline without blocks
        groups = [
            dict(params=parameters, parts=parts, lr=config.lr, weight_decay=config.weight_decay, peak=config.lr)
            for (_, parts), parameters in matrices.items()
        ]
        optimizer = Muon(groups, optimizer, config.compile, config.momentum)
    allocate_state(optimizer)
    return optimizer


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
    elif optimizer.defaults["fused"]:
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
