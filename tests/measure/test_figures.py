import ladder
from measure import figures
from measure.child_run import speed
from measure.to_loss import Curve

FACTS = dict(n_layer=1, n_embd=8, hardware="a GPU", torch="2", world_size=2, dataset=None, data_dir="a/my_data")


def rung(name, rate, gain=None):
    speeds = dict(ms=1.0, tokens_per_sec=rate, mfu=None, peak_gb=1.0, times_first=rate / 1000)
    return dict(rung=name, status="done", loss=9.0, facts=FACTS, gain=gain, **speeds)


def draw(monkeypatch, function, *arguments):
    """The (figure, axes) that a function draws."""
    drawn = []
    real = figures.new_figure
    monkeypatch.setattr(figures, "new_figure", lambda *a, **k: drawn.append(real(*a, **k)) or drawn[-1])
    function(*arguments)
    return drawn[0]


def test_a_ladder_has_rates_and_ratios(tmp_path, monkeypatch):
    results = [rung("baseline", 1000), rung("+ tf32", 2300, dict(ratio=2.3, low=2.29, high=2.31, is_clear=True))]
    results.append(rung("+ flash", 2305, dict(ratio=1.0, low=0.99, high=1.02, is_clear=False)))
    figure, (rates, memory) = draw(monkeypatch, figures.ladder, results, tmp_path / "ladder.png")
    texts = [" ".join(text.get_text().split()) for text in rates.texts]
    assert texts == ["1,000", "2,300 2.300 (2.290–2.310)", "2,305 1.000 (0.990–1.020): not significant"]
    assert [label.get_text() for label in rates.get_yticklabels()] == ["baseline", "+ tf32", "+ flash"]
    assert figure.get_suptitle().endswith("\nGPT-2, n_layer 1, n_embd 8; data: my_data\n2 × a GPU, PyTorch 2")
    rows = [ladder.cells(result, result["rung"]) for result in results]
    assert rows[0] == ["baseline", "1.00", "1,000", "–", "1.00", "", "", "", "9.0000"]
    assert rows[1] == ["+ tf32", "1.00", "2,300", "–", "1.00", "2.300", "2.290–2.310", "2.30", "9.0000"]
    assert rows[2][5:7] == ["1.000 ≈", "0.990–1.020"]


def test_a_heat_map_compares_cells_of_the_same_model(tmp_path, monkeypatch):
    rates = {("gpt2", "ddp"): 600e3, ("gpt2", "zero3"): 300e3, ("gpt2-xl", "ddp"): None, ("gpt2-xl", "zero3"): 50e3}
    results = []
    for (model, parallel), rate in rates.items():
        cell = dict(parallel=parallel, model=model)
        lost = dict(status="skipped", reason="out of memory", cell=cell)
        results.append(rung("", rate) | dict(cell=cell) if rate else lost)
    axes = dict(parallel=["ddp", "zero3"], model=["gpt2", "gpt2-xl"])
    figure, (ax,) = draw(monkeypatch, figures.heat_map, axes, results, tmp_path / "sweep.png")
    assert [text.get_text() for text in ax.texts] == [
        "600,000\n1.00 × the best\n1.0 GB",
        "300,000\n0.50 × the best\n1.0 GB",
        "out of memory",
        "50,000\n1.00 × the best\n1.0 GB",
    ]
    assert "\nGPT-2; data: my_data\n" in figure.get_suptitle()
    assert speed(results[1]) == ["1.00", "300,000", "–", "1.00"] and speed(results[2]) == []


def test_the_target_of_a_time_to_loss_is_named_beside_the_curves(tmp_path, monkeypatch):
    curve = Curve([0, 100, 200], [0.0, 1.0, 2.0], [10.0, 7.0, 6.0])
    results = [dict(status="done", facts=dict(FACTS, dataset="some/data"))]
    path = tmp_path / "to_loss.png"
    figure, (ax,) = draw(monkeypatch, figures.time_to_loss, {"first": [curve]}, 6.0, results, path)
    (text,) = ax.texts
    assert "6.000" in text.get_text() and text.get_position() == (1.01, 6.0)  # in widths of the axes: outside
    assert ax.get_ylabel() == "validation loss, nats per token" and "data: some/data\n" in figure.get_suptitle()
