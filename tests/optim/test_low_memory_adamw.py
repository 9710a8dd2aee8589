"""AdamW with its moments in bf16 or in 8 bits, against float32."""

import filecmp

import pytest
import torch
from conftest import ALONE, expect_error, logged
from test_optim import tiny

from common.errors import UserError
from config import Config, resolve
from optim.low_memory_adamw import levels, read, write
from optim.optimizer import make_optimizer, named_state, state_bytes

STATES = ("bf16", "int8")
TOLERANCE = dict(bf16=0.02, int8=0.1)


def trained(config, steps=10):
    """A tiny model and its optimizer after some steps with the same gradients for every config."""
    model = tiny()
    optimizer = make_optimizer(model, config)
    generator = torch.Generator().manual_seed(0)
    means = [torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]
    for _ in range(steps):
        for parameter, mean in zip(model.parameters(), means):
            parameter.grad = mean + torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_are_those_of_float32(states, optimizer):
    start = dict(tiny().named_parameters())
    config = dict(lr=1e-2, adamw_lr=1e-2, weight_decay=0.5, optimizer=optimizer, compile=False)
    expected = dict(trained(Config(**config))[0].named_parameters())
    model, optimizer = trained(Config(**config, adamw_states=states))
    for name, weight in model.named_parameters():
        change = expected[name] - start[name]
        assert (weight - expected[name]).norm() < TOLERANCE[states] * change.norm(), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_losses_are_those_of_float32(optimizer):
    x, y = torch.randint(64, (2, 8, 16))
    losses = {}
    for states in ("float32", *STATES):
        model = tiny()
        own = make_optimizer(model, Config(lr=0.02, optimizer=optimizer, adamw_states=states, compile=False))
        losses[states] = []
        for _ in range(10):
            own.zero_grad()
            loss = model(x, y)
            loss.backward()
            own.step()
            losses[states].append(loss.item())
    assert losses["float32"][-1] < losses["float32"][0] - 0.3
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=1e-3)
    assert losses["int8"] == pytest.approx(losses["float32"], rel=1e-2)


def test_compiled_it_is_the_same():
    """And compiled once, whatever the learning rate."""
    weights = []
    for compile in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 8, bias=False)
        optimizer = make_optimizer(layer, Config(adamw_states="int8", compile=compile))
        for step in range(3):
            layer.weight.grad = torch.randn(8, 32)
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            with torch.compiler.set_stance("fail_on_recompile"):  # make_optimizer has made the first step
                optimizer.step()
        weights.append(layer.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_are_rounded_to_the_nearest_level(signed):
    values, between = levels("cpu", signed)
    assert len(values) == 256 and len(between) == 255 and torch.equal(values, values.unique())
    numbers = torch.randn(40, 256) * torch.logspace(-9, 3, 40)[:, None]
    numbers = numbers if signed else numbers.square()
    numbers[7] = 0
    moments = dict(m_codes=torch.zeros(40, 256, dtype=torch.uint8), m_scales=torch.zeros(40, 1))
    write(moments, "m", numbers, dict(m=(values, between)), torch.tensor(False))
    stored = read(moments, "m", dict(m=(values, between)))
    scales = numbers.abs().amax(1, keepdim=True)
    nearest = (numbers[:, :, None] - values * scales[:, :, None]).abs().amin(2)
    torch.testing.assert_close((stored - numbers).abs() / scales, nearest / scales, rtol=0, atol=1e-6, equal_nan=True)
    assert not stored[7].any()


def test_a_small_gradient_beside_a_large_one_takes_steps_of_the_learning_rate():
    """The second moment of the small ones is below the lowest level of their block."""
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(torch.zeros(1, 256))
    optimizer = make_optimizer(holder, Config(lr=1e-3, weight_decay=0.0, adamw_states="int8", compile=False))
    for _ in range(50):
        before = holder.weight.detach().clone()
        holder.weight.grad = 1e-5 * torch.randn(1, 256)
        holder.weight.grad[0, 0] = 1.0
        optimizer.step()
        assert (holder.weight - before).abs().max() < 3e-3


def test_a_group_may_be_empty():
    """With Muon a stage of --pipeline may have vectors alone for AdamW."""
    layer = torch.nn.LayerNorm(8)
    optimizer = make_optimizer(layer, Config(lr=0.01, adamw_states="int8", compile=False))
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]
    layer.weight.grad, layer.bias.grad = torch.ones(8), torch.ones(8)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.full((8,), 0.99))


def test_the_state_is_as_small_as_said():
    for width in (16, 64):
        for states, expected in (("float32", 8), ("bf16", 4), ("int8", 2 + 8 / width)):
            config = Config(adamw_states=states, n_embd=width, compile=False)
            layer = torch.nn.Linear(width, 32, bias=False)
            sizes = [tensor.nbytes for tensor in named_state(layer, make_optimizer(layer, config)).values()]
            assert expected == (sum(sizes) - 4) / layer.weight.numel()  # 4: the step count
            assert state_bytes(config) == (expected, expected)
            assert state_bytes(Config(adamw_states=states, n_embd=width, optimizer="muon")) == (4, expected)


def test_what_does_not_fit_it_is_refused():
    with pytest.raises(UserError, match="bf16 needs --beta1 and --beta2 of at most 0.996"):
        resolve(Config(adamw_states="bf16", beta2=0.999), ALONE)
    resolve(Config(adamw_states="int8", beta2=0.999), ALONE)


def test_it_resumes_bit_for_bit_and_on_any_number_of_ranks(train, train_several):
    """On 3 ranks, whose shards are not even, from a checkpoint of one rank, and back."""
    flags = "--max_steps 4 --total_batch_size 384 --micro_batch_size 4 --checkpoint_every 2".split()
    runs = {states: train(states, *flags, "--adamw_states", states) for states in STATES}
    assert "fused_adamw is off: PyTorch's fused AdamW stores" in (runs["int8"] / "output.txt").read_text()
    zero3 = [*flags, "--adamw_states", "int8", "--parallel", "zero3"]
    ranks = dict(zero3=zero3, continued=[*zero3, "--resume", "log/int8/checkpoint_000002"])
    train_several(3, ranks)
    for name in ranks:
        runs[name] = runs["int8"].with_name(name)
        assert logged(runs[name]) == pytest.approx(logged(runs["int8"])[-len(logged(runs[name])) :], abs=2e-4), name

    # back on one rank
    for name in ("bf16", "int8", "zero3"):
        back = train(f"{name}_back", *flags, "--resume", f"log/{name}/checkpoint_000002", "--parallel", "ddp")
        assert logged(back) == pytest.approx(logged(runs[name])[2:], abs=1e-4), name
        for file in ("model.safetensors", "optimizer.safetensors") if name != "zero3" else ():
            files = [run / "checkpoint_000004" / file for run in (back, runs[name])]
            assert filecmp.cmp(*files, shallow=False), (name, file)

    # bf16 becomes float32; codes do not
    converted = train("converted", *flags, "--adamw_states", "float32", "--resume", "log/bf16/checkpoint_000002")
    assert "adamw_states is float32: the checkpoint was made with bf16" in (converted / "output.txt").read_text()
    assert logged(converted) == pytest.approx(logged(runs["bf16"])[2:], abs=1e-3)
    source = ("--adamw_states", "float32", "--resume", "log/int8/checkpoint_000002")
    expect_error(train("other", *flags, *source, fails=True), "--adamw_states wrote it; --init_from")
