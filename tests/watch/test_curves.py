import json
import math
import sys

import pytest
from conftest import expect_error

from common.errors import UserError
from watch import curves


def write_run(folder, steps, hellaswag=True, **facts):
    folder.mkdir(parents=True)
    rows = [dict(step=0, tokens=0, val_loss=10.9)]
    for step in range(steps):
        rate = 900_000 + 30_000 * (step % 10)
        rows.append(
            dict(step=step, tokens=1000 * (step + 1), train_loss=10.0 - step / 10, grad_norm=1.0, tokens_per_sec=rate)
        )
    rows += [dict(step=steps, tokens=1000 * steps, val_loss=5.0, samples=["text"], mfu=None)]
    rows += [dict(step=steps, tokens=1000 * steps, hellaswag_acc_norm=0.25, hellaswag_items=48)] if hellaswag else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "tok')
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The (figure, axes) of what is drawn."""
    figures = []
    real = curves.new_figure
    monkeypatch.setattr(curves, "new_figure", lambda *a, **k: figures.append(real(*a, **k)) or figures[-1])
    return figures


def points(ax):
    return [line.get_xydata().tolist() for line in ax.lines if len(line.get_xydata())]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_the_lines_are_the_logged_values(tmp_path, drawn):
    runs = [write_run(tmp_path / "one", 30, data_dir=r"$a\b$"), write_run(tmp_path / "two", 25, hellaswag=False)]
    (runs[1] / "config.json").write_text('{"dataset": "my/own", "data_dir": "x"}')
    path = curves.draw(runs)
    ((figure, axes),) = drawn
    lines = points(axes["loss"])
    assert lines[0] == [[1000 * (step + 1), pytest.approx(10 - step / 10)] for step in range(30)]
    assert lines[1] == [[0, 10.9], [30_000, 5.0]] and len(lines) == 4
    assert points(axes["hellaswag"])[0] == [[30_000, 0.25]]
    (bar,) = axes["hellaswag"].containers[0].lines[2][0].get_segments()
    assert bar[:, 1].tolist() == pytest.approx([0.25 - 1.96 / 16, 0.25 + 1.96 / 16])
    assert texts(axes["hellaswag"]) == ["GPT-2 124M\n0.2955", "chance\n0.25"]
    assert [len(line) for line in points(axes["speed"])] == [29, 24]  # without the first step, which compiles
    assert [text.get_text() for text in figure.legends[0].texts] == ["one", "two"]
    assert figure.get_suptitle() == "2 runs, on $a\\b$, my/own" and "nats per token" in axes["loss"].get_title("left")
    assert {"0.5", "1", "2"} < {text.get_text() for text in axes["norm"].get_yticklabels()}
    assert path == tmp_path / "curves-one-two.png" and path.read_bytes().startswith(b"\x89PNG")


def test_without_hellaswag_there_are_three_panels(tmp_path, drawn):
    curves.draw([write_run(tmp_path / "run", 30, hellaswag=False)])
    figure, axes = drawn[0]
    assert list(axes) == ["loss", "speed", "norm"] == [name for name, ax in axes.items() if points(ax)]
    assert len(figure.axes) == 3


def test_several_ranks_have_a_heat_map(tmp_path, drawn):
    """How far each is behind the median of the others, step by step; of a resume with fewer ranks what there is. Steps
    on one rank, the first five, are empty."""
    run = write_run(tmp_path / "run", 5)
    times = [[100, 100, 110], [100, 100, 100], [100, 104]]
    rows = [dict(step=step, tokens=1000 * (step + 1), own_ms=own, train_loss=9.0) for step, own in enumerate(times, 5)]
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    curves.draw([run])
    (mesh,) = drawn[0][1]["ranks"].collections
    empty, late = [math.nan] * 5, [100 * (100 / 105 - 1), 0, 100 * (100 / 104 - 1)]
    expected = [empty + late, [*empty, late[0], 0, 4], [*empty, 10, 0, math.nan]]
    assert mesh.get_array().filled(math.nan).tolist() == [pytest.approx(row, nan_ok=True) for row in expected]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [1000 * step for step in range(9)]
    assert drawn[0][1]["ranks"].get_ylim() == (2.5, -0.5)
    curves.draw([run, write_run(tmp_path / "other", 5)])
    assert "ranks" not in drawn[1][1]


def test_one_slow_step_of_a_long_run_is_in_the_heat_map(tmp_path, drawn):
    run = write_run(tmp_path / "run", 5)
    rows = [
        dict(step=step, tokens=1000 * (step + 1), own_ms=[100, 100, 100], train_loss=9.0) for step in range(5, 4000)
    ]
    rows[1995]["own_ms"] = [100, 400, 100]
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    curves.draw([run])
    (mesh,) = drawn[0][1]["ranks"].collections
    assert mesh.get_array().shape == (3, 1000) and mesh.get_coordinates().shape == (4, 1001, 2)
    (column,) = [column for column in range(1000) if mesh.get_array()[1, column] == 300]
    assert mesh.get_coordinates()[0, column : column + 2, 0].tolist() == [2000e3, 2004e3]  # of step 2000


def test_gpt2s_loss_is_drawn_for_its_data_alone(tmp_path, drawn):
    """The dataset decides, not the names of folders."""
    edu = dict(dataset="HuggingFaceFW/fineweb-edu", data_dir="my_data")
    others = dict(dataset=None, data_dir="edu_fineweb10B"), dict(data_dir="edu_fineweb10B"), dict(dataset="my/own")
    runs = [write_run(tmp_path / f"edu_fineweb{i}", 3, **facts) for i, facts in enumerate((edu, edu, *others))]
    for folders in (runs[:2], *([run] for run in runs[2:]), [runs[0], runs[2]]):
        curves.draw(folders)
    marked = [texts(axes["loss"]) for _, axes in drawn]
    assert marked == [["GPT-2 124M\n3.2924"], [], [], [], []]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Call main() in an empty folder with these arguments."""

    def call(*args):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["curves.py", *args])
        curves.main()

    return call


def test_several_runs_have_a_file_of_their_own(command, tmp_path, capsys):
    runs = [write_run(tmp_path / "log" / name, 3) for name in "abcd"]
    command("log/a", "log/b/")
    assert capsys.readouterr().out == "log/curves-a-b.png\n"
    assert (tmp_path / "log/curves-a-b.png").exists() and not (runs[0] / "curves.png").exists()
    assert curves.draw(runs) == tmp_path / "log/curves-4-runs.png"


def test_the_command_and_its_errors(command, tmp_path):
    write_run(tmp_path / "one", 20)
    command("one")
    assert (tmp_path / "one" / "curves.png").exists()
    with pytest.raises(UserError, match="cannot read nothing/metrics.jsonl: .*; give folders of runs, such as log/RUN"):
        command("nothing")
    (tmp_path / "empty").mkdir()
    for content in (b"", b'\xff\xfe{"tokens": 1}\n', b'{"tokens": 1, "val_loss": 2}\n'):
        (tmp_path / "empty" / "metrics.jsonl").write_bytes(content)
        with pytest.raises(UserError, match="nothing is logged"):
            command("empty")


def test_the_report_is_one_file_with_everything(tmp_path, call_main):
    text = "<script>$title {body} & \ud800"
    facts = dict(
        command="train_gpt2.py --lr '<b>'", hardware="H100", world_size=8, finished=False, profile=0, cuda=None
    )
    rolled_back = [dict(step=3, reason="NaN", norms=[dict(layer="block 7")])]
    run = write_run(tmp_path / "a & b", 5, **facts, rolled_back=rolled_back, plan=["recipe  <muon>"])
    (run / "checkpoint_000003").mkdir()
    rows = [dict(step=5, tokens=5000, samples=["old"]), dict(step=5, tokens=5000, samples=[text])]
    for step in range(5, 8):
        row = dict(train_loss=None, tokens_per_sec=9e5, mfu=0.5)
        rows.append(dict(step=step, tokens=5000, **row))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), errors="replace")
    done = call_main("-m", "watch.report", "a & b")
    assert done.stdout == "a & b/report.html\n", done.stderr
    page = (run / "report.html").read_text()
    for part in (
        "<h1>a &amp; b</h1>",
        ">not finished; report of 2",
        "<dt>cuda</dt><dd>–</dd>",
        "--lr &#39;&lt;b&gt;&#39;",
        "&lt;script&gt;$title {body} &amp;",
        "<pre>recipe  &lt;muon&gt;</pre>",
    ):
        assert part in page, part
    for part in ("50.0%</b>MFU", "900,000</b>tokens/sec", "<td>NaN</td>", "<td>block 7</td>"):
        assert part in page, part
    assert "checkpoint_000003</pre>" in page and "<dt>profile</dt><dd>0</dd>" in page and "old" not in page
    assert (run / "curves.png").exists() and 'src="data:image/png;base64,iVBORw0' in page
    for outside in ("<script", "http://", "https://", "<link", "url(", "@import"):
        assert outside not in page
    expect_error(call_main("-m", "watch.report", "none"), "cannot read none/metrics.jsonl")
