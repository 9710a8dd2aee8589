import json

import pytest
from conftest import expect_error

import curves
from common.cli import UserError


def write_run(folder, steps, hellaswag=True):
    folder.mkdir()
    rows = [dict(step=0, tokens=0, val_loss=10.9)]
    for step in range(steps):
        rows.append(
            dict(step=step, tokens=1000 * (step + 1), train_loss=10.0 - step / 10, grad_norm=1.0, tokens_per_sec=5)
        )
    rows += [dict(step=steps, tokens=1000 * steps, val_loss=5.0, samples=["text"], mfu=None)]
    rows += [dict(step=steps, tokens=1000 * steps, hellaswag_acc_norm=0.26)] if hellaswag else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "tok')
    return folder


def test_the_lines_are_the_logged_values(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / "one", 30), write_run(tmp_path / "two", 25, hellaswag=False)]
    drawn = []
    real = curves.figures.new_figure
    monkeypatch.setattr(curves.figures, "new_figure", lambda *a, **k: drawn.append(real(*a, **k)) or drawn[-1])
    curves.draw(runs, tmp_path / "curves.png")
    ((figure, ((loss, hellaswag), (speed, norm))),) = drawn
    lines = [line.get_xydata().tolist() for line in loss.lines]
    assert lines[0] == [[step + 1, pytest.approx(10 - step / 10)] for step in range(30)]  # thousand tokens
    assert lines[1] == [[0, 10.9], [30, 5.0]] and lines[-1][0][1] == 3.2924
    assert [line.get_xydata().tolist() for line in hellaswag.lines] == [[[30, 0.26]], [[0, 0.2955], [1, 0.2955]]]
    assert [len(line.get_xydata()) for line in speed.lines] == [29, 24]  # without the first step, which compiles
    assert [text.get_text() for text in figure.legends[0].texts] == ["one", "two"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_some_length_draws_its_curves(tmp_path, capsys):
    curves.draw_own(write_run(tmp_path / "short", 19, hellaswag=False))
    curves.draw_own(write_run(tmp_path / "long", 20, hellaswag=False))
    assert not (tmp_path / "short" / "curves.png").exists() and (tmp_path / "long" / "curves.png").exists()
    curves.draw_own(tmp_path / "gone")
    assert "no curves.png: cannot read" in capsys.readouterr().out


def test_the_command_and_its_errors(command, tmp_path):
    write_run(tmp_path / "one", 20)
    done = command("curves.py", "one", "--out", "figure.png")
    assert done.returncode == 0 and (tmp_path / "figure.png").exists(), done.stderr
    expect_error(command("curves.py", "nothing"), "nothing/metrics.jsonl", "log/RUN")
    expect_error(command("curves.py", "one", "--out", "no/such/folder.png"), "no/such/folder.png")
    expect_error(command("curves.py", "one", "--out", "figure.words"), "figure.words")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="nothing is logged"):
        curves.read(tmp_path / "empty")
