"""Resuming: which flags and data a continued run may change, branches, going back."""

import json
import shutil
import tarfile
from dataclasses import replace

import pytest
from conftest import ALONE, ROOT, expect_error, logged, metrics
from texts import write_corpus

from checkpoints import resume, run_folder
from common.errors import UserError, word
from config import Config
from data.loader import open_streams
from data.shards import manifest_entry


def test_what_changed_since_the_checkpoint_is_said(tmp_path):
    config = Config(lr=1e-3, val_every=7, compile=False)
    start = resume.Start(tmp_path, dict(step=0, run=vars(Config())), None, None)
    notes = resume.changed_flags(start, config)
    assert [str(note) for note in notes] == ["lr is 0.001: the checkpoint was made with 0.0006"]


CHANGES = [dict(optimizer="muon"), dict(seed=2), dict(shuffle=False), dict(seq_len=512), dict(init_from="gpt2")]


@pytest.mark.parametrize("change", CHANGES)
def test_another_optimizer_start_or_order_of_the_data_is_refused(tmp_path, change):
    start = resume.Start(tmp_path / "checkpoint_000001", dict(run=vars(Config(**change))), None, None)
    [(name, value)] = change.items()
    with pytest.raises(UserError, match=f"--{name}={word(value)}: continue with it instead of .*--init_from"):
        resume.check_same(start, Config(), {})


def test_other_data_are_recognized(tmp_path):
    """By the shards' names and sizes, by the manifest if both sides have one, and by a sample of the tokens."""
    for name, sizes in (("one", (50, 200, 300)), ("moved", (50, 200, 300)), ("other", (50, 300, 200))):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name, sizes)

    def difference(before, after, older=False):
        configs = [Config(data_dir=str(tmp_path / name), total_batch_size=64, seq_len=8) for name in (before, after)]
        (*_, data), (*_, own_data) = (open_streams(config, ALONE) for config in configs)
        if older:  # a checkpoint without the sample
            del data["sample"]
        start = resume.Start(tmp_path / "checkpoint_000001", dict(data, run={}), None, None)
        try:
            resume.check_same(start, configs[1], own_data)
        except UserError as error:
            assert "--init_from" in str(error)
            return str(error)
        return ""

    def manifest(name, source):
        (tmp_path / name / "shards.json").unlink(missing_ok=True)
        entries = [manifest_entry(path) for path in sorted((tmp_path / name).glob("*.npy"))]
        (tmp_path / name / "shards.json").write_text(json.dumps(dict(source=dict(files=source), shards=entries)))

    assert difference("one", "moved") == ""
    write_corpus(tmp_path / "moved", (50, 200, 300), seed=1)
    assert "the shards have other tokens" in difference("one", "moved")
    assert difference("one", "moved", older=True) == ""
    write_corpus(tmp_path / "moved", (50, 200, 300))
    assert "edufineweb_train_000001.npy has 300 tokens instead of 200" in difference("one", "other")
    manifest("one", "the web")
    assert difference("one", "moved") == ""
    manifest("moved", "the web")
    assert difference("one", "moved") == ""
    manifest("moved", "books")
    assert "shards.json is not the same; continue with the same data" in difference("one", "moved")
    (tmp_path / "other" / "edufineweb_train_000002.npy").unlink()
    assert "edufineweb_train_000001.npy has" in difference("one", "other")
    (tmp_path / "one" / "edufineweb_train_000001.npy").unlink()
    (tmp_path / "one" / "shards.json").unlink()
    assert "edufineweb_train_000001.npy is an additional shard" in difference("one", "other")


def test_other_data_are_refused(train, tmp_path):
    flags, drop = ("--no_shuffle", "--checkpoint_every", 3), "--checkpoint_every --max_steps"
    train("run", *flags, "--max_steps", 3, drop=drop)
    other = tmp_path / "other"
    other.mkdir()
    write_corpus(other, sizes=(400, 1000, 3000, 700))
    refused = train("run", *flags, "--max_steps", 5, "--data_dir", other, drop=drop, fails=True)
    expect_error(
        refused, "edufineweb_train_000001.npy has 1000 tokens instead of 2000", "--init_from log/run/checkpoint_"
    )


@pytest.mark.parametrize("name, ranks", [("ddp", 1), ("zero3_muon", 2)])
def test_a_run_of_an_older_version_continues(command, corpus, tmp_path, name, ranks):
    """The logs are those of six steps there. Its flags.yaml has flags that no longer exist, which are left out."""
    with tarfile.open(ROOT / "tests" / "checkpoints" / "old_runs.tar.xz") as file:
        file.extraction_filter = lambda member, path: member  # as filter="fully_trusted", new in Python 3.11.4
        file.extractall(tmp_path)
    run = tmp_path / "log" / name
    whole = [logged(run, stream) for stream in ("train", "val")]
    done = command("train_gpt2.py", "--resume", f"log/{name}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert f"resumed from log/{name}/checkpoint_000003" in done.stdout and "lr 0.01, 2 warm-up steps" in done.stdout
    for before, values in zip(whole, (logged(run, "train"), logged(run, "val"))):
        assert values == pytest.approx(before, abs=5e-5)  # another processor: 2.4e-5


def test_data_are_found_from_another_folder(train, tmp_path, monkeypatch):
    """Of a run with a relative data_dir; a run of fine-tuning whose weights are those of this folder has its name."""
    monkeypatch.chdir(tmp_path)
    run = train("run", "--data_dir", "corpus", "--checkpoint_every", 1, drop="--checkpoint_every")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for resumed in (run, run / "checkpoint_000002"):
        tasks = "piqa,lambada=corpus,winogrande=nowhere.jsonl"
        config = Config(resume=str(resumed), data_dir="corpus", tasks=tasks)
        resume.find_start(config, ALONE)
        assert config.data_dir == str(tmp_path / "corpus")
        assert config.tasks == f"piqa,lambada={tmp_path}/corpus,winogrande=nowhere.jsonl"


def test_going_back_sets_the_newer_checkpoints_aside(train):
    drop = "--checkpoint_every --max_steps"
    run = train("back", "--checkpoint_every", 1, "--max_steps", 6, "--keep_checkpoints", 9, drop=drop)
    again = ("--checkpoint_every", 1, "--max_steps", 4, "--keep_checkpoints", 2)
    train("back", *again, "--resume", run / "checkpoint_000002", drop=drop)
    names = sorted(path.name for path in run.glob("checkpoint_*"))
    assert [name for name in names if not name.endswith("abandoned")] == ["checkpoint_000003", "checkpoint_000004"]
    assert "checkpoint_000006.abandoned" in names
    assert [row["step"] for row in metrics(run)] == list(range(4))


def test_resuming_does_not_write_over_another_run(train):
    drop = "--checkpoint_every"
    one, other = (train(name, "--checkpoint_every", 1, drop=drop) for name in ("one", "other"))
    before = (other / "log.txt").read_text()
    done = train("other", "--resume", one / "checkpoint_000002", fails=True)
    expect_error(done, "other already holds a run")
    assert (other / "log.txt").read_text() == before


def test_a_branch_goes_on_by_its_own_command(train):
    drop = "--checkpoint_every --max_steps"
    one = train("one", "--checkpoint_every", 1, "--max_steps", 3, drop=drop)
    arguments = ("--checkpoint_every", 1, "--resume", one / "checkpoint_000002")
    branch = train("branch", *arguments, "--max_steps", 4, drop=drop)
    train("branch", "--resume", branch, "--max_steps", 5, drop=drop)  # as a stopped run advises
    text = (train("branch", *arguments, "--max_steps", 6, drop=drop) / "output.txt").read_text()
    assert "resumed from log/branch/checkpoint_000005" in text
    assert [row["step"] for row in metrics(branch)] == [2, 3, 4, 5]


def test_flags_come_from_the_run_or_from_a_file(train, command, call_main):
    """--resume continues a run with its flags, and --config repeats it; the command line has the last word."""
    drop = "--checkpoint_every --max_steps"
    whole = train("whole", "--checkpoint_every", 2, "--max_steps", 4, drop=drop)
    flags = ("--config", "log/whole/flags.yaml", "--run_name", "repeated", "--max_steps", 3)
    assert command("train_gpt2.py", *flags).returncode == 0
    assert logged(whole.with_name("repeated")) == logged(whole)[:3]
    done = command("train_gpt2.py", "--resume", "log/whole/checkpoint_000002", "--run_name", "branch", "--lr", "1e-4")
    assert done.returncode == 0 and done.stdout.count("the checkpoint was made with") == 1  # about lr
    assert logged(whole.with_name("branch"))[0] == logged(whole)[2]
    assert command("train_gpt2.py", "--resume", "log/whole", "--max_steps", 5).returncode == 0
    assert len(logged(whole)) == 5
    expect_error(call_main("train_gpt2.py", "--config", "none.yaml"), "none.yaml", "No such file")
    own = dict(resume="log/whole/checkpoint_000002", run_name="branch", log_dir=str(whole.parent))
    assert run_folder.flags_file_of(own) == whole.with_name("branch") / "flags.yaml"
    (whole.parent / "flags.yaml").write_text("lr: 1")  # of no run
    shutil.copytree(whole / "checkpoint_000004", whole.parent / "checkpoint_000004")
    assert run_folder.flags_file_of(dict(resume=str(whole.parent / "checkpoint_000004"))) is None


def test_a_run_that_takes_no_step_stays_as_it_is(train):
    flags, drop = ("--checkpoint_every", 1, "--max_steps"), "--checkpoint_every --max_steps"
    run = train("run", *flags, 2, drop=drop)
    before = {path.name: path.read_text() for path in run.glob("*.yaml")}
    output = (train("run", *flags, 1, "--lr", 9, drop=drop) / "output.txt").read_text()
    assert "training   none: at step 2 of 2\n" in output and "max_steps is 2: the checkpoint is at step 2;" in output
    expect_error(
        train("run", *flags, 1, "--resume", run / "checkpoint_000001", drop=drop, fails=True),
        "checkpoint_000001 has reached --max_steps 1, and log/run has newer checkpoints: raise it to go back",
    )
    assert {path.name: path.read_text() for path in run.glob("*.yaml")} == before
    assert json.loads((run / "config.json").read_text())["finished"] and not [*run.glob("*.abandoned")]


def test_torchruns_restarts_need_the_name_of_a_run(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(UserError, match="torchrun --max-restarts needs --run_name"):
        resume.find_start(Config(), ALONE)


def test_torchruns_restart_continues_from_the_newest_checkpoint(train, monkeypatch):
    """Not from the one that --resume names, from which the run's first start went back."""
    run = train("run", "--checkpoint_every", 1, "--max_steps", 2, drop="--checkpoint_every --max_steps")
    config = Config(resume=str(run / "checkpoint_000001"))
    assert resume.find_start(replace(config), ALONE).step == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resume.find_start(replace(config), ALONE).step == 2
