import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from common.cli import ROOT
from measure import hardware as roofline
from model import GPT, GPTConfig
from watch import hardware
from watch.hardware import environment, flops_per_token, mfu, peak_flops, peak_memory

CPU = torch.device("cpu")


def test_flops_of_gpt2():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert flops_per_token(model, 1024) == 6 * 124_439_808 + 12 * 12 * 768 * 1024


def test_environment_and_memory():
    facts = environment(CPU)
    assert facts["torch"] == torch.__version__ and "cpu" in facts["hardware"]
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
    (tmp_path / "code.py").write_text("")
    subprocess.run([*git, "add", "code.py"], check=True)
    dirty = environment(CPU)
    assert dirty["git_commit"] == f"{head}-dirty"
    (tmp_path / "code.py").write_text("x = 1\n")
    again = environment(CPU)
    assert again["git_commit"] == dirty["git_commit"] and again["code_sha256"] != dirty["code_sha256"]
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: open("/no/such/program"))
    assert environment(CPU)["git_commit"] is None  # no git


def test_gpu_facts_by_nvidia_smi(tmp_path, monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpu_facts(hardware.ask_nvidia_smi(gpu)) is None  # no such program
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ $1 = --id=GPU-1234 ] && echo "580.1, 700, 612, 61, 1605, 2619, 1980, 2619"\n')
    program.chmod(0o755)
    facts = hardware.gpu_facts(hardware.ask_nvidia_smi(gpu))
    assert facts["driver_version"] == "580.1" and facts["clocks.sm"] == "1605" and facts["clocks.max.mem"] == "2619"
    program.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert hardware.gpu_facts(hardware.ask_nvidia_smi(gpu)) is None
    assert hardware.gpu_facts(hardware.ask_nvidia_smi(CPU)) is None


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB300", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Quadro RTX 6000", None),
        ("T400", None),
        ("Some GPU", None),
    ],
)
def test_peak_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == 1e12 * (peak or 0)


def test_mfu():
    assert mfu(10_000, flops_per_token=1e9, peak_flops=2e13) == 0.5
    assert mfu(10_000, flops_per_token=1e9, peak_flops=peak_flops(CPU)) is None


def test_the_roofline_of_a_step(call_main):
    """On the H200 that it is fitted to, and within 5% on an H100, which has less bandwidth."""
    rates = {gpu: roofline.tokens_per_second(gpu) for gpu in roofline.CARDS}
    cards = {gpu: json.loads((ROOT / f"dev/records/cards/{gpu.lower()}.json").read_text()) for gpu in ("H100", "H200")}
    assert rates["H200"] == pytest.approx(cards["H200"]["tokens_per_second"], rel=0.002)
    assert rates["H100"] == pytest.approx(cards["H100"]["tokens_per_second"], rel=0.05)
    done = call_main("-m", "measure.hardware")
    assert "| A100 | 19.5 | 156 | 312 |  | 80 | 2,039 | 600 | 206,000 | 156,468 MPT-125M, 231" in done.stdout
