import torch
from conftest import expect_error
from test_wandb_page import train_step

from config import Config
from observe.run_log import RunLog
from observe.wandb_view import VIEW, make_view
from parallel.process_group import Distributed


def test_a_run_logs_every_metric_of_the_view(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = Config(log_dir=str(tmp_path), run_name="run", peak_tflops=1.0)
    log = RunLog(config, config, Distributed(0, 2, torch.device("cpu")), 1e9)
    log.validation(1, 100, 3.0, seconds=1.0, bits_per_byte=1.25)
    log.hellaswag(1, 100, 0.2, 0.25, items=64, seconds=1.0)
    train_step(log, 1, 2.0, own_ms=[10.0, 11.0], joules=90.0, watts=700.0, sm_mhz=1755.0, celsius=61.0)
    logged = set(log.wandb.run.summary.keys())
    log.close()
    metrics = {metric for panels in VIEW.values() for names in panels.values() for metric in names}
    assert metrics and metrics <= logged


def test_the_view_has_these_panels(command, monkeypatch):
    view = make_view("me", "gpt2", "GPT-2")
    panels = {section.name: {panel.title: tuple(panel.y) for panel in section.panels} for section in view.sections}
    assert panels == VIEW
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    expect_error(command("observe/wandb_view.py"), "wandb cannot save the view", "wandb login")
