"""Corpus: English text of public repositories as shards whose validation text hardly stands in their training text.

    python -m dev.corpus --clones clones --out corpus

dev/corpus_sources.json lists the repositories: address, commit, the files' patterns as in .gitignore, license (some
allow no commercial use), and about the most bytes to take (max_characters). git downloads only these files.

A document is a file, or about 12,000 characters of it. Of each repository, 3% are validation, by whole files. A
sentence with 40 or more letters and digits stays once in the whole corpus, in the validation text if it is in both. A
document that loses more than 40% to this rule is left out, which removes copies and near copies; so is a validation
document with more than 12% of its tokens in 13-token n-grams of the training text. The shards depend on the sources
alone.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import hashlib
import html
import itertools
import json
import multiprocessing
import os
import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.cli import ROOT, flag, parse, progress, python_command
from common.errors import UserError, first_line, run
from common.files import check_fields
from data.shard_folder import ShardFolder, split_into_shards
from data.tokenizer import END_OF_TEXT, get_tokenizer, tokenize
from measure.leak import UNIT, UNIT_END, letters, list_blocks, measure_leak, unit_hash

SEED = 1337
PART = 12_000  # characters of a document, about
SHORTEST = 400  # bytes of UTF-8
VAL_SHARE = 0.03
MOST_REPEATED = 0.4  # of a document's characters
MOST_COVERED = 0.12  # of a validation document's tokens
BATCH = 256  # documents that a process tokenizes at a time


@dataclass
class Flags:
    """Make shards of English text from public repositories, without copies and without leak into the validation."""

    clones: str
    """Folder for the repositories; a missing one is downloaded."""
    sources: str = str(ROOT / "dev" / "corpus_sources.json")
    """JSON list of the repositories."""
    out: str = "corpus"
    """Folder for the shards."""
    shard_size: int = flag(2**24, at_least=1)
    """Tokens in a training shard."""
    workers: int = flag(os.cpu_count(), at_least=1)
    """Processes that read and tokenize. The shards do not depend on it."""


# ----------------------------------------------------------------------------------------------------------------------
# Repositories


def clone(source, clones):
    """Download the source's files at its commit, unless they are there. Returns their folder. Raises UserError."""
    folder = Path(clones, *source["repository"].split("/")[-2:])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        git(folder, "init", "-q")  # in a repository: no change
        git(folder, "sparse-checkout", "set", "--no-cone", *source["files"])
        if source["commit"] not in git(folder, "rev-parse", "--revs-only", "HEAD"):
            git(folder, "config", "remote.origin.url", source["repository"])
            git(folder, "fetch", "-q", "--depth", "1", "--filter", "blob:none", "origin", source["commit"])
        git(folder, "checkout", "-q", "--detach", source["commit"])
    except subprocess.CalledProcessError as error:
        why = first_line(error.stderr)
        raise UserError(f"cannot read {source['repository']} at {source['commit']}: {why}") from error
    except FileNotFoundError as error:
        raise UserError("git is missing: install it") from error
    return folder


def git(folder, *arguments):
    environment = os.environ | dict(GIT_TERMINAL_PROMPT="0")  # of a repository that is gone GitHub asks for a password
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


# ----------------------------------------------------------------------------------------------------------------------
# Text of files

NOT_TEXT = "script|style|nav|svg|form|pre|table|figure|media|metadata|teiHeader|m:annotation|m:annotation-xml"
ELEMENT = re.compile(rf"<!--.*?-->|<[!?][^<>]*>|<({NOT_TEXT})\b[^<>]*(?<!/)>.*?</\1>", re.DOTALL)
INLINE = "a|abbr|b|cite|code|em|emphasis|foreign|hi|i|kbd|link|name|persName|placeName|pb|span|strong|sub|sup|term"
BLOCK_TAG = re.compile(rf"</?(?!(?:{INLINE}|m:\w+)\b)[A-Za-z][^<>]*>")
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
MACRO = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\[!INCLUDE *\[[^\]]*\]\([^)]*\)\]", re.DOTALL)
FRONT_MATTER = re.compile(r"\A\s*---\n.*?\n---\n", re.DOTALL)
CODE = re.compile(r"^\s*(`{3,}|~{3,})[^\n]*\n.*?^\s*\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE)
NO_PROSE = re.compile(r"^[ \t]*(\||:::|\[[^\]]+\]:).*$", re.MULTILINE)  # tables, directives, addresses
IMAGE = re.compile(r"!\[[^][]*\](\([^()]*\))?")
LINK = re.compile(r"\[([^][]*)\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^][]*\])")
ESCAPED = re.compile(r"\\([_*#<>\[\]])")
GUTENBERG = re.compile(r"\A.*\*\*\* ?START OF[^\n]*\n|\n\*\*\* ?END OF.*", re.DOTALL)


def text_of_markup(text):
    """Of HTML, TEI and OpenStax's CNXML: a paragraph for each block."""
    text = re.sub(r"\s+", " ", MACRO.sub("", ELEMENT.sub(" ", text)))
    return re.sub(r" *\n *", "\n", html.unescape(TAG.sub("", BLOCK_TAG.sub("\n\n", text))))


def text_of_markdown(text):
    text = FRONT_MATTER.sub("", text)
    for pattern in (CODE, ELEMENT, MACRO, NO_PROSE, IMAGE):
        text = pattern.sub("", text)
    return ESCAPED.sub(r"\1", html.unescape(TAG.sub("", LINK.sub(r"\1", text))))


def text_of_book(text):
    """Of plain text: a line for each paragraph."""
    return re.sub(r"(?<=\S)[ \t]*\n[ \t]*(?=\S)", " ", GUTENBERG.sub("", text))


TEXT_OF = dict.fromkeys((".html", ".xhtml", ".xml", ".cnxml"), text_of_markup)
TEXT_OF |= {".md": text_of_markdown, ".txt": text_of_book}


def tidy(text):
    text = re.sub(r"[\u200b\ufeff\ufffd\r]", "", text).replace("\u00a0", " ")
    return re.sub(r"\n\s*\n", "\n\n", re.sub(r"[ \t]+$|(?<=\S)[ \t]+(?=[ \t])", "", text, flags=re.MULTILINE)).strip()


COMMON_WORDS = set("the of and to a in is that it was for as with be on by at not are this or you from".split())


def is_prose(text):
    """Whether the text is English prose, by its shares of common words and of letters: no tables, code, other
    languages."""
    words = text.lower().split()
    common = sum(word in COMMON_WORDS for word in words)
    letters_only = sum(map(str.isalpha, text))
    return len(text) >= SHORTEST and common > 0.15 * len(words) and letters_only > 0.7 * sum(map(len, words))


def cut(text):
    """Parts of about PART characters, cut between paragraphs."""
    parts, start = [], 0
    while len(text) - start > 1.5 * PART and (end := text.find("\n\n", start + PART)) > 0:
        parts.append(text[start:end])
        start = end + 2
    return [*parts, text[start:]]


def read_documents(source_and_folder):
    """(validation, training) documents of a source: two lists of bytes, in an order that its files' names decide."""
    source, folder = source_and_folder
    paths = [path for path in folder.rglob("*") if path.suffix in TEXT_OF and path.is_file() and not path.is_symlink()]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    files, rest = [], source.get("max_characters", float("inf"))
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = tidy(TEXT_OF[names[name].suffix](names[name].read_text("utf-8", "replace")))
        files.append([part.encode() for part in cut(text) if is_prose(part)])
        rest -= sum(map(len, files[-1]))
        if rest <= 0:
            break
    val, train = [], []
    room = VAL_SHARE * sum(len(part) for parts in files for part in parts)
    for parts in files:
        size = sum(map(len, parts))
        (val if size <= room else train).extend(parts)
        room -= size if size <= room else 0
    return val, train


# ----------------------------------------------------------------------------------------------------------------------
# The corpus

SENTENCES = re.compile(b"(" + UNIT_END.pattern + b")")


def without_repeats(documents, seen):
    """The documents, (source, text) each, without the units in `seen`, a set of hashes that receives their own.

    A document that loses more than MOST_REPEATED of its text is left out.
    """
    kept = []
    for source, text in progress(documents, "sentences"):
        pieces, own = SENTENCES.split(text), set()  # sentence, what ends it, sentence, ...
        for i, sentence in enumerate(letters(text)):
            if len(sentence) < UNIT:
                continue
            unit = unit_hash(sentence)
            if unit in seen or unit in own:
                pieces[2 * i] = b""
            own.add(unit)
        shorter = re.sub(rb"\s*\n\s*\n", b"\n\n", re.sub(rb"(?<=\S) +", b" ", b"".join(pieces))).strip()
        if len(shorter) >= max(SHORTEST, (1 - MOST_REPEATED) * len(text)):
            kept.append((source, shorter))
            seen |= own
    return kept


def without_ngrams(val, val_tokens, train_tokens):
    """The validation documents, and their tokens, without those of which the training text has more than
    MOST_COVERED of the tokens in its n-grams."""
    starts = np.flatnonzero(val_tokens == END_OF_TEXT)
    lengths = np.diff(np.append(starts, len(val_tokens)))
    blocks = progress(list_blocks([train_tokens]), "n-grams")
    *_, covered = measure_leak((tokens[start:end] for tokens, start, end in blocks), val_tokens)
    keep = np.add.reduceat(covered, starts, dtype=int) <= MOST_COVERED * lengths
    return list(itertools.compress(val, keep)), val_tokens[np.repeat(keep, lengths)]


def encode(documents, pool):
    """Shuffle documents, (source, text) each, in place; returns their tokens, (tokens,) uint16."""
    random.Random(SEED).shuffle(documents)
    batches = [[text.decode() for _, text in documents[i : i + BATCH]] for i in range(0, len(documents), BATCH)]
    return np.concatenate([*progress(pool.imap(tokenize, batches), "tokens", len(batches))])


def make_corpus(sources, clones, pool):
    """(training documents, (source, text) each, their tokens, validation documents, their tokens). Raises UserError."""
    folders = [clone(source, clones) for source in progress(sources, "repositories")]
    val, train, seen = [], [], set()
    read = pool.imap(read_documents, zip(sources, folders))
    for source, (own_val, own_train) in zip(sources, progress(read, "files", len(sources))):
        val += [(source["repository"], text) for text in own_val]
        train += [(source["repository"], text) for text in own_train]
    val, train = without_repeats(val, seen), without_repeats(train, seen)
    if not (val and train):
        raise UserError(f"the repositories have {len(val)} validation and {len(train)} training documents: add more")
    val_tokens, train_tokens = encode(val, pool), encode(train, pool)
    return train, train_tokens, *without_ngrams(val, val_tokens, train_tokens)


# ----------------------------------------------------------------------------------------------------------------------
# The command


def read_sources(path):
    """The list of repositories. Raises UserError."""
    try:
        sources = json.loads(Path(path).read_bytes())
        for source in sources:
            check_fields(source, repository=str, commit=str, files=list, license=str)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the repositories in {path}: {first_line(error)}") from error
    return sources


def main():
    flags = parse(Flags)
    sources, folder = read_sources(flags.sources), ShardFolder(flags.out)
    get_tokenizer()  # fails here with a clear error, not in every worker
    with folder.lock():
        folder.read_progress()  # raises an error if the folder is complete
        with multiprocessing.Pool(flags.workers) as pool:
            train, train_tokens, val, val_tokens = make_corpus(sources, flags.clones, pool)
        for source in sources:
            for split, documents in (("val", val), ("train", train)):
                own = [len(text) for repository, text in documents if repository == source["repository"]]
                source[split] = dict(documents=len(own), bytes=sum(own))
        manifest = dict(flags={}, source=dict(repositories=sources), shards=[])
        chunks = [([0, 0], val_tokens), ([0, 1], train_tokens)]
        for new_val, new_train, state, skip in split_into_shards(chunks, flags.shard_size, len(val_tokens), None):
            manifest = folder.add(new_val, new_train, manifest | dict(state=state, skip=skip))
    for shard in manifest["shards"]:
        print(f"{shard['name']} {shard['tokens']:>13,} tokens {shard['documents']:>7,} documents {shard['sha256']}")
    tokens = len(val_tokens) + len(train_tokens)
    print(f"{tokens:,} tokens: {len(val_tokens):,} for validation, {len(train_tokens):,} for training")
    print(f"Next: {python_command('-m', 'measure.leak', '--data_dir', flags.out)}")


if __name__ == "__main__":
    run(main)
