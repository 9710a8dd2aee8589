"""AdamW that stores its two moments in bf16 or in 8 bits, and computes in float32.

8 bits are block-wise dynamic quantization (Dettmers et al. 2022, arXiv 2110.02861). A row of a weight matrix is divided
into blocks of 256 numbers or fewer. A block has a scale, its largest absolute value, so an outlier reduces only its
block's precision. Each number is divided by the scale and stored as the index (code) of the nearest of 256 levels,
which lie denser around 0: AdamW divides one moment by the root of the other, so small numbers matter.

Blocks do not cross rows. The codes and scales of a sharded weight are therefore sharded by rows too, and a checkpoint
loads on any number of ranks. torchao's AdamW8bit supports neither such resharding nor bf16 moments. Biases and
LayerNorms, 0.1% of the parameters, keep float32 moments.
"""

import math

import torch

from common.dtensors import local

BLOCK = 256  # numbers that share a scale, where it divides the row's length


def moment_bytes(states, width):
    """Bytes of the two moments for each number of a weight with rows of `width`; states: as --adamw_states."""
    return {"float32": 8, "bf16": 4, "int8": 2 * (1 + 4 / math.gcd(BLOCK, width))}[states]


class LowMemoryAdamW(torch.optim.Optimizer):
    """AdamW. Its state is plain tensors: exp_avg and exp_avg_sq, or the codes and scales of each."""

    def __init__(self, groups, states, compiled, lr, betas, eps):
        """states: "bf16" or "int8". compiled: one kernel for each weight, by torch.compile."""
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, fused=True))
        self.update = torch.compile(update) if compiled else update
        device = next(weight for group in self.param_groups for weight in group["params"]).device
        self.found_inf = torch.zeros((), device=device)  # set by update_if_finite and Muon, since `fused` is True
        self.tables = {}
        if states == "int8":
            self.tables = dict(exp_avg=levels(device, signed=True), exp_avg_sq=levels(device, signed=False))
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = dict(step=torch.zeros((), device=device), **zero_moments(weight, states))

    @torch.no_grad()
    def step(self, closure=None):
        """One update of all parameters.

        If found_inf, a scalar on the device, is 1, nothing changes, as in PyTorch's fused AdamW. The host never reads
        it, and launches the updates while the GPU computes the gradients.
        """
        skip = self.found_inf > 0
        for group in filter(lambda group: group["params"], self.param_groups):
            states = [self.state[weight] for weight in group["params"]]
            torch._foreach_add_([state["step"] for state in states], 1 - self.found_inf)
            steps, (beta1, beta2) = states[0]["step"], group["betas"]  # the same for all weights
            # numbers that change every step are tensors: torch.compile would compile each value anew
            decay = torch.tensor(1 - group["lr"] * group["weight_decay"])
            rate, correction = group["lr"] / (1 - beta1**steps), (1 - beta2**steps).sqrt()
            for weight, state in zip(group["params"], states):
                block = block_size(weight) if self.tables else 1
                moments = {key: local(value) for key, value in state.items() if key != "step"}
                self.update(
                    local(weight).detach().view(-1, block),
                    local(weight.grad).reshape(-1, block),
                    {key: value.view(-1, 1 if key.endswith("scales") else block) for key, value in moments.items()},
                    self.tables,
                    skip,
                    decay,
                    rate,
                    correction,
                    betas=group["betas"],
                    eps=group["eps"],
                )


def update(weight, gradient, moments, tables, skip, decay, rate, correction, betas, eps):
    """AdamW's update of a weight, in place, unless skip. Tensors are (n, block), scales (n, 1)."""
    m = read(moments, "exp_avg", tables).lerp(gradient, 1 - betas[0])
    v = read(moments, "exp_avg_sq", tables).lerp(gradient.square(), 1 - betas[1])
    store(weight, weight * decay - rate * m / (v.sqrt() / correction + eps), skip)
    write(moments, "exp_avg", m, tables, skip)
    write(moments, "exp_avg_sq", v, tables, skip)


def store(old, new, skip):
    """Copy new into old, unless skip."""
    old.copy_(torch.where(skip, old, new.to(old.dtype)))


def read(moments, name, tables):
    """A moment in float32."""
    if name in moments:
        return moments[name].float()
    values, _ = tables[name]
    return values[moments[f"{name}_codes"].int()] * moments[f"{name}_scales"]


def write(moments, name, moment, tables, skip):
    """Store a moment, rounded to nearest, unless skip."""
    if name in moments:
        store(moments[name], moment, skip)
        return
    _, between = tables[name]
    scales = moment.abs().amax(1, keepdim=True)
    relative = moment / scales.clamp(min=torch.finfo(torch.float32).tiny)  # a block may be all zeros
    store(moments[f"{name}_codes"], torch.bucketize(relative, between, out_int32=True), skip)
    store(moments[f"{name}_scales"], scales, skip)


def levels(device, signed):
    """The 256 levels in order, and the 255 numbers half way between them.

    From 1 down to 1e-7 each of seven decades has half as many levels as the one above it.
    """
    decades = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**i + 1, dtype=torch.float64)
        decades.append(10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2)
    positive = torch.cat(decades)
    # the second moment has no level 0, unlike the paper's: the first moment would be divided by eps
    others = torch.tensor([0.0, 1.0] if signed else [1e-7, 1.0])
    values = torch.cat([-positive, positive, others] if signed else [positive, others]).sort().values
    return values.float().to(device), ((values[:-1] + values[1:]) / 2).float().to(device)


def block_size(weight):
    """Length of a weight's blocks, which divides its rows; 1 for a vector."""
    return math.gcd(BLOCK, weight.size(1)) if weight.dim() == 2 else 1


def zero_moments(weight, states):
    """A weight's two moments {name: tensor}, sharded as the weight is."""
    names = ("exp_avg", "exp_avg_sq")
    if states == "bf16" or weight.dim() < 2:
        dtype = torch.bfloat16 if states == "bf16" else torch.float32
        return {name: torch.zeros_like(weight, dtype=dtype) for name in names}
    codes = {f"{name}_codes": torch.zeros_like(weight, dtype=torch.uint8) for name in names}
    one_per_block = weight.detach()[:, :: block_size(weight)]
    return codes | {
        f"{name}_scales": torch.zeros_like(one_per_block, memory_format=torch.contiguous_format) for name in names
    }
