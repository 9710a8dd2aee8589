"""The documentation names what exists: links, figures, flags, modules."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ["bench", "config", "export", "fineweb", "hellaswag", "ladder", "sample", "watch.curves"]
COMMANDS += [f"measure.{path.stem}" for path in (ROOT / "measure").glob("*.py")]
# Flags of torchrun, sbatch, pip and uv, and of every command
OTHERS = {"help", "standalone", "nproc_per_node", "nnodes", "nodes", "max-restarts", "extra", "extra-index-url"}
OTHERS |= {"rdzv_backend", "rdzv_endpoint", "rdzv_id", "torch-backend"}


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", text, re.M)]
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "dev" / "LOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert "://" in link or target.exists(), link
        assert not anchor or "://" in link or anchor in anchors(target), link


def test_every_figure_is_shown():
    text = "".join(page.read_text() for page in PAGES)
    shown = set(re.findall(r"!\[[^]]*\]\((?:docs/)?(figures/[^)]+)\)", text))
    assert {f"figures/{path.name}" for path in (ROOT / "docs" / "figures").iterdir()} == shown


def test_flags_modules_and_files_exist():
    flags = set(OTHERS)
    for name in COMMANDS:
        for value in vars(importlib.import_module(name)).values():
            if dataclasses.is_dataclass(value):
                flags |= {field.name for field in dataclasses.fields(value)}
    flags |= {f"no_{flag}" for flag in flags} | {"no_NAME"}
    for page in PAGES:
        text = page.read_text()
        missing = {flag for flag in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", text) if flag not in flags}
        assert not missing, (page.name, missing)
        for module in re.findall(r"python -m (\w+\.\w+)", text):
            assert module in COMMANDS or module.startswith("torch."), module
        for path in re.findall(r"`((?:[\w.]+/)*\w+\.py)`", text):
            assert (ROOT / path).exists(), path
