import contextlib
import copy
import typing

import pytest
import torch

from common.errors import UserError
from config import Config
from model import GPT, GPTConfig
from optim.optimizer import OPTIMIZERS, make_optimizer, named_state, update_if_finite
from optim.schedules import check_flags, full_batches, learning_rate, micro_batches
from parallel import gradients
from parallel.process_group import Distributed


def tiny():
    torch.manual_seed(1)
    return GPT(GPTConfig(seq_len=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16))


def test_cosine_schedule_at_its_corners():
    config = Config(lr=1e-3, warmup_steps=10, max_steps=110, min_lr_ratio=0.1)
    assert learning_rate(0, config, config.lr) == pytest.approx(1e-4)
    assert learning_rate(9, config, config.lr) == pytest.approx(1e-3)
    assert learning_rate(10, config, config.lr) == pytest.approx(1e-3)
    assert learning_rate(60, config, config.lr) == pytest.approx(1e-4 + 0.5 * 9e-4)  # half way, half down
    assert learning_rate(110, config, config.lr) == learning_rate(1000, config, config.lr) == pytest.approx(1e-4)
    rates = [learning_rate(step, config, config.lr) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


def test_constant_schedule_and_none_at_all():
    config = Config(lr=1e-3, warmup_steps=10, max_steps=110, lr_schedule="constant")
    assert learning_rate(4, config, config.lr) == pytest.approx(5e-4)
    assert learning_rate(10, config, config.lr) == learning_rate(109, config, config.lr) == 1e-3
    config.warmup_steps = 0
    assert learning_rate(0, config, config.lr) == 1e-3


def test_linear_decay_and_a_cooldown():
    config = Config(warmup_steps=10, max_steps=110, lr_schedule="linear", min_lr_ratio=0.0)
    assert [learning_rate(step, config, 1.0) for step in (9, 10, 60, 110)] == pytest.approx([1, 1, 0.5, 0])
    config = Config(warmup_steps=10, max_steps=100, lr_schedule="wsd", cooldown_ratio=0.4, min_lr_ratio=0.1)
    assert [learning_rate(step, config, 1.0) for step in (10, 60, 80, 100)] == pytest.approx([1, 1, 0.55, 0.1])
    config.cooldown_ratio = 1.0  # it begins after the warm-up
    assert learning_rate(55, config, 1.0) == pytest.approx(0.55)


@pytest.mark.parametrize(("ratio", "steps"), [(0.0, 10), (0.5, 16), (0.5, 15), (0.3, 11), (1.0, 7)])
def test_the_batch_grows(ratio, steps):
    config = Config(micro_batch_size=16, seq_len=32, total_batch_size=32 * 32 * 2, max_steps=steps)  # on two ranks
    config.batch_warmup_ratio, sequences = ratio, []
    for step in range(steps):
        count, size = micro_batches(step, config, 2)
        assert (count, size) in ((1, 8), (1, 16), (2, 16))  # a small batch is one smaller micro-batch
        sequences.append(count * size)
        assert full_batches(step + 1, config) == sum(sequences) / 32
    assert sequences == sorted(sequences)
    few = [sequences.count(size) for size in (8, 16)]
    assert few == pytest.approx([ratio * steps / 2] * 2, abs=1)
    config.warmup_steps = 0
    config.lr_schedule = "constant"
    rates = [learning_rate(step, config, 1.0) for step in range(steps)]
    assert rates == pytest.approx([(size / 32) ** 0.5 for size in sequences])


@pytest.mark.parametrize(
    ("total", "size", "minutes", "error"),
    [
        (32, 8, None, None),
        (32, 16, None, None),
        (24, 6, None, None),
        (24, 8, None, "8 does not divide a quarter and half of the batch, 6 and 12 sequences on each rank: use 2"),
        (2, 2, None, "must be a multiple of 4096 = 4 × 1024 tokens × 1, and is 2048"),
        (32, 8, 5, "use --max_steps instead of --max_minutes"),
    ],
)
def test_small_batches_are_whole_micro_batches(total, size, minutes, error):
    """24 sequences: one micro-batch of 6, then 12, which 8 do not divide. 2 sequences have no quarter."""
    config = Config(micro_batch_size=size, total_batch_size=total * 1024, batch_warmup_ratio=0.5, max_minutes=minutes)
    with pytest.raises(UserError, match=error) if error else contextlib.nullcontext():
        check_flags(config, Distributed(0, 1, torch.device("cpu")), [])


def test_gpt3s_own_numbers_are_the_defaults():
    config = Config()
    assert config.warmup_steps * config.total_batch_size == pytest.approx(375e6, rel=0.001)
    assert config.max_steps * config.total_batch_size == pytest.approx(10e9, rel=0.001)
    assert learning_rate(config.max_steps, config, config.lr) == pytest.approx(6e-5)


def test_every_optimizer_is_a_value_of_the_flag():
    assert set(typing.get_args(typing.get_type_hints(Config)["optimizer"])) == set(OPTIMIZERS)


def test_only_matrices_and_embeddings_decay():
    model = tiny()
    decayed, plain = make_optimizer(model, Config(lr=0.1, weight_decay=0.5, fused_adamw=False)).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.5 and plain["weight_decay"] == 0
    for parameter in plain["params"]:
        assert names[id(parameter)].endswith("bias") or "ln_" in names[id(parameter)]
    assert len(decayed["params"]) == 2 + 4 * 2 and len(decayed["params"]) + len(plain["params"]) == len(names)


def test_fused_adamw_is_adamw():
    models = [tiny(), tiny()]
    for model, fused in zip(models, (True, False)):
        optimizer = make_optimizer(model, Config(lr=1e-2, fused_adamw=fused))
        assert bool(optimizer.param_groups[0]["fused"]) is fused
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    start = tiny().state_dict()
    for name, weight in models[0].state_dict().items():
        torch.testing.assert_close(weight, models[1].state_dict()[name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(weight, start[name])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_changes_nothing(name, fused, scaled):
    model = tiny()
    config = Config(optimizer=name, compile=False, fused_adamw=fused)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for bad in (float("nan"), float("inf"), 1.0):
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        state = {name: value.clone() for name, value in named_state(model, optimizer).items()}
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, bad)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        norm = gradients.clip(model, config.grad_clip)
        update_if_finite(optimizer, scaler, norm)
        changed = [name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])]
        assert len(changed) == (len(before) if bad == 1 else 0)
        changed = [name for name, value in named_state(model, optimizer).items() if not torch.equal(value, state[name])]
        assert len(changed) == (len(state) if bad == 1 else 0)


def test_clipping_and_no_clipping():
    """Without clipping no gradient is written; the norm is known in either case."""
    model = torch.nn.Linear(2, 1)
    for max_norm, scale in ((0.0, 1.0), (10.0, 1.0), (1.0, 1 / 5)):
        model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
        versions = [parameter.grad._version for parameter in model.parameters()]
        assert gradients.clip(model, max_norm) == 5
        torch.testing.assert_close(model.weight.grad, scale * torch.tensor([[3.0, 0.0]]), rtol=1e-5, atol=0)
        written = [parameter.grad._version for parameter in model.parameters()] != versions
        assert written == (max_norm > 0)


def test_adamw_by_hand():
    parameter = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    holder = torch.nn.Module()
    holder.register_parameter("weight", parameter)
    config = Config(lr=0.1, weight_decay=0.5, beta2=0.95)
    optimizer = make_optimizer(holder, config)
    m = v = torch.zeros(1, 2)
    expected = copy.deepcopy(parameter.data)
    for t in range(1, 4):
        gradient = torch.tensor([[0.3, -1e-7]]) * t  # beside 1e-7 eps matters
        parameter.grad = gradient.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        expected = expected - 0.1 * 0.5 * expected - 0.1 * step
        torch.testing.assert_close(parameter.data, expected, rtol=1e-5, atol=1e-6)
