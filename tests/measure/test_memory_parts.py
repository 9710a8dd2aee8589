from dataclasses import replace

import pytest
import torch

from common.signals import StopSignal
from config import Config
from measure import memory_parts
from measure.memory_parts import describe_memory, memory_of_step, parts_at_peak
from model import GPT, GPTConfig
from optim.optimizer import make_optimizer
from parallel.memory import FP8_LOGIT_ROWS, LOGIT_ROWS
from parallel.process_group import Distributed
from train_gpt2 import build, train_step

HELD = dict(weights=100, gradients=0, optimizer_states=200, activations=0, logits=0, workspace=30)
LOGITS = 1000


def alloc(addr, size):
    return dict(action="alloc", addr=addr, size=size)


def free(addr, size):
    """PyTorch has two events for a free; the block counts as free from the first on."""
    return [dict(action=action, addr=addr, size=size) for action in ("free_requested", "free_completed")]


def parts(events, backward_events, gradients=()):
    found = parts_at_peak(HELD, events, backward_events, gradients, is_logits=lambda size: size == LOGITS)
    return {part: size - HELD[part] for part, size in found.items() if size != HELD[part]}


def test_each_block_at_the_peak_has_its_part():
    """Two micro-batches. At the peak, in the second forward, the gradient exists; the block at address 5 is logits
    then, though a gradient is allocated there later. The batch of the step before is freed."""
    first = [alloc(1, 50), alloc(2, 7), alloc(5, LOGITS), *free(2, 7), alloc(3, 100), *free(5, LOGITS), *free(1, 50)]
    second = [*free(99, 8), alloc(1, 51), alloc(5, LOGITS), alloc(2, 9)]
    backward = [*free(5, LOGITS), alloc(5, 40), *free(1, 51), *free(2, 9)]
    update = [alloc(7, 300), *free(7, 300), *free(3, 100), *free(5, 40)]
    events = first + second + backward + update
    boundary = len(first + second + backward)
    found = parts(events, boundary, gradients={3, 5})
    assert found == dict(gradients=100, logits=LOGITS, activations=51 + 9, workspace=-8)
    # the sum is the peak of PyTorch's own count
    total = peak = 0
    for event in events:
        total += dict(alloc=1, free_requested=-1).get(event["action"], 0) * event["size"]
        peak = max(peak, total)
    assert sum(found.values()) == peak


def test_the_peak_may_be_in_the_update():
    events = [alloc(1, 500), alloc(2, 100), *free(1, 500)]
    assert parts([*events, alloc(3, 600)], len(events), gradients={2}) == dict(gradients=100, workspace=600)
    assert parts([], 0) == {} and parts(free(9, 10), 1) == {}


def test_logits_are_known_by_their_size():
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=1))

    def is_logits(size, **flags):
        config = Config(micro_batch_size=12, seq_len=1024, **flags)
        return memory_parts.is_logits(size, model, config)

    whole = dict(fused_cross_entropy=False)
    assert is_logits(12288 * 50304 * 2, **whole) and is_logits(12288 * 50257 * 4, **whole)
    assert not is_logits(12288 * 3072 * 4, **whole) and not is_logits(50304 * 768 * 4, **whole)
    assert is_logits(4096 * 50304 * 2) and not is_logits(12288 * 50304 * 2)  # three chunks
    assert is_logits(8192 * 50304, fp8_head=True) and not is_logits(4096 * 50304, fp8_head=True)
    assert is_logits(12288 * 25152 * 4, tensor=2, **whole) and is_logits(3072 * 50304 * 2, context=4)


def test_the_rows_of_logits_are_those_of_the_kernels():
    pytest.importorskip("triton", reason="needs Triton")
    from kernels import cross_entropy, fp8_head

    assert (LOGIT_ROWS, FP8_LOGIT_ROWS) == (cross_entropy.LOGIT_ROWS, fp8_head.LOGIT_ROWS)


def test_what_is_held_before_a_step():
    """Gradients that share one bucket, as DDP's, count its memory once."""
    model = GPT(GPTConfig(n_layer=1, n_embd=8, n_head=2, vocab_size=64, seq_len=8))
    config = Config(fused_adamw=False)
    numbers = sum(p.numel() for p in model.parameters())
    bucket, start = torch.zeros(numbers), 0
    optimizer = make_optimizer(model, config)
    steps = 4 * len(list(model.parameters()))  # AdamW's step counters
    expected = dict(weights=4 * numbers, gradients=0, optimizer_states=8 * numbers + steps)
    assert {
        part: size for part, size in memory_parts.held_before(model, optimizer, 10**6).items() if part in expected
    } == expected
    for parameter in model.parameters():
        parameter.grad = bucket[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    held = memory_parts.held_before(model, optimizer, 10**6)
    assert held["gradients"] == 4 * numbers and sum(held.values()) == 10**6


SMALL = Config(
    device="cuda", autocast="off", compile=False, fused_cross_entropy=False, fused_gelu=False,
    bf16_residual=False, tf32=False, n_layer=4, n_head=4, n_embd=256, seq_len=256, micro_batch_size=8,
    total_batch_size=4096, max_steps=9,
)  # fmt: skip


def test_one_line_for_a_person():
    memory = dict(weights=0.46, optimizer_states=0.93, activations=19.0)
    assert describe_memory(20.4, memory) == (
        "peak memory 20.40 GB: weights 0.46, optimizer states 0.93, activations 19.00"
    )
    assert describe_memory(25.0, memory).startswith("peak memory 25.00 GB, 20.39 GB in a step: weights 0.46, ")


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, dict(autocast="bf16", compile=True), dict(fused_cross_entropy=True)])
def test_the_parts_of_a_step_sum_to_its_peak(flags):
    device = torch.device("cuda")
    trainer = build(replace(SMALL, **flags), Distributed(0, 1, device))
    c, model = trainer.config, trainer.model
    tokens = torch.randint(50257, (c.micro_batch_size, c.seq_len + 1), device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None
    step_of = lambda step: train_step(trainer, step, lambda: batch, StopSignal())  # noqa: E731
    for step in range(3):  # the allocator settles
        step_of(step)
    torch.cuda.reset_peak_memory_stats()
    result, memory = memory_of_step(lambda: step_of(3), model, trainer.optimizer, c)
    peak = torch.cuda.max_memory_allocated() / 2**30
    assert result.finite
    assert sum(memory.values()) == pytest.approx(peak, rel=0.05)
    weights = sum(p.numel() for p in model.parameters()) * 4 / 2**30
    assert [memory["weights"], memory["gradients"]] == pytest.approx([weights, weights], rel=0.01)
    assert memory["optimizer_states"] == pytest.approx(2 * weights, rel=0.01)
    logits = c.micro_batch_size * c.seq_len * 50304 * 2 / 2**30
    assert memory["logits"] >= logits and memory["activations"] > 0
    assert 0 <= memory["workspace"] < 0.3  # cuBLAS's is 32 MB on an H100
