import gc
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import expect_error

import bench
import ladder
from common import cli
from common.cli import ROOT, check_arguments, parse, python_command, spell_switches
from common.errors import Note, UserError
from common.peer_flags import HINTS
from config import Config, defaults
from optim import recipes

DEMO = Config(**recipes.DEMO)


def complaint(*arguments, flags_type=Config):
    with pytest.raises(UserError) as error:
        check_arguments(flags_type, arguments, HINTS)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "spelling, plain",
    [
        ("--flash=True", "--flash"),
        ("--flash on", "--flash"),
        ("--flash=off", "--no_flash"),
        ("--flash False --lr 0", "--no_flash --lr 0"),
        ("--compile 0 --fused-adamw=1", "--no_compile --fused_adamw"),
        ("--no-flash", "--no_flash"),
        ("--no_flash=False", "--flash"),
        ("--flash --lr 1", "--flash --lr 1"),
        ("--autocast=off --max_steps 1 off", "--autocast=off --max_steps 1 off"),
        ("--flash -- --compile=0", "--flash -- --compile=0"),
    ],
)
def test_spellings_of_switches(spelling, plain):
    assert spell_switches(Config, spelling.split()) == plain.split()


def test_switches_parse_in_every_spelling(monkeypatch):
    monkeypatch.setattr(sys, "argv", "train_gpt2.py --demo=True --flash False --compile=0 --shuffle=on".split())
    assert parse(Config, default=defaults(sys.argv)) == replace(DEMO, flash=False)
    with pytest.raises(UserError, match="--flash maybe: it must be on or off"):
        spell_switches(Config, ["--flash=maybe"])


@pytest.mark.parametrize("script", ["train_gpt2.py", "ladder.py", "bench.py"])
def test_every_training_command_knows_the_names_of_peers(command, script):
    expect_error(command(script, "--flash=off", "--learning-rate=1e-3"), "--learning-rate: use --lr")
    expect_error(command(script, "--dtype", "float16"), "--dtype: use --autocast bf16, fp16 or off")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--no-fused-loss", "--no-fused-loss: it is called --fused_cross_entropy"),
        ("--per_device_train_batch_size 8", "use --micro_batch_size"),
        ("--training.local_batch_size=8", "--training.local_batch_size: use --micro_batch_size"),
        ("--optimizer.lr 1e-3", "did you mean --lr?"),
        ("--tf23", "--tf23: there is no such flag, did you mean --tf32?"),
        ("batch_size=8", "batch_size: use --micro_batch_size"),
        ("compile=False", "compile=False: a flag starts with two dashes: --compile=False"),
        ("-lr 1e-3", "-lr: a flag starts with two dashes: --lr"),
        ("config/train_gpt2.py --lr 1", "config/train_gpt2.py: flags come from the command line, or from a file"),
        ("--demo run", "'run' is neither a flag nor its value"),
    ],
)
def test_what_is_not_a_flag(arguments, words):
    assert words in complaint(*arguments.split())


def test_hints_are_about_other_flags_and_name_flags_that_exist():
    flags = set(vars(Config()))
    assert not set(HINTS) & flags
    named = set(re.findall(r"--(\w+)", " ".join(HINTS.values())))
    assert named - flags == {"standalone", "nproc_per_node"}  # torchrun's


@pytest.mark.parametrize(
    "script, groups", [("ladder.py", ladder.LadderConfig.GROUPS), ("bench.py", bench.BenchConfig.GROUPS)]
)
def test_help_shows_a_commands_own_flags_first(command, script, groups):
    done = command(script, "--help")
    titles = [done.stdout.index(f"─ {group.TITLE} options ─") for group in groups]
    assert done.returncode == 0 and titles == sorted(titles)


@pytest.mark.parametrize(
    "script, usage",
    [("sample.py", "MODEL"), ("hellaswag.py", "MODEL"), ("export.py", "MODEL OUT"), ("curves.py", "RUNS")],
)
def test_help_names_positional_arguments(command, script, usage):
    done = command(script, "--help")
    assert done.returncode == 0 and usage in done.stdout


def test_a_command_runs_where_it_is_printed(tmp_path, monkeypatch):
    """The Python as the shell finds it, and paths from the current folder."""
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python3").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(folder / "python3"))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(ROOT)
    assert python_command("sample.py", "log/a b") == f"'{folder}/python3' sample.py 'log/a b'"
    monkeypatch.chdir(tmp_path)
    assert python_command("sample.py") == f"'my env/bin/python3' {ROOT}/sample.py"
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert python_command("-m", "wandb", "sync") == "python3 -m wandb sync"


def test_garbage_is_collected_again_after_the_imports(monkeypatch):
    """And no collection visits what was imported."""
    monkeypatch.setattr("sys.stdout", sys.stdout)  # run() replaces both
    monkeypatch.setattr("sys.stderr", sys.stderr)
    gc.disable()
    states = []
    try:
        cli.run(lambda: states.append((gc.isenabled(), gc.get_freeze_count() > 100_000)))
    finally:
        gc.unfreeze()
    assert states == [(True, True)]


def test_a_full_disk_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr("sys.stdout", sys.stdout)  # run() replaces both
    monkeypatch.setattr("sys.stderr", sys.stderr)
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")

    def write():
        with open("/dev/full", "w") as file:
            file.write("x")

    with pytest.raises(SystemExit) as ended:
        cli.run(write)
    assert ended.value.code == 1
    assert capfd.readouterr().err == "error: cannot write a file: No space left on device\n"


def test_notes_say_on_off_or_the_value():
    texts = [str(Note("x", value, "y")) for value in (True, False, None, 0, 0.1)]
    assert texts == [f"x is {value}: y" for value in ("on", "off", "off", "0", "0.1")]
