"""`transformers` and EleutherAI's lm_eval read what export.py writes."""

import json

import pytest
import torch
import yaml
from conftest import ALONE, expect_error
from test_hellaswag import tiny as tiny_gpt2
from texts import make_items
from transformers import AutoModelForCausalLM

from checkpoints import hugging_face
from checkpoints.run_folder import TRAINING
from common.files import digest, json_digest, write_json
from data.tasks import read_hellaswag
from hellaswag import Tasks

TASK = """
task: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {validation: ITEMS}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{ctx}}"
doc_to_target: "{{label}}"
doc_to_choice: endings
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_the_export_has_no_training_state(command, call_main, tmp_path):
    model = tiny_gpt2()
    (tmp_path / "checkpoint_000003").mkdir()
    hugging_face.write(model, tmp_path / "checkpoint_000003")
    (tmp_path / "checkpoint_000003" / "optimizer.safetensors").write_bytes(b"large")
    (tmp_path / "some" / "where.unfinished").mkdir(parents=True)  # of somebody else, who keeps it
    (tmp_path / "some" / "where.unfinished" / "notes").write_text("")
    done = command("export.py", "checkpoint_000003", "some/where")
    assert done.returncode == 0 and "from_pretrained" in done.stdout, done.stderr
    names = {path.name for path in (tmp_path / "some" / "where").iterdir()}
    assert names == {"config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer_config.json"}
    assert [path.name for path in (tmp_path / "some").rglob("*unfinished*/*")] == ["notes"]
    assert len(list((tmp_path / "some").iterdir())) == 2
    where = json.loads((tmp_path / "some" / "where" / "tokenizer_config.json").read_text())
    assert where["model_max_length"] == model.config.seq_len
    x = torch.randint(50257, (2, 64))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "some" / "where").eval()
    torch.testing.assert_close(theirs(x).logits, model(x), rtol=1e-4, atol=1e-3)
    (tmp_path / "file").write_text("")
    expect_error(call_main("export.py", "checkpoint_000003", "file/out"), "cannot write file/out")


def test_lm_eval_computes_the_same_accuracy(command, tmp_path):
    """acc only: lm_eval's acc_norm divides by bytes."""
    import lm_eval  # slow to import
    from lm_eval.tasks import TaskManager

    model, rows = tiny_gpt2(), [row | dict(endings=(row["endings"] * 2)[:4]) for row in make_items(12)]
    (tmp_path / "c").mkdir()
    hugging_face.write(model, tmp_path / "c")
    assert command("export.py", "c", "out").returncode == 0
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.replace("ITEMS", str(tmp_path / "items.jsonl")))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'out'},dtype=float32",
        tasks=["multiple_choice"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    tasks = Tasks(dict(hellaswag=[*map(read_hellaswag, rows)]), 64, 1000)
    acc = tasks.evaluate(lambda batch, at: model(*batch, reduction="none", at=at), ALONE)["hellaswag"]["acc"]
    assert results["results"]["multiple_choice"]["acc,none"] == pytest.approx(acc) and 0 < acc < 1


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a run that has facts and evaluations."""
    facts = dict(dataset="HuggingFaceFW/fineweb-edu", data_dir="/data/edu", world_size=8, hardware="NVIDIA H100")
    facts |= dict(
        tasks="lambada=/data/words.jsonl",
        torch="2.15.0",
        cuda=None,
        init_from="scratch",
        command="train_gpt2.py --lr 1e-3",
        finished=True,
    )
    training = dict(step=3, tokens=3000, run=facts)
    folder = tmp_path / "log" / "run" / "checkpoint_000003"
    folder.mkdir(parents=True)
    (folder.parent / "config.json").write_text(json.dumps(facts))
    rows = [dict(step=2, tokens=2000, val_loss=9.0), dict(step=3, tokens=3000, val_loss=3.25)]
    scores = dict(hellaswag_acc=0.25, hellaswag_acc_norm=0.3, hellaswag_items=10042)
    scores |= dict(lambada_acc=0.5, lambada_perplexity=9.5, lambada_items=7)
    rows += [dict(step=3, tokens=3000, **scores)]
    (folder.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hugging_face.write(tiny_gpt2(), folder)
    hashes = {name: digest(folder / name) for name in ("config.json", "model.safetensors")}
    training["sha256"] = hashes | {TRAINING: json_digest(training | dict(sha256=hashes))}
    write_json(folder / TRAINING, training)
    return folder


def test_a_model_card_has_the_facts_of_the_run(call_main, checkpoint, tmp_path):
    done = call_main("export.py", "log/run", "b", "--license", "mit")
    assert done.returncode == 0 and "hf upload USER/b b --private" in done.stdout, done.stderr
    head, text = (tmp_path / "b" / "README.md").read_text().removeprefix("---\n").split("\n---\n")
    card = yaml.safe_load(head)
    assert card["license"] == "mit" and card["datasets"] == "HuggingFaceFW/fineweb-edu"
    values = {m["type"]: m["value"] for result in card["model-index"][0]["results"] for m in result["metrics"]}
    scores = dict(hellaswag_acc=0.25, hellaswag_acc_norm=0.3, lambada_acc=0.5, lambada_perplexity=9.5)
    assert values == scores | dict(val_loss=3.25) and "- words.jsonl, lambada_acc: 0.5000 (7 items)" in text
    assert "fineweb-edu; 3,000 tokens in 3 steps" in text and "8 × NVIDIA H100; torch 2.15.0" in text
    assert "`train_gpt2.py --lr 1e-3`" in text and "/data" not in text
