"""The documentation names what exists: links, figures, flags, modules; its tables are those of the records."""

import dataclasses
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch.distributed.run
import yaml
from conftest import expect_error

import fineweb
from common.cli import parse
from common.errors import UserError
from config import Config
from dev import tables

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ["bench", "config", "dev.corpus", "export", "fineweb", "hellaswag", "ladder", "sample", "watch.curves"]
COMMANDS += ["watch.report", *(f"measure.{path.stem}" for path in (ROOT / "measure").glob("*.py"))]
# Flags of torchrun, sbatch, modal, pip and uv, and of every command
OTHERS = {"help", "standalone", "nproc_per_node", "nnodes", "nodes", "max-restarts", "extra", "extra-index-url"}
OTHERS |= {"rdzv_backend", "rdzv_endpoint", "rdzv_id", "torch-backend", "run-name", "detach"}


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
        missing = {flag for flag in re.findall(r"(?<![\w!-])--([a-zA-Z][\w-]*)", text) if flag not in flags}
        assert not missing, (page.name, missing)
        for module in re.findall(r"python -m (\w+\.\w+)", text):
            assert module in COMMANDS or module.startswith("torch."), module
        for path in re.findall(r"`((?:[\w.]+/)*\w+\.py)`", text):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page):
    text = page.read_text()
    for _, kind, name, old, _ in tables.MADE.findall(text):
        assert old == tables.make(kind, name), f"{name}: run python dev/tables.py"
    by_hand = tables.MADE.sub("", text)
    if page.name != "LOG.md":
        assert not re.search(r"^.*---:.*$", by_hand, re.M), "a table of numbers without a record"


def test_the_readmes_figures_are_those_of_the_records():
    readme, recipes = " ".join((ROOT / "README.md").read_text().split()), tables.load("recipes")
    assert f"({recipes['target']:.3f}, 1,090 steps of 131,072 tokens" in readme
    assert f"with {recipes['rows'][1]['fewer_tokens']} × fewer tokens: five seeds" in readme
    assert len(recipes["seeds"]) == 5
    warmup = tables.load("batch_warmup_time")
    assert f"in {warmup['rows'][1]['less_time']:.1f} × less time: eight seeds" in readme
    assert len(warmup["seeds"]) == 8
    line = next(row["line"] for row in tables.load("recipes_more")["rows"] if "line" in row)
    assert " ".join(line.split()) in readme


def test_records_say_how_they_were_measured():
    for path in tables.RECORDS.glob("*.json"):
        record = json.loads(path.read_text())
        assert {"command", "commit", "versions", "card", "rows"} <= record.keys(), path.name
    for path in tables.RECORDS.glob("cards/*.json"):  # of bench.py --record
        record = json.loads(path.read_text())
        assert {"command", "git_commit", "torch", "hardware", "gpus", "tokens_per_second"} <= record.keys(), path.name


def test_a_table_is_made_from_its_record(call_main, tmp_path, monkeypatch):
    page, record = tmp_path / "page.md", tmp_path / "speed.json"
    monkeypatch.setattr(tables, "PAGES", [page])
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    page.write_text("Before.\n\n<!--table:speed-->\n<!--/table-->\n\nAfter.\n")
    columns = {"card": "{card}", "rate": "{rate:,}", "share": "{share[percent]:.1f}%"}
    rows = [dict(card="A", rate=1234567, share=dict(percent=50)), dict(card="A", rate="out of memory")]
    record.write_text(json.dumps(dict(columns=columns, rows=rows, more_rows=[dict(card="B")])))
    expect_error(call_main("dev/tables.py", "--check"), "page.md: speed", "run python dev/tables.py")
    assert call_main("dev/tables.py").returncode == 0
    table = "| card | rate | share\n| --- | ---: | ---:\n| A | 1,234,567 | 50.0%\n|  | out of memory |"
    assert page.read_text() == f"Before.\n\n<!--table:speed-->\n{table}\n<!--/table-->\n\nAfter.\n"
    assert call_main("dev/tables.py", "--check").returncode == 0
    for text in ("{", None):  # damaged, missing
        record.write_text(text) if text else record.unlink()
        expect_error(call_main("dev/tables.py"), "speed.json")


def test_ladders_of_two_kinds_are_not_in_one_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    rows = [dict(name="baseline"), dict(name="tf32", times_before=2.0)]
    record = dict(card="H200", commit="a", versions="2.15", rows=rows, interval="{times_before:.2f}", gain="{low} ×")
    record["more_rows"] = [dict(name="baseline again", times_before=0.4, low=0.32, high=0.5, mark="")]
    fp8 = dict(rows=[dict(name="fp8", times_before=1.1)], more_rows=record["more_rows"])
    (tmp_path / "ladder_fp8.json").write_text(json.dumps(fp8))
    (tmp_path / "ladder.json").write_text(json.dumps(record))
    (tmp_path / "ladder_second.json").write_text(json.dumps(record | dict(rows=rows[::-1])))
    for name in ("ladder_h100", "ladder_h100_second"):
        (tmp_path / f"{name}.json").write_text(json.dumps(record | dict(card="H100", rows=rows[1:])))
    assert [row["second"]["name"] for row in tables.rungs()] == ["baseline", "tf32"]
    assert [row["h100"] for row in tables.rungs()] == [None, rows[1]]
    assert tables.make("gain", "tf32") == "2.00" and tables.make("gain", "together") == "2.50"
    assert tables.make("times", "together_fp8") == "2.0 ×" and tables.make("gain", "fp8") == "1.10"
    with pytest.raises(UserError, match="no ladder has such a rung"):
        tables.make("gain", "flash")
    for change, problem in ((dict(card="A100"), "differ in card"), (dict(rows=rows[:1]), "has no tf32")):
        (tmp_path / "ladder_second.json").write_text(json.dumps(record | change))
        with pytest.raises(UserError, match=problem):
            tables.rungs()


def started(script, **variables):
    """What a cluster's script starts with torchrun: torchrun's arguments, parsed. The cluster's programs do nothing."""
    programs = 'scontrol() { echo first; echo second; }; srun() { shift 2; "$@"; }; source() { :; }; '
    programs += 'torchrun() { printf "%s\\n" "$@"; }; '
    done = subprocess.run(["bash", "-uc", programs + script], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.distributed.run.parse_args(done.stdout.splitlines())


def test_clusters_start_existing_commands_with_existing_flags(monkeypatch):
    folder = ROOT / "clusters"
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"modal_app.py", "skypilot.yaml", "slurm.sh"}
    job = dict(SLURM_JOB_ID="7", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8", SLURM_CPUS_PER_TASK="4")
    job |= dict(SLURM_JOB_NODELIST="names")
    _, data, train = yaml.safe_load_all((folder / "skypilot.yaml").read_text())
    task = dict(SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_NODE_RANK="1", FLAGS="--parallel hsdp")
    task |= dict(SKYPILOT_NODE_IPS="first\nsecond", SKYPILOT_TASK_ID="7")
    slurm = started(f". {folder / 'slurm.sh'} --parallel hsdp", **job)
    assert (slurm.rdzv_endpoint, slurm.rdzv_id) == ("first:29500", "7-0")
    sky = started(train["run"], **task)
    assert (sky.master_addr, sky.node_rank) == ("first", 1)
    for arguments, name in (slurm, "gpt2-7"), (sky, "7"):
        assert (arguments.nnodes, arguments.nproc_per_node, arguments.training_script) == ("2", "8", "train_gpt2.py")
        monkeypatch.setattr("sys.argv", ["train_gpt2.py", *arguments.training_script_args])
        config = parse(Config)
        assert (config.run_name, config.parallel) == (name, "hsdp")
    monkeypatch.setattr("sys.argv", data["run"].split()[1:])
    assert parse(fineweb.Flags).out == config.data_dir

    text = (folder / "modal_app.py").read_text()
    compile(text, "modal_app.py", "exec")
    flags = {field.name for each in (Config, fineweb.Flags) for field in dataclasses.fields(each)}
    assert {flag for flag in re.findall(r'"--([a-z_]+)"', text)} <= flags
