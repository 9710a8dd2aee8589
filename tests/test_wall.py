"""A run imports nothing that measures, and the arrows between files and folders point one way."""

import ast
import subprocess
import sys

from conftest import ROOT

# A folder, or a file beside the folders, imports only from those after it
ORDER = (
    "ladder bench measure train_gpt2 evaluation sample hellaswag export fineweb watch config checkpoints optimizations "
    "parallel model optim data kernels common"
).split()
# What train_gpt2.py imports only when --ladder, --profile or --memory_snapshot asks for it
LAZY = {("train_gpt2", "ladder"), ("watch", "measure")}


def imports():
    """{module: the project's modules that its file imports, also inside functions}."""
    paths = [*ROOT.glob("*.py"), *(path for name in ORDER for path in (ROOT / name).glob("[!_]*.py"))]
    trees = {".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text()) for path in paths}
    found = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & trees.keys()
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & trees.keys()
    return found


# Each command in a process of its own, which has imported PyTorch and nothing of the project
IMPORT = """
import os, sys, torch, tyro
for command in sys.argv[1:]:
    if os.fork() == 0:
        __import__(command)
        names = {name.split(".")[0] for name in sys.modules}
        print(command, *names & {"measure", "triton", "cudnn", "nvmath", "flash_attn"}, flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_run_imports_nothing_that_measures_and_no_package_for_gpus():
    commands = ["train_gpt2", "sample", "hellaswag", "export", "fineweb", "kernels.mlp"]
    done = subprocess.run([sys.executable, "-c", IMPORT, *commands], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == commands, done.stderr


def test_arrows_between_folders_point_one_way():
    folders = {(a.split(".")[0], b.split(".")[0]) for a, below in imports().items() for b in below}
    assert {name for pair in folders for name in pair} <= set(ORDER)
    assert [(a, b) for a, b in folders - LAZY if ORDER.index(a) > ORDER.index(b)] == []


def test_there_is_no_circle():
    graph = imports()
    graph["train_gpt2"].discard("ladder")  # which takes over the process, and starts others that train
    while ends := {name for name, below in graph.items() if not below}:
        graph = {name: below - ends for name, below in graph.items() if name not in ends}
    assert not graph, f"a circle among {sorted(graph)}, or below them"
