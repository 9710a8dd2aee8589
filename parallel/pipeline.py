"""Pipeline parallelism: a model's blocks divided into stages, each on its own ranks (Huang et al. 2019, "GPipe").

A stage sends the residual stream, (B, T, C), to the next stage, and its gradient back. Little is sent, so stages may
stand on different machines. Stages work at the same time because a step has several micro-batches:

    stage 0    F0 F1    B0 F2 B1 F3 B2    B3
    stage 1       F0 B0 F1 B1 F2 B2 F3 B3

This is the 1F1B schedule (Narayanan et al. 2019, "PipeDream"): a backward (B) as soon as there is one, so that a stage
keeps the activations of N micro-batches at most. The gaps at the beginning and the end are the bubble.
https://docs.pytorch.org/docs/stable/distributed.pipelining.html

The head costs as much as several blocks (4.5 in GPT-2 124M), so the last stage has fewer. It is tied to the embedding
of the first stage: both have the table, start from the same weights, add up their gradients, and make the same updates.
"""

import itertools
from copy import copy

import torch
import torch.distributed as dist
import torch.nn as nn

from common.errors import UserError
from data.tokenizer import VOCAB_SIZE
from kernels.compile import compile_model
from model import GPT
from optim.schedules import accumulation_steps
from parallel import tensor
from parallel.process_group import must_divide


def check_flags(config, distributed):
    """Check --pipeline and the flags that go with it. Raises UserError if they conflict."""
    size = config.pipeline
    if size == 1:
        return
    must_divide("pipeline", size, distributed.world_size // config.tensor, "ranks, or groups of --tensor ranks")
    if size > config.n_layer + 1:
        raise UserError(f"--pipeline {size}: {config.n_layer} blocks and the head fill {config.n_layer + 1} stages")
    if config.parallel in ("zero1", "zero3", "hsdp"):
        why = "--pipeline keeps weights gathered and gradients whole"
        raise UserError(f"{why}, so --parallel {config.parallel} saves nothing: use zero2")
    if config.context > 1:
        raise UserError("--pipeline excludes --context: leave one of the two out")
    if config.batch_warmup_ratio:
        raise UserError("--pipeline excludes --batch_warmup_ratio: leave one of the two out")


def check_micro_batches(config, distributed):
    """Raises UserError if a step has too few micro-batches for --pipeline's schedule."""
    size, micro_steps = config.pipeline, accumulation_steps(config, distributed.data_size)
    if micro_steps < size:
        more = "use a smaller --micro_batch_size or a larger --total_batch_size"
        raise UserError(f"--pipeline {size} needs {size} micro-batches or more in a step, not {micro_steps}: {more}")


def blocks_of_stages(config, vocab_size=VOCAB_SIZE):
    """Number of blocks in each stage, so that the slowest stage has as few FLOPs as possible.

    FLOPs of a token's forward: a block 24C² + 4TC, the head 2VC (Narayanan et al. 2021, appendix).
    """
    C, others = config.n_embd, config.pipeline - 1
    if not others:
        return [config.n_layer]
    head = 2 * vocab_size * C / (24 * C**2 + 4 * config.seq_len * C)  # in blocks

    def slowest(last):
        return max(-(-(config.n_layer - last) // others), last + head)

    last = min(reversed(range(config.n_layer - others + 1)), key=slowest)
    before, more = divmod(config.n_layer - last, others)
    # the earlier a stage, the more micro-batches are in flight there: the later ones have one block more
    return [before + (stage >= others - more) for stage in range(others)] + [last]


def blocks_in_flight(config):
    """Of each rank, the most activations of blocks that it keeps: one for each block and micro-batch in flight."""
    return [(config.pipeline - rank) * blocks for rank, blocks in enumerate(blocks_of_stages(config))]


def bubble(config, distributed):
    """The share of a step in which a rank waits, (N-1)/(N-1 + M) for M micro-batches (Narayanan et al. 2021, 2.2)."""
    waits = config.pipeline - 1
    return waits / (waits + accumulation_steps(config, distributed.data_size))


# ----------------------------------------------------------------------------------------------------------------------
# The model


class Stage(nn.Module):
    """Adjacent blocks of a Pipeline. The first stage also embeds the tokens, the last one has the head."""

    def __init__(self, model, layers, first, last):
        super().__init__()
        parts = model.transformer
        self.config = model.config
        self.layers, self.first, self.last = layers, first, last
        self.blocks = nn.ModuleList(parts.h[layer] for layer in layers)
        # registered so that FSDP shards them with the stage: the model's embed and head use them
        self.others = nn.ModuleList([parts.wte, parts.wpe] * first + [parts.wte, parts.ln_f] * last)
        self.embed, self.head, self.find_documents = model.embed, model.head, model.find_documents
        self.autocast, self.micro_batches = model.autocast, None
        self.compiled = compile_model(self.compute, model.flags)

    def forward(self, x, idx=None, targets=None, offsets=None, reduction="mean", at=None, cache=None):
        """x: the previous stage's output (B, T, C); anything on the first stage. The others are as GPT.forward's.
        Without idx, in training, idx, targets and offsets are the next of self.micro_batches.

        Returns this stage's output; on the last stage what GPT.forward returns.
        """
        if idx is None:
            idx, targets, offsets = next(self.micro_batches)
        with copy(self.autocast):  # evaluations are inside it already, and an autocast is not reentrant
            compute = self.compute if cache else self.compiled
            return compute(x, idx, targets, offsets, reduction, at, cache)

    def compute(self, x, idx, targets, offsets, reduction, at, cache):
        if self.first:
            x = self.embed(idx, cache.positions if cache else torch.arange(idx.size(1), device=idx.device))
        documents = self.find_documents(idx, offsets, cache)
        for layer, block in zip(self.layers, self.blocks):
            x = block(x, cache.layers[layer] if cache else None, documents)
        return self.head(x, targets, reduction, at, cache) if self.last else x


class Pipeline(GPT):
    """A GPT whose blocks are divided into stages. This rank has the parameters of its own stage, by GPT-2's names."""

    def __init__(self, model, flags, distributed, autocast, mesh):
        """model: a GPT on the device "meta". flags: a resolved Config. autocast: the context of every forward.
        mesh: has one dimension, the ranks of one pipeline. A collective."""
        nn.Module.__init__(self)
        self.config, self.transformer, self.params_of_all_stages = model.config, model.transformer, model.num_params()
        self.flags, self.distributed, self.autocast, self.schedule = flags, distributed, autocast, None
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        ends = list(itertools.accumulate(blocks_of_stages(self.flags, self.config.vocab_size), initial=0))
        parts, layers = self.transformer, range(ends[self.rank], ends[self.rank + 1])
        self.has_embedding, self.has_head = self.rank == 0, self.rank == self.size - 1
        self.stage = Stage(self, layers, self.has_embedding, self.has_head)
        for layer in set(range(len(parts.h))) - set(layers):
            parts.h[layer] = None
        parts.wte = parts.wte if self.has_embedding or self.has_head else None
        parts.wpe = parts.wpe if self.has_embedding else None
        parts.ln_f = parts.ln_f if self.has_head else None
        # the ranks of the first and the last stage, which both have the embedding table
        ranks = torch.arange(self.distributed.world_size).view(self.size, -1)[[0, -1]]
        self.table_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
        # a group's first collective must include all its ranks, and a send has only two of them (P2POp's docs)
        dist.all_reduce(torch.zeros((), device=self.distributed.device), group=self.group)

    def num_params(self):
        """As GPT's: of all stages."""
        return self.params_of_all_stages

    def init_weights(self, fill=torch.Tensor.copy_):
        """As GPT's: every rank draws all weights, one after the other, and keeps its own."""
        with torch.device("meta"):
            whole = GPT(self.config)
        own = dict(self.named_parameters())
        targets = {parameter: own.get(name) for name, parameter in whole.named_parameters()}
        whole.init_weights(lambda parameter, weight: targets[parameter] is None or fill(targets[parameter], weight))

    # ---- training

    def accumulate(self, trainer, next_batch, micro_steps, stop):
        """As train_gpt2.accumulate, for a schedule that overlaps the micro-batches on the stages. A collective.

        Returns N times their mean loss on the last stage, 0 on the others, so that the mean over the ranks is the mean
        loss: () float32.
        """
        batches = [next_batch() for _ in range(micro_steps)]
        self.schedule = self.schedule or self.make_schedule(micro_steps)
        self.stage.micro_batches = iter(batches)  # the schedule passes x alone, and the stage takes them in order
        inputs = torch.cat([batch.inputs for batch in batches])  # (M·B, T)
        targets = torch.cat([batch.targets for batch in batches])
        losses = []
        with tensor.loss(self.flags):
            own_inputs = [inputs] if self.has_embedding else []
            self.schedule.step(*own_inputs, target=targets, losses=losses, return_outputs=False)
        if self.has_embedding or self.has_head:
            dist.all_reduce(self.transformer.wte.weight.grad.to_local(), group=self.table_group)
        loss = torch.zeros((), device=self.distributed.device)
        return loss + self.size * torch.stack(losses).sum().detach() if self.has_head else loss

    def make_schedule(self, micro_steps):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # slow to import

        flags = self.flags
        T = flags.seq_len // tensor.sequence_parts(flags)
        with torch.device("meta"):
            idx = torch.empty(flags.micro_batch_size, flags.seq_len, dtype=torch.long)
            x = torch.empty(flags.micro_batch_size, T, self.config.n_embd, dtype=self.dtype, requires_grad=True)
            loss = torch.empty((), requires_grad=True)
        examples = dict(input_args=idx if self.has_embedding else x, output_args=loss if self.has_head else x)
        device = self.distributed.device
        stage = PipelineStage(self.stage, self.rank, self.size, device, **examples, group=self.group)
        return Schedule1F1B(stage, micro_steps, loss_fn=lambda loss, _: loss / micro_steps, scale_grads=False)

    @property
    def dtype(self):
        """The residual stream's."""
        return torch.bfloat16 if self.config.bf16_residual else torch.float32

    # ---- evaluation

    @torch.no_grad()
    def forward(self, idx, targets=None, offsets=None, reduction="mean", at=None, cache=None):
        """As GPT.forward, without gradients. A collective: the ranks of a pipeline pass the same arguments.

        With targets the last stage returns the loss, other ranks zeros. Without, all return float32 logits.
        """
        x, stage = None, self.stage
        if cache:
            cache.reserve(idx.size(1))
        if not stage.first:
            x = torch.empty(*idx.shape, self.config.n_embd, dtype=self.dtype, device=idx.device)
            dist.recv(x, group=self.group, group_src=self.rank - 1)
        x = stage(x, idx, targets, offsets, reduction, at, cache)
        if not stage.last:
            dist.send(x, group=self.group, group_dst=self.rank + 1)
        if targets is not None:
            return x if self.has_head else torch.zeros(() if reduction == "mean" else targets.shape, device=idx.device)
        rows = at.shape if at is not None else (len(idx), 1 if cache else idx.size(1))
        logits = x.float().contiguous() if self.has_head else x.new_empty(*rows, self.config.vocab_size).float()
        dist.broadcast(logits, group=self.group, group_src=self.size - 1)
        return logits
