import json
import math
import subprocess
from pathlib import Path

import pytest
import torch

from common.cli import UserError
from config import Config
from model import GPT, GPTConfig
from observe import metrics
from observe.metrics import RunLog, duration, environment, flops_per_token, peak_tflops

CPU = torch.device("cpu")


def make_log(tmp_path, **flags):
    config = Config(log_dir=str(tmp_path), run_name="run", wandb="disabled", **flags)
    return RunLog(config, CPU, world_size=2, flops_per_token=1e9)


def test_flops_of_gpt2():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert flops_per_token(model, 1024) == 6 * 124_439_808 + 12 * 12 * 768 * 1024


def test_the_step_line_and_the_files(tmp_path, capsys):
    log = make_log(tmp_path, peak_tflops=10, max_steps=100)
    log.evaluation(0, 0, "val", 10.98765, "validation loss 10.9877", 1.23, val_loss=10.98765)
    log.train_step(
        0, 5000, 10.5, 1e-4, grad_norm=2.5, seconds=0.5, step_tokens=5000, seconds_left=17530, loss_scale=None
    )
    log.evaluation(1, 5000, "hella", 0.25, "HellaSwag 0.25", 1.0, hellaswag_acc=0.2, hellaswag_acc_norm=0.25)
    log.train_step(1, 10000, math.nan, 1e-4, 2.5, 0.5, 5000, None)
    log.close()
    out = capsys.readouterr().out.splitlines()
    # 10,000 tokens a second at 1 GFLOP each, of 2 × 10 TFLOP/s
    assert out[0] == "step     0/100 | validation loss 10.9877 | 1.2 s"
    assert out[1].startswith("step     0/100 | loss 10.500000 | lr 1.0000e-04 | norm 2.5000 | 500.00 ms | 10,000 tok/s")
    assert out[1].endswith(" | MFU 50.0% | 4h52m left")
    folder = tmp_path / "run"
    assert (folder / "log.txt").read_text().splitlines() == [
        "0 val 10.9877",
        "0 train 10.500000",
        "1 hella 0.2500",
        "1 train nan",
    ]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == dict(step=0, tokens=0, val_loss=10.98765)
    assert rows[1]["tokens_per_sec"] == 10000 and rows[1]["mfu"] == 0.5 and rows[1]["step_ms"] == 500
    assert rows[3]["train_loss"] is None  # JSON has no NaN
    facts = json.loads((folder / "config.json").read_text())
    assert facts["torch"] == torch.__version__ and facts["lr"] == 6e-4 and facts["device"] == "auto"


def test_a_finished_run_is_never_overwritten(tmp_path):
    make_log(tmp_path).close()
    with pytest.raises(UserError, match="--run_name"):
        make_log(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--log_dir"):
        make_log(tmp_path / "file")


def test_wandb_offline_needs_no_login_and_keeps_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = RunLog(Config(log_dir=str(tmp_path), run_name="run", wandb="auto"), CPU, 1, 1e9)
    log.train_step(0, 100, 3.0, 1e-4, 1.0, 0.5, 100, None)
    log.evaluation(1, 100, "val", 3.0, "validation loss", 1.0, val_loss=3.0)
    log.samples(1, 100, ["Hello"])
    assert log.wandb is not None and log.where_to_watch().startswith("wandb leet ")
    assert log.wandb.config["lr"] == 6e-4 and "torch" in log.wandb.config
    log.train_step(2, 200, 2.0, 1e-4, 1.0, 0.5, 100, None)
    assert log.wandb.summary["train/loss"] == 2.0 and log.wandb.summary["by_tokens/val_loss"] == 3.0
    log.close()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_a_failing_wandb_does_not_stop_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = RunLog(Config(log_dir=str(tmp_path), run_name="run"), CPU, 1, 1e9)
    run = log.wandb

    def fail(*_, **__):
        raise ConnectionError("gone")

    monkeypatch.setattr(run, "log", fail)
    log.train_step(0, 100, 3.0, 1e-4, 1.0, 0.5, 100, None)
    log.train_step(1, 200, 2.0, 1e-4, 1.0, 0.5, 100, None)
    assert capsys.readouterr().out.count("wandb run failed (ConnectionError: gone)") == 1
    log.close()
    run.finish()
    assert len((tmp_path / "run" / "log.txt").read_text().splitlines()) == 2


def test_wandb_without_a_network_goes_offline(tmp_path, monkeypatch, capsys):
    import wandb

    def no_network(**_):
        raise ConnectionError("no route to host")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", no_network)
    log = RunLog(Config(log_dir=str(tmp_path), run_name="run", wandb="online"), CPU, 1, 1e9)
    assert log.wandb.offline and "wandb online failed (ConnectionError" in capsys.readouterr().out
    log.close()


def test_durations():
    assert [duration(s) for s in (5.9, 190, 17530, 100000)] == ["0m05s", "3m10s", "4h52m", "1d03h"]


def test_environment_and_peaks():
    facts = environment(CPU)
    assert facts["torch"] == torch.__version__ and "cpu" in facts["hardware"]
    assert peak_tflops(CPU) is None


def test_a_repository_without_commits_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "__file__", str(tmp_path / "metrics.py"))
    assert environment(CPU)["git_commit"] is None
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert environment(CPU)["git_commit"] is None  # git says "HEAD" here, and fails


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
    ]
    + [
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA H20", 148),
        ("NVIDIA L40", 181),
        ("T400", None),
        ("NVIDIA GB200", None),
        ("Some GPU", None),
    ],
)
def test_peak_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == peak


def test_a_resumed_run_keeps_its_page_and_repeats_no_line(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = Config(log_dir=str(tmp_path), run_name="run", wandb="auto")
    log = RunLog(config, CPU, 1, 1e9)
    for step in range(4):
        log.evaluation(step, 100 * step, "val", 3.0, "validation loss", 1.0, val_loss=3.0)
        log.train_step(step, 100, 3.0, 1e-4, 1.0, 0.5, 100, None)
    facts = log.facts
    log.close(finished=False)
    with open(tmp_path / "run" / "log.txt", "a") as file:
        file.write("4 tra")  # torn
    for evaluated, evaluations in ((True, [0, 1, 2]), (False, [0, 1])):
        log = RunLog(
            config, CPU, 1, 1e9, tmp_path / "run" / "checkpoint_000002", dict(step=2, evaluated=evaluated, run=facts)
        )
        assert log.wandb.id == facts["wandb_id"]
        lines = [line.split()[:2] for line in (tmp_path / "run" / "log.txt").read_text().splitlines()]
        assert [int(step) for step, stream in lines if stream == "val"] == evaluations
        assert [int(step) for step, stream in lines if stream == "train"] == [0, 1]
        log.close(finished=False)


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    log = make_log(tmp_path)
    with pytest.raises(UserError, match="by another process"):
        make_log(tmp_path)
    log.close(finished=False)


def test_spikes_are_marked(tmp_path, capsys):
    log = make_log(tmp_path)
    for step in range(30):
        log.train_step(step, 100, 3.0 + 0.01 * (step % 2), 1e-4, 1.0, 0.5, 100, None)
    log.train_step(30, 100, 4.0, 1e-4, 1.0, 0.5, 100, None)
    lines = capsys.readouterr().out.splitlines()
    assert "spike" in lines[-1] and not any("spike" in line for line in lines[:-1])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_log_on_a_full_disk_stops_the_run_in_one_line(tmp_path):
    log = make_log(tmp_path)
    log.log_txt = open("/dev/full", "w", buffering=1)
    with pytest.raises(UserError, match="cannot write the log in .*No space left on device.*stopped at step 3"):
        log.train_step(3, 100, 3.0, 1e-4, 1.0, 0.5, 100, None)
