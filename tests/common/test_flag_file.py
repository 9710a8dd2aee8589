import dataclasses
import string

import pytest

from common import flag_file
from common.errors import UserError
from config import Config, chosen_flags, defaults
from optim import schedules

ABC = string.ascii_lowercase


def read(path, text):
    path.write_text(text)
    return flag_file.read(path, Config)


def test_what_is_written_is_read(tmp_path):
    config = Config(lr=1e-5, autocast="off", data_dir="a: b", micro_batch_size=4, compile=False, run_name="x", seed=3)
    flag_file.write(tmp_path / "flags.yaml", chosen_flags(config), Config)
    text = (tmp_path / "flags.yaml").read_text()
    assert len(text.splitlines()) == 7 and "run_name" not in text  # no flag that has its default
    read_back = Config(**flag_file.read(tmp_path / "flags.yaml", Config))
    assert read_back == dataclasses.replace(config, run_name=None)


def test_a_resumed_run_has_the_flags_of_its_file(tmp_path, capsys):
    """Every value, also one that is the usual default and not the recipe's."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"finished": false}')
    own = dict(lr=5e-4, max_steps=19073, autocast="off", data_dir="my data", warmup_steps=715, compile=True)
    config = Config(**schedules.recipe_defaults(dict(model="tiny", optimizer="muon")) | own)
    flag_file.write(run / "flags.yaml", chosen_flags(config), Config)
    assert flag_file.read(run / "flags.yaml", Config) == dict(model="tiny", optimizer="muon") | own
    assert defaults(dict(resume=str(run))) == config and not capsys.readouterr().out
    with open(run / "flags.yaml", "a") as file:
        file.write("rungs: all\nmax_bad_steps: 10\n")  # of an older version
    assert defaults(dict(resume=str(run))) == config
    assert capsys.readouterr().out == f"{run}/flags.yaml has flags that no longer exist: max_bad_steps, rungs\n"
    with pytest.raises(UserError, match="flags.yaml: --rungs: there is no such flag"):
        defaults(dict(config=str(run / "flags.yaml")))


def test_a_newline_in_a_flag_makes_no_line(tmp_path):
    folder = tmp_path / "a\nlr: 1"
    folder.mkdir()
    flag_file.write(folder / "flags.yaml", chosen_flags(Config(log_dir=str(folder))), Config)
    assert flag_file.read(folder / "flags.yaml", Config) == dict(log_dir=str(folder))


def test_values_as_people_write_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    text = "autocast: off\nlr: 6e-4\ncompile: off\nmicro_batch_size: null\nmax_steps: 10 # short\nflash: True\n"
    assert read(tmp_path / "flags.yaml", text + "data_dir:\nlog_dir: ~/x\ntasks: ~\n") == dict(
        autocast="off", lr=6e-4, compile=False, max_steps=10, flash=True, log_dir="/home/me/x"
    )
    assert read(tmp_path / "flags.yaml", "") == {}


@pytest.mark.parametrize(
    "text, words",
    [
        ("lr: high", "--lr: could not convert string to float: 'high'"),
        ("learning_rate: 1", "did you mean --lr?"),
        ("lrr: 1", "did you mean --lr?"),
        ("config: other.yaml", "config is for the command line"),
        ("resume: log/A", "resume is for the command line"),
        ("lr: [1, 2]", "it must be YAML, NAME: VALUE on each line"),
        ("a: &a [x]\n" + "".join(f"a: &{b} [*{a}, *{a}]\n" for a, b in zip(ABC, ABC[1:])), "it must be YAML"),
        ("lr: " + "[" * 5000, "cannot read the flags"),
        ("- " * 5000, "cannot read the flags"),
        ("? [x]\n: 1", "cannot read the flags"),
        ("# nanoGPT's\nout_dir = 'out'\nlearning_rate = 1e-3", "it must be YAML"),
        ("lr", "NAME: VALUE"),
        ("lr: 'a", "cannot read the flags"),
        ("\0", "cannot read the flags"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        read(tmp_path / "flags.yaml", text)
    assert words in str(error.value) and "flags.yaml" in str(error.value) and "\n" not in str(error.value)
