"""Every attention kernel of the device side by side."""

import json

import pytest
import torch
from conftest import expect_error
from test_figures import FACTS, draw

from kernels.documents import NO_BOUNDARIES, Documents, find_hidden
from measure import attention, figures

SMALL = "--device cpu --tokens 64 --lengths 16 32 --widths 8 --n_embd 16 --repeats 1 --run_name side_by_side".split()


def test_it_measures_every_kernel_of_the_device(command, call_main, tmp_path):
    done = command("measure/attention.py", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "log" / "side_by_side"
    results = json.loads((folder / "attention.json").read_text())["results"]
    assert [(r["name"], r["T"]) for r in results] == [
        (name, T) for T in (16, 32) for name in ("written out", "FlashAttention")
    ]
    for result in results:
        seconds = 1e-3 * (result["forward_ms"] + result["backward_ms"])
        # 2 GEMMs forward and 5 backward, each of 2·T·C FLOPs a token, of which causal attention needs half
        assert result["tflops"] * 1e12 * seconds == pytest.approx(7 * 64 * result["T"] * 16)
    table = (folder / "attention.md").read_text()
    first = results[0]
    assert f"| written out | 8 | 16 | {first['forward_ms']:.3f} | {first['backward_ms']:.3f} |" in table
    assert (folder / "attention.png").stat().st_size > 1000
    expect_error(call_main("measure/attention.py", *SMALL), "side_by_side exists")
    expect_error(command("measure/attention.py", *SMALL, ranks=2), "start it with python")


def test_within_documents():
    """All kernels get the same documents, and compute what --mask_documents computes."""
    flags, cpu = attention.Flags(tokens=64, n_embd=16, repeats=1, documents=8), torch.device("cpu")
    results = [attention.measure(name, 8, 32, flags, cpu) for name in attention.candidates(cpu, flags)]
    assert results[0]["share"] == results[1]["share"] < 0.9
    starts = torch.rand(2, 32) < 0.2
    documents = Documents(find_hidden(starts, True))
    qkv = torch.randn(2, 32, 48)
    written_out, fused = (attention.attend(name, qkv, 2, documents) for name in attention.candidates(cpu, flags))
    torch.testing.assert_close(written_out, fused)
    assert not torch.allclose(written_out, attention.attend("written out", qkv, 2, NO_BOUNDARIES))


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--lengths 48", "--tokens 64 is not a multiple of 48"),
        ("--widths 0", "at least 1"),
        ("--widths 7", "--n_embd"),
        ("--documents=-1", "--documents -1"),
    ],
)
def test_what_it_does_not_measure(call_main, flags, complaint):
    expect_error(call_main("measure/attention.py", *SMALL, *flags.split()), complaint)


def test_out_of_memory_is_a_row_and_a_cross(tmp_path, monkeypatch):
    done = dict(name="written out", D=64, status="done", forward_ms=1.0, backward_ms=2.0, peak_gb=5.0, facts=FACTS)
    failed = dict(name="written out", D=64, T=2048, status="skipped", reason="out of memory", facts=FACTS)
    results = [done | dict(T=512), done | dict(T=1024), failed, failed | dict(T=4096)]
    _, axes = draw(monkeypatch, figures.attention, results, tmp_path / "attention.png")
    for ax, last in zip(axes, (3.0, 5.0)):
        (cross,) = [line for line in ax.lines if line.get_marker() == "x"]
        assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (2048, 2 * last)
    flags = attention.Flags(tokens=4096)
    row = done | dict(T=512, tflops=1.0, of_roof=0.5)
    assert "| written out | 64 | 2,048 | out of memory |" in attention.markdown([row, failed], flags)
    assert attention.cells(failed) == ["written out", "64", "2,048", "out of memory"]
