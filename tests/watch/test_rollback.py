import json
import math
import shutil
from types import SimpleNamespace

import pytest
from conftest import expect_error, logged, metrics
from safetensors.torch import load_file

from checkpoints import resume
from checkpoints.load import read_training
from checkpoints.run_folder import checkpoints_of
from config import Config
from optim.schedules import steps_in_time
from watch.rollback import MARGIN, MAX_BAD_STEPS, PATIENCE, WINDOW, Health, as_left

# A fault in a step, once in the life of the process
FAULT = """
import sys, torch, train_gpt2
from common.device import local
real, done = train_gpt2.train_step, []

def train_step(trainer, step, *rest):
    first = trainer.distributed.rank == 0
    if step == 15 and not done:
        {fault}
        done.append(step)
    return real(trainer, step, *rest)

train_gpt2.train_step = train_step
train_gpt2.main()
"""
# A weight of block 1 on rank 0 has its highest bit of the exponent flipped
FLIP = "if first: local(trainer.model.transformer.h[1].mlp.c_fc.weight.data).view(torch.int32).flatten()[3] ^= 1 << 30"
GROW = "for parameter in trainer.model.parameters(): parameter.data.mul_(20)"
FLAGS = "--max_steps 32 --checkpoint_every 10 --keep_checkpoints 9 --total_batch_size 64 --micro_batch_size 2".split()
DROP = "--max_steps --checkpoint_every --total_batch_size --micro_batch_size"


def observe(losses):
    """The Health after steps with these losses."""
    health = Health(resume.Start(None, None, None, None))
    for step, loss in enumerate(losses):
        health.observe(step, SimpleNamespace(loss=loss, finite=math.isfinite(loss)))
    return health


def test_what_is_a_divergence():
    falling = [6 - 0.01 * step for step in range(40)]
    assert observe(falling).problem is None
    assert observe([*falling, 9, 9, 9, 2]).problem is None  # a spike
    assert observe(falling + [math.nan] * (MAX_BAD_STEPS - 1) + [2]).problem is None
    bad = observe(falling + [math.nan] * MAX_BAD_STEPS)
    assert "not finite in 10 of the last 20 steps" in bad.problem and bad.sound == 39
    assert observe(falling + [2, math.nan] * MAX_BAD_STEPS).is_lost  # every second step
    high = observe(falling + [falling[-1] + 3 * MARGIN] * WINDOW)
    assert "median loss of 20 steps" in high.problem and high.sound == 39
    # also if the high losses differ by much
    assert observe(falling + [falling[-1] + 3 * MARGIN, falling[-1] + 40 * MARGIN] * WINDOW).problem
    high.forget()
    assert high.problem is None
    new = observe(falling + [falling[-1] + 0.7 * MARGIN] * (PATIENCE + 5))  # not well, for so long that it is the trend
    assert new.problem is None and new.sound == 39 + PATIENCE + 5


def train_with_a_flipped_bit(train, script, ranks, flags):
    run = train("run", *FLAGS, *flags, drop=DROP, script=script(FAULT.format(fault=FLIP)), ranks=ranks)
    text = (run / "output.txt").read_text()
    [block] = [line.split() for line in text.splitlines() if line.startswith("block 1 ")]
    assert not all(math.isfinite(float(norm)) and float(norm) < 1e6 for norm in block[2:])  # the table shows where
    [rollback] = json.loads((run / "config.json").read_text())["rolled_back"]
    assert (rollback["step"], rollback["diverged"]) == (10, 15 + MAX_BAD_STEPS)
    assert rollback["skipped_tokens"] == 64 * (rollback["diverged"] - rollback["step"] + WINDOW)
    rows = [row for row in metrics(run) if "lr" in row]
    assert [row["step"] for row in rows] == list(range(32)) and all(row["train_loss"] for row in rows)
    training = read_training(run / "checkpoint_000032")
    assert training["run"]["rolled_back"] == [rollback]
    return run


@pytest.mark.parametrize(
    "ranks, flags", [(1, ["--optimizer", "muon"]), (2, []), (2, ["--parallel", "zero3"]), (2, ["--tensor", 2])]
)
def test_a_flipped_bit_does_not_end_a_run(train, script, ranks, flags):
    train_with_a_flipped_bit(train, script, ranks, flags)


def test_a_run_that_went_back_resumes_as_if_it_had_not_stopped(train, script):
    run = train_with_a_flipped_bit(train, script, 1, [])
    whole = load_file(run / "checkpoint_000032/model.safetensors")
    before = [row["lr"] for row in metrics(run) if "lr" in row]
    shutil.rmtree(run / "checkpoint_000032")
    again = train("run", *FLAGS, drop=DROP)
    assert "resumed from log/run/checkpoint_000030" in (again / "output.txt").read_text()
    assert [row["lr"] for row in metrics(again) if "lr" in row] == before and before[10] < before[9] / 1.9
    resumed = load_file(again / "checkpoint_000032/model.safetensors")
    assert all(resumed[name].equal(whole[name]) for name in whole)


def test_a_run_that_was_stopped_before_a_divergence_was_found_goes_back_too(train, script):
    """As if it had not stopped; with few checkpoints, of which the newest that is sound stays."""
    code = "import os\n" + FAULT.format(fault=GROW).replace("step == 15", "step == 25")
    stops = code.replace("    return real", "    if step == 35 and done: os.kill(os.getpid(), 2)\n    return real")
    flags = (*FLAGS, "--max_steps", 50, "--checkpoint_every", 4, "--keep_checkpoints", 1)
    whole = train("whole", *flags, drop=DROP, script=script(code))
    train("run", *flags, drop=DROP, script=script(stops))
    run = train("run", *flags, drop=DROP)
    assert "resumed from log/run/checkpoint_000035" in (run / "output.txt").read_text()
    [[rollback], [expected]] = [
        json.loads((folder / "config.json").read_text())["rolled_back"] for folder in (run, whole)
    ]
    assert rollback["step"] == expected["step"] == 24 and rollback["diverged"] == expected["diverged"]
    weights = [load_file(folder / "checkpoint_000050/model.safetensors") for folder in (run, whole)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_run_and_a_branch_go_back_to_their_start(train, script):
    code = FAULT.format(fault=FLIP)
    flags = (*FLAGS, "--checkpoint_every", 100)
    run = train("run", *flags, "--max_steps", 12, drop=DROP, script=script(code.replace("step == 15", "step == 2")))
    assert (run / "checkpoint_000000").exists()
    flags = (*flags, "--resume", "log/run/checkpoint_000012")
    branch = train("branch", *flags, drop=DROP, script=script(code))
    for folder, step in ((run, 0), (branch, 12)):
        [*_, rollback] = json.loads((folder / "config.json").read_text())["rolled_back"]
        assert rollback["step"] == step
        assert f"back to log/{folder.name}/checkpoint_{step:06d}" in (folder / "output.txt").read_text()


def test_copies_of_the_weights_that_differ_are_noticed(train, script):
    code = FAULT.format(fault="if first: trainer.model.transformer.wte.weight.data[3, 3] += 1e-4")
    run = train("run", *FLAGS, drop=DROP, script=script(code), ranks=2)
    lines = [line for line in (run / "output.txt").read_text().splitlines() if "copies of the weights differ" in line]
    assert [line.split()[1] for line in lines] == ["20/32", "30/32", "32/32"]


def test_a_loss_that_stays_high_sends_a_run_back(train, script, monkeypatch):
    """Also a run that torchrun has restarted: not to its newest checkpoint, which a high loss left."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    code = FAULT.format(fault=GROW).replace("step == 15", "step == 25")
    flags = (*FLAGS, "--max_steps", 50, "--val_every", 50)
    run = train("run", *flags, drop=DROP, script=script(code))
    facts = json.loads((run / "config.json").read_text())
    [rollback] = facts["rolled_back"]
    assert rollback["step"] == 20 and "the median loss of 20 steps is" in rollback["problem"]
    assert facts["lr"] == 1e-3 / 2 and "rollback 1 of 3" in (run / "output.txt").read_text()
    none = train("none", *flags, "--rollbacks", 0, drop=DROP, script=script(code))
    assert "no rollback is left, training goes on" in (none / "output.txt").read_text()
    assert logged(run, "val")[-1] < logged(none, "val")[-1] - 1
    assert "block 1" in (none / "output.txt").read_text()  # the norms by layer


def test_a_run_goes_on_past_what_it_has_skipped():
    rollback = dict(step=3, tokens=300, position=900)
    assert resume.position_of(500, []) == 500
    assert resume.position_of(500, [dict(rollback, position=1), rollback]) == 1100
    assert resume.position_of(200, [rollback]) == 900  # from an older checkpoint than the rollback's


def test_the_learning_rate_after_a_rollback_is_noted_once(tmp_path):
    rollback = dict(step=3, tokens=300, position=900, lost_seconds=0.0)
    start = resume.Start(tmp_path, dict(step=3, run=vars(Config()), rolled_back=[rollback]), None, None)
    config = as_left(Config(), start, notes := [])
    notes += resume.changed_flags(start, config)
    assert [str(note) for note in notes] == ["lr is 0.0003: it is 0.5 × --lr since the run's rollbacks"]


def test_minutes_become_steps():
    config = Config(max_minutes=2, max_steps=7)
    fresh = resume.Start(None, None, None, None)
    assert steps_in_time(config, 0, fresh) == 7  # no step is known
    assert steps_in_time(Config(max_steps=7), 9, fresh) == 9  # a checkpoint beyond --max_steps
    assert steps_in_time(config, 10, fresh, seconds=30) == 40
    assert steps_in_time(config, 41, fresh, seconds=121) == 41  # the time is over
    rollback = dict(step=10, tokens=0, position=0, lost_seconds=60)
    back = resume.Start(None, dict(step=10, trained_seconds=30, rolled_back=[rollback]), None, None)
    assert steps_in_time(config, 10, back) == 20
    assert steps_in_time(config, 15, back, seconds=30) == 15


def test_a_run_of_some_minutes(train, tmp_path):
    """It ends with an evaluation and a checkpoint, and stays as it is."""
    flags = ["--max_minutes", 0.01, "--val_every", 10**6, "--checkpoint_every", 10**6]
    run = train("run", *flags, drop="--max_steps")
    facts = json.loads((run / "config.json").read_text())
    steps, [last, _] = len(logged(run)), checkpoints_of(run)
    assert facts["finished"] and last.name == f"checkpoint_{steps:06d}" and len(logged(run, "val")) == 2
    train("run", *flags, drop="--max_steps")
    assert len(logged(run)) == steps and checkpoints_of(run)[0] == last
    output = (run / "output.txt").read_text()
    assert f"training   none: at step {steps} of {steps}\n" in output and "max_steps" not in output
    assert f"note       max_minutes is 0.01: the checkpoint is at step {steps}; raise it to continue\n" in output


def test_minutes_and_steps_exclude_each_other(train):
    expect_error(train("run", "--max_minutes", 1, fails=True), "--max_minutes", "leave out --max_steps")


def test_a_stop_after_a_rollback_saves(train, script):
    """Ctrl-C, as a signal of the process to itself."""
    code = FAULT.format(fault=FLIP).replace(
        "    return real", "    if step == 12 and done: os.kill(os.getpid(), 2)\n    return real"
    )
    run = train("run", *FLAGS, drop=DROP, script=script("import os\n" + code))
    text = (run / "output.txt").read_text()
    assert "SIGINT: stopped at step 12" in text and (run / "checkpoint_000012").exists()


def test_a_process_that_ends_during_a_rollback_goes_back_too(train, script):
    """Its next start, too, continues from the sound checkpoint, not from the newer ones after the fault."""
    code = "import os\n" + FAULT.format(fault=GROW).replace("step == 15", "step == 25")
    ends = code.replace("train_gpt2.main()", "train_gpt2.rollback.again = lambda *_: os._exit(9)\ntrain_gpt2.main()")
    flags = (*FLAGS, "--max_steps", 50, "--val_every", 50)
    train("run", *flags, drop=DROP, script=script(ends), fails=True)
    run = train("run", *flags, drop=DROP)
    assert "resumed from log/run/checkpoint_000020" in (run / "output.txt").read_text()
    assert [rollback["step"] for rollback in json.loads((run / "config.json").read_text())["rolled_back"]] == [20]
    assert (run / "checkpoint_000030.abandoned").exists() and (run / "log.txt.abandoned").exists()
