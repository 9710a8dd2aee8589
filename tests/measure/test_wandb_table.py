import json

from config import Config
from measure.wandb_table import publish
from watch.curves import new_figure


def test_a_ladders_table_and_figure(tmp_path):
    """The table has the columns of all results."""
    folder = tmp_path / "ladder-1"
    folder.mkdir()
    results = [
        dict(rung="baseline", status="done", ms=2.5, facts=dict(lr=1.0)),
        dict(rung="+ tf32", status="skipped", reason="no GPU"),
    ]
    new_figure(2, 2)[0].savefig(folder / "ladder.png")
    publish(Config(wandb="offline"), folder, "ladder", results)
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/ladder/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["rung", "status", "ms", "reason"]
    assert content["data"] == [["baseline", "done", 2.5, None], ["+ tf32", "skipped", None, "no GPU"]]
    assert len(list(folder.glob("wandb/offline-run-*/files/media/images/ladder/*.png"))) == 1
