import os
import signal
import threading

import pytest
import torch
from conftest import TINY, wait_until
from fork_server import descendants
from texts import write_corpus

from common.cli import given
from common.errors import UserError
from config import Config, defaults
from measure.child_run import ChildRun, explain, train_to_end
from measure.results import Results, data_sha256


def end_with_a_bug(config, pipe):
    raise TypeError("bad operand")


def end_as_linux_does(config, pipe):
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_an_error(config, pipe):
    raise UserError("out of memory (CUDA out of memory. Tried to allocate 20.00 MiB): use --micro_batch_size 8")


def test_why_a_run_ended(tmp_path):
    for work in (end_with_a_bug, end_as_linux_does, end_with_an_error):
        run = ChildRun(work, Config(), 1, tmp_path / work.__name__)
        with pytest.raises((UserError, RuntimeError)) as caught:
            run.answer()
        run.close(0)
        if work is end_with_a_bug:
            assert explain(caught.value) == dict(status="failed", reason=f"exit code 1, see {tmp_path}/{work.__name__}")
            assert (tmp_path / work.__name__).read_text().endswith("TypeError: bad operand\n")
        else:
            assert explain(caught.value) == dict(status="skipped", reason="out of memory")
    assert explain(UserError("no train shards in x")) == dict(status="skipped", reason="no train shards in x")


def results(folder, kind="ladder", goes_on=True):
    return Results(Config(log_dir=str(folder), run_name="x"), kind, torch.device("cpu"), ("rung",), goes_on)


def test_a_run_that_a_signal_stops(corpus, tmp_path):
    """It ends as a complete one does, and is not kept."""

    def stop():
        path = tmp_path / "x" / "00" / "metrics.jsonl"
        wait_until(lambda: path.exists() and path.stat().st_size)
        os.kill(descendants(os.getpid())[-1], signal.SIGTERM)

    flags = given(Config, arguments=list(map(str, TINY))) | dict(data_dir=str(corpus), max_steps=100_000)
    config = Config(**vars(defaults(flags)) | flags)
    stopper = threading.Thread(target=stop)
    stopper.start()
    folder = results(tmp_path)
    result = train_to_end(config, folder, "00", 1)
    stopper.join()
    assert result["status"] == "skipped" and result["reason"] == "a signal ended it"
    assert folder.kept("00", config, command=result["command"]) is None


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


def test_a_result_of_another_command_machine_version_code_or_data_is_not_taken(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "data")
    folder, command, config = results(tmp_path), "python train_gpt2.py --lr 1", Config(data_dir=str(tmp_path / "data"))
    facts = dict(folder.environment, command="other", data_sha256=data_sha256(config))
    row = folder.keep(dict(name="00", command=command, status="done", facts=facts))
    assert "; after a stop the same command with --run_name x goes on\n" in capsys.readouterr().out
    assert folder.kept("00", config, command=command) == row and folder.kept("01", config, command=command) is None
    with pytest.raises(UserError, match="has runs whose command is .*, and now it is another: choose"):
        folder.kept("00", config, command="another")
    for name in ("hardware", "torch", "git_commit", "code_sha256"):
        folder.environment = row["facts"] | {name: "another", "command": ""}
        with pytest.raises(UserError, match=f"has runs whose {name} is .*, and now it is another: choose"):
            folder.kept("00", config, command=command)
    folder.environment = row["facts"]
    write_corpus(tmp_path / "data", seed=1)  # as long as before
    with pytest.raises(UserError, match="has runs whose data_sha256 is "):
        folder.kept("00", config, command=command)
