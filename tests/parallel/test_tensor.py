"""Ranks that split every layer: the gradients, training, evaluations and checkpoints of one rank."""

import json

import pytest
import torch
from conftest import expect_error, metrics
from test_layouts import assert_same
from texts import make_items
from updates import weights

from common.errors import UserError
from config import Config, resolve
from parallel.place import describe
from parallel.process_group import Distributed

# On every rank a whole model beside the split one
SCRIPT = """
from dataclasses import replace

import torch

from common.device import full_tensor
from config import Config
from model import GPTConfig
from parallel import fsdp, gradients, process_group, tensor
from train_gpt2 import build

distributed = process_group.start("cpu", tensor=2)
sizes = GPTConfig(seq_len=8, n_layer=2, n_head=4, n_embd=32)
config = Config(device="cpu", autocast="off", compile=False, fused_cross_entropy=False, tensor=2)
config = replace(config, fused_gelu=False, bf16_residual=False, cuda_graphs=False)
split = build(config, distributed, sizes=sizes)
alone = replace(distributed, rank=0, world_size=1, tensor=1)
whole = build(replace(config, tensor=1), alone, sizes=sizes)

x, y = torch.randint(sizes.vocab_size, (2, 3, 8))
y[0, 2:5] = -1  # without a loss
for trainer in (split, whole):
    for last in (False, True):
        with gradients.accumulation(trainer, last):
            trainer.train_forward(x, y).backward()
for (name, own), (_, expected) in zip(split.model.named_parameters(), whole.model.named_parameters(), strict=True):
    for kind, tensors in (("", (own, expected)), ("gradient of ", (own.grad, expected.grad))):
        found = full_tensor(tensor.in_gpt2_order(name, tensors[0].detach()))
        torch.testing.assert_close(found, tensors[1], rtol=1e-4, atol=1e-7, msg=kind + name)
assert tensor.in_gpt2_order("c_proj.bias", own) is own

at = torch.tensor([3, 11, 20])
with torch.no_grad(), fsdp.gathered(split.model, config):
    caches = [trainer.model.new_cache() for trainer in (split, whole)]
    for arguments in (
        (dict(idx=x, targets=y, reduction="none"),) * 2,
        (dict(idx=x, targets=y.flatten()[at], reduction="none", at=at),) * 2,
        (dict(idx=x[:, :5]),) * 2,
        tuple(dict(idx=x[:, :5], cache=cache) for cache in caches),
        tuple(dict(idx=x[:, 5:6], cache=cache) for cache in caches),
    ):
        own, expected = (trainer.model(**each) for trainer, each in zip((split, whole), arguments))
        torch.testing.assert_close(own, expected)
del split, whole, trainer
process_group.stop()
"""


def test_gradients_losses_and_logits_are_those_of_a_whole_model(command, script):
    done = command(script(SCRIPT), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr


def test_training_and_checkpoints_are_those_of_one_rank(train, train_several, command, tmp_path):
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in make_items(5)))
    flags = "--max_steps 3 --checkpoint_every 2 --val_every 3 --val_tokens 64 --hellaswag_every 3".split()
    flags += ["--n_layer", 1, "--n_head", 4, "--mask_documents", "--tasks", f"hellaswag={tmp_path}/items.jsonl"]
    with_samples = [*flags, "--sample_every", 3]
    whole = train("whole", *with_samples)
    middle = "log/{}/checkpoint_000002".format
    flags_of_two = [*flags, "--tensor", 2]
    two, again = train_several(
        2, dict(two=[*with_samples, "--tensor", 2], again=[*flags_of_two, "--resume", middle("two")])
    )
    more = dict(
        ddp=["--tensor", 2, "--activation_checkpointing", "selective"],
        zero3=["--tensor", 2, "--parallel", "zero3", "--resume", middle("whole"), "--micro_batch_size", 2],
    )
    ddp, zero3 = train_several(4, {name: [*flags, *more[name]] for name in more})
    one = train("one", *flags, "--resume", middle("ddp"))
    for run in (two, ddp):
        assert_same(run, whole, steps=3)
    for run in (zero3, one):
        assert_same(run, whole, steps=1)
    samples = [[row["samples"] for row in metrics(run) if "samples" in row] for run in (whole, two)]
    assert samples[0] == samples[1] and len(samples[0]) == 1
    assert command("export.py", middle("ddp"), "exported").returncode == 0
    for found, expected in ((again, two), (tmp_path / "exported", tmp_path / middle("ddp"))):  # bit for bit
        expected = weights(expected)
        for name, weight in weights(found).items():
            assert torch.equal(weight, expected[name]), name


def resolved(ranks, machine=None, **flags):
    distributed = Distributed(0, ranks, torch.device("cpu"), flags["tensor"], ranks_of_machine=machine or ranks)
    config, notes = resolve(Config(**flags), distributed)
    return describe(config, distributed), "\n".join(map(str, notes))


def test_flags_that_do_not_fit_are_refused_in_one_line():
    for ranks, flags, words in (
        (5, dict(tensor=5), "--tensor 5 does not divide 12 attention heads: try one of [1, 2, 3, 4, 6, 12]"),
        (2, dict(tensor=2, model="gpt2-xl"), "25 attention heads: try one of [1, 5, 25]"),
        (4, dict(tensor=3), "--tensor 3 does not divide 4 ranks: try one of [1, 2, 4]"),
        (2, dict(tensor=2, pad_vocab=False), "needs --pad_vocab"),
        (2, dict(tensor=2, autocast="fp16"), "needs --parallel ddp, not --tensor 2"),
        (8, dict(tensor=2, parallel="hsdp", machine=6), "ranks of a machine do not divide 4"),
    ):
        with pytest.raises(UserError) as error:
            resolved(ranks, **flags)
        assert words in str(error.value)


def test_the_plan_describes_the_mesh():
    assert resolved(2, tensor=2)[0] == "2 ranks split every layer; ddp"
    assert resolved(4, tensor=2)[0] == "2 ranks split every layer; ddp"
    words, notes = resolved(12, tensor=3, parallel="hsdp", machine=6)
    assert words == "3 ranks split every layer; hsdp, 2 copies on 2 ranks each"
    assert "so every rank holds the whole residual stream" in notes
    for mode in ("zero2", "hsdp"):
        notes = resolved(2, tensor=2, parallel=mode)[1]
        assert notes.count(f"parallel is {mode}: ") == 1 and "nothing is sharded" in notes


def test_one_rank_splits_nothing(train):
    expect_error(train("alone", "--tensor", 2, fails=True), "--tensor 2 does nothing here: there is one rank")
