import json
import os
import re
import signal

import pytest
import torch
from conftest import TINY

from common.errors import UserError
from config import SETTLING_STEPS
from measure import child_run
from measure.results import Results

CPU = torch.device("cpu")


def test_a_measurement_in_doubt_says_so():
    assert "interquartile range is 35%" in child_run.uneven_warning(dict(spread=0.35))[0]
    assert child_run.uneven_warning(dict(spread=0.05)) == child_run.uneven_warning(dict(status="skipped")) == []


def test_why_a_run_ended():
    memory = "error: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB): use --micro_batch_size 8"
    assert child_run.explain("", -signal.SIGTERM, "x.txt")["status"] == "stopped"
    for output, code in [(memory, 1), ("Killed", -9)]:
        assert child_run.explain(output, code, "x.txt") == dict(status="skipped", reason="out of memory")
    told = "device     1 × cpu\nerror (rank 1): no train shards in x\nlater"
    assert child_run.explain(told, 1, "x.txt") == dict(status="skipped", reason="no train shards in x")
    bug = child_run.explain("Traceback\n  ...\nTypeError: bad operand\n", 1, "x.txt")
    assert bug["status"] == "failed" and "TypeError: bad operand" in bug["reason"] and "x.txt" in bug["reason"]


def test_a_run_that_a_signal_stops(corpus, tmp_path):
    """It ends with exit code 0, and has no figures."""

    class Bar:
        n = 0

        def update(self, steps):
            self.n += steps
            if steps == 1 and self.n == 2:
                with open(f"/proc/self/task/{os.getpid()}/children") as file:
                    os.kill(int(file.read().split()[-1]), signal.SIGTERM)

    steps = SETTLING_STEPS + 100000
    arguments = [*TINY, "--data_dir", str(corpus), "--max_steps", str(steps)]
    result = child_run.measure(arguments, Results(tmp_path, "x", "ladder", CPU), "00", 1, steps, Bar())
    assert result["status"] == "stopped" and "ms" not in result
    assert re.fullmatch(r"a signal ended it after \d+ of 100005 steps", result["reason"])


def test_two_measurements_of_one_name_leave_each_other_alone(tmp_path):
    """The second one ends before it deletes anything."""
    first = Results(tmp_path, "x", "ladder", CPU, goes_on=True)
    running = first.folder / "00_baseline"
    running.mkdir()
    with pytest.raises(UserError, match="is being written by another process: choose another --run_name"):
        Results(tmp_path, "x", "ladder", CPU, goes_on=True)
    assert running.exists()
    with pytest.raises(UserError, match="exists: choose another --run_name"):
        Results(tmp_path, "x", "sweep", CPU, goes_on=True)


@pytest.mark.parametrize("name", ["hardware", "torch", "git_commit"])
def test_a_result_of_another_machine_version_or_commit_is_not_taken(tmp_path, name):
    results = Results(tmp_path, "x", "ladder", CPU)
    kept = dict(command="python train_gpt2.py --lr 1", status="done", facts=dict(results.environment, command="other"))
    path = results.folder / "00.json"
    path.write_text(json.dumps(kept))
    assert child_run.read_kept(path, kept["command"], results.environment) == kept
    with pytest.raises(UserError, match="other flags"):
        child_run.read_kept(path, kept["command"] + " --fp8", results.environment)
    path.write_text(json.dumps(dict(kept, facts=kept["facts"] | {name: "older"})))
    with pytest.raises(UserError, match=f"has runs whose {name} is older, and now it is "):
        child_run.read_kept(path, kept["command"], results.environment)
