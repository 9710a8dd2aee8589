"""A hang of several ranks: every rank's stacks and flight recorder in the run's folder, and one line that names the
rank for which the others wait.

PyTorch's flight recorder keeps each rank's last 2,000 collectives. A thread on every rank watches for new collectives
of the default group. When none starts on its rank for LIMIT seconds, it alerts all ranks through the process group's
store, which works without collectives. A run reports its first hang.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

import contextlib
import faulthandler
import json
import pickle
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoints.run_folder import unused_name
from common.cli import ROOT, print_over_bar

LIMIT = 480  # seconds without a new collective. NCCL's timeout is 30 minutes in the default group, 10 in others.
ANSWER = 10  # seconds that a rank has to answer an alert
ALERT = "hang"  # the key in the store; a rank's answer has its number behind it


@contextlib.contextmanager
def watch(folder, distributed):
    """Watch for a hang of several ranks inside this context. folder: the run's, which gets a folder `hang`, or `hang.1`
    if an earlier process has left one.

    The thread answers unless this rank's process is stopped, or a library keeps Python's global interpreter lock.
    """
    done = threading.Event()
    thread = threading.Thread(target=watch_collectives, args=(Path(folder) / "hang", distributed, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(2 * ANSWER)  # the group is destroyed next


def watch_collectives(folder, distributed, done):
    """Report a hang if no default-group collective starts for LIMIT seconds, or another rank alerts."""
    store = dist.distributed_c10d._get_default_store()
    number, since = None, time.monotonic()
    with contextlib.suppress(dist.DistError):  # the store's host has ended, and with it the job
        while not done.wait(min(10, LIMIT / 20)):
            begun = dist.group.WORLD._get_sequence_number_for_group()
            if begun != number:
                number, since = begun, time.monotonic()
            if time.monotonic() - since > LIMIT:
                store.compare_set(ALERT, "", unused_name(folder).name)  # the first alert names the folder
            if store.check([ALERT]):
                return report(folder.with_name(store.get(ALERT).decode()), distributed, store)


def report(folder, distributed, store):
    """Write this rank's stacks and flight recorder. The lowest rank that answers prints what the ranks' answers say."""
    rank, bindings = distributed.rank, torch._C._distributed_c10d
    # NCCL has a flight recorder of its own, which fr_trace of torch.distributed reads
    trace = bindings._dump_nccl_trace() if dist.get_backend() == "nccl" else bindings._dump_fr_trace()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"stacks_rank_{rank}.txt", "w") as file:
            faulthandler.dump_traceback(file)
        (folder / f"flight_recorder_rank_{rank}").write_bytes(trace)
    except OSError as error:
        print_over_bar(f"rank {rank}: cannot write {folder} ({error.strerror})")
    answer = dict(groups=last_collectives(pickle.loads(trace)["entries"]), where=where())
    store.set(f"{ALERT} {rank}", json.dumps(answer))
    keys = {other: f"{ALERT} {other}" for other in range(distributed.world_size)}
    until = time.monotonic() + ANSWER
    while time.monotonic() < until and not store.check(list(keys.values())):
        time.sleep(0.1)
    answers = {other: json.loads(store.get(key)) for other, key in keys.items() if store.check([key])}
    if rank == min(answers):
        reason = explain(answers, distributed.world_size)
        print_over_bar(f"no collective for {LIMIT} s: {reason}; stacks and flight recorder: {folder}/")


def last_collectives(entries):
    """{process group: {last, waits}} of a flight recorder's entries: the number of the last collective that has begun,
    and [number, name, group's description] of the first that is not complete, or None."""
    groups = {}
    for entry in sorted(entries, key=lambda entry: entry["collective_seq_id"]):
        if entry["is_p2p"]:
            continue  # sends and receives have no numbers
        name, description = entry["process_group"]
        group = groups.setdefault(name, dict(last=0, waits=None))
        group["last"] = entry["collective_seq_id"]
        if not entry["retired"] and entry["state"] != "completed" and group["waits"] is None:
            group["waits"] = [entry["collective_seq_id"], entry["profiling_name"], description]
    return groups


def where():
    """The innermost line of this project that the main thread executes, such as "loader.py:130 next_batch"."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    frame = ([frame for frame in stack if Path(frame.filename).is_relative_to(ROOT)] or stack)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def explain(answers, world_size):
    """Which rank did not arrive at which collective, in words. answers: {rank: {groups, where}} of report()."""
    silent = [rank for rank in range(world_size) if rank not in answers]
    waits = [
        (rank, name, group["waits"])
        for rank, answer in sorted(answers.items())
        for name, group in answer["groups"].items()
        if group["waits"]
    ]
    # a rank that waits in another group is not the cause
    others = answers.keys() - {rank for rank, _, _ in waits}
    for rank, name, (number, operation, description) in waits:
        theirs = {other: answers[other]["groups"].get(name) for other in sorted(others)}
        late = next(iter([other for other, group in theirs.items() if group and group["last"] < number] + silent), None)
        if late is not None:
            doing = f"is at {answers[late]['where']}" if late in answers else "does not answer"
            return (
                f"rank {late} did not arrive at {operation} {number} of {description}, where rank {rank} waits; "
                f"rank {late} {doing}"
            )
    return ", ".join(f"rank {rank} is at {answer['where']}" for rank, answer in answers.items())
