"""HellaSwag: how often a model finds the true ending of a short text likelier than three false ones.

    python hellaswag.py log/RUN                                  # or a checkpoint, a Hugging Face folder, gpt2
    python hellaswag.py gpt2 --data mine.jsonl                   # other multiple choice

Endings are scored as build-nanogpt scores them (Zellers et al. 2019 for the data): acc counts the items where the true
ending has the lowest summed loss, acc_norm where it has the lowest loss per token. For other tasks, export.py writes a
folder that EleutherAI's lm_eval reads.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import tyro

from checkpoints.load import load_model, locate
from common.cli import flag, parse, progress
from common.errors import UserError, first_line, out_of_memory, run
from common.files import check_fields, regular_file
from data.loader import make_batch
from data.tokenizer import encode
from parallel import process_group
from parallel.process_group import batches_of_rank

# OpenAI's GPT-2 weights by this script's measures (build-nanogpt), GPT-3 from Brown et al. 2020, table H.1
REFERENCE = "GPT-2 124M: acc 0.2859, acc_norm 0.2955; 1558M: 0.3842, 0.4893; GPT-3 125M: acc 0.337"
# Widths of the batches in training. torch.compile builds a graph for each; one width alone adds 50% padding.
WIDTHS = 3
HELLASWAG = "data/validation-00000-of-00001.parquet"
SLOW_DEVICE_ITEMS = 32  # in training; GPT-2 124M takes 0.3 s an item on two CPU cores, 50 minutes for all


def load_items(path=None, limit=None):
    """Multiple-choice items: a list of dict(ctx=str, endings=[str, ...], label=int, the index of the true ending).

    path: a .jsonl file with these keys on each line; by default HellaSwag's 10,042 validation items from the hub.
    limit: at most this many, evenly spread: HellaSwag begins with its shortest third, captions of videos.
    Raises UserError if the items cannot be read or are something else.
    """
    source = "HellaSwag from the hub" if path is None else path
    try:
        if path is None:
            from pyarrow.parquet import read_table

            from common.hub import download

            rows = read_table(download("Rowan/hellaswag", HELLASWAG, "dataset")).to_pylist()
        else:
            rows = regular_file(path).read_bytes().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {source} ({first_line(error)}); hellaswag.py reads a local file with "
            "--data FILE.jsonl, train_gpt2.py with --hellaswag_data FILE.jsonl; --hellaswag_every 0 trains without it"
        ) from error
    items = []
    for number, row in enumerate(rows, 1):
        if path and not row.strip():
            continue
        try:
            items.append(read_item(json.loads(row) if path else row))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{source}, line {number}: {error}; an item needs ctx, endings (two or more, not blank) and label (the "
                f"index of the true ending), this one is {row!r:.80}"
            ) from error
    if not items:
        raise UserError(f"{source} has no items: it needs one a line, with ctx, endings and label")
    count = min(limit or len(items), len(items))
    return [items[i * len(items) // count] for i in range(count)]


def read_item(row):
    """The item in a row of HellaSwag, whose label may be text. Raises ValueError if the row is something else."""
    check_fields(row, ctx=str, endings=list, label=int | str)
    ctx, endings, label = row["ctx"], row["endings"], str(row["label"])
    # a blank text has nothing to score: without a context, nothing predicts an ending's first token
    if not all(isinstance(text, str) and text.strip() for text in (ctx, *endings)):
        raise ValueError("ctx or an ending is blank or not text")
    if len(endings) < 2 or label not in map(str, range(len(endings))):
        raise ValueError(f"there are {len(endings)} endings, and label is {label}")
    return dict(ctx=ctx, endings=endings, label=int(label))


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
    """Items of load_items as batches, and the accuracy of a model on them.

    labels (items,): the index of each item's true ending. choices (items, most endings) bool: which endings exist.
    """

    def __init__(self, items, seq_len, tokens, widths=WIDTHS):
        """seq_len: the most tokens the model takes. tokens: the most tokens in a batch. widths: see make_batches."""
        contexts = [encode(item["ctx"]).tolist() for item in items]
        each = progress(zip(items, contexts), "tokenizing", len(items))
        pairs = [(context, encode(" " + end).tolist()) for item, context in each for end in item["endings"]]
        self.batches, self.lengths = make_batches(pairs, seq_len, tokens, widths)
        self.labels = torch.tensor([item["label"] for item in items])
        counts = torch.tensor([len(item["endings"]) for item in items])
        self.choices = torch.arange(counts.max()) < counts[:, None]

    @torch.no_grad()
    def sum_losses(self, losses_of, distributed, stop=None):
        """The loss of each ending, summed over its tokens: (endings of all items,) float64, on every rank.

        losses_of(batch, positions), for a data.loader.Batch, returns a loss for each target; the padding's are ignored.
        The ranks divide the batches. Raises Stopped as batches_of_rank.
        """
        own = []
        for batch in batches_of_rank(self.batches, "HellaSwag", distributed, stop):
            at = batch.positions.to(distributed.device, non_blocking=True).long()
            own.append((losses_of(make_batch(batch.inputs, batch.targets, distributed.device), at), batch))
        sums = torch.zeros(len(self.lengths), dtype=torch.float64)
        for values, batch in own:  # a loop of its own: reading the losses waits for the device
            sums.index_add_(0, batch.endings, values[: len(batch.endings)].cpu().double())
        return torch.stack(distributed.all_gather(sums)[:: distributed.tensor]).sum(dim=0)

    def right(self, *arguments, **options):
        """Two (items,) bool: where the true ending has the lowest loss, and where it has the lowest loss per token.

        A collective; arguments as of sum_losses."""
        sums = self.sum_losses(*arguments, **options)
        tables = torch.full((2, *self.choices.shape), math.inf)  # inf where an ending does not exist
        tables[:, self.choices] = torch.stack((sums, sums / self.lengths)).float()
        return tables.argmin(dim=2) == self.labels

    def evaluate(self, *arguments, **options):
        """(acc, acc_norm), each between 0 and 1. A collective; arguments as of sum_losses."""
        return tuple(self.right(*arguments, **options).double().mean(dim=1).tolist())


def choice_in_training(config):
    """The MultipleChoice that a training run evaluates, or None. config: a resolved Config."""
    if not config.hellaswag_every:
        return None
    items = load_items(config.hellaswag_data, None if config.device == "cuda" else SLOW_DEVICE_ITEMS)
    return MultipleChoice(items, config.seq_len, config.micro_batch_size * config.seq_len)


@dataclass
class Flags:
    """Evaluate a GPT-2 on HellaSwag, or on other multiple choice."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run's folder (its newest checkpoint), a checkpoint, a Hugging Face folder, a name on the hub (gpt2), a .pt."""
    data: str | None = None
    """A local .jsonl file instead of HellaSwag; a line has ctx, endings and label, the true ending's index from 0."""
    limit: int | None = flag(None, at_least=1)
    """Evaluate only this many items, evenly spread."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto: a GPU if there is one."""


def main():
    flags = parse(Flags)
    distributed = process_group.start(flags.device)
    with out_of_memory("use a smaller model"):
        name = distributed.broadcast(distributed.on_main(lambda: locate(flags.model)))  # a run may write a newer one
        model = load_model(name).to(distributed.device)
        on_gpu = distributed.device.type == "cuda"
        bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        autocast = torch.autocast(distributed.device.type, torch.bfloat16, enabled=bf16)

        def losses_of(batch, at):
            with autocast:
                return model(*batch, reduction="none", at=at)

        # nothing is compiled here, so more widths only save padding
        items, tokens = load_items(flags.data, flags.limit), 16384 if on_gpu else 4096
        task = MultipleChoice(items, model.config.seq_len, tokens, widths=16)
        scores = [f"{x:.4f} ± {math.sqrt(x * (1 - x) / len(items)):.4f}" for x in task.evaluate(losses_of, distributed)]
    if distributed.is_main:
        name = Path(flags.data or "HellaSwag").stem
        chance = (1 / task.choices.sum(dim=1)).mean().item()
        print(f"{name}, {len(items):,} items: acc {scores[0]} | acc_norm {scores[1]} (± standard error)")
        print(f"  {REFERENCE if 'hellaswag' in name.lower() else f'chance: {chance:.4f}'}")
    process_group.stop()


if __name__ == "__main__":
    run(main)
