"""Tensor parallelism: every layer split over N adjacent ranks (Shoeybi et al. 2019, "Megatron-LM").

Attention and the MLP have two GEMMs each. The first is split by output columns: a rank computes q, k and v of its own
heads, or its own columns of the hidden layer. Attention of a head, and GELU, then need no other rank. The second GEMM
is split by input rows, so it reads the columns that the rank has. Each rank's product has the full width, and the sum
of the products over the ranks is the layer's output.

The residual stream and the LayerNorms are split along the sequence (Korthikanti et al. 2022):

    residual stream, LayerNorm      (B, T/N, C)
    all-gather                      (B, T, C)
    c_attn, attention or c_fc, GELU (B, T, 3C/N) (B, T, C/N) or (B, T, 4C/N)
    c_proj                          (B, T, C), to be summed over the ranks
    reduce-scatter                  (B, T/N, C)

That is two all-gathers and two reduce-scatters for a block's forward and as many for its backward, in every
micro-batch. Computation waits for them, so the N ranks need the fastest links: those inside one machine. Evaluations
have sequences of any length. There, and if N does not divide the sequence length of training, the residual stream is
whole on every rank, and all-reduces replace all-gathers and reduce-scatters.

The embedding table, which is also the head, is split by rows. A rank looks up the tokens of its rows, and computes
their columns of the logits. The cross-entropy all-reduces three numbers for each token (the maximum, the sum of the
exponentials, the target's logit); no rank holds whole logits.

Parameters are DTensors with GPT-2's shapes, which FSDP shards further. In c_attn the rows of q, k and v lie one above
the other, but a shard is one contiguous piece. In memory they are therefore ordered by rank: q, k and v of rank 0's
heads, then of rank 1's. Checkpoints have GPT-2's order.
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

import contextlib
import logging

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from common.errors import Note, UserError
from parallel.process_group import must_divide


def check_flags(config, distributed, notes):
    """Check --tensor and the flags that go with it. Raises UserError if they conflict."""
    size = config.tensor
    if size == 1:
        return
    if not config.pad_vocab:
        raise UserError("--tensor divides the rows of the embedding table equally, which needs --pad_vocab")
    must_divide("tensor", size, config.n_head, "attention heads")
    must_divide("tensor", size, distributed.world_size, "ranks")
    if sequence_parts(config) < size:
        reason = f"it does not divide seq_len {config.seq_len} / context {config.context}"
        notes.append(Note("tensor", size, f"{reason}, so every rank holds the whole residual stream"))


def sequence_parts(config):
    """Number of parts of the residual stream over the ranks of --tensor; 1 if they do not divide its length."""
    return 1 if config.seq_len // config.context % config.tensor else config.tensor


# ----------------------------------------------------------------------------------------------------------------------
# Splitting a model

# PyTorch warns that the gradient norm, one number, is summed over one dimension of the mesh after the other
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def split(model, mesh, seq_len):
    """Split a GPT over the ranks of a mesh with one dimension, in place. The model may be on the device "meta".

    seq_len: tokens of a sequence in training, with --context of a rank's part of it.

    Between modules activations are plain tensors. Hooks around a module wrap its inputs as DTensors and redistribute
    inputs and outputs to the next placement. DTensor operators compute on the local shard.
    """
    divides = seq_len % mesh.size() == 0

    def residual():
        """The residual stream's layout: split along the sequence in training, whole in evaluations."""
        return Shard(1) if divides and torch.is_grad_enabled() else Replicate()

    def enter(placement):
        """A hook that makes a module's only input a DTensor; placement(): how it lies on the ranks."""
        return lambda module, inputs, mesh: DTensor.from_local(*inputs, mesh, [placement()], run_check=False)

    def enter_positions(module, inputs, mesh):
        position = enter(Replicate)(module, inputs, mesh)
        return position.redistribute(placements=[Shard(0) if residual().is_shard() else Replicate()])

    def gather(x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # LayerNorm's output is float32: half the bytes to send
        return x.redistribute(placements=[Replicate()])

    def scatter(module, output, mesh):
        return output.redistribute(placements=[residual()]).to_local()

    def local(module, output, mesh):
        return output.to_local()

    by_rows, by_columns = placed(weight=Shard(0), bias=Shard(0)), placed(weight=Shard(1))
    for block in model.transformer.h:
        for norm, first, second in (
            (block.ln_1, block.attn.c_attn, block.attn.c_proj),
            (block.ln_2, block.mlp.c_fc, block.mlp.c_proj),
        ):
            distribute_module(norm, mesh, None, enter(residual))
            distribute_module(first, mesh, by_rows, lambda module, inputs, mesh: gather(*inputs), local)
            distribute_module(second, mesh, by_columns, enter(lambda: Shard(-1)), scatter)
    distribute_module(model.transformer.wte, mesh, by_rows, enter(Replicate), scatter)
    distribute_module(model.transformer.wpe, mesh, None, enter_positions, local)
    # the head takes a DTensor: its logits are split by columns, and F.cross_entropy computes in parallel
    distribute_module(model.transformer.ln_f, mesh, None, enter(residual), lambda module, output, mesh: gather(output))


def return_full_tensors(model):
    """Let a split GPT, or a stage of one, return plain tensors."""

    def whole(module, inputs, output):
        # clone: FSDP's hook on the output does not allow a view, and full_tensor() may return one
        return output.full_tensor().clone() if isinstance(output, DTensor) else output

    model.register_forward_hook(whole)


def loss(config):
    """A context for forward and backward, in which F.cross_entropy takes logits that are split by columns."""
    return loss_parallel() if config.tensor > 1 else contextlib.nullcontext()


def placed(**placements):
    """A partition function for distribute_module, which replicates parameters that have no placement here."""

    def partition(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            if key in placements:
                parameter = distribute_tensor(parameter, mesh, [placements[key]], src_data_rank=None)
                setattr(module, key, nn.Parameter(parameter))

    return partition


# ----------------------------------------------------------------------------------------------------------------------
# The order of c_attn's rows


def order_by_rank(tensors):
    """Put the rows of q, k and v into the order of the ranks, in place. tensors: pairs (name, tensor)."""
    for name, tensor in tensors:
        if size := ranks_of(name, tensor):
            tensor.detach().copy_(reordered(tensor.detach(), 3, size))


def in_gpt2_order(name, tensor):
    """A tensor with its rows in GPT-2's order: a new one if they are ordered by rank."""
    size = ranks_of(name, tensor)
    return reordered(tensor, size, 3) if size else tensor


def ranks_of(name, tensor):
    """Number of ranks by which the rows of a tensor are ordered; 0 for GPT-2's order. name: may have a prefix."""
    if not isinstance(tensor, DTensor) or not name.endswith(("c_attn.weight", "c_attn.bias")):
        return 0
    mesh = tensor.device_mesh
    return mesh["tensor"].size() if "tensor" in mesh.mesh_dim_names else 0


def reordered(tensor, outer, inner):
    """A DTensor whose rows, (outer, inner, n), become (inner, outer, n). A collective."""
    whole = tensor.full_tensor().unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
