"""Ranks that split every sequence: the losses, gradient norms, evaluations and checkpoints of one rank."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import metrics
from test_layouts import assert_same
from texts import make_items

from common.errors import UserError
from config import Config, resolve
from model import GPT, GPTConfig
from optimizations import saved_operators
from parallel import context
from parallel.activation_checkpointing import checkpoint_activations
from parallel.memory import bytes_of_activations
from parallel.place import describe
from parallel.process_group import Distributed


def test_training_evaluations_and_checkpoints_are_those_of_one_rank(train, train_several, tmp_path):
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in make_items(5)))
    flags = "--max_steps 3 --checkpoint_every 2 --val_every 3 --val_tokens 64 --hellaswag_every 3".split()
    flags += ["--n_layer", 1, "--n_head", 6, "--n_embd", 48, "--micro_batch_size", 2, "--mask_documents"]
    flags += ["--tasks", f"hellaswag={tmp_path}/items.jsonl"]
    with_samples = [*flags, "--sample_every", 3]
    whole = train("whole", *with_samples)
    middle = "log/{}/checkpoint_000002".format
    flags_of_two = [*flags, "--context", 2]
    zero3 = ["--parallel", "zero3", "--micro_batch_size", 1, "--resume", middle("whole")]
    two, zero3 = train_several(2, dict(two=[*with_samples, "--context", 2], zero3=[*flags_of_two, *zero3]))
    more = dict(
        ddp=["--activation_checkpointing", "selective"],
        # --tensor leaves 3 of the 6 heads, of which the ranks have 2 and 1
        tensor=["--tensor", 2, "--activation_checkpointing", "full", "--resume", middle("two")],
    )
    ddp, split = train_several(4, {name: [*flags_of_two, *more[name]] for name in more})
    one = train("one", *flags, "--resume", middle("ddp"))
    for run in (two, ddp):
        assert_same(run, whole, steps=3)
    for run in (zero3, split, one):
        assert_same(run, whole, steps=1)
    samples = [[row["samples"] for row in metrics(run) if "samples" in row] for run in (whole, two)]
    assert samples[0] == samples[1] and len(samples[0]) == 1


def resolved(ranks, **flags):
    split = (flags.get("tensor", 1), flags["context"]) if ranks > 1 else ()
    distributed = Distributed(0, ranks, torch.device("cpu"), *split)
    config, notes = resolve(Config(**flags), distributed)
    return describe(config, distributed), "\n".join(map(str, notes))


def test_flags_that_do_not_fit_are_refused_in_one_line():
    for ranks, flags, words in (
        (
            6,
            dict(context=4),
            "--context 4 does not divide 6 ranks, or groups of --tensor ranks: try one of [1",
        ),
        (3, dict(context=2), "--context 2 does not divide 3 ranks, or groups of --tensor ranks: try one of [1, 3]"),
        (12, dict(context=3), "--context 3 does not divide 1024 tokens of a sequence: try one of [1, 2, 4, 8, "),
        (12, dict(context=4, tensor=2), "--context 4 does not divide 6 ranks, or groups"),
        (16, dict(context=16), "--context 16 is more than the 12 attention heads of a rank"),
        (16, dict(context=4, tensor=4), "more than the 3 attention heads of a rank"),
        (4, dict(context=2, total_batch_size=1024), "2 groups of 2 ranks: try --total_batch_size 2048"),
        (1, dict(context=0), "--context 0: it must be at least 1"),
    ):
        with pytest.raises(UserError) as error:
            resolved(ranks, **flags)
        assert words in str(error.value)


def test_the_plan_describes_the_groups():
    assert resolved(2, context=2)[0] == "2 ranks split every sequence; ddp"
    assert resolved(2, context=2, model="gpt2-xl")[0] == "2 ranks split every sequence; ddp"  # 13 and 12 heads
    odd = dict(seq_len=1022, total_batch_size=1022 * 2)
    words, notes = resolved(8, context=2, tensor=2, parallel="zero3", **odd)
    assert words == "2 ranks split every layer; 2 ranks split every sequence; zero3"
    assert "it does not divide seq_len 1022 / context 2, so every rank holds the whole residual stream" in notes


def test_one_rank_splits_nothing():
    assert "context is 1: there is one rank" in resolved(1, context=2)[1]


def test_more_ranks_in_a_group_take_less_memory():
    config = Config(n_layer=12, n_head=12, n_embd=768, micro_batch_size=64)
    one, two, four = (bytes_of_activations(replace(config, context=n)) for n in (1, 2, 4))
    assert one / 2 < two < 0.6 * one
    assert four < two


def test_full_checkpointing_of_a_compiled_model_keeps_the_inputs_of_its_blocks(two_ranks):
    torch.compiler.reset()  # of other tests' graphs
    B, T, C, layers = 2, 32, 16, 3
    model = GPT(GPTConfig(seq_len=T, vocab_size=31, n_layer=layers, n_head=2, n_embd=C, pad_vocab=False))
    checkpoint_activations(model, "full", saved_operators())
    context.split(model, Config(context=2), replace(two_ranks, context=2))
    kept = {}

    def keep(tensor):
        if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)(*torch.randint(31, (2, B, T)))
    tokens = B * T // 2
    logits = tokens * 31
    # and the input of the last LayerNorm, and what it gives to the head
    assert sorted(numel for numel in kept.values() if numel >= tokens * C) == [tokens * C] * (layers + 1) + [logits]
