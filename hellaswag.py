"""HellaSwag: how often a model finds the true ending of a short text likelier than three false ones.

    python hellaswag.py log/RUN                                  # or a checkpoint, a Hugging Face folder, gpt2
    python hellaswag.py gpt2 --tasks hellaswag=mine.jsonl        # other multiple choice
    python hellaswag.py gpt2 --tasks arc_easy,piqa,lambada,winogrande

Endings are scored as build-nanogpt scores them (Zellers et al. 2019 for the data): acc counts the items where the true
ending has the lowest summed loss, acc_norm where it has the lowest loss per token. The other tasks equal lm_eval's, see
data/tasks.py; for more, export.py writes a folder that lm_eval reads.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from checkpoints.load import load_located, locate
from common.cli import flag, parse, progress
from common.errors import out_of_memory, run
from data.loader import Batch, make_batch
from data.tasks import TASKS, load_items, split_tasks
from data.tokenizer import encode
from parallel import process_group
from parallel.process_group import batches_of_rank

# OpenAI's GPT-2 weights by this script's measures (build-nanogpt), GPT-3 from Brown et al. 2020, table H.1
REFERENCE = "GPT-2 124M: acc 0.2859, acc_norm 0.2955; 1558M: 0.3842, 0.4893; GPT-3 125M: acc 0.337"
# Widths of the batches in training. torch.compile builds a graph for each; one width alone adds 50% padding.
WIDTHS = 3
SLOW_DEVICE_ITEMS = 32  # of a task in training; GPT-2 124M takes 0.3 s an item on two CPU cores, 50 minutes for all


class EndingBatch(NamedTuple):
    """Endings with their contexts, one a row, padded to a common width. N: tokens of all endings, with padding."""

    inputs: torch.Tensor  # (R, width) int32
    targets: torch.Tensor  # (N,) int32, -1 in the padding
    positions: torch.Tensor  # (N,) int32, the input in inputs.flatten() that predicts each target
    endings: torch.Tensor  # (targets without padding,) the ending to which each target belongs


def make_batches(pairs, seq_len, tokens, widths):
    """Batches of at most `tokens` inputs in a few shapes: (EndingBatches, tokens in each ending as (pairs,) int64).

    pairs: token lists (context, ending). A row of more than seq_len tokens loses the start of its context.
    widths: the number of different widths; rows of similar length share a batch.
    """
    rows = [(context + ending)[-seq_len - 1 :] for context, ending in pairs]
    ends = np.array([len(row) for row in rows])
    starts = np.maximum(1, ends - [len(ending) for _, ending in pairs])  # nothing predicts a row's first token
    batches = []
    order = np.argsort(ends, kind="stable")
    widest = min(seq_len, -(-(ends.max() - 1) // 8) * 8)
    steps = [*dict.fromkeys(min(widest, -(-widest * i // widths // 8) * 8) for i in range(1, widths + 1))]
    for narrower, width in zip([0, *steps], steps):
        fitting = order[(ends[order] - 1 > narrower) & (ends[order] - 1 <= width)]
        R = max(1, min(tokens // width, len(fitting)))
        groups = [fitting[i : i + R] for i in range(0, len(fitting), R)]
        N = max((int((ends - starts)[group].sum()) for group in groups), default=0)
        column = np.arange(1, width + 1)
        for group in groups:
            padded = np.zeros((R, width + 1), dtype=np.int32)
            for r, pair in enumerate(group):
                padded[r, : ends[pair]] = rows[pair]
            r, c = np.nonzero((column >= starts[group, None]) & (column < ends[group, None]))
            targets, positions = np.full(N, -1, dtype=np.int32), np.zeros(N, dtype=np.int32)
            targets[: len(r)], positions[: len(r)] = padded[r, c + 1], r * width + c
            batches.append(EndingBatch(*map(torch.from_numpy, (padded[:, :-1], targets, positions, group[r]))))
    return batches, torch.from_numpy(ends - starts)


class MultipleChoice:
    """Items of data.tasks as batches, and the scores of a model on them.

    labels (items,): the index of each item's true ending. choices (items, most endings) bool: which endings exist.
    sizes (endings of all items,): what acc_norm divides a loss by, the ending's tokens or lm_eval's characters.
    """

    def __init__(self, items, seq_len, tokens, widths=WIDTHS, title="HellaSwag"):
        """seq_len: the most tokens the model takes. tokens: the most tokens in a batch. widths: see make_batches."""
        pairs, characters = [], []
        for item in progress(items, "tokenizing"):
            encoded = {text: encode(text).tolist() for pair in item.pairs for text in pair}  # each context once
            pairs += [(encoded[context], encoded[ending]) for context, ending in item.pairs]
            characters += item.characters
        self.batches, lengths = make_batches(pairs, seq_len, tokens, widths)
        self.sizes = torch.where(torch.tensor(characters) > 0, torch.tensor(characters), lengths)
        self.labels = torch.tensor([item.label for item in items])
        counts = torch.tensor([len(item.pairs) for item in items])
        self.choices = torch.arange(counts.max()) < counts[:, None]
        self.title = title

    @torch.no_grad()
    def sum_losses(self, losses_of, distributed, stop=None, shape=()):
        """The loss of each ending, summed over its tokens: (endings of all items,) float64, on every rank.

        losses_of(batch, positions), for a data.loader.Batch, returns a loss for each target; the padding's are ignored.
        With a shape it returns as many kinds of losses, (*shape, N). The ranks divide the batches. Raises Stopped as
        batches_of_rank.
        """
        own = []
        for batch in batches_of_rank(self.batches, self.title, distributed, stop):
            at = batch.positions.to(distributed.device, non_blocking=True).long()
            own.append((losses_of(make_batch(batch.inputs, batch.targets, distributed.device), at), batch))
        sums = torch.zeros(*shape, len(self.sizes), dtype=torch.float64)
        for values, batch in own:  # a loop of its own: reading the losses waits for the device
            sums.index_add_(-1, batch.endings, values[..., : len(batch.endings)].cpu().double())
        return torch.stack(distributed.all_gather(sums)[:: distributed.tensor]).sum(dim=0)

    def right(self, *arguments, **options):
        """Two (items,) bool: where the true ending has the lowest loss, and where it has the lowest loss per size.

        A collective; arguments as of sum_losses."""
        sums = self.sum_losses(*arguments, **options)
        tables = torch.full((2, *self.choices.shape), math.inf)  # inf where an ending does not exist
        tables[:, self.choices] = torch.stack((sums, sums / self.sizes)).float()
        return tables.argmin(dim=2) == self.labels

    def greedy(self, losses_of, distributed, stop=None):
        """Of items with one ending: (where the likeliest tokens are the ending, its summed loss), (items,) each.

        A collective; losses_of is that of sum_losses, and of a batch without targets it returns logits, (N, V)."""

        def losses_and_misses(batch, at):
            logits = losses_of(Batch(batch.inputs, None, batch.offsets), at).float()
            losses = F.cross_entropy(logits, batch.targets, ignore_index=-1, reduction="none")
            misses = (logits.argmax(dim=1) != batch.targets).float()
            return torch.stack((losses, misses)) / distributed.pipeline  # all stages have the logits

        losses, misses = self.sum_losses(losses_and_misses, distributed, stop, shape=(2,))
        return misses == 0, losses


class Tasks:
    """Several tasks of data/tasks.py. They share their batches, so torch.compile builds no graphs for each, but those
    that need logits have one graph more."""

    def __init__(self, items, seq_len, tokens, widths=WIDTHS):
        """items: {task: its items}; the rest as of MultipleChoice."""
        self.items = items
        self.groups = []  # (tasks, their MultipleChoice, whether they need logits)
        for needs_logits in (False, True):
            if names := [name for name in items if ("perplexity" in TASKS[name].metrics) == needs_logits]:
                own = list(itertools.chain.from_iterable(items[name] for name in names))
                choice = MultipleChoice(own, seq_len, tokens, 1 if needs_logits else widths, ", ".join(names))
                self.groups.append((names, choice, needs_logits))

    def evaluate(self, losses_of, distributed, stop=None):
        """{task: {metric: value, "items": their number}}. A collective; arguments as of MultipleChoice.greedy."""
        scores = {}
        for names, choice, needs_logits in self.groups:
            values = (choice.greedy if needs_logits else choice.right)(losses_of, distributed, stop)
            counts = [len(self.items[name]) for name in names]
            for name, *own in zip(names, *(each.double().split(counts) for each in values)):
                metrics = dict(zip(TASKS[name].metrics, (each.mean().item() for each in own)))
                if needs_logits:
                    metrics["perplexity"] = own[1].mean().exp().item()
                scores[name] = metrics | dict(items=len(self.items[name]))
        return {name: scores[name] for name in self.items}


def tasks_in_training(config):
    """The Tasks that a training run evaluates, or None. config: a resolved Config."""
    if not config.hellaswag_every:
        return None
    limit = None if config.device == "cuda" else SLOW_DEVICE_ITEMS
    files = {"hellaswag": None} | split_tasks(config.tasks)
    items = {name: load_items(file, limit, name) for name, file in files.items()}
    return Tasks(items, config.seq_len, config.micro_batch_size * config.seq_len)


@dataclass
class Flags:
    """Evaluate a GPT-2 on HellaSwag, or on other tasks."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run's folder (its newest checkpoint), a checkpoint, a Hugging Face folder, a name on the hub (gpt2), a .pt."""
    tasks: str | None = flag(None, is_path=False)
    """Names of hellaswag (the default), arc_easy, piqa, lambada and winogrande, as in arc_easy,piqa=FILE.jsonl.
    A line of a file of hellaswag has ctx, endings and label, the true ending's index from 0."""
    limit: int | None = flag(None, at_least=1)
    """Evaluate only this many items, evenly spread."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto: a GPU if there is one."""


def print_scores(name, items, scores):
    """Print a task's scores, with standard errors of accuracies, and what to compare them with."""
    n = scores.pop("items")
    texts = [
        f"{metric} {x:.4f}" + (f" ± {math.sqrt(x * (1 - x) / n):.4f}" if metric != "perplexity" else "")
        for metric, x in scores.items()
    ]
    print(f"{name}, {n:,} item{'s' * (n > 1)}: {' | '.join(texts)} (± standard error)")
    if "hellaswag" in name.lower():
        print(f"  {REFERENCE}")
    elif "perplexity" not in scores:
        print(f"  chance: {sum(1 / len(item.pairs) for item in items) / n:.4f}")


def main():
    flags = parse(Flags)
    files = split_tasks(flags.tasks) or {"hellaswag": None}
    distributed = process_group.start(flags.device)
    with out_of_memory("use a smaller model"):
        name = distributed.broadcast(distributed.on_main(lambda: locate(flags.model)))  # a run may write a newer one
        model = load_located(name).to(distributed.device)
        on_gpu = distributed.device.type == "cuda"
        bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        autocast = torch.autocast(distributed.device.type, torch.bfloat16, enabled=bf16)

        def losses_of(batch, at):
            with autocast:
                return model(*batch, reduction="none", at=at)

        items = {name: load_items(file, flags.limit, name) for name, file in files.items()}
        # nothing is compiled here, so more widths only save padding
        tasks = Tasks(items, model.config.seq_len, 16384 if on_gpu else 4096, widths=16)
        scores = tasks.evaluate(losses_of, distributed)
    if distributed.is_main:
        for name, metrics in scores.items():
            print_scores(Path(files[name] or name).name, items[name], metrics)
    process_group.stop()


if __name__ == "__main__":
    run(main)
