"""A run imports nothing that measures, and the folders' arrows point one way."""

import ast
import json
import subprocess
import sys

import pytest
from conftest import ROOT

# Each folder may import from those after it. model.py and the tables of flags stand between the folders.
ORDER = (
    *("ladder", "bench", "measure"),
    *("train_gpt2", "sample", "hellaswag", "export", "fineweb", "evaluation"),
    *("watch", "checkpoints", "config", "parallel", "model", "optim", "data", "optimizations", "kernels", "common"),
)
FILES = sorted(path for path in ROOT.glob("*.py")) + sorted(
    path for name in ORDER for path in (ROOT / name).glob("*.py")
)


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports():
    """{module: the project's modules that its file imports}, also inside functions."""
    names = {module_of(path) for path in FILES}
    found = {}
    for path in FILES:
        own = found.setdefault(module_of(path), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names} & names
                own |= whole or {node.module} & names
            elif isinstance(node, ast.Import):
                own |= {alias.name for alias in node.names} & names
    return found


@pytest.mark.parametrize("command", ["train_gpt2", "sample", "hellaswag", "export", "fineweb"])
def test_a_run_imports_nothing_that_measures(command):
    code = f"import json, sys, {command}; print(json.dumps([m for m in sys.modules if m.split('.')[0] == 'measure']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_there_is_no_circle():
    graph = imports()
    while ends := [name for name, below in graph.items() if not below & graph.keys()]:
        for name in ends:
            del graph[name]
    assert not graph, f"a circle among {sorted(graph)}"
