"""Pipeline parallelism: a model's blocks divided into stages, each on its own ranks (Huang et al. 2019, "GPipe").

A stage sends the residual stream, (B, T, C), to the next stage, and its gradient back. Little is sent, so stages may
stand on different machines. Stages work at the same time because a step has several micro-batches:

    stage 0    F0 F1    B0 F2 B1 F3 B2    B3
    stage 1       F0 B0 F1 B1 F2 B2 F3 B3

This is the 1F1B schedule (Narayanan et al. 2019, "PipeDream"): a backward (B) as soon as there is one, so that a stage
keeps the activations of N micro-batches at most. The gaps at the beginning and the end are the bubble. In interleaved
1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2) each rank has several stages, V of them, of fewer blocks, so
that the last rank begins V times earlier. PyTorch's schedules do the work.
https://docs.pytorch.org/docs/stable/distributed.pipelining.html

The head costs as much as several blocks (4.5 in GPT-2 124M), so the last stage has fewer. It is tied to the embedding
of the first stage: both have the table, start from the same weights, add up their gradients, and make the same updates.
"""

import itertools
from copy import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.dtensors import full_tensor
from common.errors import UserError
from data.tokenizer import VOCAB_SIZE
from kernels.compile import compile_model
from model import GPT
from optim.schedules import accumulation_steps
from parallel import fsdp, tensor
from parallel.process_group import tensor_groups, try_one_of


def check_flags(config, distributed):
    """Check --pipeline and the flags that go with it. Raises UserError if they conflict."""
    size, stages = config.pipeline, config.pipeline * config.stages_per_rank
    if size == 1:
        if config.stages_per_rank > 1:
            raise UserError("--stages_per_rank is for --pipeline: leave it out")
        return
    if stages > config.n_layer + 1:
        raise UserError(
            f"--pipeline {size} × --stages_per_rank {config.stages_per_rank} are {stages} stages, but {config.n_layer} "
            f"blocks and the head fill {config.n_layer + 1} at most: use fewer"
        )
    groups = distributed.world_size // config.tensor
    if groups % size:
        fits = [n for n in range(2, (config.n_layer + 1) // config.stages_per_rank + 1) if groups % n == 0]
        where, hint = tensor_groups(groups, config.tensor), try_one_of(fits, "use --pipeline 1")
        raise UserError(f"--pipeline {size} does not divide {where}: {hint}")
    if config.parallel in ("zero3", "hsdp"):
        raise UserError(
            f"--pipeline keeps a stage's weights gathered during a step, so --parallel {config.parallel} saves "
            "nothing: use zero2"
        )
    if config.context > 1:
        raise UserError("--pipeline excludes --context: use --tensor with --context")
    if config.batch_warmup_steps:
        raise UserError(
            "--batch_warmup_steps begins with one micro-batch, which leaves all stages of --pipeline but one idle: "
            "leave one of the two out"
        )


def check_micro_batches(config, distributed):
    """Raises UserError if a step has too few micro-batches for --pipeline's schedule."""
    size, micro_steps = config.pipeline, accumulation_steps(0, config, distributed.data_size)
    if size == 1 or micro_steps >= size and (config.stages_per_rank == 1 or micro_steps % size == 0):
        return
    sequences = micro_steps * config.micro_batch_size  # of each data-parallel rank
    fits = [b for b in range(1, sequences // size + 1) if sequences % (b * size) == 0]
    rule = f"{size} micro-batches or more" if config.stages_per_rank == 1 else f"a multiple of {size} micro-batches"
    hint = f"--micro_batch_size {fits[-1]}" if fits else "a larger --total_batch_size"
    raise UserError(f"--pipeline {size} needs {rule} in a step, and there are {micro_steps}: use {hint}")


def blocks_of_stages(config, vocab_size=VOCAB_SIZE):
    """Number of blocks in each stage, so that the slowest stage has as few FLOPs as possible.

    FLOPs of a token's forward: a block 24C² + 4TC, the head 2VC (Narayanan et al. 2021, appendix).
    """
    C, others = config.n_embd, config.pipeline * config.stages_per_rank - 1
    if not others:
        return [config.n_layer]
    head = 2 * vocab_size * C / (24 * C**2 + 4 * config.seq_len * C)  # in blocks

    def slowest(last):
        return max(-(-(config.n_layer - last) // others), last + head)

    last = min(reversed(range(config.n_layer - others + 1)), key=slowest)
    before, more = divmod(config.n_layer - last, others)
    # the earlier a stage, the more micro-batches are in flight there: the later ones have one block more
    return [before + (stage >= others - more) for stage in range(others)] + [last]


def blocks_of_ranks(config):
    """Number of blocks that each rank of a pipeline has."""
    stages = blocks_of_stages(config)
    return [sum(stages[rank :: config.pipeline]) for rank in range(config.pipeline)]


def blocks_in_flight(config):
    """Of each rank, the most activations of blocks that it keeps: one for each block and micro-batch in flight.

    Interleaved: ScheduleInterleaved1F1B's warm-up forwards and one more, N of each of the rank's V stages in turn.
    """
    N, V = config.pipeline, config.stages_per_rank
    stages = blocks_of_stages(config)

    def of_rank(rank):
        own = stages[rank::N]
        forwards = N - rank if V == 1 else (V - 1) * N + 2 * (N - 1 - rank) + 1
        return sum(own[i // N % V] for i in range(forwards))

    return [of_rank(rank) for rank in range(N)]


def bubble(config, distributed):
    """The share of a step in which a rank waits, (N-1)/(N-1 + V·M) for M micro-batches (Narayanan et al. 2021, 2.2)."""
    waits = config.pipeline - 1
    return waits / (waits + config.stages_per_rank * accumulation_steps(0, config, distributed.data_size))


def describe(config, distributed):
    """The parallel mode in words, for the plan."""
    words = fsdp.describe(config, distributed)
    if config.pipeline == 1:
        return words
    own = f"{config.pipeline} ranks share the blocks, {' + '.join(map(str, blocks_of_stages(config)))}; the bubble is "
    own += f"{bubble(config, distributed):.1%} of a step"
    return own + (f"; each stage: {words}" if distributed.data_size * config.tensor > 1 else "")


# ----------------------------------------------------------------------------------------------------------------------
# The model


class Stage(nn.Module):
    """Adjacent blocks of a Pipeline. The first stage also embeds the tokens, the last one has the head."""

    def __init__(self, model, index, layers, first, last):
        super().__init__()
        parts = model.transformer
        self.config = model.config
        self.index, self.layers, self.first, self.last = index, layers, first, last
        self.blocks = nn.ModuleList(parts.h[layer] for layer in layers)
        # registered so that FSDP shards them with the stage: the model's embed and head use them
        self.others = nn.ModuleList([parts.wte, parts.wpe] * first + [parts.wte, parts.ln_f] * last)
        self.embed, self.head, self.find_documents = model.embed, model.head, model.find_documents
        self.autocast, self.micro_batches = model.autocast, None
        self.compiled = compile_model(self.compute, model.flags)
        # torch.compile keeps 8 graphs of one function; evaluations need four for each stage
        self.compile_evaluations = model.flags.stages_per_rank == 1

    def forward(self, x, idx=None, targets=None, offsets=None, reduction="mean", at=None, cache=None):
        """x: the previous stage's output (B, T, C); anything on the first stage. The others are as GPT.forward's.
        Without idx, in training, idx, targets and offsets are the next of self.micro_batches.

        Returns this stage's output; on the last stage what GPT.forward returns.
        """
        if idx is None:
            idx, targets, offsets = next(self.micro_batches)
        compiled = not cache and (self.compile_evaluations or torch.is_grad_enabled())
        with copy(self.autocast):  # evaluations are inside it already, and an autocast is not reentrant
            compute = self.compiled if compiled else self.compute
            return compute(x, idx, targets, offsets, reduction, at, cache)

    def compute(self, x, idx, targets, offsets, reduction, at, cache):
        if self.first:
            x = self.embed(idx, cache.positions if cache else torch.arange(idx.size(1), device=idx.device))
        documents = self.find_documents(idx, offsets, cache)
        for layer, block in zip(self.layers, self.blocks):
            x = block(x, cache.layers[layer] if cache else None, documents)
        return self.head(x, targets, reduction, at, cache) if self.last else x


class Pipeline(GPT):
    """A GPT whose blocks are divided into stages. This rank has the parameters of its own stages, by GPT-2's names.

    Create it on the device "meta". form_stages() then removes what other ranks have.
    """

    def __init__(self, sizes, flags, distributed, autocast):
        """sizes: GPTConfig. flags: a resolved Config. autocast: the context of every forward."""
        super().__init__(sizes)
        self.flags, self.distributed, self.autocast = flags, distributed, autocast
        self.params_of_stages = super().num_params()
        self.schedule = None

    def form_stages(self, mesh):
        """Keep this rank's stages. mesh: has one dimension, the ranks of one pipeline. A collective.

        Stage s is on rank s % N, so that the next stage is always on the next rank. Returns {stage: its blocks}.
        """
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        ends = list(itertools.accumulate(blocks_of_stages(self.flags, self.config.vocab_size), initial=0))
        parts, last = self.transformer, len(ends) - 2
        own = range(self.rank, last + 1, self.size)
        self.stages = nn.ModuleList(
            Stage(self, i, range(ends[i], ends[i + 1]), first=i == 0, last=i == last) for i in own
        )
        self.has_embedding, self.has_head = 0 in own, last in own
        kept = {layer for stage in self.stages for layer in stage.layers}
        for layer in set(range(len(parts.h))) - kept:
            parts.h[layer] = None
        parts.wte = parts.wte if self.has_embedding or self.has_head else None
        parts.wpe = parts.wpe if self.has_embedding else None
        parts.ln_f = parts.ln_f if self.has_head else None
        # the ranks of the first and the last stage, which both have the embedding table
        ranks = torch.arange(self.distributed.world_size).view(self.size, -1)[[0, -1]]
        self.table_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
        # a group's first collective must include all its ranks, and a send has only two of them (P2POp's docs)
        dist.all_reduce(torch.zeros((), device=self.distributed.device), group=self.group)
        return {stage: stage.blocks for stage in self.stages}

    def num_params(self):
        """As GPT's: of all stages."""
        return self.params_of_stages

    def init_weights(self, fill=torch.Tensor.copy_):
        """As GPT's: every rank draws all weights, one after the other, and keeps its own."""
        with torch.device("meta"):
            whole = GPT(self.config)
        own = dict(self.named_parameters())
        targets = {parameter: own.get(name) for name, parameter in whole.named_parameters()}

        def fill_own(parameter, weight):
            if targets[parameter] is not None:
                fill(targets[parameter], weight)

        whole.init_weights(fill_own)

    # ---- training

    def accumulate(self, next_batch, micro_steps):
        """Forward and backward of a step's micro-batches: gradients accumulate. A collective.

        Returns N times their mean loss on the last stage, 0 on the others, so that the mean over the ranks is the mean
        loss: () float32.
        """
        self.schedule = self.schedule or self.make_schedule(micro_steps)
        micro_batches = [next_batch() for _ in range(micro_steps)]
        for stage in self.stages:  # the schedule passes x alone, and each stage takes the micro-batches in order
            stage.micro_batches = iter(micro_batches)
        idx, targets, _ = zip(*micro_batches)
        idx, targets = torch.cat(idx), torch.cat(targets)  # (M·B, T)
        losses = []
        with tensor.loss(self.flags):
            inputs = [idx] if self.has_embedding else []
            self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        if self.has_embedding or self.has_head:
            dist.all_reduce(self.transformer.wte.weight.grad.to_local(), group=self.table_group)
        return self.size * torch.stack(losses).sum().detach() if self.has_head else torch.zeros((), device=idx.device)

    def make_schedule(self, micro_steps):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B  # slow to import

        flags = self.flags
        T = flags.seq_len // tensor.sequence_parts(flags)
        with torch.device("meta"):
            idx = torch.empty(flags.micro_batch_size, flags.seq_len, dtype=torch.long)
            x = torch.empty(flags.micro_batch_size, T, self.config.n_embd, dtype=self.dtype, requires_grad=True)
            loss = torch.empty((), requires_grad=True)
        stages = [
            PipelineStage(
                stage,
                stage.index,
                self.size * len(self.stages),
                self.distributed.device,
                input_args=idx if stage.first else x,
                output_args=loss if stage.last else x,
                group=self.group,
            )
            for stage in self.stages
        ]
        options = dict(loss_fn=lambda loss, _: loss / micro_steps, scale_grads=False)
        if len(stages) == 1:
            return Schedule1F1B(stages[0], micro_steps, **options)
        return ScheduleInterleaved1F1B(stages, micro_steps, **options)

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
        x = None
        if cache:
            cache.reserve(idx.size(1))
        for stage in self.stages:
            if not stage.first:
                x = torch.empty(*idx.shape, self.config.n_embd, dtype=self.dtype, device=idx.device)
                dist.recv(x, group=self.group, group_src=(self.rank - 1) % self.size)
            x = stage(x, idx, targets, offsets, reduction, at, cache)
            if not stage.last:
                dist.send(x, group=self.group, group_dst=(self.rank + 1) % self.size)
        if targets is not None:
            return x if self.has_head else torch.zeros(() if reduction == "mean" else targets.shape, device=idx.device)
        rows = at.shape if at is not None else (len(idx), 1 if cache else idx.size(1))
        logits = x.float().contiguous() if self.has_head else x.new_empty(*rows, self.config.vocab_size).float()
        dist.broadcast(logits, group=self.group, group_src=self.size - 1)
        return logits


def clip_gradients(model, max_norm):
    """Scale the gradients down to a norm of max_norm, over all stages of a Pipeline; 0: leave them as they are.

    Returns the norm before, () float32, in either case: the log has it, and a step whose norm is not finite is skipped.
    """
    stages, counted = isinstance(model, Pipeline), dict(model.named_parameters())
    if stages and model.has_head:  # the first stage counts the table
        del counted["transformer.wte.weight"]
    norm = full_tensor(get_total_norm([parameter.grad for parameter in counted.values()]))
    if stages:
        norm = norm**2
        dist.all_reduce(norm, group=model.group)
        norm = norm.sqrt()
    if max_norm:
        clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
