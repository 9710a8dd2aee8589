"""Context parallelism: N ranks compute every sequence together, for sequences whose activations one GPU cannot hold.

Each rank has T/N adjacent tokens of a sequence. Embedding, LayerNorm, MLP, head and loss process tokens independently.
Attention reads earlier tokens too, so two all-to-alls per block exchange tokens for heads and back (Jacobs et
al. 2023, "DeepSpeed Ulysses"; the a2a of Megatron-LM's --cp-comm-type):

    residual stream, c_attn         (B, T/N, C) (B, T/N, 3C)    some tokens, all heads
    all-to-all                      (B, T, 3C/N)                all tokens, some heads
    attention                       (B, T, C/N)
    all-to-all                      (B, T/N, C)                 some tokens, all heads
    c_proj, MLP                     (B, T/N, C)

Attention sees whole sequences with fewer heads. So every kernel and every mask computes it unchanged, and causal
attention is the same work on every rank.

The alternatives, ring attention (Liu et al. 2023) and all-gathered keys and values (Llama 3, arXiv 2407.21783, section
3.3.2), allow more ranks than heads. But GPT-2 has as many heads of keys and values as of queries: a rank would receive
2C numbers for every token of the other ranks, where the all-to-alls bring 4C/N. PyTorch's experimental
context_parallel, a ring, replaces F.scaled_dot_product_attention, which flash4, the default on Hopper, triton and
--mask_documents do not call. By default it gives each rank tokens from both ends of a sequence, while the model
computes positions from adjacent ones. It has no kernels for CPUs.

Each rank's loss is the mean over its own tokens. Gradients are averaged over these ranks too, by DDP or FSDP, as over
ranks with other sequences: the mean over all tokens. Without gradients (validation, HellaSwag, samples) nothing is
split, and each rank computes sequences of its own.
"""

import torch
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import init_device_mesh

from common.errors import UserError
from parallel.process_group import must_divide


def check_flags(config, distributed):
    """Check --context. Raises UserError if it does not fit the ranks, the sequence length or the heads."""
    size, ranks, heads = config.context, distributed.data_context_size, config.n_head // config.tensor
    if size == 1:
        return
    must_divide("context", size, ranks, "ranks, or groups of --tensor ranks")
    must_divide("context", size, config.seq_len, "tokens of a sequence")
    if size > heads:
        raise UserError(f"--context {size} is more than the {heads} attention heads of a rank")


def split(model, config, distributed):
    """Let each group of --context ranks share the sequences that a GPT trains on, in place."""
    if config.context == 1:
        return
    # not a dimension of FSDP's mesh, whose replicas and shards include the ranks of a context group
    shape = (distributed.data_size, config.context, config.tensor)
    mesh = init_device_mesh(distributed.device.type, shape, mesh_dim_names=("data", "context", "tensor"))["context"]
    rank, size, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    # Heads that size does not divide: the first ranks have one more, such as 13 and 12 of gpt2-xl's 25
    heads, head_width = model.config.n_head // config.tensor, model.config.n_embd // model.config.n_head
    columns = [head_width * (heads // size + (r < heads % size)) for r in range(size)]  # of each rank's heads

    def own_tokens(x):
        """This rank's part of x (..., T) in training."""
        return x.chunk(size, dim=-1)[rank].contiguous() if torch.is_grad_enabled() else x

    def own_targets(idx, targets=None, *others, **options):
        return (idx, targets if targets is None else own_tokens(targets), *others), options

    def tokens_to_heads(module, inputs, qkv):
        if torch.is_grad_enabled():
            qkv = gather_tokens(qkv.unflatten(2, (3, -1)), columns, rank, group).flatten(2)
        return qkv

    def heads_to_tokens(module, inputs):
        (y,) = inputs
        return gather_heads(y, columns, rank, group) if torch.is_grad_enabled() else y

    # outside --tensor's hooks: input hooks run before them (prepend), output hooks after them
    model.register_forward_pre_hook(lambda module, inputs, named: own_targets(*inputs, **named), with_kwargs=True)
    for embedding in (model.transformer.wte, model.transformer.wpe):  # of tokens (B, T), and of positions (T,)
        embedding.register_forward_pre_hook(lambda module, inputs: own_tokens(*inputs), prepend=True)
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(tokens_to_heads)
        block.attn.c_proj.register_forward_pre_hook(heads_to_tokens, prepend=True)


def gather_tokens(x, columns, rank, group):
    """All tokens of this rank's heads: (B, T/N, 3, C) -> (B, T, 3, columns[rank]). columns: of every rank's heads."""
    sent = x.split(columns, dim=3)
    sizes = [part.numel() for part in sent]
    received = torch.cat([part.flatten() for part in sent])
    received = all_to_all_single(received, [sizes[rank]] * len(sizes), sizes, group)
    return received.view(len(sizes), *sent[rank].shape).transpose(0, 1).flatten(1, 2)


def gather_heads(x, columns, rank, group):
    """All heads of this rank's tokens, the way back: (B, T, columns[rank]) -> (B, T/N, C)."""
    sent = x.unflatten(1, (len(columns), -1)).transpose(0, 1)  # (N, B, T/N, columns[rank])
    B, T = sent.shape[1:3]
    sizes = [B * T * width for width in columns]
    received = all_to_all_single(sent.flatten(), sizes, [sizes[rank]] * len(sizes), group)
    return torch.cat([part.view(B, T, -1) for part in received.split(sizes)], dim=2)
