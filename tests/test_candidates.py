"""The candidates after Muon, on a small GPT with gradients at random."""

import pytest
import torch

from common.errors import UserError
from config import Config
from dev.candidates import CANDIDATES, choose, make
from model import GPT, GPTConfig
from optim.optimizer import make_optimizer

CONFIG = Config(optimizer="muon", max_steps=6, compile=False, warmup_steps=0, lr=0.01)


def small_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(seq_len=8, vocab_size=64, n_layer=1, n_head=2, n_embd=32))


def train(text):
    """The weights after six steps of the candidates of a text; None: of Muon."""
    model = small_gpt()
    optimizer = make_optimizer(model, CONFIG) if text is None else make(choose(text), model, CONFIG)
    for _ in range(CONFIG.max_steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"]
        optimizer.step()
    if text and "average" in text:
        optimizer.blend(0.8)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_none_is_muon():
    torch.testing.assert_close(train("none"), train(None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CANDIDATES if name != "power"])
def test_each_candidate_changes_the_weights(name):
    plain, own = train("none"), train(name)
    assert own.isfinite().all() and not torch.allclose(own, plain)
    assert (own - plain).norm() < plain.norm()


def test_matrices_without_gradient_stay_finite():
    """As in the first step of "zero": behind a projection of zeros there is none."""
    model = small_gpt()
    optimizer = make(choose("normuon"), model, CONFIG)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.nn.utils.parameters_to_vector(model.parameters()).isfinite().all()


def test_bad_candidates_end_in_one_line():
    assert choose("none") == {} and choose("normuon,average=0.5") == dict(normuon=0.95, average=0.5)
    for text in ("lion", "average=much"):
        with pytest.raises(UserError, match=text.split("=")[0]):
            choose(text)
