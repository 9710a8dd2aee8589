"""The optimizer, and its state by parameter name."""

import torch

STATE_BYTES = 8  # of optimizer state per parameter: AdamW's two float32 moments


def make_optimizer(model, config):
    """AdamW with weight decay on matrices and embeddings, none on biases and LayerNorms. Its state is allocated."""
    parameters = list(model.parameters())
    groups = [
        dict(params=[p for p in parameters if p.dim() >= 2], weight_decay=config.weight_decay),
        dict(params=[p for p in parameters if p.dim() < 2], weight_decay=0.0),
    ]
    # fused_adamw: one kernel updates all parameters, instead of several launches for each operation
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8, fused=config.fused_adamw or None
    )
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

    norm: a scalar on the device; a fused optimizer reads it there, so the host does not wait for it.
    """
    finite = torch.isfinite(norm)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    elif optimizer.defaults["fused"]:
        optimizer.found_inf = (~finite).float()
        optimizer.step()
    elif finite:
        optimizer.step()


def named_state(model, optimizer):
    """The optimizer's tensors as {"KEY.PARAMETER": tensor}, such as "exp_avg.transformer.wte.weight"."""
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
