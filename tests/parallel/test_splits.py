"""Runs of the whole program with split layers, sequences or depth have the figures of one rank."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import expect_error, logged, metrics
from test_layouts import assert_same, placed
from texts import make_items
from torch._dynamo.testing import CompileCounter
from updates import assert_same_updates, weights

from config import Config
from parallel import gradients

MIDDLE, STEPS = 2, 3
AT_MIDDLE = f"log/{{}}/checkpoint_{MIDDLE:06d}".format
ON_TWO_RANKS = dict(
    tensor="--tensor 2",
    pipeline="--pipeline 2",
    tensor_to_pipeline=f"--tensor 1 --pipeline 2 --resume {AT_MIDDLE('tensor')}",
    pipeline_to_pipeline=f"--pipeline 2 --resume {AT_MIDDLE('pipeline')}",
)
# with a mode that divides the data or the weights
ON_FOUR_RANKS = dict(
    tensor_zero2="--tensor 2 --parallel zero2",
    context_hsdp="--context 2 --parallel hsdp",
    pipeline_zero2="--pipeline 2 --parallel zero2",
)
WITH_NORMUON = dict(normuon_context="--context 2", normuon_pipeline="--pipeline 2", normuon_tensor="--tensor 2")
NORMUON_ON_FOUR_RANKS = dict(
    normuon_tensor_zero3=f"--tensor 2 --parallel zero3 --resume {AT_MIDDLE('normuon_tensor')}",
    normuon_tensor_pipeline=f"--tensor 2 --pipeline 2 --resume {AT_MIDDLE('whole_normuon')}",
)


def test_figures_checkpoints_and_exports(train, train_several, command, tmp_path, call_main):
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in make_items(2)))
    (tmp_path / "last_words.jsonl").write_text(
        "".join(json.dumps(dict(text=item["ctx"] + " end")) + "\n" for item in make_items(3))
    )
    steps = "--n_layer 3 --micro_batch_size 1 --total_batch_size 64 --mask_documents "
    steps += f"--max_steps {STEPS} --checkpoint_every {MIDDLE}"
    evaluations = f"--val_every {STEPS} --val_tokens 64 --hellaswag_every {STEPS}"
    flags = [*steps.split(), *evaluations.split()]
    flags += ["--tasks", f"hellaswag={tmp_path}/items.jsonl,lambada={tmp_path}/last_words.jsonl"]  # which needs logits
    normuon = [*steps.split(), "--optimizer", "normuon"]
    whole, whole_normuon = train("whole", *flags), train("whole_normuon", *normuon)
    of_two = {name: [*flags, *more.split()] for name, more in ON_TWO_RANKS.items()}
    with_normuon = {name: [*normuon, *more.split()] for name, more in WITH_NORMUON.items()}
    of_four = {name: [*flags, *more.split()] for name, more in ON_FOUR_RANKS.items()}
    runs = train_several(2, of_two | with_normuon)
    of_four |= {name: [*normuon, *more.split()] for name, more in NORMUON_ON_FOUR_RANKS.items()}
    runs += train_several(4, of_four, machines=2)
    for run in [run for run in runs if run.name.startswith("normuon")]:
        losses = logged(run)
        assert len(losses) in (STEPS - MIDDLE, STEPS)
        assert losses == pytest.approx(logged(whole_normuon)[-len(losses) :], abs=1e-4)
        assert_same_updates(run, whole_normuon, whole_normuon / f"checkpoint_{MIDDLE:06d}", STEPS)
    for run in [run for run in runs if not run.name.startswith("normuon")]:
        assert_same(run, whole, steps=STEPS - MIDDLE if "_to_" in run.name else STEPS)
        of_both = [[row["lambada_perplexity"] for row in metrics(r) if "lambada_acc" in row] for r in (run, whole)]
        assert of_both[0][-1] == pytest.approx(of_both[1][-1], rel=1e-3)

    def final(name):
        return tmp_path / "log" / name / f"checkpoint_{STEPS:06d}"

    expected = weights(final("pipeline"))
    assert command("export.py", final("pipeline"), "exported").returncode == 0
    # a resumed run is the uninterrupted one, bit by bit
    for folder in (tmp_path / "exported", final("pipeline_to_pipeline")):
        for name, weight in weights(folder).items():
            assert torch.equal(weight, expected[name]), name
    piece = next(final("pipeline").glob("shard-00001-*"))
    piece.write_bytes(piece.read_bytes()[:-1] + b"x")
    expect_error(call_main("sample.py", final("pipeline")), "is damaged: shard-00001-", "is not what was written")


# the targets of the ranks of context and tensor are a graph of their own; hooks of FSDP's units separate embeddings,
# blocks (one graph) and head
@pytest.mark.parametrize(
    "flags, graphs",
    [
        (dict(context=2), 2),
        (dict(context=2, parallel="zero3"), 2),
        (dict(context=2, parallel="hsdp"), 4),
        (dict(tensor=2), 4),
    ],
)
def test_all_of_a_split_model_is_compiled(two_ranks, flags, graphs):
    groups = {name: size for name, size in flags.items() if name != "parallel"}
    model = placed(7, replace(two_ranks, **groups), **flags)
    torch.compiler.reset()
    count = CompileCounter()
    forward = torch.compile(model, backend=count, dynamic=False)
    with gradients.accumulation(SimpleNamespace(model=model, train_forward=forward, config=Config(**flags)), last=True):
        forward(*torch.randint(50257, (2, 2, 32))).backward()
    assert count.frame_count == graphs
