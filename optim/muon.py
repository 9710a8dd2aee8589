"""Muon: momentum, orthogonalized, for the blocks' matrices; AdamW for everything else.

The momentum of a weight matrix has a few large singular values, so a step in its direction changes the matrix in a few
directions only. Muon replaces all singular values by 1: with M = U S Vᵀ the step is U Vᵀ, and rare directions learn as
fast as frequent ones (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/). Newton-Schulz iterations compute
U Vᵀ with GEMMs alone, in bf16: an odd polynomial of M acts on its singular values and leaves U and V as they are.

AdamW updates the embeddings, whose rows are single tokens' vectors, the biases and the LayerNorms (Liu et al. 2025).

Ranks share the work. With ddp, without --pipeline, every rank orthogonalizes some of the matrices, and an all-gather
collects the results. With zero1 to zero3 and hsdp an all-to-all collects whole matrices from their shards, each on one
rank, and another one returns the results. --tensor splits matrices by rows or columns: the same two all-to-alls, over
its ranks, collect them from these parts.

NorMuon (Li et al. 2025, arXiv 2510.05491) also gives all rows of an update, each the change of one neuron's input
weights, the same size on average. U Vᵀ of a tall matrix has rows of different lengths, and so has that of any matrix
with singular values that the iterations leave below 1.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from common.device import local

# Polar Express (Amsel et al. 2025, arXiv 2505.16932): the five polynomials x -> a x + b x³ + c x⁵ that bring singular
# values from 0.001 to 1 closest to 1. They take x / 1.01, since bf16 rounds some singular values up.
COEFFICIENTS = tuple(
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
MOMENTUM = 0.95  # Muon's momentum: the decay rate of the mean of the gradients
BETA2 = 0.95  # NorMuon's decay rate of the rows' second moments


class Muon(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for others, as one optimizer.

    Muon's update of a matrix: momentum is the running mean of the gradients; the Nesterov direction is the mean of
    gradient and momentum, orthogonalized, times 0.2 √(larger dimension), which is about the size of AdamW's updates, so
    both take similar learning rates (Liu et al. 2025, arXiv 2502.16982). Weight decay is decoupled, as in AdamW.
    NorMuon divides each row by the root of its second moment, and keeps the norm of the whole update.
    """

    def __init__(self, groups, adamw, compiled, by_rows=False):
        """groups: dictionaries with params (matrices of one shape), lr, its peak, weight_decay, and parts: the number
        of matrices, one above the other, that each parameter consists of. adamw: the AdamW for the rest; if its
        default `fused` is True, both read found_inf. compiled: torch.compile fuses the operations before and after the
        GEMMs into one kernel for each weight. by_rows: NorMuon."""
        super().__init__(groups, dict(fused=adamw.defaults["fused"]))
        self.matrices = list(self.param_groups)
        self.adamw, self.by_rows = adamw, by_rows
        self.param_groups += adamw.param_groups
        self.state = adamw.state
        for group in self.matrices:
            for weight in group["params"]:
                self.state[weight] = dict(momentum_buffer=torch.zeros_like(weight))
                if by_rows:
                    self.state[weight]["second_moment"] = zeros_of_rows(weight)
        self.update_momentum = torch.compile(update_momentum, dynamic=False) if compiled else update_momentum
        self.update_weight = torch.compile(update_weight, dynamic=False) if compiled else update_weight
        self.found_inf = torch.zeros((), device=weight.device)  # set by update_if_finite

    @torch.no_grad()
    def step(self, closure=None):
        """One update of all parameters.

        If AdamW is fused, nothing changes where found_inf, a scalar on the device, is 1: the host does not wait for it.
        """
        if self.defaults["fused"]:
            self.adamw.found_inf = self.found_inf
        self.adamw.step()
        skip, applied = self.found_inf > 0, 1 - self.found_inf
        for group in self.matrices:
            weights = group["params"]
            if weights[0].grad is None:
                continue
            shape, mesh = weights[0].shape, weights[0].device_mesh if isinstance(weights[0], DTensor) else None
            shards = [local(weight).detach() for weight in weights]
            directions = shards[0].new_empty(len(weights), *shards[0].shape, dtype=torch.bfloat16)
            for weight, direction in zip(weights, directions):
                gradient, momentum = local(weight.grad), local(self.state[weight]["momentum_buffer"])
                flat = gradient.reshape(-1), momentum.view(-1), direction.view(-1)
                self.update_momentum(*flat, skip, MOMENTUM)
            if mesh and "tensor" in mesh.mesh_dim_names:
                updates = update_split(directions, weights[0], group["parts"])
            else:
                whole = to_owners(directions, shape[0], mesh)  # (n of this rank, rows, columns)
                updates = from_owners(orthogonalize_parts(whole, group["parts"]), directions, mesh)
            # tensors: torch.compile compiles again for each new Python number
            rate = applied * (group["lr"] * 0.2 * math.sqrt(max(shape[0] // group["parts"], shape[1])))
            decay = 1 - applied * (group["lr"] * group["weight_decay"])
            if self.by_rows:
                updates = map(torch.mul, updates, self.row_scales(weights, updates, applied))  # float32, one at a time
            for weight, update in zip(shards, updates):
                self.update_weight(weight.view(-1), update.reshape(-1), decay, rate)

    def row_scales(self, weights, updates, applied):
        """NorMuon's factors (n, rows, 1) for the rows of `updates`. Updates the rows' second moments.

        weights: n matrices of one shape; updates: this rank's shards of their orthogonalized updates (n, rows,
        columns); applied: 0 for a step that changes nothing, otherwise 1.
        """
        squares = torch.linalg.vector_norm(updates, dim=2, keepdim=True, dtype=torch.float32).square()
        sum_over_shards(squares, weights[0], dim=1)
        moments = [local(self.state[weight]["second_moment"]) for weight in weights]
        for moment, mean in zip(moments, squares / weights[0].size(1)):
            moment.lerp_(mean, applied * (1 - BETA2))
        inverse = 1 / torch.stack(moments).clamp(min=1e-20)
        before, after = sum_over_shards(torch.stack((squares, squares * inverse)).sum(dim=2), weights[0], dim=0)
        return (inverse * (before / after.clamp(min=1e-20))[:, None]).sqrt()  # the norm of a matrix stays


def update_momentum(gradient, momentum, direction, skip, decay):
    """Update the momentum, and write the Nesterov direction; if skip, the momentum stays and the direction is 0."""
    mean = momentum.lerp(gradient, 1 - decay)
    momentum.copy_(torch.where(skip, momentum, mean))
    direction.copy_(torch.where(skip, 0, gradient.lerp(mean, decay)))


def update_weight(weight, update, decay, rate):
    """weight * decay - update * rate, in place."""
    weight.mul_(decay).sub_(update.float() * rate)


def zeros_of_rows(weight):
    """Zeros (rows, 1), sharded as the weight's rows."""
    zeros = local(weight).new_zeros(len(local(weight)), 1)
    if not isinstance(weight, DTensor):
        return zeros
    placements = [Replicate() if placement.is_shard(1) else placement for placement in weight.placements]
    shape = torch.Size((len(weight), 1))
    return DTensor.from_local(zeros, weight.device_mesh, placements, run_check=False, shape=shape, stride=(1, 1))


def sum_over_shards(x, weight, dim):
    """Sum x, in place, over the ranks that split a dimension of a matrix."""
    for index, placement in enumerate(weight.placements if isinstance(weight, DTensor) else ()):
        if getattr(placement, "dim", None) == dim:  # Shard or _StridedShard
            dist.all_reduce(x, group=weight.device_mesh.get_group(index))
    return x


def update_split(directions, weight, parts):
    """The updates for matrices that --tensor splits. directions: their shards on this rank; weight: one of them."""
    (rows, columns), mesh = weight.shape, weight.device_mesh
    shard, tensor = mesh["shard"], mesh["tensor"]
    by_rows, size = weight.placements[-1] == Shard(0), tensor.size()
    split = to_owners(directions, rows // size if by_rows else rows, shard)  # (n, rows, columns) of a --tensor rank
    split = (split if by_rows else split.mT).contiguous()
    whole = to_owners(split, rows if by_rows else columns, tensor)
    whole = whole if by_rows else whole.mT
    # c_attn's rows are ordered by rank, each with its q, k and v; orthogonalized apart they lie one above the other
    whole = whole.unflatten(1, (size, parts, -1)).transpose(1, 2).flatten(1, 3)
    whole = orthogonalize_parts(whole, parts)
    whole = whole.unflatten(1, (parts, size, -1)).transpose(1, 2).flatten(1, 3)
    updates = from_owners(whole if by_rows else whole.mT, split, tensor)
    return from_owners(updates if by_rows else updates.mT, directions, shard)


def orthogonalize_parts(x, parts):
    """orthogonalize(), of each of the matrices that lie one above the other in a matrix of x."""
    return orthogonalize(x.unflatten(1, (parts, -1)).flatten(0, 1)).view_as(x)


def orthogonalize(x):
    """U Vᵀ for each matrix U S Vᵀ in x (n, rows, columns), approximately, in x's dtype."""
    if tall := x.size(1) > x.size(2):
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # all singular values at most 1
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def to_owners(x, rows, mesh):
    """This rank's n of the N matrices, whole: (n, rows, columns). Zeros fill up the last ranks.

    x: all matrices (N, rows, columns), the same on all ranks; with a mesh their shards by rows.
    """
    if not dist.is_initialized():
        return x
    world_size = mesh.size(-1) if mesh else dist.get_world_size()
    n = -(-len(x) // world_size)
    missing = n * world_size - len(x)
    if mesh is None:
        return F.pad(x, (0, 0, 0, 0, 0, missing)).view(world_size, n, *x.shape[1:])[dist.get_rank()]
    # as torch.chunk splits rows: the last shards may have fewer rows, or none
    shard = -(-rows // world_size)
    x = F.pad(x, (0, 0, 0, shard - x.size(1), 0, missing))
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=mesh.get_group(-1))
    return received.view(world_size, n, shard, -1).transpose(0, 1).flatten(1, 2)[:, :rows]


def from_owners(x, like, mesh):
    """The reverse of to_owners: all matrices, or with a mesh this rank's shards by rows, in the shape of `like`."""
    if not dist.is_initialized():
        return x
    if mesh is None:
        gathered = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
        dist.all_gather_single(gathered, x.contiguous())
        return gathered[: len(like)]
    world_size = mesh.size(-1)
    shard = -(-x.size(1) // world_size)
    x = F.pad(x, (0, 0, 0, shard * world_size - x.size(1))).view(len(x), world_size, shard, -1).transpose(0, 1)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=mesh.get_group(-1))
    return received.flatten(0, 1)[: len(like), : like.size(1)]
