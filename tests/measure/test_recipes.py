"""The ladder of training recipes: measure.to_loss."""

import json

import pytest
from conftest import expect_error, logged

from common.errors import UserError
from measure import to_loss
from measure.to_loss import ToLossConfig, choose_recipes


def test_the_ladder_of_recipes_climbs(train, tmp_path):
    flags = ("--seeds", 1, "--max_steps", 8, "--val_tokens", 256)
    drop = "--lr --warmup_steps"  # the rungs set them
    folder = train("recipes", *flags, drop=drop, script="measure/to_loss.py")
    results = json.loads((folder / "to_loss.json").read_text())["results"]
    assert [(r["rung"], r["status"]) for r in results] == [
        ("tuned AdamW", "done"),
        ("tuned Muon", "done"),
        ("fp8, also in the head", "skipped"),
    ]
    assert results[2]["reason"] == "--fp8 does nothing here: this is cpu, not an NVIDIA GPU; leave it out"
    assert [results[i]["facts"]["lr_schedule"] for i in range(2)] == ["cosine", "wsd"]
    assert [results[i]["facts"]["weight_decay"] for i in range(2)] == [0.3, 0.75]
    assert results[1]["facts"]["optimizer"] == "muon" and results[1]["facts"]["warmup_steps"] == 0
    for index, result in enumerate(results[:2], 1):
        run = folder / f"{index:02d}_seed1337"
        assert result["finals"] == pytest.approx([logged(run, "val")[-1]], abs=1e-4)
        assert len(logged(run)) == 8 and len(logged(run, "val")) == 9
    orders = [logged(folder / f"{index:02d}_seed1337")[0] for index in (1, 2)]
    assert orders == [orders[0]] * 2  # the same weights and data
    assert (folder / "to_loss.png").stat().st_size > 10_000
    # a ladder that was stopped goes on: only the run that is not done trains again
    (folder / "02_seed1337.json").unlink()
    before = {path: path.stat().st_mtime for path in folder.glob("*/metrics.jsonl")}
    train("recipes", *flags, "--target_loss", 9.5, drop=drop, script="measure/to_loss.py")
    after = {path: path.stat().st_mtime for path in before}
    assert [path.parent.name for path in before if after[path] != before[path]] == ["02_seed1337"]
    again = json.loads((folder / "to_loss.json").read_text())["results"]
    assert [r["finals"] for r in again[:2]] == [r["finals"] for r in results[:2]]
    table = (folder / "to_loss.md").read_text()
    assert "to a validation loss of 9.5000: " in table
    # a damaged file, also of a later run, ends it before anything is overwritten
    for text in ("{", "[]", ""):
        (folder / "02_seed1337.json").write_text(text)
        done = train("recipes", *flags, drop=drop, script="measure/to_loss.py", fails=True)
        expect_error(done, "cannot read", "recipes/02_seed1337.json", "delete it")
        assert (folder / "to_loss.md").read_text() == table


def test_recipes_of_ones_own(train):
    """Each rung adds to the flags before it; Muon brings its recipe; a rung may have other steps and batches."""
    recipes = ("--recipes", "optimizer=muon lr=2e-3", "mask_documents=on max_steps=12 total_batch_size=64")
    flags = ("--seeds", 1, "--max_steps", 8, "--val_tokens", 256, *recipes)
    folder = train("own", *flags, "--beta2", 0.9, script="measure/to_loss.py")
    first, muon, masked = json.loads((folder / "to_loss.json").read_text())["results"]
    assert [r["rung"] for r in (first, muon, masked)] == ["flags as given", *recipes[1:]]
    assert first["facts"]["optimizer"] == "adamw" and first["facts"]["beta2"] == masked["facts"]["beta2"] == 0.9
    assert muon["facts"]["lr"] == 2e-3 and muon["facts"]["lr_schedule"] == "wsd" and not muon["facts"]["mask_documents"]
    assert masked["facts"]["optimizer"] == "muon" and masked["facts"]["mask_documents"]
    counts = [len(logged(folder / f"{index:02d}_seed1337")) for index in (1, 2, 3)]
    sizes = [result["facts"]["total_batch_size"] for result in (first, muon, masked)]
    assert counts == [8, 8, 12] and sizes == [sizes[0], sizes[0], 64] != [64] * 3
    row = (folder / "to_loss.md").read_text().splitlines()[4]
    assert f"| {masked['finals'][0] - muon['finals'][0]:+.4f} |" in row


def test_bad_recipes_end_in_one_line(corpus, monkeypatch):
    with pytest.raises(UserError, match="--max_steps 3: the first 5 steps"):
        to_loss.climb(to_loss.ToLossConfig(data_dir=str(corpus), max_steps=3))
    with pytest.raises(UserError, match="--max_steps 4: the first 5 steps"):
        to_loss.climb(to_loss.ToLossConfig(data_dir=str(corpus), recipes=("max_steps=4",)))
    monkeypatch.setattr("sys.argv", ["to_loss.py", "--lr", "7e-3", "--fp8"])
    with pytest.raises(UserError, match="leave out --fp8, --lr, which the rungs set, or use --recipes"):
        to_loss.main()
    for texts, complaint in (
        (("lr",), "--recipes 'lr': Missing value for argument '--lr'"),
        (("lr=1e-3,2e-3",), "--lr: could not convert"),
        (("",), "--recipes '': it takes flags of train_gpt2.py, each once"),
        (("lr=1e-3 lr=2e-3",), "each once"),
        (("seed=1",), "seed is the same in all runs"),
        (("tensor=2",), "tensor is the same in all runs"),
        (("fp8=perhaps",), "--fp8=perhaps: it must be on or off"),
        (("fp8=on", "fp8=on"), "a rung twice"),
    ):
        with pytest.raises(UserError, match=complaint):
            choose_recipes(ToLossConfig(recipes=texts))


def test_a_rung_of_another_model_keeps_the_ladders_own_flags():
    recipes = choose_recipes(ToLossConfig(recipes=("model=tiny",)))
    assert recipes == {"flags as given": {}, "model=tiny": dict(model="tiny")}
