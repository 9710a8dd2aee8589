import math
import subprocess

import pytest
import torch

from common.errors import UserError
from config import Config
from parallel.process_group import Distributed
from train_gpt2 import StepResult
from watch.run_log import RunLog

ALONE = Distributed(0, 1, torch.device("cpu"))


def make_log(tmp_path, **flags):
    config = Config(log_dir=str(tmp_path), run_name="run", **flags)
    return RunLog(config, config, ALONE, 1e9)


def train_step(log, step, loss, own_ms=(math.nan,)):
    facts = dict(finite=True, loss_scale=None, trained_seconds=0.0, seconds=0.5, own_ms=own_ms)
    result = StepResult(1e-4, loss, 1.0, 100, **facts)
    log.train_step(step, 100 * (step + 1), result)


def fail(error):
    def raise_error(*_, **__):
        raise error

    return raise_error


def test_offline_needs_no_login_and_records_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = make_log(tmp_path, wandb="auto")
    train_step(log, 0, 3.0)
    log.validation(1, 100, 3.0, seconds=1.0, bits_per_byte=1.25)
    scores = dict(hellaswag=dict(acc=0.2, acc_norm=0.25, items=64), piqa=dict(acc=0.5, acc_norm=0.6, items=32))
    log.tasks(1, 100, scores, seconds=1.0)
    log.samples(1, 100, ["Hello"])
    run = log.wandb.run
    assert run is not None and log.where_to_watch()["watch"].endswith(f"-m wandb leet {tmp_path}/run/wandb")
    assert run.config["lr"] == 6e-4 and "torch" in run.config
    train_step(log, 1, 2.5)
    train_step(log, 2, 2.0, own_ms=[10.0, 11.0])
    summary = run.summary
    assert summary["train/loss"] == 2.0 and summary["_step"] == 2
    assert summary["val/loss"] == 3.0 and summary["val/bits_per_byte"] == 1.25
    assert summary["val/hellaswag_acc"] == 0.2 and summary["val/hellaswag_acc_norm"] == 0.25
    assert summary["val/piqa_acc_norm"] == 0.6
    assert summary["ranks/own_ms_0"] == 10 and summary["ranks/own_ms_1"] == 11 and summary["train/slowest_rank"] == 1
    assert summary["train/step_ms"] == 500 and "train/mfu" not in summary.keys()
    panels = {name.partition("/")[0] for name in summary.keys() if name[0] != "_"}
    assert panels == {"train", "val", "ranks"} and "val/samples" in summary.keys()
    log.close()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_disabled(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log = make_log(tmp_path, wandb="auto")
    train_step(log, 0, 3.0)
    log.samples(1, 100, ["Hello"])
    assert log.wandb.run is None and log.where_to_watch() == dict(watch=f"{tmp_path}/run/metrics.jsonl")
    assert log.facts["wandb_id"] is None
    log.close()
    assert not (tmp_path / "run" / "wandb").exists()


def test_an_error_of_wandb_does_not_stop_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = make_log(tmp_path)
    run = log.wandb.run
    monkeypatch.setattr(run, "log", fail(ConnectionError("gone")))
    train_step(log, 0, 3.0)
    train_step(log, 1, 2.0)
    log.samples(1, 100, ["Hello"])
    assert capsys.readouterr().out.count("wandb run failed (ConnectionError: gone)") == 1
    assert log.where_to_watch()["watch"].endswith("metrics.jsonl")
    log.close()
    run.finish()
    assert len((tmp_path / "run" / "log.txt").read_text().splitlines()) == 2


def test_an_error_in_the_samples_table_does_not_stop_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = make_log(tmp_path)
    run = log.wandb.run
    monkeypatch.setattr(log.wandb._samples, "add_data", fail(ValueError("no table")))
    log.samples(1, 100, ["Hello"])
    assert "wandb run failed (ValueError: no table)" in capsys.readouterr().out
    log.close()
    run.finish()


def test_without_a_network_it_goes_offline(tmp_path, monkeypatch, capsys):
    nobody = dict(WANDB_BASE_URL="http://127.0.0.1:1", WANDB_API_KEY="0" * 40, WANDB_INIT_TIMEOUT="0.1")
    for name, value in nobody.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for mode in ("online", "auto"):
        log = make_log(tmp_path, wandb=mode)
        assert log.wandb.run.offline and "it records offline" in capsys.readouterr().out
        log.close(finished=False)


def test_without_a_login_it_goes_offline_or_says_so(tmp_path, monkeypatch, capsys):
    for name, value in dict(WANDB_API_KEY="", HOME=str(tmp_path), NETRC="").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log = make_log(tmp_path, wandb="auto")
    assert log.wandb.run.offline and log.where_to_watch()["watch"].endswith(
        "/wandb (offline, since it is not logged in)"
    )
    assert not capsys.readouterr().out
    log.close()
    with pytest.raises(UserError, match="not logged in.*-m wandb login.*--wandb offline"):
        make_log(tmp_path / "online", wandb="online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match="cannot be online .WANDB_API_KEY invalid: API key must have 40"):
        make_log(tmp_path / "online", wandb="online")
    assert not (tmp_path / "online").exists()


def test_a_resumed_run_keeps_its_page(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)  # the command is printed for the current folder
    log = make_log(tmp_path)
    facts = log.facts
    assert facts["wandb_id"] == log.wandb.run.id
    log.close(finished=False)
    config = Config(log_dir=str(tmp_path), run_name="run")
    checkpoint = tmp_path / "run" / "checkpoint_000002"
    log = RunLog(config, config, ALONE, 1e9, checkpoint, dict(step=2, run=facts))
    assert log.wandb.run.id == facts["wandb_id"]
    log.close(finished=False)
    upload = log.where_to_watch()["upload"]
    said = subprocess.run(f"{upload} --dry-run", shell=True, capture_output=True, text=True).stderr
    assert "Would sync 2 run(s)" in said and said.index("offline-run-") < said.rindex("offline-run-"), said
    (tmp_path / "run" / "checkpoint_000004").mkdir()
    log = RunLog(config, config, ALONE, 1e9, checkpoint, dict(step=2, run=facts))  # goes back to step 2
    assert log.wandb.run.id != facts["wandb_id"]
    log.close(finished=False)
    log = RunLog(config, config, ALONE, 1e9)  # a new run
    assert log.wandb.run.id != facts["wandb_id"]
    log.close()
