import ladder
from measure import figures, sweep
from measure.to_loss import Curve

FACTS = dict(n_layer=1, n_embd=8, hardware="a GPU", torch="2", world_size=1)


def rung(name, rate):
    return dict(
        rung=name,
        status="done",
        ms=1.0,
        tokens_per_sec=rate,
        mfu=None,
        spread=0.01,
        peak_gb=1.0,
        mj_per_token=None if name == "baseline" else 1.1749,
        loss=9.0,
        facts=FACTS,
    )


def draw(monkeypatch, function, *arguments):
    """The (figure, axes) that a function draws."""
    drawn = []
    real = figures.new_figure
    monkeypatch.setattr(figures, "new_figure", lambda *a, **k: drawn.append(real(*a, **k)) or drawn[-1])
    function(*arguments)
    return drawn[0]


def test_a_ladder_has_one_unit(tmp_path, monkeypatch):
    results = [rung("baseline", 44_332), rung("+ tf32", 1_167_250)]
    _, (speed, _) = draw(monkeypatch, figures.ladder, results, tmp_path / "ladder.png")
    assert [text.get_text().split()[0] for text in speed.texts] == ["44.3k", "1,167k"]
    assert [label.get_text() for label in speed.get_yticklabels()] == ["baseline", "+ tf32"]
    row = ladder.cells(results[0], results[:1])
    assert row == ["baseline", "1.00", "44,332", "", "1.00", "–", "1.00", "–", "9.0000"]
    row = ladder.cells(results[1], results)
    assert row == ["+ tf32", "1.00", "1,167,250", "26.33", "26.33", "–", "1.00", "1.17", "9.0000"]


def test_a_heat_map_compares_cells_of_the_same_model(tmp_path, monkeypatch):
    rates = {("gpt2", "ddp"): 600e3, ("gpt2", "zero3"): 300e3, ("gpt2-xl", "ddp"): None, ("gpt2-xl", "zero3"): 50e3}
    results = []
    for (model, parallel), rate in rates.items():
        cell = dict(parallel=parallel, model=model)
        lost = dict(status="skipped", reason="out of memory", cell=cell)
        facts = dict(FACTS, world_size=2)
        results.append(rung("", rate) | dict(cell=cell, facts=facts) if rate else lost)
    axes = dict(parallel=["ddp", "zero3"], model=["gpt2", "gpt2-xl"])
    _, (ax,) = draw(monkeypatch, figures.heat_map, axes, results, tmp_path / "sweep.png")
    texts = [text.get_text() for text in ax.texts]
    assert [text.split("\n")[1] for text in texts] == [
        "1.00 × the best",
        "0.50 × the best",
        "memory",
        "1.00 × the best",
    ]
    assert ax.get_title("left").endswith("\nGPT-2; 2 × a GPU, PyTorch 2")
    assert sweep.cells(results[1]) == ["zero3", "gpt2", "1.00", "300,000", "–", "1.00"]
    assert sweep.cells(results[2]) == ["ddp", "gpt2-xl", "skipped: out of memory"]


def test_rates_below_a_thousand_are_not_rounded():
    assert [figures.rate_text(rate, least=812.3) for rate in (812.3, 3412.0)] == ["812", "3,412"]
    assert figures.rate_text(3412.0, least=1000.0) == "3.4k"


def test_the_target_of_a_time_to_loss_is_named_beside_the_curves(tmp_path, monkeypatch):
    curve = Curve([0, 100, 200], [0.0, 1.0, 2.0], [10.0, 7.0, 6.0])
    _, (ax,) = draw(monkeypatch, figures.time_to_loss, {"first": [curve]}, 6.0, FACTS, tmp_path / "to_loss.png")
    (text,) = ax.texts
    assert "6.000" in text.get_text() and text.get_position() == (1.01, 6.0)  # in widths of the axes: outside
