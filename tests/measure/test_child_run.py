import os
import signal
import threading

import pytest
import torch
from conftest import TINY, wait_until

from common.cli import given
from common.errors import UserError
from config import Config, defaults
from measure import child_run
from measure.results import Results


def test_why_a_run_ended():
    memory = "error: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB): use --micro_batch_size 8"
    assert child_run.explain("", -signal.SIGTERM, "x.txt")["status"] == "stopped"
    for output, code in [(memory, 1), ("Killed", -9)]:
        assert child_run.explain(output, code, "x.txt") == dict(status="skipped", reason="out of memory")
    told = "device     1 × cpu\nerror (rank 1): no train shards in x\nlater"
    assert child_run.explain(told, 1, "x.txt") == dict(status="skipped", reason="no train shards in x")
    bug = child_run.explain("Traceback\n  ...\nTypeError: bad operand\n", 1, "x.txt")
    assert bug["status"] == "failed" and "TypeError: bad operand" in bug["reason"] and "x.txt" in bug["reason"]


def results(folder, kind="ladder", goes_on=True):
    return Results(Config(log_dir=str(folder), run_name="x"), kind, torch.device("cpu"), ("rung",), goes_on)


def test_a_run_that_a_signal_stops(corpus, tmp_path):
    """It ends with exit code 0, and has no figures."""

    def stop():
        path = tmp_path / "x" / "00" / "metrics.jsonl"
        wait_until(lambda: path.exists() and path.stat().st_size)
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            os.kill(int(file.read().split()[-1]), signal.SIGTERM)

    flags = given(Config, arguments=list(map(str, TINY))) | dict(data_dir=str(corpus), max_steps=100_000)
    config = Config(**vars(defaults(flags)) | flags)
    stopper = threading.Thread(target=stop)
    stopper.start()
    result = child_run.measure(config, results(tmp_path), "00", 1)
    stopper.join()
    assert result["status"] == "stopped" and result["reason"] == "a signal ended it"


def test_two_measurements_of_one_name_leave_each_other_alone(tmp_path):
    """The second one ends before it deletes anything."""
    first = results(tmp_path)
    running = first.folder / "00_baseline"
    running.mkdir()
    with pytest.raises(UserError, match="is being written by another process: choose another --run_name"):
        results(tmp_path)
    assert running.exists()
    with pytest.raises(UserError, match="exists: choose another --run_name"):
        results(tmp_path, "sweep")


def test_a_result_of_another_command_machine_version_or_commit_is_not_taken(tmp_path):
    folder, command = results(tmp_path), "python train_gpt2.py --lr 1"
    row = folder.keep(dict(name="00", command=command, status="done", facts=dict(folder.environment, command="other")))
    assert folder.kept("00", command) == row and folder.kept("01", command) is None
    with pytest.raises(UserError, match="has runs whose command is .*, and now it is another: choose"):
        folder.kept("00", "another")
    for name in ("hardware", "torch", "git_commit"):
        folder.environment = row["facts"] | {name: "another", "command": ""}
        with pytest.raises(UserError, match=f"has runs whose {name} is .*, and now it is another: choose"):
            folder.kept("00", command)
