import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from conftest import free_port
from torch._dynamo.testing import CompileCounter

from common.errors import UserError, run
from config import Config
from model import GPT, GPTConfig
from parallel import ddp, process_group, rendezvous

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
    assert alone.minimum(3) == 3.0


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
    torch.cuda._sleep(10**9)  # cycles: half a second
    assert read() == [1.0, 1.0, 5.0, 5.0] and not torch.cuda.current_stream().query()


@pytest.mark.parametrize(
    "words, device, machine",
    [
        ("--device cuda, but PyTorch sees no GPU", "cuda", {}),
        ("--device mps, but PyTorch sees no Apple GPU", "mps", {}),
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
        ("WORLD_SIZE is x", dict(WORLD_SIZE="x")),
        ("WORLD_SIZE is 0: it must be a whole number from 1", dict(WORLD_SIZE=0)),
        ("WORLD_SIZE is -2", PAIR | dict(WORLD_SIZE=-2)),
        ("RANK is 1: it must be a whole number from 0 to 0", dict(RANK=1)),
        ("RANK is 2: it must be a whole number from 0 to 1", PAIR | dict(RANK=2)),
        ("LOCAL_RANK is 1.5", PAIR | dict(LOCAL_RANK=1.5)),
        ("MASTER_PORT is 65536: it must be a whole number from 1 to 65535", PAIR | dict(MASTER_PORT=2**16)),
        *[(f"{name} is not set", {key: PAIR[key] for key in PAIR if key != name}) for name in list(PAIR)[1:]],
    ],
)
def test_wrong_environment_variables_of_the_launcher(monkeypatch, words, environment):
    with pytest.raises(UserError) as error:
        start(monkeypatch, "cpu", **environment)
    assert words in str(error.value) and "torchrun" in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_world_size_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", sys.stdout)  # run() replaces both
    monkeypatch.setattr("sys.stderr", sys.stderr)
    with pytest.raises(SystemExit) as end:
        run(lambda: start(monkeypatch, "cpu", WORLD_SIZE="x"))
    message = capsys.readouterr().err
    assert end.value.code == 1 and message.startswith("error: WORLD_SIZE is x") and message.count("\n") == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_overlapped_gradients_split_the_compiled_graph(group, overlap):
    torch._dynamo.reset()  # of other tests' graphs
    config, count = Config(overlap_gradients=overlap), CompileCounter()
    model = GPT(GPTConfig(seq_len=8, vocab_size=301, n_layer=2, n_head=2, n_embd=128))
    compiled = torch.compile(model, backend=count, dynamic=False)
    wrapped = ddp.wrap_ddp(compiled, config, process_group.Distributed(0, 2, torch.device("cpu")))
    with ddp.micro_batch(model, wrapped, config, last=True):
        wrapped(*torch.randint(301, (2, 2, 8))).backward()
    assert (count.frame_count > 1) == overlap  # DDP's first bucket has 1 MB


def test_gradients_of_ddp_are_kept_in_its_buckets_alone(group):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    wrapped = ddp.wrap_ddp(model, Config(compile=False), process_group.Distributed(0, 2, torch.device("cpu")))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    places = []
    for _ in range(3):
        for last in (False, True):
            with ddp.micro_batch(model, wrapped, Config(), last):
                wrapped(torch.ones(4, 3)).sum().backward()
            places.append({p.grad.untyped_storage().data_ptr() for p in model.parameters()})
        assert all((p.grad != 0).all() for p in model.parameters())
        optimizer.step()
        ddp.zero_gradients(optimizer, wrapped)
        assert all((p.grad == 0).all() for p in model.parameters())
    assert places[2:] == places[3:4] * 4 and len(places[3]) < len(places[0])  # from the second step on
    ddp.zero_gradients(optimizer, model)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("rank, missing", [(0, "rank 1"), (1, "rank 0 at localhost:")])
def test_ranks_that_do_not_come(monkeypatch, capsys, rank, missing):
    for name, value in (PAIR | dict(RANK=rank, MASTER_PORT=free_port())).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=f"waited 0 minutes for {missing}"):
        process_group.start("cpu", patience=(0, 0.05))
    assert capsys.readouterr().err.startswith(f"waiting for {missing}")


def test_either_rank_can_be_late(monkeypatch):
    for late in (0, 1):
        for name, value in dict(MASTER_ADDR="localhost", MASTER_PORT=free_port()).items():
            monkeypatch.setenv(name, str(value))
        with ThreadPoolExecutor() as pool:
            first = pool.submit(rendezvous.meet, 1 - late, 2, patience=(60, 60))
            time.sleep(0.1)
            stores = [rendezvous.meet(late, 2, patience=(60, 60)), first.result(60)]
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"


def test_a_port_that_is_taken(monkeypatch):
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        with pytest.raises(UserError, match="address already in use.*MASTER_PORT free"):
            rendezvous.meet(0, 2, patience=(0, 0))


def test_ranks_meet_under_a_name_of_this_start():
    """Although the store still has the one before, whose ranks some have called."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("localhost", store.port, is_master=False) for _ in (1, 2)]
    names = []
    for _ in range(3):
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(rendezvous.launch_prefix, client, rank, 3) for rank, client in enumerate(clients, 1)]
            time.sleep(0.2)  # they call the rank 0 before
            found = {rendezvous.launch_prefix(store, 0, 3), *(other.result(20) for other in others)}
        assert len(found) == 1
        names += found
    assert len(set(names)) == 3
