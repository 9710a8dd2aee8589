import contextlib
import dataclasses
import json
import math
import resource
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints.resume import continues
from checkpoints.run_folder import checkpoints_of, make_folder, step_of
from common.errors import UserError
from config import Config
from measure.results import Results
from parallel.process_group import Distributed
from train_gpt2 import StepResult
from watch import run_log
from watch.run_log import RunLog

TWO_RANKS = Distributed(0, 2, torch.device("cpu"))


def make_log(tmp_path, resumed=None, training=None, **flags):
    config = Config(log_dir=str(tmp_path), run_name="run", wandb="disabled", **flags)
    return RunLog(config, config, TWO_RANKS, 1e9, resumed, training)


def train_step(log, step, loss=3.0, loss_scale=None, **kwargs):
    facts = dict(
        tokens=5000, finite=True, loss_scale=loss_scale, trained_seconds=0.0, seconds=0.5, own_ms=[math.nan] * 2
    )
    log.train_step(step, 5000 * (step + 1), StepResult(1e-4, loss, 2.5, **facts), **kwargs)


def read_steps(folder, stream):
    lines = [line.split() for line in (folder / "log.txt").read_text().splitlines()]
    return [int(step) for step, name, _ in lines if name == stream]


def read_rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_step_line_and_the_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_log, "peak_flops", lambda device: 1e13)
    log = make_log(tmp_path, max_steps=100)
    log.validation(0, 0, 10.98765, seconds=1.23, bits_per_byte=3.45678)
    train_step(log, 0, 10.5)
    hellaswag = dict(acc=0.2, acc_norm=0.25, items=64)
    log.tasks(1, 5000, dict(hellaswag=hellaswag, lambada=dict(acc=0.5, perplexity=40.0, items=32)), seconds=1.0)
    train_step(log, 1, math.nan, loss_scale=4.0, bad_steps=2)
    log.samples(2, 10000, ["one", "two"])
    log.close()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "step     0/100 | validation loss 10.9877 | 3.4568 bits/byte | 1.2 s"
    # 10,000 tokens a second at 1 GFLOP each, of 2 × 10 TFLOP/s
    assert out[1] == (
        "step     0/100 | loss 10.500000 | lr 1.0000e-04 | norm 2.5000 | 500.00 ms | 10,000 tok/s | MFU 50.0% | "
        "time left unknown"
    )
    assert out[2] == "step     1/100 | HellaSwag acc 0.2000 | acc_norm 0.2500 | 64 items | 1.0 s"
    assert out[3] == "step     1/100 | lambada_acc 0.5000 | lambada_perplexity 40.0000"
    assert out[4].startswith("step     1/100 | loss nan | lr") and out[4].endswith(
        "left | not finite, skipped (2 in a row)"
    )
    assert out[5:] == ["sample 0: one", "sample 1: two"]
    folder = tmp_path / "run"
    assert (folder / "log.txt").read_text().splitlines() == [
        "0 val 10.9877",
        "0 train 10.500000",
        "1 hella 0.2500",
        "1 train nan",
    ]
    rows = read_rows(folder)
    assert rows[0] == dict(step=0, tokens=0, val_loss=10.98765, val_bits_per_byte=3.45678)
    expected = dict(step=0, tokens=5000, train_loss=10.5, lr=1e-4, grad_norm=2.5, step_ms=500, tokens_per_sec=10000)
    assert rows[1] == expected | dict(mfu=0.5, peak_gb=rows[1]["peak_gb"]) and rows[1]["peak_gb"] > 0
    values = dict(hellaswag_acc=0.2, hellaswag_acc_norm=0.25, hellaswag_items=64)
    values |= dict(lambada_acc=0.5, lambada_perplexity=40, lambada_items=32)
    assert rows[2] == dict(step=1, tokens=5000) | values
    assert rows[3]["train_loss"] is None  # JSON has no NaN
    assert rows[3]["loss_scale"] == 4.0 and rows[3]["bad_steps"] == 2
    assert rows[4] == dict(step=2, tokens=10000, samples=["one", "two"])
    assert log.val_losses == {0: 10.98765}
    facts = json.loads((folder / "config.json").read_text())
    assert facts["torch"] == torch.__version__ and facts["lr"] == 6e-4 and facts["device"] == "auto"
    assert facts["world_size"] == 2 and facts["finished"] is True and facts["wandb_id"] is None


def test_time_left(tmp_path, monkeypatch, capsys):
    """From the end of the process's first step, which compiles; what lies between steps counts."""
    ends = iter([1000.0, 1010.0, 1040.0])
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: next(ends))
    log = make_log(tmp_path, tmp_path / "run" / "checkpoint_000007", dict(step=7), max_steps=100)
    for step in (7, 8, 9):
        train_step(log, step)
    lines = capsys.readouterr().out.splitlines()
    # 10 s a step and 91 steps; then 20 s a step and 90 steps
    assert [line.split(" | ")[-1] for line in lines] == ["time left unknown", "15:10 left", "30:00 left"]


def test_a_finished_run_is_never_overwritten(tmp_path):
    make_log(tmp_path).close()
    with pytest.raises(UserError, match="--run_name"):
        make_log(tmp_path)


def test_a_run_with_checkpoints_is_never_overwritten(tmp_path):
    make_log(tmp_path).close(finished=False)
    (tmp_path / "run" / "checkpoint_000002").mkdir()
    with pytest.raises(UserError, match="already holds a run.*--run_name"):
        make_log(tmp_path)
    with pytest.raises(UserError, match="already holds a run.*--run_name"):
        make_log(tmp_path, tmp_path / "other" / "checkpoint_000002", dict(step=2))
    make_log(tmp_path, tmp_path / "run" / "checkpoint_000002", dict(step=2)).close()


def test_a_folder_that_is_no_runs_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("")
    with pytest.raises(UserError, match="is not a run's folder"):
        make_log(tmp_path)


@pytest.mark.parametrize("start", [(), ("other/checkpoint_000002", dict(step=2))])
def test_a_run_without_a_checkpoint_begins_again(tmp_path, start):
    """Also as a branch of another run, to whose steps the log of the first attempt does not belong."""
    log = make_log(tmp_path)
    train_step(log, 0)
    log.close(finished=False)
    log = make_log(tmp_path, *start, resume=start[0] if start else "auto")
    assert log.facts["resume"] == (start[0] if start else "auto")
    assert (tmp_path / "run" / "log.txt").read_text() == "" and log.val_losses == {}
    assert (tmp_path / "run" / "log.txt.old").read_text() == "0 train 3.000000\n"
    assert (tmp_path / "run" / "metrics.jsonl.old").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--log_dir"):
        make_log(tmp_path / "file")
    (tmp_path / "log").symlink_to("of/a/disk/that/is/not/mounted")
    with pytest.raises(UserError, match="cannot make .*log: File exists; choose another --log_dir"):
        make_folder(tmp_path / "log", None, "gpt2")


def test_a_resumed_run_repeats_no_line(tmp_path):
    """Lines of the steps before the checkpoint stay, and evaluations of its step that are not due again."""
    log = make_log(tmp_path)
    folder = tmp_path / "run"
    for step in range(4):
        log.validation(step, 5000 * step, 3.0 - step / 8, seconds=1.0, bits_per_byte=1.0)
        train_step(log, step)
    log.close(finished=False)
    for name, torn in (("log.txt", "4 tra"), ("metrics.jsonl", '{"step": 1, "tok')):
        with open(folder / name, "a") as file:
            file.write(torn)
    make_log(tmp_path, folder / "checkpoint_000002", dict(step=2), val_every=3).close(finished=False)
    assert read_steps(folder, "val") == [0, 1, 2] and read_steps(folder, "train") == [0, 1]
    log = make_log(tmp_path, folder / "checkpoint_000002", dict(step=2), val_every=2)
    assert read_steps(folder, "val") == read_steps(folder, "train") == [0, 1]
    assert [row["step"] for row in read_rows(folder)] == [0, 0, 1, 1]
    assert log.val_losses == {0: 3.0, 1: 2.875} and log.first_step == 2
    log.validation(2, 10000, 1.0, seconds=1.0, bits_per_byte=1.0)
    assert log.val_losses == {0: 3.0, 1: 2.875, 2: 1.0} and read_steps(folder, "val") == [0, 1, 2]
    log.close(finished=False)
    assert not list(folder.glob("*.abandoned"))


def test_the_log_of_an_abandoned_past_is_kept(tmp_path):
    """A run that continues from a checkpoint other than its newest."""
    log = make_log(tmp_path)
    folder = tmp_path / "run"
    for step in range(4):
        train_step(log, step)
        (folder / f"checkpoint_{step + 1:06d}").mkdir()
    log.close(finished=False)
    make_log(tmp_path, folder / "checkpoint_000002", dict(step=2)).close(finished=False)
    assert read_steps(folder, "train") == [0, 1]
    assert len((folder / "log.txt.abandoned").read_text().splitlines()) == 4
    assert len((folder / "metrics.jsonl.abandoned").read_text().splitlines()) == 4


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    log = make_log(tmp_path)
    with pytest.raises(UserError, match="by another process"):
        make_log(tmp_path)
    log.close(finished=False)


@contextlib.contextmanager
def no_file_beyond(size):
    """A disk that takes a file's bytes up to this size, and then fails. With capsys: pytest prints to a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_wait_for_a_full_disk(tmp_path, capsys):
    """Also half a line. It is said once."""
    log = make_log(tmp_path)
    train_step(log, 0)
    log_txt = tmp_path / "run" / "log.txt"
    with no_file_beyond(log_txt.stat().st_size + 7):
        for step in (1, 2, 3):
            train_step(log, step)
        log.flush()
        assert log_txt.read_text() == "0 train 3.000000\n1 train"
    train_step(log, 4)
    train_step(log, 5)
    log.close()
    log.check_complete()
    assert log_txt.read_text() == "".join(f"{step} train 3.000000\n" for step in range(6))
    assert [row["step"] for row in read_rows(tmp_path / "run")] == list(range(6))
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step ")]
    assert said == [f"cannot write {tmp_path}/run (File too large): training goes on, log lines wait in memory"]


def test_a_disk_that_stays_full_is_an_error_at_the_end(tmp_path, capsys):
    log = make_log(tmp_path)
    train_step(log, 0)
    log_txt = tmp_path / "run" / "log.txt"
    with no_file_beyond(log_txt.stat().st_size + len("1 train 3.0")):
        train_step(log, 1)
        log.close()
    with pytest.raises(UserError, match="run could not be written completely .File too large.: .*make room"):
        log.check_complete()
    assert log_txt.read_text() == "0 train 3.000000\n1 train 3.0"
    make_log(tmp_path, tmp_path / "run" / "checkpoint_000002", dict(step=2)).close()
    assert log_txt.read_text() == "0 train 3.000000\n"  # half a number is none


def test_a_deleted_folder_is_an_error_at_the_end(tmp_path):
    log = make_log(tmp_path)
    train_step(log, 0)
    shutil.rmtree(tmp_path / "run")
    log.close()
    with pytest.raises(UserError, match="run could not be written completely .No such file"):
        log.check_complete()


@pytest.mark.parametrize("renames", range(8))
def test_a_run_that_is_killed_while_it_goes_back_has_a_whole_log(tmp_path, monkeypatch, renames):
    """It ends before one of the renames: of three checkpoints, config.json, flags.yaml and two logs; or after."""
    log, run = make_log(tmp_path), tmp_path / "run"
    for step in range(6):
        (run / f"checkpoint_{step:06d}").mkdir()
        train_step(log, step)
    log.close()
    whole = (run / "log.txt").read_text().splitlines()
    left = iter(range(renames))

    def rename(path, target, rename=Path.rename):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename)
        make_log(tmp_path, run / "checkpoint_000002", dict(step=2))
    newest = checkpoints_of(run)[0]
    log = make_log(tmp_path, newest, dict(step=step_of(newest)))
    log.close()
    assert (run / "log.txt").read_text().splitlines() == whole[: step_of(newest)]
    assert [row["step"] for row in read_rows(run)] == list(range(step_of(newest)))
    assert (run / "log.txt.abandoned").read_text().splitlines() == whole


def test_unnamed_runs_of_the_same_second_have_different_names(tmp_path, monkeypatch):
    config = Config(log_dir=str(tmp_path), wandb="disabled")
    logs = [RunLog(config, config, TWO_RANKS, 1e9) for _ in range(3)]
    names = [log.folder.name for log in logs]
    assert len(set(names)) == 3 and any(name.endswith(".1") for name in names)
    assert [log.facts["run_name"] for log in logs] == names and all(name.startswith("gpt2-2") for name in names)
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(config, init_from=".")
    assert RunLog(config, config, TWO_RANKS, 1e9).folder.name.startswith(f"{tmp_path.name}-2")


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/tmp", "a\nb", "\udcff"])
def test_names_that_no_run_has(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^--run_name .*must be"):
        continues(Config(run_name=name))
    with pytest.raises(UserError, match="^--run_name .*must be"):
        Results(Config(run_name=name), "ladder", torch.device("cpu"), ("rung",))
    assert not list(tmp_path.iterdir())
