"""What tests train on and evaluate: tokens, documents and HellaSwag's rows, made at random."""

import numpy as np
import torch

from data.shards import write_shard
from data.tokenizer import END_OF_TEXT

WORDS = "the man then woman sits down on a chair and starts to read his book while dog runs past it quickly".split()


def make_items(count):
    """Rows of HellaSwag of random words, with two to four endings."""
    generator = torch.Generator().manual_seed(4)

    def text(longest):
        n = int(torch.randint(1, longest, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator))

    return [dict(ctx=text(20), endings=[text(9) for _ in range(4 - i % 3)], label=i % 2) for i in range(count)]


def make_documents(count, rng, longest=60):
    """Documents of random tokens, each opening with <|endoftext|>."""
    return [np.append(END_OF_TEXT, rng.integers(0, 50256, rng.integers(1, longest))) for _ in range(count)]


def write_corpus(folder, sizes=(400, 2000, 1500, 700), seed=0):
    """Shards of the given sizes in tokens, 0 for validation, whose documents run on from one to the next."""
    rng = np.random.default_rng(seed)
    tokens = np.concatenate(make_documents(sum(sizes) // 10, rng)).astype(np.uint16)
    start = 0
    for index, size in enumerate(sizes):
        split = "train" if index else "val"
        write_shard(folder / f"edufineweb_{split}_{index:06d}.npy", tokens[start : start + size])
        start += size
    return tokens
