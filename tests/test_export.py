"""`transformers` and EleutherAI's lm_eval read what export.py writes."""

import json

import pytest
import torch
from conftest import expect_error
from test_hellaswag import ALONE, make_items
from test_hellaswag import tiny as tiny_gpt2
from transformers import AutoModelForCausalLM

from checkpoints import hugging_face
from hellaswag import MultipleChoice

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

    model, items = tiny_gpt2(), [item | dict(endings=(item["endings"] * 2)[:4]) for item in make_items(12)]
    (tmp_path / "c").mkdir()
    hugging_face.write(model, tmp_path / "c")
    assert command("export.py", "c", "out").returncode == 0
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "task.yaml").write_text(TASK.replace("ITEMS", str(tmp_path / "items.jsonl")))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'out'},dtype=float32",
        tasks=["multiple_choice"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    acc, _ = MultipleChoice(items, 64, 1000).evaluate(lambda batch, at: model(*batch, reduction="none", at=at), ALONE)
    assert results["results"]["multiple_choice"]["acc,none"] == pytest.approx(acc) and 0 < acc < 1
