"""Stages of blocks on several ranks: the gradients, training, evaluations and checkpoints of one rank."""

import json

import pytest
import torch
from conftest import expect_error, logged, metrics
from test_layouts import assert_same
from texts import make_items

from common.errors import UserError
from config import Config, resolve
from parallel.pipeline import blocks_of_stages
from parallel.place import describe
from parallel.process_group import Distributed

# On every rank a whole model beside the stages. The vocabulary is small, so that the last stage has blocks too
SCRIPT = """
from dataclasses import replace

import torch

from common.device import full_tensor
from common.interrupt import StopSignal
from config import Config
from data.loader import Batch
from model import GPTConfig
from optim.optimizer import update_if_finite
from parallel import fsdp, gradients, process_group
from train_gpt2 import build, train_step

distributed = process_group.start("cpu", pipeline=2)
alone = replace(distributed, rank=0, world_size=1, pipeline=1)
sizes = GPTConfig(seq_len=8, vocab_size=128, n_layer=5, n_head=4, n_embd=32)
config = Config(device="cpu", autocast="off", compile=False, fused_cross_entropy=False, n_layer=5)
config = replace(config, fused_gelu=False, bf16_residual=False, n_embd=32, seq_len=8, warmup_steps=0, lr=1e-3)
config = replace(config, micro_batch_size=2, total_batch_size=64, lr_schedule="constant", cuda_graphs=False)

def full(tensor):
    return full_tensor(tensor.detach())

layers = [[0, 1, 2], [3, 4]]
whole = build(config, alone, sizes=sizes)
stages = build(replace(config, pipeline=2), distributed, sizes=sizes)
own = dict(stages.model.named_parameters())
assert {int(name.split(".")[2]) for name in own if ".h." in name} == set(layers[distributed.rank]), own.keys()
for step in range(10):
    batches = [Batch(x, y, None) for x, y in torch.randint(128, (4, 2, 2, 8))]
    losses = [whole.model(*batch) / 4 for batch in batches]
    sum(losses).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.model.parameters(), 1.0)
    whole.optimizer.step()
    whole.optimizer.zero_grad()
    result = train_step(stages, step, lambda _, batches=iter(batches): next(batches), StopSignal())
    assert result.finite and result.tokens == 64
    expected = [sum(losses).item(), norm.item()]
    torch.testing.assert_close([result.loss, result.grad_norm], expected, rtol=1e-5, atol=0)
for name, weight in whole.model.named_parameters():
    if name in own and not name.endswith("c_attn.bias"):
        torch.testing.assert_close(full(own[name]), weight.detach(), rtol=1e-3, atol=1e-4, msg=name)

x, y, _ = batches[0]
caches = [trainer.model.new_cache() for trainer in (stages, whole)]
with torch.no_grad(), fsdp.gathered(stages.model, config):
    at = torch.tensor([3, 11])
    losses = [trainer.forward(x, y.flatten()[at], reduction="none", at=at) for trainer in (stages, whole)]
    tokens = [[trainer.model(part, cache=cache) for part in (x[:, :5], x[:, 5:6])]
              for trainer, cache in zip((stages, whole), caches)]
torch.testing.assert_close(losses[0], losses[1] * distributed.rank, rtol=1e-4, atol=1e-4)  # rank 1 has the head
torch.testing.assert_close(*tokens, rtol=1e-4, atol=1e-4)

# both copies of the table are the same numbers
tables = distributed.all_gather(full(own["transformer.wte.weight"]))
assert torch.equal(*tables)

# the gradient of one stage is not finite: no stage changes its weights
before = {name: full(weight).clone() for name, weight in own.items()}
stages.model.accumulate(stages, iter(batches).__next__, 4, None)
if distributed.rank == 1:
    own[f"transformer.h.{layers[1][0]}.attn.c_proj.bias"].grad.to_local()[0] = float("inf")
norm = gradients.clip(stages.model, 1.0)
assert not torch.isfinite(norm)
update_if_finite(stages.optimizer, stages.scaler, norm)
assert all(torch.equal(full(own[name]), before[name]) for name in own)
del stages, own

# the losses of a stage in bf16, and no autocast is left on after an evaluation, which is inside one
half = dict(autocast="bf16", bf16_residual=True)
whole = build(replace(config, **half), alone, sizes=sizes)
stages = build(replace(config, **half, pipeline=2), distributed, sizes=sizes)
with torch.no_grad(), fsdp.gathered(stages.model, config), stages.autocast:
    loss = stages.forward(x, y)
assert not torch.is_autocast_enabled("cpu")
with torch.no_grad(), whole.autocast:
    expected = whole.forward(x, y)
torch.testing.assert_close(loss, expected * distributed.rank, rtol=1e-2, atol=0)
process_group.stop()
"""


def test_ten_steps_are_those_of_a_whole_model(command, script):
    done = command(script(SCRIPT), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr


def test_training_and_checkpoints_are_those_of_one_rank(train, train_several, tmp_path):
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in make_items(5)))
    steps = ["--n_layer", 3, "--micro_batch_size", 1, "--total_batch_size", 64, "--mask_documents", "--max_steps"]
    saves = [*steps, 3, "--checkpoint_every", 2]
    flags = "--val_every 3 --val_tokens 64 --sample_every 3 --hellaswag_every 3".split()
    flags = [*saves, *flags, "--tasks", f"hellaswag={tmp_path}/items.jsonl"]
    whole = train("whole", *flags)
    middle = "log/{}/checkpoint_000002".format
    ddp, four, tensor = train_several(
        4,
        dict(
            ddp=[*saves, "--pipeline", 2],
            four=[*flags, "--pipeline", 4, "--resume", middle("whole")],
            tensor=[*steps, 3, "--pipeline", 2, "--tensor", 2],
        ),
    )
    one = train("one", *flags, "--resume", middle("ddp"))
    norms = [[row["grad_norm"] for row in metrics(run) if "lr" in row] for run in (whole, ddp, tensor)]
    for run, own in ((ddp, norms[1]), (tensor, norms[2])):
        assert logged(run) == pytest.approx(logged(whole), abs=1e-5)
        assert own == pytest.approx(norms[0], rel=1e-3)
    for run in (four, one):
        assert_same(run, whole, steps=1)
    samples = [[row["samples"] for row in metrics(run) if "samples" in row] for run in (whole, four, one)]
    assert all(mine == samples[0] and mine for mine in samples)


def resolved(ranks, **flags):
    distributed = Distributed(0, ranks, torch.device("cpu"), flags.get("tensor", 1), pipeline=flags["pipeline"])
    config, _ = resolve(Config(**flags), distributed)
    return describe(config, distributed)


def test_flags_that_do_not_fit_are_refused_in_one_line():
    few = dict(pipeline=2, seq_len=1024, total_batch_size=4096)
    for ranks, flags, words in (
        (
            4,
            dict(pipeline=3),
            "--pipeline 3 does not divide 4 ranks, or groups of --tensor ranks: try one of [1",
        ),
        (8, dict(pipeline=3, tensor=2), "does not divide 4 ranks, or groups of --tensor ranks: try one of [1, 2, 4]"),
        (16, dict(pipeline=16), "--pipeline 16: 12 blocks and the head fill 13 stages"),
        (4, dict(pipeline=2, parallel="zero3"), "--parallel zero3 saves nothing: use zero2"),
        (4, dict(pipeline=2, context=2), "--pipeline excludes --context"),
        (2, dict(pipeline=2, batch_warmup_ratio=0.5), "--pipeline excludes --batch_warmup_ratio"),
        (2, dict(pipeline=2, autocast="fp16"), "needs --parallel ddp, not --pipeline 2"),
        (2, dict(few, micro_batch_size=4), "needs 2 micro-batches or more in a step, not 1: use "),
        (2, dict(few, micro_batch_size=4), "use a smaller --micro_batch_size"),
        (4, dict(few, total_batch_size=2048, micro_batch_size=1), "or a larger --total_batch_size"),
    ):
        with pytest.raises(UserError) as error:
            resolved(ranks, **flags)
        assert words in str(error.value)


def test_stages_are_balanced_by_their_flops():
    def blocks(pipeline, model=(12, 768)):
        n_layer, n_embd = model
        return blocks_of_stages(Config(pipeline=pipeline, n_layer=n_layer, n_embd=n_embd))

    assert blocks(1) == [12]
    assert blocks(2) == [8, 4]  # the head costs as much as 4.5 blocks
    assert blocks(3) == [5, 6, 1]
    assert blocks(4) == [4, 4, 4, 0]
    assert blocks(2, model=(48, 1600)) == [25, 23]
    assert resolved(2, pipeline=2, micro_batch_size=16) == (
        "2 ranks share the blocks, 8 + 4; the bubble is 3.0% of a step; ddp"
    )
    assert resolved(4, pipeline=2, micro_batch_size=16) == (
        "2 ranks share the blocks, 8 + 4; the bubble is 5.9% of a step; ddp"
    )


def test_one_rank_has_no_stages(train):
    expect_error(train("alone", "--pipeline", 2, fails=True), "--pipeline 2 does nothing here: there is one rank")
