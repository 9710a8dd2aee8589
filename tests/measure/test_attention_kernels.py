"""Every attention kernel of the device side by side."""

import json
import platform

import pytest
import torch
from conftest import expect_error

from common.errors import UserError
from measure import attention, timing

SMALL = "--device cpu --tokens 64 --lengths 16 32 --widths 8 --n_embd 16 --repeats 1 --run_name side_by_side".split()


def test_it_measures_every_kernel_of_the_device(command, call_main, tmp_path):
    done = command("measure/attention.py", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attention: " not in done.stderr  # in a pipe a bar is a line every 30 seconds, and no more
    folder = tmp_path / "log" / "side_by_side"
    results = json.loads((folder / "attention.json").read_text())["results"]
    assert [(r["name"], r["T"]) for r in results] == [
        (name, T) for T in (16, 32) for name in ("written out", "FlashAttention")
    ]
    for result in results:
        seconds = 1e-3 * (result["forward_ms"] + result["backward_ms"])
        # 2 GEMMs forward and 5 backward, each of 2·T·C FLOPs a token, of which causal attention needs half
        assert result["rate"] * 1e12 * seconds == pytest.approx(7 * 64 * result["T"] * 16)
    table = (folder / "attention.md").read_text()
    first = results[0]
    assert f"| written out | 8 | 16 | {first['forward_ms']:.3f} | {first['backward_ms']:.3f} |" in table
    expect_error(call_main("measure/attention.py", *SMALL), "side_by_side exists")
    expect_error(command("measure/attention.py", *SMALL, ranks=2), "start it with python")


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--lengths 48", "each of --lengths must divide --tokens 64, each of --widths --n_embd 16"),
        ("--widths 0", "must divide"),
        ("--widths 7", "must divide"),
    ],
)
def test_what_it_does_not_measure(call_main, flags, complaint):
    expect_error(call_main("measure/attention.py", *SMALL, *flags.split()), complaint)


def test_a_kernel_without_backward_has_the_flops_of_forward(monkeypatch):
    monkeypatch.setattr(attention, "attend", lambda name, qkv, H: qkv.detach().exp())
    flags = attention.Flags(tokens=64, n_embd=16, repeats=1)
    result = attention.measure(flags, torch.device("cpu"), "x", D=8, T=16)
    assert result["backward_ms"] == 0
    assert result["rate"] * 1e9 * result["forward_ms"] == pytest.approx(2 * 64 * 16 * 16)


def test_a_kernel_that_cannot_run_is_a_row_with_its_reason(tmp_path, capsys):
    """Out of memory, a refusal of sizes, a package that does not fit; other errors end the command."""
    errors = dict(large=torch.OutOfMemoryError("x"), wide=UserError("no head of 999"), old=ImportError("no y\nin z"))

    def measure(name, T):
        if name in errors:
            raise errors[name]
        return dict(forward_ms=1.0, backward_ms=0.0, peak_gb=None, rate=2.0)

    def table(*names, **options):
        flags = attention.Flags(log_dir=str(tmp_path), run_name="-".join(names))
        cases = [dict(name=name, T=2048) for name in names]
        timing.time_all("kernels", flags, torch.device("cpu"), cases, measure, "TFLOP/s", 4, "A note", **options)
        return (tmp_path / flags.run_name / "kernels.md").read_text().splitlines()

    assert table("fine", *errors)[2:] == [
        "| fine | 2048 | 1.000 | – | 2 | 50% | – |",
        "| large | 2048 | skipped: out of memory |  |  |  |  |",
        "| wide | 2048 | skipped: no head of 999 |  |  |  |  |",
        "| old | 2048 | skipped: no y |  |  |  |  |",
        "",
        "A note; the limit is 4 TFLOP/s. GB/s are 10^9 bytes, GB 2^30.",
        "",
        f"{platform.machine()} cpu, PyTorch {torch.__version__}.",
    ]
    assert "skipped: no head of 999\n" in capsys.readouterr().out
    assert table("fine", passes=("forward",))[2] == "| fine | 2048 | 1.000 | 2 | 50% | – |"
    errors["broken"] = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        table("broken")
