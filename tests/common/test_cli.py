import errno
import gc
import io
import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import docstring_parser
import pytest
import torch

import bench
import export
import fineweb
import hellaswag
import ladder
import sample
import train_gpt2
from common import errors
from common.cli import NANOGPT, ROOT, given, parse, progress, python_command
from common.errors import Note, UserError
from config import Config, defaults
from measure.plan import PlanConfig
from measure.sweep import SweepConfig
from optim import schedules
from watch import curves

DEMO = Config(**schedules.DEMO)


def complaint(*arguments, flags_type=Config):
    with pytest.raises(UserError) as error:
        given(flags_type, arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "spelling, flags",
    [
        (["--flash=True", "--compile=0", "--no-fused-adamw"], dict(flash=True, compile=False, fused_adamw=False)),
        (["--autocast=off", "--flash"], dict(autocast="off", flash=True)),
        (["--max-steps", "3", "--lr=6e-4", "--n_layer=2"], dict(max_steps=3, lr=6e-4, n_layer=2)),
        (["--data_dir=my data", "--run-name", "a b"], dict(data_dir="my data", run_name="a b")),
        (["--weight_decay", "-0.5", "--tasks=None"], dict(weight_decay=-0.5, tasks=None)),
    ],
)
def test_spellings(spelling, flags):
    assert given(Config, arguments=spelling) == flags


def test_a_value_that_begins_with_dashes():
    prompt, model = "--no way", "log/A"
    for arguments in ([f"--prompt={prompt}", model], [model, f"--prompt={prompt}"]):
        assert given(sample.Flags, arguments=arguments) == dict(prompt=prompt, model=model)


@pytest.mark.parametrize("flags_type", [Config, ladder.LadderConfig, bench.BenchConfig, SweepConfig, PlanConfig])
def test_values_with_spaces_and_the_home_folder(flags_type, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    spelled = ["--log_dir=~/my log", "--data-dir=my data", "--config", "~/a.yaml", "--init_from=a b=c"]
    flags = dict(log_dir="/home/me/my log", data_dir="my data", config="/home/me/a.yaml", init_from="a b=c")
    assert given(flags_type, arguments=spelled) == flags


def test_the_home_folder_in_other_commands(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for flags_type, spelled, flags in (
        (sample.Flags, ["~/m", "--prompt=~/x y"], dict(model="/home/me/m", prompt="~/x y")),
        (hellaswag.Flags, ["~/A", "--tasks=piqa=~/x"], dict(model="/home/me/A", tasks="piqa=~/x")),
        (export.Flags, ["log/A", "~/my gpt2"], dict(model="log/A", out="/home/me/my gpt2")),
        (fineweb.Flags, ["--input=~/my *.txt", "--out=~"], dict(input="/home/me/my *.txt", out="/home/me")),
    ):
        assert given(flags_type, arguments=spelled) == flags


def test_the_command_line_goes_before_the_defaults(monkeypatch):
    monkeypatch.setattr(sys, "argv", "train_gpt2.py --demo=True --no_flash --compile=0 --shuffle=on".split())
    assert parse(Config, default=defaults(given(Config))) == replace(DEMO, flash=False)


@pytest.mark.parametrize("module", [train_gpt2, ladder, bench])
def test_every_training_command_knows_the_names_of_peers(monkeypatch, module):
    for arguments, words in (
        (["--no_flash", "--learning-rate=1e-3"], "--learning-rate: there is no such flag, did you mean --lr?"),
        (["--dtype", "float16"], "--dtype: there is no such flag, did you mean --autocast?"),
    ):
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        with pytest.raises(UserError, match=words):
            module.main()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--block_size 8", "--block_size: there is no such flag, did you mean --seq_len?; see"),
        ("--no 8 --max_step=4 x", "--no: there is no such flag; --max_step: there is no such flag, did you mean"),
        ("--no 8 --max_step=4 x", "mean --max_steps?; 'x' is neither a flag nor its value; see --help"),
        ("--max_iters 9", "--max_iters: there is no such flag, did you mean --max_steps?"),
        ("--log_interval 9", "--log_interval: there is no such flag; see"),
        ("--eval_only", "--eval_only: there is no such flag; see"),
        ("--tf23", "--tf23: there is no such flag, did you mean --tf32?"),
        ("micro_batch_size=8", "'micro_batch_size=8' is neither a flag nor its value"),
        ("compile=False", "'compile=False' is neither a flag nor its value"),
        ("-lr 1e-3", "'-lr' is neither a flag nor its value"),
        ("--demo run", "'run' is neither a flag nor its value"),
        ("--demo " + "x" * 999, "xxx' is neither a flag nor its value"),  # too long for a file's name
        (f"--data_dir a {__file__}", "is one path too many: put --data_dir or --resume before it; see"),
        ("--demo False", "'False' is neither a flag nor its value"),
        ("--demo=maybe", "--demo=maybe: it must be on or off"),
        ("--no_demo=False", "'False' is neither a flag nor its value"),
        ("--run_name", "Missing value for argument '--run_name'"),
        ("--run_name --demo", "Missing value for argument '--run_name'"),
        ("--lr fast", "--lr: could not convert string to float: 'fast'"),
        ("--n_layer 1.5", "--n_layer: no type matching {None}|INT could be instantiated from ['1.5']"),
        ("--model gpt3", "invalid choice 'gpt3' for argument '--model'. Expected one of ('gpt2', "),
    ],
)
def test_what_is_not_a_flag(arguments, words):
    assert words in complaint(*arguments.split())


def test_a_bad_value_is_named_on_every_terminal(monkeypatch):
    for encoding in ("utf-8", "ascii"):  # tyro draws its boxes as the encoding allows
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
        assert complaint("--lr", "fast") == "--lr: could not convert string to float: 'fast'; see --help"
        assert complaint("--run_name") == "Missing value for argument '--run_name'. Expected 1 values; see --help"


def test_numbers_have_bounds(monkeypatch):
    for argument, words in (
        ("--top_p=0", "--top_p 0.0: it must be above 0"),
        ("--top_p=1.5", "--top_p 1.5: it must be at most 1"),
        ("--temperature=nan", "--temperature nan: it must be finite"),
        ("--seed=-1", "--seed -1: it must be at least 0"),
        (f"--seed={2**63}", f"--seed {2**63}: it must be below {2**63}"),
    ):
        monkeypatch.setattr(sys, "argv", ["sample.py", "log/A", argument])
        with pytest.raises(UserError, match=words):
            sample.main()


def test_the_names_of_peers_are_not_ours():
    assert not NANOGPT.keys() & vars(Config()).keys() and set(NANOGPT.values()) < {*vars(Config()), "prompt", "count"}


def help_of(flags_type, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit) as ended:
        parse(flags_type)
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("flags_type", [ladder.LadderConfig, bench.BenchConfig])
def test_help_shows_a_commands_own_flags_first(flags_type, monkeypatch, capsys):
    text = help_of(flags_type, monkeypatch, capsys)
    groups = flags_type.__bases__[-1], *reversed(Config.__bases__)
    titles = [text.index(f" {group.TITLE} options ") for group in groups]
    assert titles == sorted(titles)


def test_help_of_a_module_shows_how_it_is_started(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="measure.sweep"))
    assert help_of(SweepConfig, monkeypatch, capsys).startswith("usage: python -m measure.sweep [-h] [OPTIONS] FLAG=")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert help_of(sample.Flags, monkeypatch, capsys).startswith("usage: script [-h] [OPTIONS] MODEL")


def test_help_may_lose_its_reader(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)  # as head does
    monkeypatch.setattr(sys, "stdout", errors.Console(open(writer, "w")))
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit) as ended:
        parse(Config)
    assert not ended.value.code


@pytest.mark.parametrize("flags_type", [Config, hellaswag.Flags, export.Flags, fineweb.Flags, sample.Flags])
def test_help_breaks_lines_at_sentences_alone(flags_type):
    """--help keeps the line breaks of a flag's description."""
    for base in flags_type.__mro__[:-1]:
        for flag in docstring_parser.parse_from_object(base).params:
            assert all(line.endswith((".", ";")) for line in flag.description.splitlines()), flag.arg_name


@pytest.mark.parametrize(
    "flags_type, positional",
    [
        (sample.Flags, ["MODEL"]),
        (hellaswag.Flags, ["MODEL"]),
        (export.Flags, ["MODEL", "OUT"]),
        (curves.Flags, ["RUN [RUN ...]"]),
    ],
)
def test_positional_arguments(flags_type, positional, monkeypatch, capsys):
    assert " ".join(positional) in help_of(flags_type, monkeypatch, capsys)
    for count, name in enumerate(positional):
        monkeypatch.setattr(sys, "argv", ["script", *"ab"[:count]])
        with pytest.raises(UserError, match=f"{name.partition(' ')[0]}S? is missing"):
            parse(flags_type)
    if flags_type is not curves.Flags:
        assert "'c' is neither a flag nor its value" in complaint(
            *"abc"[3 - len(positional) - 1 :], flags_type=flags_type
        )


def test_a_command_runs_where_it_is_printed(tmp_path, monkeypatch):
    """The Python as it was typed, or torchrun's; and paths from the current folder."""
    monkeypatch.setattr(sys, "orig_argv", [f"{tmp_path}/my env/bin/python3", "train_gpt2.py"])
    monkeypatch.chdir(ROOT)
    assert python_command("sample.py", "log/a b") == f"'{tmp_path}/my env/bin/python3' sample.py 'log/a b'"
    monkeypatch.chdir(tmp_path)
    assert python_command("sample.py") == f"'my env/bin/python3' {ROOT}/sample.py"
    monkeypatch.setattr(sys, "orig_argv", ["python3", "train_gpt2.py"])
    assert python_command("-m", "wandb", "sync") == "python3 -m wandb sync"


def test_garbage_is_collected_again_after_the_imports(monkeypatch):
    """And no collection visits what was imported."""
    monkeypatch.setattr("sys.stdout", sys.stdout)  # run() replaces both
    monkeypatch.setattr("sys.stderr", sys.stderr)
    gc.disable()
    states = []
    try:
        errors.run(lambda: states.append((gc.isenabled(), gc.get_freeze_count() > 100_000)))
    finally:
        gc.unfreeze()
    assert states == [(True, True)]


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_all():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as some programs that start others leave it
    code = "from common.errors import run; run(lambda: [print('x' * 999) for _ in range(200)])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer, cwd=ROOT)
    while select.select([], [writer], [], 0)[1] and process.poll() is None:
        time.sleep(0.01)  # until the pipe is full
    os.close(writer)
    with open(reader, "rb") as output:
        assert len(output.read()) == 200_000
    assert process.wait() == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_name_does_not_command_the_terminal(monkeypatch):
    """What progress bars write around a line passes, and a file gets everything as it is."""
    name, bar = "a\x1b[31m\rb\x07\x9b\tc é\n", ["\r 10%|# ", "\r      \r", "\r\033[Kstep\n"]
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        for text in [name, *bar]:
            errors.Console(stream).write(text)
    assert terminal.getvalue() == "a\\x1b[31m\\x0db\\x07\\x9b\tc é\n" + "".join(bar)
    assert file.getvalue() == name + "".join(bar)


def test_streams_of_a_notebook(monkeypatch):
    """They cannot be reconfigured. An error is one line, whatever its names."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())

    def main():
        print("hello")
        raise UserError("no shards in a\nb")

    out, err = sys.stdout, sys.stderr
    with pytest.raises(SystemExit):
        errors.run(main)
    assert out.getvalue() == "hello\n" and err.getvalue() == "error: no shards in a\\nb\n"


def test_a_full_disk_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr("sys.stdout", sys.stdout)  # run() replaces both
    monkeypatch.setattr("sys.stderr", sys.stderr)
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")

    def write():
        with open("/dev/full", "w") as file:
            file.write("x")

    with pytest.raises(SystemExit) as ended:
        errors.run(write)
    assert ended.value.code == 1
    assert capfd.readouterr().err == "error: No space left on device\n"
    with pytest.raises(SystemExit):
        errors.run(lambda: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied", "curves.png")))
    assert capfd.readouterr().err == "error: Permission denied: curves.png\n"


def test_a_compile_cache_that_cannot_be_written_is_one_line(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr("sys.stdout", sys.stdout)  # run() replaces both
    monkeypatch.setattr("sys.stderr", sys.stderr)
    from torch import _dynamo  # noqa: F401 - its import needs a cache; a failed one would break later tests of this process

    (tmp_path / "cache").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as ended:
        errors.run(lambda: torch.compile(torch.sin)(torch.ones(8)))
    assert ended.value.code == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: torch.compile cannot use its cache ([Errno 17] File exists: ")


def test_notes_say_on_off_or_the_value():
    texts = [str(Note("x", value, "y")) for value in (True, False, None, 0, 0.1)]
    assert texts == [f"x is {value}: y" for value in ("on", "off", "off", "0", "0.1")]


def test_progress_in_a_pipe_is_lines(capsys):
    assert list(progress(range(3), "work", delay=0, mininterval=0)) == [0, 1, 2]
    lines = capsys.readouterr().err.split("\n")
    assert len(lines) > 2 and all(line.strip().startswith("work: ") for line in lines if line.strip())
    assert list(progress(range(3), "work")) == [0, 1, 2] and not capsys.readouterr().err  # it takes less than 30 s
