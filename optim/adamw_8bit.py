"""AdamW that stores its two moments in 8 bits, and computes in float32.

Block-wise dynamic quantization (Dettmers et al. 2022, arXiv 2110.02861): a row of a weight matrix is divided into
blocks of 256 numbers or fewer. A block has a scale, its largest absolute value, so an outlier reduces only its block's
precision. Each number is divided by the scale and stored as the index (code) of the nearest of 256 levels, which lie
denser around 0: AdamW divides one moment by the root of the other, so small numbers matter.

Blocks do not cross rows, so codes and scales are sharded as their weight is, and a checkpoint loads on any number of
ranks. Biases and LayerNorms, 0.1% of the parameters, keep float32 moments.

torchao's AdamW8bit divides by eps where the second moment rounds to 0: gradients of 1e-5 that share a block with a 1
take steps of 1,800 times the learning rate.
"""

import math

import torch

from common.device import local

BLOCK = 256  # numbers that share a scale, where it divides the row's length
SIGNED = dict(exp_avg=True, exp_avg_sq=False)  # the two moments


class AdamW8bit(torch.optim.Optimizer):
    """AdamW. Its state is plain tensors: the codes and scales of exp_avg and exp_avg_sq."""

    def __init__(self, groups, compiled, lr, betas, eps):  # compiled: one kernel for each weight
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, fused=True))
        self.update = torch.compile(update) if compiled else update
        weights = [weight for group in self.param_groups for weight in group["params"]]
        self.found_inf = torch.zeros((), device=weights[0].device)  # set by update_if_finite, since `fused` is True
        self.tables = {name: levels(weights[0].device, signed) for name, signed in SIGNED.items()}
        for weight in weights:
            self.state[weight] = dict(step=torch.zeros_like(self.found_inf), **zero_moments(weight))

    @torch.no_grad()
    def step(self, closure=None):
        """One update of all parameters; none if found_inf is 1, as in PyTorch's fused AdamW: the host does not wait."""
        skip = self.found_inf > 0
        for group in filter(lambda group: group["params"], self.param_groups):
            states = [self.state[weight] for weight in group["params"]]
            torch.foreach.add_([state["step"] for state in states], 1 - self.found_inf)
            steps, (beta1, beta2) = states[0]["step"], group["betas"]  # the same for all weights
            # numbers that change every step are tensors: torch.compile would compile each value anew
            decay = torch.tensor(1 - group["lr"] * group["weight_decay"])
            rate, correction = group["lr"] / (1 - beta1**steps), (1 - beta2**steps).sqrt()
            numbers = skip, decay, rate, correction, group["betas"], group["eps"]
            for weight, state in zip(group["params"], states):
                block = block_size(weight)
                moments = {key: local(value) for key, value in state.items() if key != "step"}
                moments = {key: value.view(-1, 1 if "scales" in key else block) for key, value in moments.items()}
                both = local(weight).detach().view(-1, block), local(weight.grad).reshape(-1, block)
                self.update(*both, moments, self.tables, *numbers)


def update(weight, gradient, moments, tables, skip, decay, rate, correction, betas, eps):
    """AdamW's update of a weight, in place, unless skip. Tensors are (n, block), scales (n, 1)."""
    m = read(moments, "exp_avg", tables).lerp(gradient, 1 - betas[0])
    v = read(moments, "exp_avg_sq", tables).lerp(gradient.square(), 1 - betas[1])
    weight.copy_(torch.where(skip, weight, weight * decay - rate * m / (v.sqrt() / correction + eps)))
    for name, moment in (("exp_avg", m), ("exp_avg_sq", v)):
        for key, value in encode(moments, name, moment, tables).items():
            moments[key].copy_(torch.where(skip, moments[key], value.to(moments[key].dtype)))


def read(moments, name, tables):
    """A moment in float32."""
    codes = moments.get(f"{name}_codes")
    return moments[name] if codes is None else tables[name][0][codes.int()] * moments[f"{name}_scales"]


def encode(moments, name, moment, tables):
    """What stores a moment, each number rounded to the nearest level: {key of moments: tensor}."""
    if name in moments:
        return {name: moment}
    scales = moment.abs().amax(1, keepdim=True)
    relative = moment / scales.clamp(min=torch.finfo(torch.float32).tiny)  # a block may be all zeros
    return {f"{name}_codes": torch.bucketize(relative, tables[name][1], out_int32=True), f"{name}_scales": scales}


def levels(device, signed):
    """The 256 levels in order, and the 255 numbers half way between. Each decade has half as many as the one above."""
    decades = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**i + 1, dtype=torch.float64)
        decades.append(10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2)
    positive = torch.cat(decades)
    others = torch.tensor([0.0, 1.0] if signed else [1e-7, 1.0])  # the second moment has no level 0, unlike the paper's
    values = torch.cat([-positive, positive, others] if signed else [positive, others]).sort().values
    return values.float().to(device), ((values[:-1] + values[1:]) / 2).float().to(device)


def block_size(weight):
    """Length of a weight's blocks, which divides its rows; 1 for a vector."""
    return math.gcd(BLOCK, weight.size(1)) if weight.dim() == 2 else 1


def zero_moments(weight):
    """A weight's two moments {name: tensor}, sharded as the weight is."""
    if weight.dim() < 2:
        return {name: torch.zeros_like(weight) for name in SIGNED}
    first = weight.detach()[:, :: block_size(weight)]  # of each block
    codes = {f"{name}_codes": torch.zeros_like(weight, dtype=torch.uint8) for name in SIGNED}
    return codes | {f"{name}_scales": torch.zeros_like(first, memory_format=torch.contiguous_format) for name in SIGNED}
