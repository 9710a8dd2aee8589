"""HellaSwag: how often the model finds the true ending of a short story likelier than three false ones. Also LAMBADA.

    python hellaswag.py CHECKPOINT                    # or a Hugging Face folder, or gpt2
    python hellaswag.py gpt2 --data hellaswag_val.jsonl lambada_test.jsonl mine.jsonl

HellaSwag (Zellers et al. 2019) and other multiple choice are scored by completion, as build-nanogpt does: acc compares
the endings' summed losses, acc_norm their losses per token. LAMBADA (Paperno et al. 2016) asks for the last word of a
passage: acc is how often greedy decoding finds all its tokens, perplexity is that of the word.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from checkpoints import checkpoint
from common import cli
from common.cli import UserError, first_line, hub_errors, parse, run
from data.tokenizer import get_tokenizer
from parallel import distributed

DATASETS = {
    "HellaSwag": dict(path="Rowan/hellaswag", split="validation"),
    "LAMBADA": dict(path="EleutherAI/lambada_openai", name="default", split="test"),
}
# Radford et al. 2019's weights by this script's measures (HellaSwag: build-nanogpt; LAMBADA: EleutherAI's evaluation
# harness), and Brown et al. 2020, table H.1
MARKS = {
    "HellaSwag": "GPT-2 124M: acc 0.2859, acc_norm 0.2955; 1558M: 0.3842, 0.4893; GPT-3 125M: acc 0.337",
    "LAMBADA": "GPT-2 124M: acc 0.3256, perplexity 40.06; GPT-3 125M: 0.427, 18.6",
}
WIDTHS = 3  # of rows, in training: each is a graph to compile; with one there would be half again as much padding


def load_items(name, path=None):
    """Items of a .jsonl file, or of DATASETS[name], downloaded: dicts with ctx, endings and label, or with text.

    Raises UserError when they cannot be read, or are something else.
    """
    try:
        if path is not None:
            with open(path, encoding="utf-8") as file:
                items = [json.loads(line) for line in file if line.strip()]
        else:
            from datasets import load_dataset

            items = load_dataset(**DATASETS[name]).to_list()
        if items and "text" in items[0]:
            items = [dict(text=item["text"].strip()) for item in items]
            wrong = next((item for item in items if " " not in item["text"]), None)
        else:
            items = [dict(ctx=item["ctx"], endings=list(item["endings"]), label=int(item["label"])) for item in items]
            wrong = next((i for i in items if len(i["endings"]) < 2 or not 0 <= i["label"] < len(i["endings"])), None)
    except (*hub_errors(), KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read {name} from {path or 'the hub'} ({type(error).__name__}: {first_line(error)}); hellaswag.py "
            "takes it as --data FILE.jsonl, train_gpt2.py as --hellaswag_data FILE.jsonl, or does without it: "
            "--hellaswag_every 0"
        ) from error
    if not items or wrong:
        raise UserError(
            f"{path or name}: every line must have ctx, two endings or more and the label of one of them, or a text of "
            f"two words or more; {'this one has not: ' + json.dumps(wrong)[:80] if wrong else 'there is none'}"
        )
    return items


class Rows:
    """Contexts and what may follow them, as rows of a few fixed shapes, the short apart from the long."""

    def __init__(self, pairs, seq_len, tokens, widths):
        """pairs: token lists (context, continuation). tokens: at most so many in a batch. widths: so many of rows. Rows
        of more than seq_len tokens lose the start of their context."""
        rows = [(context + continuation)[-seq_len - 1 :] for context, continuation in pairs]
        ends = np.array([len(row) for row in rows])
        starts = np.maximum(1, ends - [len(continuation) for _, continuation in pairs])  # the first token has no loss
        self.lengths = torch.from_numpy(ends - starts)  # of the continuations
        self.batches = []  # inputs (R, width); the continuations, and their places in the inputs, (N,); whose they are
        order = np.argsort(ends, kind="stable")
        widest = min(seq_len, -(-(ends.max() - 1) // 8) * 8)
        steps = [*dict.fromkeys(min(widest, -(-widest * i // widths // 8) * 8) for i in range(1, widths + 1))]
        for narrower, width in zip([0, *steps], steps):
            here = order[(ends[order] - 1 > narrower) & (ends[order] - 1 <= width)]
            R = max(1, min(tokens // width, len(here)))
            parts = [here[i : i + R] for i in range(0, len(here), R)]
            N = max((int(self.lengths[part].sum()) for part in parts), default=0)
            position = np.arange(1, width + 1)
            for part in parts:
                batch = np.zeros((R, width + 1), dtype=np.int32)
                for r, pair in enumerate(part):
                    batch[r, : ends[pair]] = rows[pair]
                r, column = np.nonzero((position >= starts[part, None]) & (position < ends[part, None]))
                targets, at = np.full(N, -1, dtype=np.int32), np.zeros(N, dtype=np.int32)
                targets[: len(r)], at[: len(r)] = batch[r, column + 1], r * width + column
                self.batches.append([torch.from_numpy(array) for array in (batch[:, :-1], targets, at, part[r])])

    @torch.no_grad()
    def measure(self, function, distributed, progress=None):
        """What function(x, y, at) gives for each continuation, summed over its tokens: (pairs,) float64.

        The function gets inputs (R, width), targets (N,), and where in inputs.flatten() each belongs, (N,). It returns
        (N,) numbers; where a target is -1, any. The ranks divide the batches, and each returns all sums.
        """
        mine = self.batches[distributed.rank :: distributed.world_size]
        found = []
        for *given, _ in tqdm(mine, progress, disable=not progress):
            found.append(function(*(tensor.to(distributed.device, non_blocking=True).long() for tensor in given)))
        sums = torch.zeros(len(self.lengths), dtype=torch.float64)
        for values, (*_, pairs) in zip(found, mine):
            sums.index_add_(0, pairs, values[: len(pairs)].cpu().double())
        return torch.stack(distributed.all_gather(sums)).sum(dim=0)


class MultipleChoice:
    """HellaSwag, or other items with ctx, endings and label."""

    def __init__(self, items, seq_len, tokens, widths=WIDTHS):
        """Arguments as of Rows. Raises UserError for other items."""
        if "endings" not in items[0]:
            raise UserError("items of multiple choice must have ctx, endings and label, and these have a text")
        encode = get_tokenizer().encode_ordinary
        contexts = [encode(item["ctx"]) for item in items]
        pairs = [(context, encode(" " + end)) for item, context in zip(items, contexts) for end in item["endings"]]
        self.rows = Rows(pairs, seq_len, tokens, widths)
        self.labels = torch.tensor([item["label"] for item in items])
        counts = torch.tensor([len(item["endings"]) for item in items])
        self.choices = torch.arange(counts.max()) < counts[:, None]  # (items, most endings)

    def losses(self, losses_of, distributed, progress=None):
        """The summed loss of every ending, and the loss per token: (items, most endings), infinite where is no ending.

        losses_of: a function for Rows.measure.
        """
        sums = self.rows.measure(losses_of, distributed, progress)
        tables = [torch.full(self.choices.shape, math.inf) for _ in range(2)]
        for table, values in zip(tables, (sums, sums / self.rows.lengths)):
            table[self.choices] = values.float()
        return tables

    def evaluate(self, losses_of, distributed, progress=None):
        """(acc, acc_norm)."""
        losses = self.losses(losses_of, distributed, progress)
        return tuple((table.argmin(dim=1) == self.labels).double().mean().item() for table in losses)


class LastWord:
    """LAMBADA, or other items with a text, of which the last word is to be found."""

    def __init__(self, items, seq_len, tokens, widths=WIDTHS):
        encode = get_tokenizer().encode_ordinary
        split = [item["text"].rpartition(" ") for item in items]
        pairs = [(encode(context), encode(" " + word)) for context, _, word in split]
        self.rows = Rows(pairs, seq_len, tokens, widths)

    def evaluate(self, model, losses_of, distributed, progress=None):
        """(acc, perplexity)."""

        def misses(x, y, at):
            return model(x, at=at).argmax(dim=-1) != y

        acc = (self.rows.measure(misses, distributed, progress) == 0).double().mean().item()
        return acc, self.rows.measure(losses_of, distributed, progress).mean().exp().item()


@dataclass
class Flags:
    """Evaluate a GPT-2 on HellaSwag and LAMBADA, or on files of their formats."""

    model: tyro.conf.Positional[str]
    """A checkpoint, a Hugging Face folder, or a name on its hub such as gpt2."""
    data: tuple[str, ...] = ()
    """.jsonl files instead of the two that are downloaded: lines with ctx, endings and label, or with text."""
    limit: int | None = None
    """Evaluate only this many items of each."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto takes a GPU where there is one."""
    batch_tokens: int | None = None
    """Tokens in a batch; by default 16384 on a GPU, 4096 elsewhere."""


def main():
    flags = parse(Flags)
    if any(value is not None and value < 1 for value in (flags.batch_tokens, flags.limit)):
        raise UserError("--batch_tokens and --limit must be at least 1")
    cli.out_of_memory_hint = "use a smaller --batch_tokens or model"
    distributed = distributed.start(flags.device)
    shape = dict(tokens=flags.batch_tokens or (16384 if distributed.device.type == "cuda" else 4096), widths=16)
    model = checkpoint.load_model(flags.model).to(distributed.device)
    bf16 = distributed.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    autocast = torch.autocast(distributed.device.type, torch.bfloat16, enabled=bf16)

    def losses_of(x, y, at):
        return model(x, y, reduction="none", at=at)

    for name, path in [(Path(path).stem, path) for path in flags.data] or [(name, None) for name in DATASETS]:
        items = load_items(name, path)[: flags.limit]
        progress = name if distributed.is_main else None
        with autocast:
            if "endings" in items[0]:
                task = MultipleChoice(items, model.config.seq_len, **shape)
                results = "acc {:.4f} | acc_norm {:.4f}".format(*task.evaluate(losses_of, distributed, progress))
                kind, chance = "HellaSwag", f"chance {(1 / task.choices.sum(dim=1)).mean():.4f}"
            else:
                task = LastWord(items, model.config.seq_len, **shape)
                results = "acc {:.4f} | perplexity {:.2f}".format(
                    *task.evaluate(model, losses_of, distributed, progress)
                )
                kind, chance = "LAMBADA", ""
        if distributed.is_main:
            print(f"{name}, {len(items):,} items: {results}")
            print(f"  {MARKS[kind] if kind.lower() in name.lower() else chance}")
    distributed.stop()


if __name__ == "__main__":
    run(main)
