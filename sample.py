"""Text out of a checkpoint.

python sample.py CHECKPOINT --prompt "Hello, I'm a language model,"     # or a Hugging Face folder, or gpt2
"""

from dataclasses import dataclass
from typing import Literal

import torch
import tyro

import checkpoint
import parallel
from cli import UserError, parse, run
from tokenizer import END_OF_TEXT, get_tokenizer


def sample(model, prompt, count, max_new_tokens, temperature=1.0, top_k=50, seed=42):
    """`count` continuations of the prompt, as text that starts with it; an empty prompt starts a document.

    Text ends before an <|endoftext|>. The same seed gives the same text on the same device.
    """
    tokenizer = get_tokenizer()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = tokenizer.encode_ordinary(prompt) or [END_OF_TEXT]
    start = torch.tensor([tokens] * count, device=device)
    rows = model.generate(start, max_new_tokens, temperature, top_k, generator).tolist()
    texts = []
    for row in rows:
        new = row[len(tokens) :]
        if END_OF_TEXT in new:
            new = new[: new.index(END_OF_TEXT)]
        texts.append(prompt + tokenizer.decode(new))
    return texts


@dataclass
class Flags:
    """Sample text from a GPT-2."""

    model: tyro.conf.Positional[str]
    """A checkpoint, a Hugging Face folder, or a name on its hub such as gpt2."""
    prompt: str = "Hello, I'm a language model,"
    """What the text starts with."""
    count: int = 4
    """Texts."""
    max_new_tokens: int = 100
    """Tokens after the prompt."""
    temperature: float = 1.0
    """Above 1 wilder, below 1 tamer, 0 always the likeliest token."""
    top_k: int = 50
    """Choose among this many likeliest tokens; 0 is all."""
    seed: int = 42
    """Another seed, another text."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto takes a GPU where there is one."""


def main():
    flags = parse(Flags)
    if flags.count < 1 or flags.max_new_tokens < 1 or flags.temperature < 0 or flags.top_k < 0:
        raise UserError("--count and --max_new_tokens must be at least 1, --temperature and --top_k at least 0")
    ranks = parallel.start(flags.device)
    model = checkpoint.load_model(flags.model).to(ranks.device)
    texts = sample(model, flags.prompt, flags.count, flags.max_new_tokens, flags.temperature, flags.top_k, flags.seed)
    print(f"\n{'-' * 80}\n".join(texts))


if __name__ == "__main__":
    run(main)
