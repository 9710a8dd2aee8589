"""Generate text with a GPT-2.

python sample.py log/RUN --prompt "Hello, I'm a language model,"        # or a checkpoint, a Hugging Face folder, gpt2
python sample.py gpt2 --prompt "$(cat story.txt)"
"""

import common.interrupt  # first: Ctrl-C during the other imports

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import tyro

from checkpoints.load import load_model
from common.cli import flag, parse, progress
from common.errors import UserError, out_of_memory, run
from data.tokenizer import END_OF_TEXT, get_tokenizer, tokenize
from parallel import process_group

PROMPT = "Hello, I'm a language model,"


def draw_token(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw a token for each row of logits (B, V): (B, 1) int64.

    temperature: divides the logits; below 1e-5 the most likely token is taken. top_k: draw from the k most likely
    tokens; 0 is all. top_p: draw from the fewest tokens that together have this probability after top_k (nucleus
    sampling, Holtzman et al. 2020).
    """
    if temperature < 1e-5:  # logits divided by it could overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k:
        kept = logits.topk(min(top_k, logits.size(-1))).values
        logits = logits.masked_fill(logits < kept[:, -1:], float("-inf"))
    probabilities = F.softmax(logits, dim=-1)
    if top_p < 1:
        ordered = probabilities.sort(dim=-1, descending=True).values
        last = (ordered.cumsum(dim=-1) - ordered < top_p).sum(dim=-1, keepdim=True) - 1  # (B, 1), the least likely kept
        probabilities = probabilities.where(probabilities >= ordered.gather(1, last), 0)
    return torch.multinomial(probabilities, 1, generator=generator)


@torch.no_grad()
def generate(model, tokens, max_new_tokens, **options):
    """Yield the max_new_tokens tokens, (B, 1) each, that follow tokens (B, T), T >= 1. options: draw_token's.

    Beyond seq_len tokens the model gets the last seq_len and recomputes all of them for every token, because GPT-2's
    position embeddings are absolute. Raises UserError if the logits are not finite.
    """
    seq_len = model.config.seq_len
    cache = model.new_cache()
    new = tokens
    for _ in range(max_new_tokens):
        if tokens.size(1) > seq_len:
            cache, new = model.new_cache(), tokens[:, -seq_len:]
        logits = model(new, cache=cache)[:, -1]
        if not logits.isfinite().all():  # drawing from NaN is an assertion that ends a GPU's process
            raise UserError("the model's logits are not finite: if its training diverged, use an earlier checkpoint")
        new = draw_token(logits, **options)
        yield new
        tokens = torch.cat((tokens, new), dim=1)


def sample(model, prompt, count, max_new_tokens, seed=42, top_k=50, **options):
    """Generate `count` texts that begin with the prompt and end before <|endoftext|>: a list of strings.

    An empty prompt starts a new document, as <|endoftext|> in a prompt does. The same seed gives the same tokens on the
    same device. options: draw_token's.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    prompt_tokens = tokenize(prompt.split("<|endoftext|>"))[1:].tolist() or [END_OF_TEXT]
    start = torch.tensor([prompt_tokens] * count, device=device)  # (count, T)
    drawn = generate(model, start, max_new_tokens, top_k=top_k, generator=generator, **options)
    columns, ended = [], torch.zeros(count, 1, dtype=torch.bool, device=device)
    for tokens in progress(drawn, "samples", total=max_new_tokens):
        columns.append(tokens)
        ended |= tokens == END_OF_TEXT
        if ended.all():
            break
    rows = torch.cat(columns, dim=1).tolist()
    rows = [row[: row.index(END_OF_TEXT)] if END_OF_TEXT in row else row for row in rows]
    return [prompt + get_tokenizer().decode(row) for row in rows]


def sample_in_training(model, seed, distributed):
    """Four short texts, or the reason why there are none: a list of strings. A collective.

    Rank 0 computes them, with the ranks that its model is split over.
    """
    texts = None
    if distributed.data_context_rank == 0:
        try:
            texts = sample(model, PROMPT, count=4, max_new_tokens=24, seed=seed)
        except UserError as error:  # the logits are not finite; MAX_BAD_STEPS decides when the run stops
            texts = [f"({error})"]
    return distributed.broadcast(texts)


@dataclass
class Flags:
    """Generate text with a GPT-2."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A run's folder (its newest checkpoint), a checkpoint, a Hugging Face folder, a name on the hub (gpt2), a .pt."""
    prompt: Annotated[str, tyro.conf.arg(help_behavior_hint=f"(default: {PROMPT})")] = flag(PROMPT, is_path=False)
    """The beginning of the text."""
    count: int = flag(4, at_least=1)
    """Number of texts."""
    max_new_tokens: int = flag(100, at_least=1)
    """Tokens to generate after the prompt."""
    temperature: float = flag(1.0, at_least=0)
    """Above 1 more random, below 1 less; 0 always takes the most likely token."""
    top_k: int = flag(50, at_least=0)
    """Draw from the k most likely tokens; 0 is all."""
    top_p: float = flag(1.0, above=0, at_most=1)
    """Draw from the fewest tokens that together have this probability."""
    seed: int = flag(42, at_least=0, below=2**63)
    """Random seed; the same seed gives the same text."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto: a GPU if there is one."""


def main():
    flags = parse(Flags)
    device = process_group.start_alone(flags.device, "sample.py runs in one process")
    options = {name: getattr(flags, name) for name in ("max_new_tokens", "seed", "temperature", "top_k", "top_p")}
    with out_of_memory("use a smaller --count or model"):
        model = load_model(flags.model).to(device)
        print(f"\n{'-' * 80}\n".join(sample(model, flags.prompt, flags.count, **options)))


if __name__ == "__main__":
    run(main)
