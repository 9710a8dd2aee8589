"""HellaSwag: how often the model finds the true ending of a short story likelier than three false ones.

    python hellaswag.py CHECKPOINT            # or a Hugging Face folder, or gpt2
    python hellaswag.py gpt2 --data hellaswag_val.jsonl

Zellers et al. 2019. Scored by completion, as build-nanogpt does: acc compares the endings' summed losses, acc_norm
their losses per token. OpenAI's GPT-2 124M has acc_norm 0.2955 by this measure.
"""

import json
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from tqdm import tqdm

import checkpoint
import parallel
from cli import UserError, parse, run
from tokenizer import get_tokenizer

ENDINGS = 4


def load_items(path=None):
    """HellaSwag's validation set: dicts with ctx, endings (4) and label (0 to 3). From a .jsonl file, or downloaded.

    Raises UserError when it cannot be read.
    """
    try:
        if path is not None:
            with open(path, encoding="utf-8") as file:
                items = [json.loads(line) for line in file if line.strip()]
        else:
            from datasets import load_dataset

            items = load_dataset("Rowan/hellaswag", split="validation").to_list()
        items = [dict(ctx=item["ctx"], endings=item["endings"], label=int(item["label"])) for item in items]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"cannot read HellaSwag from {path or 'the hub'} ({type(error).__name__}: {reason}); hellaswag.py takes it "
            "as --data FILE.jsonl, train_gpt2.py as --hellaswag_data FILE.jsonl, or does without: --hellaswag_every 0"
        ) from error
    if not items or any(len(item["endings"]) != ENDINGS or not 0 <= item["label"] < ENDINGS for item in items):
        raise UserError(
            f"HellaSwag from {path or 'the hub'}: every item must have {ENDINGS} endings and a label from 0 to 3"
        )
    return items


def encode(items):
    """Each item's tokens: [(context, [four endings])], an ending with the space before it."""
    tokenizer = get_tokenizer()
    contexts = tokenizer.encode_ordinary_batch([item["ctx"] for item in items])
    endings = tokenizer.encode_ordinary_batch([" " + ending for item in items for ending in item["endings"]])
    return [(context, endings[ENDINGS * i : ENDINGS * (i + 1)]) for i, context in enumerate(contexts)]


class HellaSwag:
    """The items as rows of one fixed shape, so that torch.compile builds one graph for all of them."""

    def __init__(self, items, seq_len, rows):
        """rows: sequences in a batch, at least 4. Rows longer than seq_len lose the start of their context."""
        self.labels = torch.tensor([item["label"] for item in items])
        self.encoded = encode(items)
        longest = max(len(context) + len(ending) for context, endings in self.encoded for ending in endings)
        self.width = min(seq_len, -(-(longest - 1) // 32) * 32)  # inputs leave out the last token
        self.items_per_batch = max(1, rows // ENDINGS)

    def batch(self, first):
        """Inputs, targets (-1 outside the endings), both (rows, width), of the items from `first` on."""
        x = torch.zeros(self.items_per_batch * ENDINGS, self.width, dtype=torch.long)
        y = torch.full_like(x, -1)
        row = 0
        for context, endings in self.encoded[first : first + self.items_per_batch]:
            for ending in endings:
                tokens = torch.tensor((context + ending)[-self.width - 1 :])
                n = len(tokens) - 1
                x[row, :n] = tokens[:-1]
                y[row, :n] = tokens[1:]
                y[row, : max(0, n - len(ending))] = -1
                row += 1
        return x, y

    @torch.no_grad()
    def evaluate(self, losses_of, ranks, progress=False):
        """(acc, acc_norm) over all items, divided over the ranks.

        losses_of(x, y) gives each target's loss, (rows, width), 0 where y is -1.
        """
        sums, counts, which = [], [], []
        step = self.items_per_batch
        starts = range(ranks.rank * step, len(self.encoded), ranks.world_size * step)
        for first in tqdm(starts, desc="HellaSwag", disable=not progress):
            x, y = (tensor.to(ranks.device, non_blocking=True) for tensor in self.batch(first))
            sums.append(losses_of(x, y).float().sum(dim=1).view(-1, ENDINGS))  # (items, 4)
            counts.append((y >= 0).sum(dim=1).view(-1, ENDINGS))
            which.append(torch.arange(first, first + step))
        right = right_norm = 0
        if sums:
            keep = torch.cat(which) < len(self.encoded)
            sums, counts = torch.cat(sums).cpu()[keep], torch.cat(counts).cpu()[keep]
            labels = self.labels[torch.cat(which)[keep]]
            right = (sums.argmin(dim=1) == labels).sum()
            right_norm = ((sums / counts).argmin(dim=1) == labels).sum()
        right, right_norm = ranks.sum(right, right_norm)
        return right / len(self.encoded), right_norm / len(self.encoded)


@dataclass
class Flags:
    """Evaluate a GPT-2 on HellaSwag."""

    model: tyro.conf.Positional[str]
    """A checkpoint, a Hugging Face folder, or a name on its hub such as gpt2."""
    data: str | None = None
    """The validation set as a .jsonl file; by default it is downloaded."""
    limit: int | None = None
    """Evaluate only this many items."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto takes a GPU where there is one."""
    rows: int = 64
    """Sequences in a batch."""


def main():
    flags = parse(Flags)
    if flags.rows < 1 or (flags.limit is not None and flags.limit < 1):
        raise UserError("--rows and --limit must be at least 1")
    ranks = parallel.start(flags.device)
    model = checkpoint.load_model(flags.model).to(ranks.device)
    hellaswag = HellaSwag(load_items(flags.data)[: flags.limit], model.config.seq_len, flags.rows)

    def losses_of(x, y):
        with torch.autocast(ranks.device.type, torch.bfloat16, enabled=ranks.device.type == "cuda"):
            return model(x, y, reduction="none")

    acc, acc_norm = hellaswag.evaluate(losses_of, ranks, progress=ranks.is_main)
    if ranks.is_main:
        print(f"HellaSwag, {len(hellaswag.labels):,} items: acc {acc:.4f} | acc_norm {acc_norm:.4f}")
        print("GPT-2 124M, all 10,042 items: acc_norm 0.2955")
    parallel.stop()


if __name__ == "__main__":
    run(main)
