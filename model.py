"""GPT-2: attention, MLP, block, GPT; loss, KV cache.

Architecture: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", with parameter names
as OpenAI and Hugging Face have them. Shapes: B batch, T sequence, C embedding width, H heads, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels.attention import has_varlen_attention
from kernels.documents import NO_BOUNDARIES, Documents, find_hidden


@dataclass
class GPTConfig:
    seq_len: int = 1024  # maximum sequence length
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    attention: str = "sdpa"  # a value of --attention: what computes it
    pad_vocab: bool = True  # embedding table rounded up to a multiple of pad_to rows
    pad_to: int = 128  # a multiple of 128: whole tensor-core tiles
    bf16_residual: bool = False  # the residual stream in bf16; needs autocast to bf16
    fused_cross_entropy: bool = False  # head and loss by a Triton kernel; needs a GPU
    fused_gelu: bool = False  # GELU in the epilogues of cuBLASLt's GEMMs
    mask_documents: bool = False  # a token attends within its own document; the last token of the vocabulary opens one
    fp8_head: bool = False  # the head's GEMMs of fused_cross_entropy in float8

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} cannot be divided into n_head {self.n_head} heads of equal width")

    @property
    def table_rows(self):
        """Rows of the embedding table: vocab_size, or with pad_vocab the next multiple of pad_to."""
        return -(-self.vocab_size // self.pad_to) * self.pad_to if self.pad_vocab else self.vocab_size


def causal_attention(q, k, v, mask=None):
    """softmax(q kᵀ / √D) v with the (T, S) matrix in memory. q (B, H, T, D) of the last T of S tokens, k and v
    (B, H, S, D).

    mask (B, 1, T, S) bool: True hides a key; by default the causal mask.
    """
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))  # (B, H, T, S)
    if mask is None:
        T, S = scores.shape[-2:]
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1 + S - T)
    scores = scores.masked_fill(mask, float("-inf"))
    return F.softmax(scores, dim=-1).to(v.dtype) @ v  # (B, H, T, D)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_width = config.n_embd // config.n_head
        self.attention = config.attention
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, past, documents):
        qkv = self.c_attn(x)  # (B, T, 3C)
        B, T, C = *qkv.shape[:2], qkv.size(2) // 3
        n_head = C // self.head_width  # fewer than the model's where heads are split over GPUs
        # flash4: the fastest forward, cuDNN's, and the fastest backward, FlashAttention-4's, which writes the gradients
        # of q, k and v to one (B, T, 3C) tensor, as c_attn's backward reads them
        if self.attention == "flash4" and past is None and documents.hidden is None:
            from kernels.flash4 import flash4

            return self.c_proj(flash4(qkv, n_head, documents.offsets)[0])
        # triton: flash attention in Triton, written to be read
        if self.attention == "triton" and past is None and documents.hidden is None and documents.offsets is None:
            from kernels.flash_triton import flash_triton

            return self.c_proj(flash_triton(qkv.contiguous(), n_head)[0])
        # mask_documents: no score between two documents is computed
        if documents.offsets is not None:
            from torch.nn.attention.varlen import varlen_attn  # imports the compiler, a second

            q, k, v = qkv.reshape(B * T, 3, n_head, self.head_width).unbind(1)  # (B·T, H, D)
            y = varlen_attn(q, k, v, documents.offsets, documents.offsets, T, T, window_size=(-1, 0))  # causal
            return self.c_proj(y.reshape(B, T, C))
        q, k, v = (part.view(B, T, n_head, -1).transpose(1, 2) for part in qkv.split(C, dim=2))  # (B, H, T, C/H)
        if past:  # the keys and values of earlier tokens
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)  # (B, H, S, C/H)
        if past is not None:
            past[:] = k, v
        # flash: one kernel that never writes the (T, T) matrix to memory (Dao et al. 2022)
        if self.attention != "written_out" and k.size(2) == T:
            mask = None if documents.hidden is None else ~documents.hidden
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            y = causal_attention(q, k, v, documents.hidden)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fused_gelu = config.fused_gelu
        self.keep_gelu = True  # whether fused_gelu keeps GELU's output for backward, or recomputes it
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        # fused_gelu: GELU and its gradient run in GEMM epilogues, without a pass over (B, T, 4C)
        if self.fused_gelu:
            from kernels.mlp import fused_mlp

            return fused_mlp(x, self.c_fc, self.c_proj, self.keep_gelu)
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.recompute = None  # options for torch.utils.checkpoint

    def forward(self, x, past, documents):
        # activation_checkpointing: backward recomputes the block's activations instead of keeping them
        if self.recompute is not None:
            return checkpoint(self.compute, x, past, documents, **self.recompute)
        return self.compute(x, past, documents)

    def compute(self, x, past, documents):
        x = x + self.attn(self.ln_1(x), past, documents)
        return x + self.mlp(self.ln_2(x))


class Cache:
    """The KV cache: for each layer [keys, values] of all tokens so far, (B, H, S, D) each; at first []."""

    def __init__(self, n_layer, device):
        self.layers = [[] for _ in range(n_layer)]
        self.length, self.device = 0, device

    def reserve(self, T):
        """Count T more tokens. Returns their positions, (T,)."""
        self.positions = torch.arange(self.length, self.length + T, device=self.device)
        self.length += T
        return self.positions


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # shapes only
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(config.table_rows, config.n_embd),
                    wpe=nn.Embedding(config.seq_len, config.n_embd),
                    h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                    ln_f=nn.LayerNorm(config.n_embd),
                )
            )
        if torch.get_default_device().type != "meta":  # a model on "meta" gets its memory and weights later
            self.to_empty(device=torch.get_default_device())
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, fill=torch.Tensor.copy_):
        """Initial weights: normal with standard deviation 0.02, for the 2L projections into the residual stream
        0.02/√(2L); biases 0, LayerNorm weights 1 (Radford et al. 2019, section 2.3).

        Weights are drawn in host memory one after the other, so they depend on the seed alone. fill(parameter, weight)
        copies each into its parameter, which may be a DTensor.
        """
        for name, parameter in self.named_parameters():
            weight = torch.zeros(parameter.shape, device="cpu")
            if name.endswith("c_proj.weight"):
                weight.normal_(std=0.02 / math.sqrt(2 * self.config.n_layer))
            elif weight.dim() == 2:  # padding rows stay 0; the others are the same as without padding
                rows = self.config.vocab_size if name.endswith("wte.weight") else len(weight)
                weight[:rows].normal_(std=0.02)
            elif name.endswith("weight"):  # LayerNorm
                weight.fill_(1)
            fill(parameter, weight)

    def num_params(self):
        """Number of parameters; the tied embedding counts once, its padding not at all."""
        padding = self.config.table_rows - self.config.vocab_size
        return sum(p.numel() for p in self.parameters()) - padding * self.config.n_embd

    def forward(self, idx, targets=None, offsets=None, reduction="mean", at=None, cache=None):
        """Logits, or with targets their cross-entropy.

        idx (B, T) int64. targets (B, T) int64, -1 to ignore a position. The loss is in nats: the mean over the
        other targets, or with reduction="none" (B, T), 0 at ignored positions. Without targets: logits (B, T, V)
        without padding.
        offsets: with mask_documents, kernels.documents.find_offsets(idx); without them attention takes a (B, 1, T, T)
        mask.
        at (N,) int64, indices into idx.flatten(): targets and losses are then (N,), logits (N, V).
        cache, from new_cache(): idx follows the tokens of earlier calls; logits are those of the last position,
        (B, 1, V).

        Raises ValueError for more than seq_len tokens in one call.
        """
        T = idx.size(1)
        if T > self.config.seq_len:
            raise ValueError(f"{T} tokens, but the model has {self.config.seq_len} positions")
        x = self.embed(idx, cache.reserve(T) if cache else torch.arange(T, device=idx.device))
        documents = self.find_documents(idx, offsets, cache)
        for layer, block in enumerate(self.transformer.h):
            x = block(x, cache.layers[layer] if cache else None, documents)
        return self.head(x, targets, reduction, at, cache)

    def find_documents(self, idx, offsets, cache):
        c = self.config
        if cache or not c.mask_documents:  # with a cache, all tokens belong to one document
            return NO_BOUNDARIES
        varlen = c.attention != "written_out" and has_varlen_attention(idx.device, c.n_embd // c.n_head)
        if varlen and offsets is not None:
            return Documents(offsets=offsets)
        return Documents(hidden=find_hidden(idx, c.vocab_size - 1))

    def embed(self, idx, position):
        x = self.transformer.wte(idx) + self.transformer.wpe(position)  # (B, T, C)
        # bf16_residual: half the bytes to read and write in LayerNorms and residual additions
        return x.bfloat16() if self.config.bf16_residual else x

    def head(self, x, targets, reduction, at=None, cache=None):
        if cache:
            x = x[:, -1:]
        if at is not None:
            x = x.flatten(0, 1)[at]  # (N, C)
        x = self.transformer.ln_f(x)
        # fused_cross_entropy: logits exist for some tokens at a time; one kernel computes their loss and replaces them
        # by their gradient
        if self.config.fused_cross_entropy and targets is not None and reduction == "mean":
            if self.config.fp8_head:  # the head's GEMMs in 8 bits
                from kernels.fp8_head import fp8_cross_entropy as fused_cross_entropy
            else:
                from kernels.cross_entropy import fused_cross_entropy  # needs Triton
            return fused_cross_entropy(x, self.transformer.wte.weight, targets, self.config.vocab_size)
        # pad_vocab: the head's GEMM, the largest of all, has 50304 columns, a multiple of a tensor-core tile. A bias of
        # -inf keeps the padding out of the softmax for free; slicing it off would copy all logits.
        padding = None
        if self.config.table_rows > self.config.vocab_size:
            padding = x.new_zeros(self.config.table_rows)
            padding[self.config.vocab_size :].fill_(float("-inf"))
        logits = F.linear(x, self.transformer.wte.weight, padding)  # (..., V); the head is tied to the token embedding
        if targets is None:
            return logits[..., : self.config.vocab_size]
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction=reduction)
        return loss if reduction == "mean" else loss.view_as(targets)

    def new_cache(self):
        """An empty KV cache for forward."""
        return Cache(self.config.n_layer, next(self.parameters()).device)
