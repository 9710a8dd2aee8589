import subprocess

import pytest
import torch

from model import GPT, GPTConfig
from watch import hardware
from watch.hardware import environment, flops_per_token, peak_memory, peak_tflops

CPU = torch.device("cpu")


def test_flops_of_gpt2():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert flops_per_token(model, 1024) == 6 * 124_439_808 + 12 * 12 * 768 * 1024


def test_environment_and_peaks():
    facts = environment(CPU)
    assert facts["torch"] == torch.__version__ and "cpu" in facts["hardware"]
    assert peak_tflops(CPU) is None
    assert 0.05 < peak_memory(CPU) < 100  # GB


def test_git_commit(tmp_path, monkeypatch):
    """The commit of the repository that contains the code, wherever the command runs."""
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    assert environment(CPU)["git_commit"] is None  # no repository
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert environment(CPU)["git_commit"] is None  # no commit: git prints "HEAD" and fails
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run([*git, "log", "--format=%H"], check=True, capture_output=True, text=True).stdout.strip()
    assert environment(CPU)["git_commit"] == head
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: open("/no/such/program"))
    assert environment(CPU)["git_commit"] is None  # no git


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
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
