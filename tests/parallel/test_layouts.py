"""A model spread over ranks in every way: the same training, and checkpoints that any of them goes on from."""

import json
from collections import Counter

import pytest
import torch
from conftest import ALONE, expect_error, logged, metrics
from texts import make_items
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from updates import weights

from checkpoints import resume, save
from common.device import local
from common.errors import UserError
from config import Config
from model import GPT, GPTConfig
from optim.optimizer import make_optimizer
from optimizations import saved_operators
from parallel import fsdp, place
from parallel.activation_checkpointing import checkpoint_activations


def assert_same(run, whole, steps=3):
    """The same losses over the last steps, the same evaluations, and the same weights in the end, but for rounding."""
    assert len(logged(run)) == steps
    assert logged(run) == pytest.approx(logged(whole)[-steps:], abs=1e-5)
    norms = [[row["grad_norm"] for row in metrics(r) if "lr" in row][-steps:] for r in (run, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert logged(run, "val")[-1] == pytest.approx(logged(whole, "val")[-1], abs=2e-4)
    assert logged(run, "hella") == logged(whole, "hella")[-len(logged(run, "hella")) :]
    for (name, weight), expected in zip(weights(run).items(), weights(whole).values()):
        if name.endswith("c_attn.bias"):  # the keys' bias has no gradient: AdamW blows its rounding up
            weight, expected = (torch.cat(bias.chunk(3)[::2]) for bias in (weight, expected))
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=5e-5, msg=name)


def test_every_layout_trains_and_resumes_as_one_rank_does(train, train_several, command, tmp_path, call_main):
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in make_items(5)))
    flags = "--max_steps 3 --checkpoint_every 2 --val_every 3 --val_tokens 64 --hellaswag_every 3".split()
    flags += ["--tasks", f"hellaswag={tmp_path}/items.jsonl", "--micro_batch_size", "1"]
    flags += ["--n_layer", "3"]  # two gathered together, and one alone
    flags += ["--mask_documents"]  # the blocks share the documents' boundaries
    between = ["--val_every", "2", "--sample_every", "2"]  # then training goes on
    whole = train("whole", *flags, *between)
    middle = "log/{}/checkpoint_000002".format
    runs = train_several(
        4,
        dict(
            ddp=flags,
            zero2=[*flags, "--parallel", "zero2"],
            zero3=[*flags, *between, "--parallel", "zero3", "--activation_checkpointing", "full"],
            hsdp=[*flags, "--parallel", "hsdp", "--activation_checkpointing", "selective"],
            zero1=[*flags, "--parallel", "zero1"],
            whole_zero2=[*flags, "--parallel", "zero2", "--resume", middle("whole")],
            zero3_hsdp=[*flags, "--parallel", "hsdp", "--resume", middle("zero3"), "--no_pad_vocab"],
        ),
        machines=2,
    )
    for run in runs[:5]:
        assert_same(run, whole)
    for run in runs[5:]:
        assert_same(run, whole, steps=1)
    assert not (runs[2] / "checkpoint_000002" / "model.safetensors").exists()  # in pieces
    assert len(list((runs[2] / "checkpoint_000002").glob("shard-00001-*"))) > 2
    sizes = Counter()  # bytes that each rank of hsdp wrote: two copies share the table's weight and two moments, 2 to 1
    for path in (runs[3] / "checkpoint_000002").glob("shard-*"):
        sizes[path.name.split("-")[1]] += path.stat().st_size
    assert len(sizes) == 4 and max(sizes.values()) < 2 * min(sizes.values()), sizes
    samples = [[row["samples"] for row in metrics(run) if "samples" in row] for run in (whole, runs[2])]
    assert samples[0] == samples[1] and len(samples[0]) == 2

    # onto fewer ranks, and from pieces to one file
    fewer = dict(zero3="zero3", zero2="hsdp", hsdp="zero2")
    fewer = {f"{mode}_two": ["--parallel", mode, "--resume", middle(before)] for mode, before in fewer.items()}
    for run in train_several(2, {name: [*flags, *more] for name, more in fewer.items()}, machines=2):
        assert_same(run, whole, steps=1)
    assert_same(train("hsdp_one", *flags, "--resume", tmp_path / middle("hsdp")), whole, steps=1)
    assert command("export.py", middle("zero3"), "exported").returncode == 0
    for (name, weight), expected in zip(
        weights(tmp_path / "exported").items(), weights(tmp_path / middle("zero3")).values()
    ):
        assert torch.equal(weight, expected), name

    # damage is said in one line
    piece = next((runs[1] / "checkpoint_000003").glob("shard-00003-*"))
    piece.write_bytes(piece.read_bytes()[:-1] + b"x")
    for done in (
        train("again", *flags, "--resume", runs[1] / "checkpoint_000003", fails=True),
        train("from", "--init_from", runs[1] / "checkpoint_000003", drop="--n_layer --n_head --n_embd", fails=True),
        command("export.py", runs[1] / "checkpoint_000003", "damaged"),
        command("sample.py", runs[1] / "checkpoint_000003"),
    ):
        expect_error(done, "checkpoint_000003 is damaged: shard-00003-", "is not what was written")
    piece.unlink()
    expect_error(call_main("sample.py", runs[1] / "checkpoint_000003"), "cannot read", "shard-00003-", "No such file")
    (runs[1] / "checkpoint_000003" / "training.json").unlink()  # has the hashes
    expect_error(call_main("sample.py", runs[1] / "checkpoint_000003"), "checkpoint_000003 lacks a piece of")


def placed(n_layer, distributed=ALONE, **flags):
    config = Config(autocast="off", **flags)
    with torch.device("meta"):
        model = GPT(GPTConfig(seq_len=32, n_layer=n_layer, n_head=2, n_embd=32))
    checkpoint_activations(model, config.activation_checkpointing, saved_operators())
    model = place.place(model, config, distributed, None)
    resume.initialize(model, None)
    return model


@pytest.mark.parametrize(  # hsdp: embeddings, block, head
    "mode, how, graphs", [("zero3", "full", 1), ("hsdp", "off", 3), ("hsdp", "full", 3), ("hsdp", "selective", 3)]
)
def test_all_of_a_sharded_model_is_compiled(group, mode, how, graphs):
    torch.compiler.reset()
    count = CompileCounter()
    model = placed(7, parallel=mode, activation_checkpointing=how)
    torch.compile(model, backend=count, dynamic=False)(*torch.randint(50257, (2, 2, 32))).backward()
    assert count.frame_count == graphs


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_a_small_model_is_one_unit(group, mode, monkeypatch):
    for limit, graphs in ((fsdp.MAX_ONE_UNIT_PARAMS, 1), (0, 3)):
        monkeypatch.setattr(fsdp, "MAX_ONE_UNIT_PARAMS", limit)
        torch.compiler.reset()  # it remembers where forward's graph broke
        count = CompileCounter()
        model = placed(7, parallel=mode)
        torch.compile(model, backend=count, dynamic=False)(*torch.randint(50257, (2, 2, 32))).backward()
        assert count.frame_count == graphs


def test_small_blocks_are_gathered_together(group):
    model = placed(7, parallel="hsdp")
    gathered = []

    def look(*_):
        whole = [not isinstance(block.ln_1.weight, DTensor) for block in model.transformer.h]
        gathered.append([i for i in range(7) if whole[i]])

    for block in model.transformer.h:
        block.attn.register_forward_pre_hook(look)
    model(*torch.randint(50257, (2, 2, 32)))
    assert gathered == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6]]


def test_evaluations_that_find_no_room_for_all_weights(group, monkeypatch):
    def unshard(part):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = placed(1, parallel="zero3")
    monkeypatch.setattr(fsdp.FSDPModule, "unshard", unshard)
    with pytest.raises(UserError, match="all weights on every GPU.* --val_every 0"):
        with fsdp.gathered(model, Config(parallel="zero3")):
            pass


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_training_goes_on_while_a_snapshot_is_written(group, layout):
    model = placed(1, parallel=layout)
    optimizer = make_optimizer(model, Config(lr=0.1))
    snapshots = []
    for _ in range(2):
        model(*torch.randint(50257, (2, 2, 32))).backward()
        optimizer.step()
        tensors = save.snapshot(model, optimizer, ALONE)
        shards = tensors if layout == "zero3" else tensors[0] | tensors[1]
        snapshots.append({name: local(shard) for name, shard in shards.items()})
        if len(snapshots) == 1:
            before = {name: piece.clone() for name, piece in snapshots[0].items()}
    for name, piece in before.items():
        assert torch.equal(snapshots[0][name], piece) and not torch.equal(snapshots[1][name], piece), name


class Count(TorchDispatchMode):
    """How often each operation is computed."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.name()] = self.counts.get(function.name(), 0) + 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("flash", [True, False])
def test_what_activation_checkpointing_computes_again(flash):
    gradients, counts = {}, {}
    for how in ("off", "full", "selective"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(seq_len=32, n_layer=2, n_head=2, n_embd=32, attention="sdpa" if flash else "written_out"))
        checkpoint_activations(model, how, saved_operators())
        loss = model(*torch.randint(50257, (2, 2, 32)))
        with Count() as counter:
            loss.backward()
        counts[how] = counter.counts
        gradients[how] = [parameter.grad for parameter in model.parameters()]
    for how in ("full", "selective"):
        for gradient, expected in zip(gradients[how], gradients["off"]):
            assert torch.equal(gradient, expected)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu" if flash else "aten::bmm"
    again = {
        how: [
            counts[how].get(name, 0) - counts["off"].get(name, 0) for name in ("aten::addmm", attention, "aten::gelu")
        ]
        for how in ("full", "selective")
    }
    # of each block's four products not the last, of which nothing is kept for backward
    assert again == dict(full=[6, 2 if flash else 4, 2], selective=[0, 0, 2])


def test_selective_keeps_the_fused_mlp_but_not_what_gelu_gave():
    x, y = torch.randint(301, (2, 2, 32))
    gradients, counts, kept = {}, {}, {}
    for how in ("off", "full", "selective"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(seq_len=32, vocab_size=301, n_layer=2, n_head=2, n_embd=32, fused_gelu=True))
        checkpoint_activations(model, how, saved_operators())
        loss = model(x, y)
        with Count() as counter:
            loss.backward()
        counts[how] = counter.counts.get("gpt2::mlp", 0)
        gradients[how] = [parameter.grad for parameter in model.parameters()]
        kept[how] = model.transformer.h[0].mlp.keep_gelu
    assert counts == dict(off=0, full=2, selective=0) and kept == dict(off=True, full=True, selective=False)
    for how in ("full", "selective"):
        for gradient, expected in zip(gradients[how], gradients["off"]):
            assert torch.equal(gradient, expected)
