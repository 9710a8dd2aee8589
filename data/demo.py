"""The demo's corpus, made from text that ships with Python: no network needed.

A document is one of pydoc's help topics, or all docstrings of one module of the standard library.
"""

import ast
import hashlib
import sysconfig
from pathlib import Path

from common.cli import progress
from common.errors import UserError
from common.files import lock
from data.shards import list_shards, write_shard
from data.tokenizer import tokenize

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}


def read_documents():
    """Yield (name, text) of every document in a fixed order. Modules are parsed, not imported."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}  # a separate package in some Linux distributions
    for name, text in sorted(topics.items()):
        yield f"topic {name}", text
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.rglob("*.py")) if not SKIPPED & set(path.relative_to(library).parts)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in progress(paths, "reading docstrings"):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue  # templates and files for other versions of Python
        docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        if text := "\n\n".join(filter(None, docstrings)):
            yield str(path.relative_to(library)), text


def make_data(data_dir):
    """Write the corpus to data_dir as one validation and one training shard, unless both exist.

    A hash of its name assigns a document to validation with probability 1/10. Raises UserError if data_dir has other
    shards or cannot be written, or if Python's library has no source.
    """
    paths = {"val": Path(data_dir) / "demo_val_000000.npy", "train": Path(data_dir) / "demo_train_000001.npy"}
    if all(path.exists() for path in paths.values()):
        return
    if others := {path for split in paths for path in list_shards(data_dir, split)} - set(paths.values()):
        raise UserError(f"{data_dir} already holds {len(others)} other shards: train on them with --no_demo")
    try:
        Path(data_dir).mkdir(parents=True, exist_ok=True)
        with lock(Path(data_dir) / "lock"):  # waits for another process that makes the same corpus
            if not all(path.exists() for path in paths.values()):
                write_corpus(paths)
    except OSError as error:
        raise UserError(f"cannot write the demo's data in {data_dir} ({error}): choose another --data_dir") from error


def write_corpus(paths):
    """Tokenize the documents into paths, {split: path}. Raises UserError if there are none; OSError."""
    texts = {"val": [], "train": []}
    for name, text in read_documents():
        first_byte = hashlib.sha256(name.encode()).digest()[0]
        texts["val" if first_byte < 26 else "train"].append(text)
    if not texts["val"] or not texts["train"]:
        raise UserError(
            f"--demo needs Python's library as source, but {sysconfig.get_paths()['stdlib']} has no docstrings: use "
            "another Python, or make data with fineweb.py"
        )
    for split, path in paths.items():
        tokens = tokenize(texts[split])
        write_shard(path, tokens)
        print(f"demo corpus, {split}: {len(texts[split])} documents, {len(tokens):,} tokens in {path}")
