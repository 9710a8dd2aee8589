"""How the ranks of one start find each other: torchrun's environment variables, and a store that all of them share."""

import contextlib
import hashlib
import os
import socket
import sys
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from common.errors import UserError, first_line

PATIENCE = (60, 600)  # seconds that a rank waits for the others: before it says so, and before it gives up
HOW_TO_START = "start with torchrun, or set WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every rank"


def launched():
    """(rank, world size, local rank) from the environment variables that torchrun sets; (0, 1, 0) without them.

    Raises UserError for a variable that is missing or out of range.
    """
    world_size = read_variable("WORLD_SIZE", range(1, 10**6), "1")
    default = "0" if world_size == 1 else "not set"
    rank, local_rank = (read_variable(name, range(world_size), default) for name in ("RANK", "LOCAL_RANK"))
    if world_size > 1:
        read_variable("MASTER_PORT", range(1, 2**16))
        if not os.environ.get("MASTER_ADDR"):
            raise UserError(f"MASTER_ADDR is not set: it must be the host of rank 0; {HOW_TO_START}")
    return rank, world_size, local_rank


def ranks_of_machine(default=1):
    """Ranks on this machine, as torchrun says; without torchrun the default."""
    return read_variable("LOCAL_WORLD_SIZE", range(1, 10**6), str(default))


def read_variable(name, allowed, default="not set"):
    """An environment variable as an int. Raises UserError if it is not in the range `allowed`."""
    text = os.environ.get(name, default)
    if not text.isdecimal() or int(text) not in allowed:
        raise UserError(
            f"{name} is {text or 'empty'}: it must be a whole number from {allowed[0]} to {allowed[-1]}; {HOW_TO_START}"
        )
    return int(text)


def meet(rank, world_size, patience):
    """The store that all ranks of this start share. torchrun hosts it; without torchrun rank 0 does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_host:  # TCPStore waits too, but prints a C++ stack trace every minute
        wait_until(lambda: is_listening(host, port), lambda: f"rank 0 at {host}:{port}", patience)
    try:
        address = "localhost" if is_host else host
        store = dist.TCPStore(address, port, None, is_host, timedelta(minutes=30), wait_for_workers=False)
        return dist.PrefixStore(launch_prefix(store, rank, world_size, patience), store)
    except dist.DistNetworkError as error:
        raise UserError(
            f"no store at {host}:{port} ({first_line(error)}): is rank 0 running, and MASTER_PORT free on its machine?"
        ) from error


def is_listening(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def wait_until(ready, missing, patience):
    """Call ready() until it returns something true, and return that.

    missing(): which ranks it waits for, in words. Raises UserError after patience[1] seconds.
    """
    notice, limit = patience
    began, pause, said = time.monotonic(), 0.01, False
    while not (result := ready()):
        waited = time.monotonic() - began
        if waited > limit:
            raise UserError(
                f"waited {limit / 60:.0f} minutes for {missing()}: all ranks need the same WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT"
            )
        if waited > notice and not said:
            print(f"waiting for {missing()}", file=sys.stderr, flush=True)
            said = True
        time.sleep(pause)
        pause = min(2 * pause, 1)
    return result


def launch_prefix(store, rank, world_size, patience=PATIENCE):
    """A key prefix for this start of the ranks: the same on all ranks, and never used before.

    torchrun's restarts share one store, which still has the addresses of the killed processes, and its restart counts
    differ from machine to machine; without a new prefix for each start the ranks hang or fail to connect. Each rank
    publishes a fresh identifier, and the prefix is a hash of all identifiers. A rank that has read the identifier of a
    killed process finds that some rank has not marked this prefix, and reads again.
    """
    prefix = "start"
    store.set(f"start {rank}", uuid.uuid4().hex)

    def keys(prefix):
        return [f"{prefix} {other}" for other in range(world_size)]

    def ready():
        nonlocal prefix
        if store.check(keys("start")):
            prefix = hashlib.sha256(b"".join(store.multi_get(keys("start")))).hexdigest()  # keys of the store are short
            store.set(f"{prefix} {rank}", "")
            return store.check(keys(prefix)) and prefix

    def missing():
        late = [str(other) for other, key in enumerate(keys(prefix)) if not store.check([key])]
        return f"rank {', '.join(late)}"

    return wait_until(ready, missing, patience)
