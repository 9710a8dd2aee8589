"""The demo's corpus: text that ships with every Python, tokenized into shards. No network.

A document is one of pydoc's topics, or one module's docstrings.
"""

import ast
import hashlib
import sysconfig
from pathlib import Path

from tqdm import tqdm

from common.cli import UserError
from data.shards import write_shard
from data.tokenizer import tokenize

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}


def read_documents():
    """Yield (name, text) of every document, in a fixed order. Nothing is imported but pydoc's topics."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}  # some distributions package it apart
    for name, text in sorted(topics.items()):
        yield f"topic {name}", text
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not SKIPPED & set(path.relative_to(root).parts)]
    for path in tqdm(paths, desc="reading docstrings", leave=False):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue  # lib2to3's Python 2 grammar tests and the like
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        if text := "\n\n".join(filter(None, texts)):
            yield str(path.relative_to(root)), text


def make_data(data_dir):
    """Write the corpus into data_dir, unless it is there. A hash of its name picks a tenth of documents to validate."""
    paths = {"val": Path(data_dir) / "demo_val_000000.npy", "train": Path(data_dir) / "demo_train_000001.npy"}
    if all(path.exists() for path in paths.values()):
        return
    if others := set(Path(data_dir).glob("*.npy")) - set(paths.values()):
        raise UserError(f"{data_dir} already holds {len(others)} other shards: the demo needs a --data_dir of its own")
    split = {"val": [], "train": []}
    for name, text in read_documents():
        digest = hashlib.sha256(name.encode()).digest()
        split["val" if digest[0] < 26 else "train"].append(text)
    if not split["val"] or not split["train"]:
        raise UserError(
            f"no docstrings in {sysconfig.get_paths()['stdlib']}: this Python ships without its library's source"
        )
    for name, texts in split.items():
        tokens = tokenize(texts)
        try:
            Path(data_dir).mkdir(parents=True, exist_ok=True)
            write_shard(paths[name], tokens)
        except OSError as error:
            raise UserError(
                f"cannot write the demo's data in {data_dir} ({error}): choose another --data_dir"
            ) from error
        print(f"demo corpus, {name}: {len(texts)} documents, {len(tokens):,} tokens")
