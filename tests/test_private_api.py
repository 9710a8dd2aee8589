"""Every use of private PyTorch API has its row in the docs, with the test that fails when PyTorch changes it."""

import ast
import re

from conftest import ROOT
from test_wall import ORDER


def private_uses():
    """{(file, name)}: attributes and modules with a leading underscore, and ATen's operators; but not of self."""
    paths = [*ROOT.glob("*.py"), *(path for name in ORDER for path in (ROOT / name).glob("*.py"))]
    for path in paths:
        file = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text())
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch", "flash_attn")):
                for alias in node.names:
                    if "._" in f"{node.module}.{alias.name}":
                        yield file, f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Attribute) and id(node) not in inner:
                name = ast.unparse(node)
                own = name.startswith(("self.", "cls.", "os.", "sys."))
                if not own and re.search(r"\._(?!_)|\baten\.", name) and re.fullmatch(r"[\w.]+", name):
                    yield file, re.sub(r"^aten\.", "torch.ops.aten.", name)


def test_every_use_of_private_api_is_in_the_table():
    rows = set()
    for page in (ROOT / "docs").glob("*.md"):
        rows |= set(re.findall(r"^\| `(\S+\.py)` \| `(\S+)` \| .+ \| `tests/\S+\.py`.* \|$", page.read_text(), re.M))
    assert rows == set(private_uses())


def test_the_tests_that_the_table_names_exist():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert all((ROOT / name).exists() for name in re.findall(r"`(tests/\S+\.py)`", pages))
