import json

import pytest
import torch

from common.errors import UserError
from measure import sweep
from measure.sweep import read_axis


def test_a_sweep_finds_the_best_on_each_number_of_ranks(train):
    """A combination that cannot run has its reason; the others go on."""
    grid = ("gpus=1,2", "parallel=ddp,zero3", "--steps", 1)
    folder = train("grid", *grid, script="measure/sweep.py")
    results = json.loads((folder / "sweep.json").read_text())["results"]
    assert [tuple(r["cell"].values()) for r in results] == [(n, p) for n in (1, 2) for p in ("ddp", "zero3")]
    assert [r["status"] for r in results] == ["done", "skipped", "done", "done"]
    assert results[1]["reason"] == (
        "--parallel zero3 does nothing here: there is one rank (torchrun starts several); leave it out"
    )
    done = [results[i] for i in (0, 2, 3)]
    assert [r["facts"]["world_size"] for r in done] == [1, 2, 2]
    assert [r["facts"]["parallel"] for r in done] == ["ddp", "ddp", "zero3"]
    assert [r["loss"] for r in done] == pytest.approx([done[0]["loss"]] * 3, abs=1e-4)  # ranks divide the same batch
    assert [r["command"].split()[0] for r in done] == ["python", "torchrun", "torchrun"]
    best, _, last = sorted(done, key=lambda r: -r["tokens_per_sec"])
    output = (folder / "output.txt").read_text()
    assert "not used: --checkpoint_every" in output and "--max_steps" in output
    assert f" wins: {best['tokens_per_sec'] / last['tokens_per_sec']:.2f} × the slowest" in output
    assert f"| gpus 1, parallel zero3 | skipped: {results[1]['reason']} |" in (folder / "sweep.md").read_text()
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    # a sweep that was stopped goes on: only the cell that is not done is measured again
    (folder / "02.json").unlink()
    again = train("grid", *grid, script="measure/sweep.py")
    rates = [r.get("tokens_per_sec") for r in json.loads((again / "sweep.json").read_text())["results"]]
    assert [rate == r.get("tokens_per_sec") for rate, r in zip(rates, results)] == [True, True, False, True]


def test_axes():
    assert read_axis("micro_batch_size=8,16") == ("micro_batch_size", [8, 16])
    assert read_axis("compile=on,off") == ("compile", [True, False])
    assert read_axis("lr=1e-3") == ("lr", [1e-3])
    assert read_axis("model=gpt2,gpt2-xl") == ("model", ["gpt2", "gpt2-xl"])
    assert read_axis("gpus=1,2") == ("gpus", [1, 2])
    assert read_axis("parallel=ddp,zero3") == ("parallel", ["ddp", "zero3"])
    for text in (
        "batch=1",
        "flash",
        "flash=",
        "lr=fast",
        "seq_len=1.5",
        "max_steps=5,10",
        "profile=0,2",
        "lr=1,1",
        "parallel=ddp,zero4",
        "gpus=0,1",
        "steps=1,2",
        "no_flash=1",
        "seeds=1,2",
    ):
        with pytest.raises(UserError, match=text):
            read_axis(text)
    with pytest.raises(UserError, match="batch_size=8: --batch_size: there is .* did you mean --micro_batch_size"):
        read_axis("batch_size=8")


def test_bad_sweeps_end_in_one_line(monkeypatch, corpus, tmp_path):
    def error(**flags):
        with pytest.raises(UserError) as caught:
            sweep.sweep(sweep.SweepConfig(data_dir=str(corpus), log_dir=str(tmp_path / "log"), **flags))
        return str(caught.value)

    assert "a sweep needs at least one flag" in error()
    assert "flash=on,perhaps: --flash=perhaps: it must be on or off" in error(axes=("flash=on,perhaps",))
    assert "names a flag twice" in error(axes=("lr=1", "lr=2"))
    assert "--config RUN/flags.yaml" in error(axes=("lr=1,2",), resume="log/x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cuda, but PyTorch sees no such GPU" in error(axes=("lr=1,2",), device="cuda")
    assert not (tmp_path / "log").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it with python" in error(axes=("lr=1,2",))
