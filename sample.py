"""Text out of a checkpoint.

python sample.py CHECKPOINT --prompt "Hello, I'm a language model,"     # or a Hugging Face folder, or gpt2
python sample.py gpt2 --prompt_file story.txt --stream                  # - is standard input
"""

import codecs
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
import tyro

from checkpoints import checkpoint
from common import cli
from common.cli import UserError, parse, run
from common.device import missing_compiler
from data.tokenizer import END_OF_TEXT, get_tokenizer
from model import kernels
from parallel import distributed


def choose(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """A token for each row of logits (B, V): (B, 1) int64.

    temperature divides the logits, and 0 takes the likeliest token. top_k keeps only the k likeliest, 0 all; of these
    top_p keeps the likeliest that together have at least so much probability (Holtzman et al. 2020).
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k:
        kept = logits.topk(min(top_k, logits.size(-1))).values
        logits = logits.masked_fill(logits < kept[:, -1:], float("-inf"))
    probabilities = F.softmax(logits, dim=-1)
    if top_p < 1:
        ordered = probabilities.sort(dim=-1, descending=True).values
        last = (ordered.cumsum(dim=-1) - ordered < top_p).sum(dim=-1, keepdim=True) - 1  # the least likely that is kept
        probabilities = probabilities.where(probabilities >= ordered.gather(1, last), 0)
    return torch.multinomial(probabilities, 1, generator=generator)


@torch.no_grad()
def generate(model, tokens, max_new_tokens, graph=False, **options):
    """Yield the tokens that follow tokens (B, T), T >= 1, one (B, 1) after another. options: choose's.

    Past seq_len tokens the model sees the last seq_len, which are then read anew for every token, since GPT-2's
    positions are absolute. graph, on an NVIDIA GPU: a step is recorded once and replayed, which takes the time of its
    kernels instead of that of starting them. For a call outside of autocast.
    """
    seq_len = model.config.seq_len
    cache = model.new_cache(min(seq_len, tokens.size(1) + max_new_tokens))
    logits = model(tokens[:, -seq_len:], cache=cache)
    if graph and max_new_tokens > 1 and tokens.size(1) < seq_len:
        step = record(model, cache, len(tokens))
    else:
        step = partial(model, cache=cache)
    for i in range(max_new_tokens):
        choice = choose(logits[:, -1], **options)
        yield choice
        if i == max_new_tokens - 1:
            return
        tokens = torch.cat((tokens, choice), dim=1)
        if tokens.size(1) <= seq_len:
            logits = step(choice)
        else:
            logits = model(tokens[:, -seq_len:], cache=model.new_cache(seq_len))


def record(model, cache, B):
    """A step of generation as a CUDA graph: a function of a token (B, 1) that returns its logits (B, 1, V)."""
    length = cache.length.clone()
    token = torch.zeros(B, 1, dtype=torch.long, device=length.device)
    compute = partial(by_kernels, model) if B <= 4 and may_use_kernels(model) else model
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # once before it is recorded: kernels are compiled, libraries set up their memory
        compute(token, cache=cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = compute(token, cache=cache)
    cache.length.copy_(length)  # what was written there is written again by the first token

    def replay(choice):
        token.copy_(choice)
        graph.replay()
        return logits

    return replay


def may_use_kernels(model):
    """Whether by_kernels can run here: with Triton, on an NVIDIA GPU from Ampere on, in float32."""
    weight = model.transformer.wpe.weight
    nvidia = torch.version.cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    return kernels and nvidia and weight.dtype == torch.float32 and not missing_compiler(weight.device)


@torch.no_grad()
def by_kernels(model, token, cache):
    """model(token, cache=cache) for a token (B, 1) after the prompt, in float32 and five kernels a layer.

    For few texts the time of a token is that of reading the weights, and of starting what is between them.
    """
    wte, wpe, blocks, norm = model.transformer.values()
    place = cache.take(1)
    x = (wte(token) + wpe(place)).squeeze(1)  # (B, C)
    for block, past in zip(blocks, cache.layers):
        attn, mlp = block.attn, block.mlp
        qkv = kernels.token_linear(x, attn.c_attn.weight, attn.c_attn.bias, norm=block.ln_1)  # (B, 3C)
        y = kernels.token_attention(qkv, past.k, past.v, place)
        x = kernels.token_linear(y, attn.c_proj.weight, attn.c_proj.bias, added=x)
        h = kernels.token_linear(x, mlp.c_fc.weight, mlp.c_fc.bias, norm=block.ln_2, gelu=True)  # (B, 4C)
        x = kernels.token_linear(h, mlp.c_proj.weight, mlp.c_proj.bias, added=x)
    return F.linear(norm(x), wte.weight[: model.config.vocab_size]).unsqueeze(1)  # (B, 1, V)


def sample(model, prompt, count, max_new_tokens, seed=42, **options):
    """`count` continuations of the prompt, as text that starts with it; an empty prompt starts a document.

    Text ends before an <|endoftext|>. The same seed gives the same text on the same device. options: generate's.
    """
    new = [[] for _ in range(count)]
    for choice in pieces(model, prompt, count, max_new_tokens, seed, **options):
        for row, token in zip(new, choice):
            row.append(token)
    return [
        prompt + get_tokenizer().decode(row[: row.index(END_OF_TEXT)] if END_OF_TEXT in row else row) for row in new
    ]


def pieces(model, prompt, count, max_new_tokens, seed, top_k=50, **options):
    """Yield lists of `count` tokens that follow the prompt, until each row has had an <|endoftext|>."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = get_tokenizer().encode_ordinary(prompt) or [END_OF_TEXT]
    start = torch.tensor([tokens] * count, device=device)
    ended = set()
    for choice in generate(model, start, max_new_tokens, top_k=top_k, generator=generator, **options):
        choice = choice.flatten().tolist()
        yield choice
        ended |= {row for row, token in enumerate(choice) if token == END_OF_TEXT}
        if len(ended) == count:
            return


@dataclass
class Flags:
    """Sample text from a GPT-2."""

    model: tyro.conf.Positional[str]
    """A checkpoint, a Hugging Face folder, or a name on its hub such as gpt2."""
    prompt: str = "Hello, I'm a language model,"
    """What the text starts with."""
    prompt_file: str | None = None
    """A file with the prompt instead; - is standard input."""
    count: int | None = None
    """Texts; by default 4, and one with --stream."""
    max_new_tokens: int = 100
    """Tokens after the prompt."""
    temperature: float = 1.0
    """Above 1 wilder, below 1 tamer, 0 always the likeliest token."""
    top_k: int = 50
    """Choose among this many likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    stream: bool = False
    """Print the text while it grows."""
    seed: int = 42
    """Another seed, another text."""
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """auto takes a GPU where there is one."""


def read_prompt(path):
    """Raises UserError when there is none."""
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt_file {path}: {error}") from error


def main():
    flags = parse(Flags)
    count = flags.count or (1 if flags.stream else 4)
    if count < 1 or flags.max_new_tokens < 1 or flags.temperature < 0 or flags.top_k < 0 or not 0 < flags.top_p <= 1:
        raise UserError(
            "--count and --max_new_tokens must be at least 1, --temperature and --top_k at least 0, --top_p above 0 "
            "and at most 1"
        )
    if flags.stream and count > 1:
        raise UserError(f"--stream prints one text, --count is {count}: leave one of them out")
    cli.out_of_memory_hint = "use a smaller --count or model"
    prompt = flags.prompt if flags.prompt_file is None else read_prompt(flags.prompt_file)
    distributed = distributed.start(flags.device)
    model = checkpoint.load_model(flags.model).to(distributed.device)
    options = dict(temperature=flags.temperature, top_k=flags.top_k, top_p=flags.top_p, seed=flags.seed)
    options |= dict(graph=distributed.device.type == "cuda")
    if flags.stream:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
        print(prompt, end="", flush=True)
        for (token,) in pieces(model, prompt, 1, flags.max_new_tokens, **options):
            if token != END_OF_TEXT:
                print(decoder.decode(get_tokenizer().decode_single_token_bytes(token)), end="", flush=True)
        print(decoder.decode(b"", final=True))
    else:
        print(f"\n{'-' * 80}\n".join(sample(model, prompt, count, flags.max_new_tokens, **options)))


if __name__ == "__main__":
    run(main)
