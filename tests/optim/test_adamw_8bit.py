"""AdamW with its moments in 8 bits, against float32."""

import filecmp

import pytest
import torch
from conftest import logged
from test_optim import tiny

from config import Config
from optim.adamw_8bit import encode, levels, read
from optim.optimizer import make_optimizer

OPTIMIZERS = ("adamw", "adamw_8bit")


def test_updates_are_those_of_float32():
    start, models = dict(tiny().named_parameters()), {}
    for name in OPTIMIZERS:
        models[name] = model = tiny()
        optimizer = make_optimizer(model, Config(optimizer=name, lr=1e-2, weight_decay=0.5, compile=False))
        generator = torch.Generator().manual_seed(0)
        means = [torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]
        for _ in range(10):
            for parameter, mean in zip(model.parameters(), means):
                parameter.grad = mean + torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    for (name, expected), weight in zip(models["adamw"].named_parameters(), models["adamw_8bit"].parameters()):
        assert (weight - expected).norm() < 0.1 * (expected - start[name]).norm(), name


def test_losses_are_those_of_float32():
    x, y = torch.randint(64, (2, 8, 16))
    losses = {}
    for name in OPTIMIZERS:
        model = tiny()
        optimizer = make_optimizer(model, Config(lr=0.02, optimizer=name, compile=False))
        losses[name] = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["adamw"][-1] < losses["adamw"][0] - 0.3
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=1e-2)


def test_compiled_it_is_the_same():
    """And compiled once, whatever the learning rate."""
    weights = []
    for compile in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 8, bias=False)  # its group of vectors is empty
        optimizer = make_optimizer(layer, Config(optimizer="adamw_8bit", compile=compile))
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
    moments = encode({}, "m", numbers, dict(m=(values, between)))
    stored = read(moments, "m", dict(m=(values, between)))
    scales = numbers.abs().amax(1, keepdim=True)
    nearest = (numbers[:, :, None] - values * scales[:, :, None]).abs().amin(2)
    torch.testing.assert_close((stored - numbers).abs() / scales, nearest / scales, rtol=0, atol=1e-6, equal_nan=True)
    assert not stored[7].any()


def test_a_small_gradient_beside_a_large_one_takes_steps_of_the_learning_rate():
    """The second moment of the small ones is below the lowest level of their block."""
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(torch.zeros(1, 256))
    optimizer = make_optimizer(holder, Config(lr=1e-3, weight_decay=0.0, optimizer="adamw_8bit", compile=False))
    for _ in range(50):
        before = holder.weight.detach().clone()
        holder.weight.grad = 1e-5 * torch.randn(1, 256)
        holder.weight.grad[0, 0] = 1.0
        optimizer.step()
        assert (holder.weight - before).abs().max() < 3e-3


def test_it_resumes_bit_for_bit_and_on_any_number_of_ranks(train, train_several):
    """On 3 ranks, whose shards are not even, from a checkpoint of one rank, and back."""
    flags = "--optimizer adamw_8bit --n_layer 1 --max_steps 2 --total_batch_size 384 --checkpoint_every 1".split()
    one = train("one", *flags)
    zero3 = [*flags, "--parallel", "zero3"]
    ranks = train_several(3, dict(zero3=zero3, continued=[*zero3, "--resume", "log/one/checkpoint_000001"]))
    for run in ranks:
        assert logged(run) == pytest.approx(logged(one)[-len(logged(run)) :], abs=2e-4), run
    for run in (one, ranks[0]):
        back = train(f"{run.name}_back", *flags, "--resume", f"log/{run.name}/checkpoint_000001", "--parallel", "ddp")
        assert logged(back) == pytest.approx(logged(run)[1:], abs=1e-4)
    for file in ("model.safetensors", "optimizer.safetensors"):
        files = [run / "checkpoint_000002" / file for run in (one, one.with_name("one_back"))]
        assert filecmp.cmp(*files, shallow=False), file
