"""Muon against torch.optim.Muon, NorMuon by hand, and on several ranks against one."""

import pytest
import torch
from conftest import expect_error, logged
from test_optim import tiny
from updates import assert_same_updates

from checkpoints import load
from config import Config, defaults
from optim.muon import Muon, orthogonalize
from optim.optimizer import make_optimizer

JORDAN = ((3.4445, -4.7750, 2.0315),) * 5  # torch.optim.Muon's coefficients
NORMUON = "--optimizer normuon --max_steps 2 --total_batch_size 192 --checkpoint_every 1".split()


@pytest.mark.parametrize("rows, columns", [(48, 48), (48, 192), (192, 48)])
def test_singular_values_become_one(rows, columns):
    """For singular values over two orders of magnitude; a matrix of zeros stays zero."""
    U, _, Vh = torch.linalg.svd(torch.randn(2, rows, columns), full_matrices=False)
    x = torch.zeros(3, rows, columns)
    x[:2] = U * torch.logspace(0, -2, 48) @ Vh
    result = orthogonalize(x)
    values = torch.linalg.svdvals(result[:2])
    assert values.min() > 0.85 and values.max() < 1.15
    assert (result[:2] - U @ Vh).norm() < 0.1 * (U @ Vh).norm()
    assert not result[2].any()


def with_gradients(model, steps):
    """Before each of so many steps, set gradients that are the same for every model of the same shapes."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        yield


def is_matrix(name):
    return name.startswith("transformer.h.") and name.endswith("weight") and "ln_" not in name


def test_updates_are_those_of_pytorchs_muon_and_adamw(monkeypatch):
    """Where both do the same: q, k and v together, and torch.optim.Muon's coefficients."""
    monkeypatch.setattr("optim.muon.COEFFICIENTS", JORDAN)
    monkeypatch.setattr("optim.muon.MOMENTUM", 0.9)
    ours, reference = tiny(), tiny()
    config = Config(optimizer="muon", lr=0.02, adamw_lr=0.01, weight_decay=0.5, compile=False)
    matrices = [parameter for name, parameter in reference.named_parameters() if is_matrix(name)]
    others = [parameter for name, parameter in reference.named_parameters() if not is_matrix(name)]
    muon = torch.optim.Muon(matrices, 0.02, weight_decay=0.5, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    groups = [
        dict(params=[parameter for parameter in others if parameter.dim() == 2], weight_decay=0.5),
        dict(params=[parameter for parameter in others if parameter.dim() < 2], weight_decay=0.0),
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, config.beta2), fused=True)
    optimizer = make_optimizer(ours, config)
    assert isinstance(optimizer, Muon)
    for group in optimizer.matrices:
        group["parts"] = 1
    for group in optimizer.param_groups:  # what the schedule sets at its peak
        group["lr"] = group["peak"]
    for _ in zip(with_gradients(ours, 5), with_gradients(reference, 5)):
        optimizer.step()
        muon.step()
        adamw.step()
    start = dict(tiny().named_parameters())
    for (name, weight), expected in zip(ours.named_parameters(), reference.parameters()):
        change = expected - start[name]
        assert (weight - expected).norm() < 0.01 * change.norm(), name  # bf16 rounds


def test_query_key_and_value_are_orthogonalized_apart(monkeypatch):
    monkeypatch.setattr("optim.muon.MOMENTUM", 0.0)
    model = tiny()
    name, weight = next((n, p) for n, p in model.named_parameters() if n.endswith("c_attn.weight"))
    config = Config(optimizer="muon", lr=1.0, weight_decay=0.0, compile=False)
    optimizer = make_optimizer(model, config)
    before = weight.detach().clone()
    for _ in with_gradients(model, 1):
        parts = orthogonalize(weight.grad.view(3, 16, 16).bfloat16()).float()
        optimizer.step()
    torch.testing.assert_close(before - weight, 0.2 * 16**0.5 * parts.view(48, 16), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows, columns", [(48, 16), (16, 64)])
def test_normuon_by_hand(rows, columns):
    """Rows are divided by the root of their second moment, and the update keeps its norm; a row of zeros stays zero."""
    weight, other = torch.nn.Parameter(torch.zeros(rows, columns)), torch.nn.Parameter(torch.zeros(8))
    group = dict(params=[weight], parts=1, lr=1.0, weight_decay=0.0)
    optimizer = Muon([group], torch.optim.AdamW([other]), compiled=False, by_rows=True)
    momentum, second = torch.zeros(rows, columns), torch.zeros(rows, 1)
    for step in range(3):
        before, other.grad = weight.detach().clone(), torch.ones(8)
        weight.grad = torch.randn(rows, columns) * torch.logspace(0, -3, rows)[:, None]
        weight.grad[-1] = 0
        momentum = momentum.lerp(weight.grad, 0.05)
        update = orthogonalize(weight.grad.lerp(momentum, 0.95).bfloat16()[None])[0].float()
        second = 0.95 * second + 0.05 * update.square().mean(dim=1, keepdim=True)
        expected = update / second.sqrt().clamp(min=1e-9)
        expected *= 0.2 * max(rows, columns) ** 0.5 * update.norm() / expected.norm()
        optimizer.step()
        torch.testing.assert_close(before - weight, expected, rtol=1e-3, atol=1e-5)
        if step == 0:
            sizes = (before - weight)[:-1].square().mean(dim=1).sqrt()
            torch.testing.assert_close(sizes, sizes.mean().expand(rows - 1))
    assert not weight[-1].any()


@pytest.mark.parametrize("by_rows", [False, True])
def test_compiled_it_is_the_same(by_rows):
    """And compiled once, whatever the learning rate."""
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        weight, other = torch.nn.Parameter(torch.randn(16, 8)), torch.nn.Parameter(torch.zeros(8))
        group = dict(params=[weight], parts=1, lr=0.0, weight_decay=0.5)
        optimizer = Muon([group], torch.optim.AdamW([other], fused=True), compiled, by_rows)
        for step in range(4):
            weight.grad, other.grad = torch.randn(16, 8), torch.randn(8)
            optimizer.param_groups[0]["lr"] = 0.01 * step
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                optimizer.step()
        weights.append(weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_its_recipe_is_the_default_and_each_part_a_flag():
    chosen = defaults(dict(optimizer="muon"))
    assert chosen.optimizer == "muon"
    assert (chosen.lr_schedule, chosen.min_lr_ratio) == ("wsd", 0.0) and chosen.lr != Config().lr
    assert defaults(dict(optimizer="adamw")) == Config()


def test_any_number_of_ranks_trains_as_one(train, train_several):
    """On 3 ranks the rows of some matrices and the number of matrices do not divide evenly."""
    whole = train("whole", *NORMUON)
    sharded = [*NORMUON, "--parallel", "zero3"]
    runs = dict(ddp=NORMUON, zero3=sharded, continued=[*sharded, "--resume", "log/whole/checkpoint_000001"])
    hsdp = [*NORMUON, "--parallel", "hsdp", "--micro_batch_size", 3, "--resume", "log/zero3/checkpoint_000001"]
    for run in (*train_several(3, runs), *train_several(4, dict(hsdp=hsdp))):
        count = len(logged(run))
        assert count in (1, 2) and logged(run) == pytest.approx(logged(whole)[-count:], abs=2e-4)
        assert_same_updates(run, whole, whole / "checkpoint_000001", step=2)


def test_resumes_bit_for_bit_and_not_with_another_optimizer(train):
    whole = train("whole", *NORMUON)
    continued = train("continued", *NORMUON, "--resume", "log/whole/checkpoint_000001")
    assert logged(continued) == logged(whole)[1:]
    weights = [load.load_model(run / "checkpoint_000002").state_dict() for run in (whole, continued)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    adamw = ("--optimizer", "adamw", "--resume", "log/whole/checkpoint_000001")
    refused = train("adamw", "--max_steps", 2, *adamw, fails=True)
    expect_error(refused, "was trained with --optimizer=normuon: continue with it instead of adamw", "--init_from")
