"""Liger's kernels in the training step."""

import json

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import expect_error
from texts import write_corpus

from measure import liger
from measure.turns import ROUNDS

SMALL = "--n_layer 1 --n_head 2 --n_embd 128 --seq_len 64 --micro_batch_size 2 --total_batch_size 128 --seconds 0"


def test_without_a_gpu_one_line_says_so(call_main):
    done = call_main("-m", "measure.liger", "--device", "cpu")
    expect_error(done, "measure.liger: it is for GPUs, not cpu")


@pytest.mark.gpu
def test_each_run_is_timed_in_turn(call_main, tmp_path):
    pytest.importorskip("liger_kernel")
    write_corpus(tmp_path, sizes=(4000, 1280))
    done = call_main("-m", "measure.liger", *SMALL.split(), "--data_dir", tmp_path, "--run_name", "in_turn")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = json.loads((tmp_path / "log" / "in_turn" / "liger.json").read_text())["results"]
    assert first["gain"] is None and all(len(row["gain"]["rounds"]) == ROUNDS for row in others)


@pytest.mark.gpu
def test_liger_computes_the_same(monkeypatch):
    pytest.importorskip("liger_kernel")
    from kernels import cross_entropy  # needs Triton

    for owner, name in ((nn.LayerNorm, "forward"), (cross_entropy, "mean_cross_entropy")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    x = torch.randn(2, 64, 128, device="cuda", requires_grad=True)
    weight = (0.1 * torch.randn(384, 128, device="cuda")).requires_grad_()
    targets = torch.randint(384, (2, 64), device="cuda")
    layer = nn.LayerNorm(128).cuda()
    expected = layer(x), F.cross_entropy((x @ weight.t()).flatten(0, 1), targets.flatten())
    liger.use_liger_head()
    liger.use_liger_layer_norm()
    with torch.autocast("cuda", torch.bfloat16):
        own = layer(x), cross_entropy.fused_cross_entropy(x, weight, targets, 384)
    for computed, reference in zip(own, expected):
        torch.testing.assert_close(computed, reference, rtol=0.02, atol=0.02)
    gradients = (torch.autograd.grad(loss, [x, weight]) for loss in (own[1], expected[1]))
    for computed, reference in zip(*gradients):
        torch.testing.assert_close(computed, reference, rtol=0.05, atol=1e-3)
