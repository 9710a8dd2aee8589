from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from measure.roofline import gpu_peaks, work
from model import GPT, GPTConfig


def test_work_counts_what_pytorch_counts():
    """Flash attention computes half of the T × T scores, with five GEMMs in backward; without flash there are four."""
    config = GPTConfig(
        seq_len=64, vocab_size=500, n_layer=3, n_head=2, n_embd=32, pad_vocab=False, attention="written_out"
    )
    model = GPT(config)
    tokens = torch.randint(500, (4, 65))
    with FlopCounterMode(display=False) as counter:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    written_out = work(config, 64, 4 * 64)["matrix products"][0]
    flash = work(replace(config, attention="sdpa"), 64, 4 * 64)
    assert written_out == counter.get_total_flops()
    assert flash["matrix products"][0] + flash["attention"][0] * 2 * 6 // 7 == written_out


def test_least_traffic():
    """One token, one layer of width 1 and a vocabulary of 10, counted by hand; 2 bytes per activation."""
    config = GPTConfig(vocab_size=10, n_layer=1, n_head=1, n_embd=1)
    counts = work(config, 1, 1)
    assert counts["matrix products"][1] == 3 * 2 * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1) + (1 + 10))
    assert counts["loss"][1] == 10 * 3 * 2 and counts["attention"][1] == 12 * 2
    assert counts["normalization"][1] == 3 * 28 and counts["element-wise"][1] == 4 * 5 * 2
    assert counts["optimizer"][1] == (12 + 11) * 32
    fused = work(replace(config, fused_gelu=True, fused_cross_entropy=True), 1, 1)
    assert fused["element-wise"][1] == 0 and fused["loss"][1] == 10 * 2 * 2
    assert fused["matrix products"][1] == counts["matrix products"][1] + 4 * 2 * 2  # GELU's input, written and read
    bf16 = work(replace(config, bf16_residual=True), 1, 1)
    assert bf16["normalization"][1] == 3 * 16
    config.attention = "written_out"
    written_out = work(config, 3, 1)  # 3 scores per token, in 6 GEMMs and in the softmax
    assert written_out["matrix products"][1] == counts["matrix products"][1] + 6 * 2 * (3 + 2)
    assert written_out["attention"][1] == 5 * 3 * 2


@pytest.mark.gpu
def test_the_peaks_of_a_gpu():
    name = torch.cuda.get_device_name()
    peak, bandwidth = gpu_peaks(torch.device("cuda", 0), 989.4e12)
    assert peak == 989.4e12 and 1e11 < bandwidth < 2e13
    if "H200" in name:
        assert bandwidth == pytest.approx(4.8e12, rel=0.05)  # data sheet
