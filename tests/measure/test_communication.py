"""What a step sends, against the collectives that DDP and FSDP start, and the estimate for machines not at hand."""

from collections import Counter

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from common.dtensors import fill
from config import Config
from measure import communication as comm
from model import GPT, GPTConfig
from parallel import ddp, fsdp


class Recorder(TorchDispatchMode):
    """Counts the collectives that are started inside it: {(operation, bytes): count}."""

    # operator: (the operation, which argument has the size of nccl-tests' S)
    OPERATORS = {
        "c10d::_allgather_base_": ("all-gather", 0),
        "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if name := self.OPERATORS.get(function._schema.name):
            self.counts[name[0], args[name[1]].nbytes] += 1
        return function(*args, **(kwargs or {}))

    def count_bucket(self, bucket):
        """DDP's hook: the all-reduce of a bucket, in C++, is no operator. Nothing is sent."""
        self.counts["all-reduce", bucket.buffer().nbytes] += 1
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


@pytest.mark.parametrize("parallel, autocast", [("ddp", "off"), ("zero2", "bf16"), ("zero3", "off"), ("zero3", "bf16")])
def test_a_step_sends_what_is_counted(two_ranks, monkeypatch, parallel, autocast):
    monkeypatch.setattr(fsdp, "MIN_ALL_GATHER_PARAMS", 2 * 12 * 128**2)  # two units of two blocks, one of one
    monkeypatch.setattr(comm, "BUCKET_BYTES", 2**20)
    sizes = dict(n_layer=5, n_head=2, n_embd=128)
    config = Config(parallel=parallel, autocast=autocast, compile=False, **sizes)
    with torch.device("meta"):
        model = GPT(GPTConfig(seq_len=8, vocab_size=301, **sizes))
    fsdp.place(model, config, two_ranks)
    model.init_weights(fill)
    recorder, micro_steps = Recorder(), 3
    if parallel == "ddp":
        forward = DistributedDataParallel(model, bucket_cap_mb=1)
        forward.register_comm_hook(recorder, Recorder.count_bucket)
    else:
        forward = model
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):  # the first step arranges DDP's buckets
        recorder.counts = Counter()
        for micro_step in range(micro_steps):
            x, y = torch.randint(301, (2, 2, 8))
            with recorder, ddp.micro_batch(model, forward, config, last=micro_step == micro_steps - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast == "bf16"):
                    loss = forward(x, y)
                loss.backward()
        ddp.zero_gradients(optimizer, forward)
    expected = Counter()
    for operation, size, count in comm.collectives_of_step(model, config, micro_steps):
        expected[operation, size] += count
    assert recorder.counts == expected and expected.total() > 3


def test_time_between_and_beyond_the_measured_sizes():
    points = [(1000, 1.0), (10_000, 2.0), (1_000_000, 50.0)]
    expected = {10: 1.0, 1000: 1.0, 3162.2777: 2**0.5, 10_000: 2.0, 100_000: 10.0, 3_000_000: 150.0}
    assert {size: comm.ms_of_collective(points, size) for size in expected} == pytest.approx(expected)
    sent = [comm.Collective("all-gather", 1000, 3), comm.Collective("all-gather", 100_000, 2)]
    assert comm.bytes_of_step(sent) == 203_000
    assert comm.ms_of_step(sent, {"all-gather": points}) == pytest.approx(23.0)


def buckets_of_124m():
    with torch.device("meta"):
        return comm.collectives_of_step(GPT(GPTConfig()), Config(), micro_steps=1)


@pytest.mark.parametrize(
    "gpus, network, divisor, micro_batch, micro_steps, ms, overlap",
    [
        (8, 0, 1, 108.6, 1, 115, False),
        (16, 400, 1, 56.4, 1, 63, False),
        (16, 12.5, 1, 56.4, 1, 82, True),
        (16, 12.5, 2, 56.4, 1, 75, True),  # --bf16_gradients
        (16, 12.5, 1, 108.6, 2, 246, True),
        (32, 400, 1, 30.0, 1, 37, False),
        (32, 400, 1, 108.6, 1, 117, False),
        (32, 12.5, 1, 30.0, 1, 83, True),
        (32, 12.5, 1, 108.6, 1, 142, True),
    ],
)
def test_a_step_on_machines_of_eight_gpus(gpus, network, divisor, micro_batch, micro_steps, ms, overlap):
    """From the times of micro-batches in docs/links.md, and 300 GB/s in a machine."""
    averaging = comm.averaging_ms(498e6 / divisor, 8, 300e9, gpus // 8, 1e9 * network)
    wait, overlapped = comm.wait_for_averaging(averaging, micro_batch, buckets_of_124m())
    total = comm.ddp_step_ms(micro_batch, micro_steps, wait, 124e6)
    assert total == pytest.approx(ms, abs=0.6) and overlapped == overlap


@pytest.mark.parametrize("divisor, wait", [(1, 46.9), (2, 27.7)])
def test_a_step_waits_for_the_last_bucket_as_measured(divisor, wait):
    """--overlap_gradients on two H200s over TCP, to which SPLIT_GRAPH_SECONDS is fitted, and --bf16_gradients too.

    docs/scaling.md, "Slower links"
    """
    expected = (pytest.approx(wait, rel=0.03), True)
    assert comm.wait_for_averaging(110.7 / divisor, 214, buckets_of_124m()) == expected
