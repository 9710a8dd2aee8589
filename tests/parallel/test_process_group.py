import socket
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from common.errors import UserError
from config import Config
from model import GPT, GPTConfig
from parallel import gradients, process_group

PAIR = dict(WORLD_SIZE=2, RANK=0, LOCAL_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=29500)


def start(monkeypatch, device, gpus=0, mps=False, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    return process_group.start(device)


def test_auto_takes_the_cpu_where_there_is_nothing_else(monkeypatch):
    alone = start(monkeypatch, "auto")
    assert (alone.rank, alone.world_size, alone.device) == (0, 1, torch.device("cpu"))
    assert alone.all_reduce(1, torch.tensor(2.5), torch.eye(2)) == [1.0, 2.5, 1.0, 0.0, 0.0, 1.0]
    assert alone.minimum(3) == 3


@pytest.mark.gpu
def test_an_all_reduce_waits_neither_for_the_gpu_nor_for_later_work():
    device = torch.device("cuda", 0)
    process_group.Distributed(0, 1, device).all_reduce(torch.zeros((), device=device), 1)  # takes the memory
    torch.cuda.synchronize()
    x = torch.ones((), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = process_group.Distributed(0, 1, device).begin_all_reduce(x, True, torch.full((2,), 5.0, pin_memory=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda._sleep(5 * 10**9)  # cycles: some seconds
    assert read() == [1.0, 1.0, 5.0, 5.0] and not torch.cuda.current_stream().query()


@pytest.mark.parametrize(
    "words, device, machine",
    [
        ("--device cuda, but PyTorch sees no such GPU", "cuda", {}),
        ("--device mps, but PyTorch sees no such GPU", "mps", {}),
        ("several ranks cannot share an Apple GPU", "auto", dict(mps=True, **PAIR)),
        ("use --nproc_per_node=2", "cuda", dict(gpus=2, **PAIR | dict(WORLD_SIZE=3, RANK=2, LOCAL_RANK=2))),
    ],
)
def test_devices_that_are_not_there(monkeypatch, words, device, machine):
    with pytest.raises(UserError) as error:
        start(monkeypatch, device, **machine)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words, environment",
    [
        ("WORLD_SIZE", dict(WORLD_SIZE="x")),
        ("'1.5'", PAIR | dict(LOCAL_RANK=1.5)),
        ("4 tasks would each do the same", dict(SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=1)),
        ("2 tasks would each do the same", dict(OMPI_COMM_WORLD_SIZE=2)),
        *[(name, {key: PAIR[key] for key in PAIR if key != name}) for name in list(PAIR)[1:]],
    ],
)
def test_wrong_environment_variables_of_the_launcher(monkeypatch, words, environment):
    with pytest.raises(UserError) as error:
        start(monkeypatch, "cpu", **environment)
    assert words in str(error.value) and "torchrun" in str(error.value) and "\n" not in str(error.value)


def test_a_port_that_is_taken(monkeypatch):
    with socket.create_server(("localhost", 0)) as server, pytest.raises(UserError, match="the ranks do not meet"):
        start(monkeypatch, "cpu", **PAIR | dict(MASTER_PORT=server.getsockname()[1]))


@pytest.mark.parametrize("overlap", [True, False])
def test_overlapped_gradients_split_the_compiled_graph(group, monkeypatch, overlap):
    torch.compiler.reset()  # of other tests' graphs
    config, count = Config(overlap_gradients=overlap), CompileCounter()
    model = GPT(GPTConfig(seq_len=8, vocab_size=301, n_layer=2, n_head=2, n_embd=128))
    compiled = torch.compile(model, backend=count, dynamic=False)
    ranks, calls = process_group.Distributed(0, 2, torch.device("cpu")), []
    average = gradients.allreduce_hook
    monkeypatch.setattr(gradients, "allreduce_hook", lambda *bucket: calls.append("average") or average(*bucket))
    wrapped = gradients.wrap_ddp(compiled, config, ranks, lambda: calls.append("begin"))
    with gradients.accumulation(SimpleNamespace(model=model, train_forward=wrapped, config=config), last=True):
        wrapped(*torch.randint(301, (2, 2, 8))).backward()
    assert (count.frame_count > 1) == overlap  # DDP's first bucket has 1 MB
    assert calls and calls == ["begin", "average"] * (len(calls) // 2)


def test_gradients_of_ddp_are_kept_in_its_buckets_alone(group):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    ranks = process_group.Distributed(0, 2, torch.device("cpu"))
    wrapped = gradients.wrap_ddp(model, Config(compile=False), ranks, lambda: None)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    places = []
    trainer = SimpleNamespace(model=model, train_forward=wrapped, optimizer=optimizer, config=Config(cuda_graphs=False))
    for _ in range(3):
        for last in (False, True):
            with gradients.accumulation(trainer, last):
                wrapped(torch.ones(4, 3)).sum().backward()
            places.append({p.grad.untyped_storage().data_ptr() for p in model.parameters()})
        assert all((p.grad != 0).all() for p in model.parameters())
        optimizer.step()
        gradients.zero(trainer)
        assert all((p.grad == 0).all() for p in model.parameters())
    assert places[2:] == places[3:4] * 4 and len(places[3]) < len(places[0])  # from the second step on
    trainer.train_forward = model
    gradients.zero(trainer)
    assert all(p.grad is None for p in model.parameters())
