"""Every operation at every level of the device: the same result, and what its time means."""

import json
from functools import partial
from typing import get_args

import pytest
import torch
from conftest import expect_error

from measure import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = "--tokens 40 --n_embd 24 --vocab_size 301 --repeats 1 --run_name levels".split()
LEVELS = ["eager", "library", "chunked"] if DEVICE.type == "cpu" else get_args(kernels.Level)


@pytest.mark.gpu(cpu_too=True)
@pytest.mark.parametrize("kernel", kernels.LEVELS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_computes_the_same(monkeypatch, kernel, level):
    if level not in kernels.LEVELS[kernel] or kernels.missing(level, DEVICE) or level == "quack":  # in 16 bits alone
        pytest.skip("not here")
    if level != "cuda":  # which is for bf16
        monkeypatch.setattr(kernels, "dtype_of_activations", lambda device: torch.float32)
    kernels.check(kernels.Flags(tokens=40, n_embd=24, vocab_size=301), DEVICE, kernel, level)


def test_gelu_in_triton(monkeypatch):
    """On a CPU in Triton's interpreter; a wrong gradient is found."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "dtype_of_activations", lambda device: torch.float32)
    check = partial(kernels.check, kernels.Flags(tokens=40, n_embd=24), DEVICE, "gelu", "triton")
    check()
    monkeypatch.setitem(kernels.LEVELS["gelu"], "triton", lambda x: x * torch.sigmoid(1.702 * x).detach())
    with pytest.raises(AssertionError, match="not close"):
        check()


def test_it_measures_the_levels_of_the_device(command, call_main, tmp_path):
    some = ["--device", "cpu", "--kernel", "gelu", "cross_entropy", "--levels", "eager", "library", "cuda"]
    done = command("measure/kernels.py", *SMALL, *some)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "log" / "levels"
    results = json.loads((folder / "kernels.json").read_text())["results"]
    assert [(r["name"], r["level"], r["status"]) for r in results] == [
        *[("gelu", level, "done") for level in ("eager", "library")],
        ("gelu", "cuda", "skipped"),
        *[("cross_entropy", level, "done") for level in ("eager", "library")],
    ]
    # float32: GELU's x, y, x, dy, dx; the logits and their gradient
    done = [r for r in results if r["status"] == "done"]
    for result, moved in zip(done, [4 * 5 * 40 * 4 * 24] * 2 + [4 * 2 * 40 * 301] * 2):
        seconds = 1e-3 * (result["forward_ms"] + result["backward_ms"])
        assert result["rate"] * 1e9 * seconds == pytest.approx(moved)
    table = (folder / "kernels.md").read_text()
    assert "| gelu | cuda | skipped: CUDA C++ is for NVIDIA GPUs, not cpu |" in table and "float32" in table
    expect_error(call_main("measure/kernels.py", *SMALL, "--kernel", "layer_norm", "--levels", "cuda"), "no operation")


def test_the_head_has_flops(call_main, tmp_path):
    flags = [*SMALL, "--device", "cpu", "--kernel", "head"]
    assert call_main("measure/kernels.py", *flags, "--levels", "library", "chunked", "liger").returncode == 0
    *done, liger = json.loads((tmp_path / "log" / "levels" / "kernels.json").read_text())["results"]
    assert liger["status"] == "skipped"
    for result in done:
        seconds = 1e-3 * (result["forward_ms"] + result["backward_ms"])
        assert result["rate"] * 1e12 * seconds == pytest.approx(3 * 2 * 40 * 24 * 301)
    assert ", liger-kernel " in (tmp_path / "log" / "levels" / "kernels.md").read_text()
    expect_error(call_main("measure/kernels.py", *flags, "gelu"), "time it alone")


@pytest.mark.gpu
def test_the_bandwidth_of_a_gpu():
    bandwidth = kernels.memory_bandwidth(torch.device("cuda", 0))
    assert 100 < bandwidth < 20_000
    if "H200" in torch.cuda.get_device_name():
        assert bandwidth == pytest.approx(4800, rel=0.05)  # data sheet
