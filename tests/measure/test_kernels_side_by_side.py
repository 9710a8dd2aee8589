"""Cross-entropy, GELU and LayerNorm at every level of the device: the same operation, and what its time means."""

import json

import pytest
import torch
from conftest import expect_error

from measure import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = "--tokens 40 --n_embd 24 --vocab_size 301 --repeats 1 --run_name levels".split()
LEVELS = ["eager", "library"] if DEVICE.type == "cpu" else list(kernels.LEVELS["cross_entropy"])


@pytest.mark.gpu(cpu_too=True)
@pytest.mark.parametrize("kernel", kernels.LEVELS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_computes_the_same(monkeypatch, kernel, level):
    if level not in kernels.LEVELS[kernel] or kernels.missing(level, DEVICE):
        pytest.skip("not here")
    monkeypatch.setattr(kernels, "dtype_of_activations", lambda device: torch.float32)
    leaves, others = kernels.make_inputs(kernel, kernels.Flags(tokens=40, n_embd=24, vocab_size=301), DEVICE)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference = dict(
        cross_entropy=torch.nn.functional.cross_entropy,
        gelu=lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        layer_norm=lambda x, weight, bias: torch.nn.functional.layer_norm(x, (24,), weight, bias, 1e-5),
    )[kernel]
    expected = reference(*exact, *others)
    result = kernels.function_of(kernel, level)(*leaves, *others)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    if result.requires_grad:
        gradient = torch.randn_like(expected) if expected.dim() else torch.ones_like(expected)
        expected.backward(gradient)
        result.backward(gradient.to(result.dtype))
        for leaf, other in zip(leaves, exact):
            torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


def test_it_measures_the_levels_of_the_device(command, call_main, tmp_path):
    some = ["--device", "cpu", "--kernel", "gelu", "cross_entropy", "--levels", "eager", "library", "triton"]
    done = command("measure/kernels.py", *SMALL, *some)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "log" / "levels"
    results = json.loads((folder / "kernels.json").read_text())["results"]
    assert [(r["name"], r["level"], r["status"]) for r in results] == [
        *[("gelu", level, "done") for level in ("eager", "library")],
        *[("cross_entropy", level, "done") for level in ("eager", "library")],
        ("cross_entropy", "triton", "skipped"),
    ]
    # float32: GELU's x, y, x, dy, dx; the logits and their gradient
    for result, moved in zip(results, [4 * 5 * 40 * 4 * 24] * 2 + [4 * 2 * 40 * 301] * 2):
        seconds = 1e-3 * (result["forward_ms"] + result["backward_ms"])
        assert result["rate"] * 1e9 * seconds == pytest.approx(moved)
    table = (folder / "kernels.md").read_text()
    assert "| cross_entropy | triton | skipped: it is for GPUs, not cpu |" in table and "float32" in table
    expect_error(call_main("measure/kernels.py", *SMALL, "--kernel", "gelu", "--levels", "triton"), "no operation has")


@pytest.mark.gpu
def test_the_bandwidth_of_a_gpu():
    bandwidth = kernels.memory_bandwidth(torch.device("cuda", 0))
    assert 100 < bandwidth < 20_000
    if "H200" in torch.cuda.get_device_name():
        assert bandwidth == pytest.approx(4800, rel=0.05)  # data sheet
