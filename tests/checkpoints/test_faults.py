"""Nothing lost: trainings that are killed, stopped, starved of disk, or go wrong, and what is left of them."""

import contextlib
import filecmp
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, TINY, begin, expect_error, logged, metrics, wait_until
from fork_server import TIMEOUT

from checkpoints import load
from checkpoints.run_folder import checkpoints_of, step_of
from common import errors

EVERY_3 = ("--checkpoint_every", 3, "--val_every", 4, "--val_tokens", 64)


def same(one, other, step):
    """Two runs ended with the same weights and the same state, bit by bit, and tell the same story."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [run / f"checkpoint_{step:06d}" / name for run in (one, other)]
        assert filecmp.cmp(*files, shallow=False), name
    assert (one / "log.txt").read_text() == (other / "log.txt").read_text()
    rows = [[(row["step"], row["tokens"], row.get("train_loss")) for row in metrics(run)] for run in (one, other)]
    assert rows[0] == rows[1]


def longer(steps):
    """TINY, but for its number of steps and the evaluations that EVERY_3 sets."""
    flags = list(TINY)
    flags[flags.index("--max_steps") + 1] = str(steps)
    for flag in ("--checkpoint_every", "--val_every"):
        del flags[flags.index(flag) : flags.index(flag) + 2]
    return flags


def fork(tmp_path, flags, launcher=(), **env):
    """Begin a training in the background: its process, and the files of what it prints."""
    outputs = [tmp_path / "out.txt", tmp_path / "err.txt"]
    return begin([*launcher, ROOT / "train_gpt2.py", *flags], tmp_path, outputs, env), *outputs


def long_run(name, steps, *flags):
    """Flags of a run that has checkpoints before it ends."""
    return [*longer(steps), "--data_dir", "corpus", "--run_name", name, *map(str, (*EVERY_3, *flags))]


def has_checkpoint(run):
    """One after a step."""
    return any(map(step_of, checkpoints_of(run)))


def children(process):
    """The processes that a process has started."""
    path = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(path) as file:
        return [int(number) for number in file.read().split()]


def writing(run):
    """Whether a checkpoint is half written, and not since an earlier end."""
    return any(not (path / "torn").exists() for path in run.glob("checkpoint_*.unfinished"))


KILLS = 4
MUON = ("--optimizer", "muon")  # its checkpoints hold the states of both optimizers: AdamW updates the embeddings


def test_killed_at_random_moments(train, corpus, tmp_path):
    """Every other time inside of a checkpoint: every run ends as if nothing had happened."""
    own = (*EVERY_3, *MUON, "--total_batch_size", 64)
    command = [*longer(20), "--data_dir", str(corpus), *map(str, own)]
    moments = random.Random(7)
    runs = killed = in_checkpoints = 0
    while True:
        run = tmp_path / "log" / f"killed-{runs}"
        for path in run.glob("checkpoint_*.unfinished"):
            (path / "torn").touch()
        process, _, errors = fork(tmp_path, [*command, "--run_name", run.name])
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0, 2.0) if killed < KILLS else TIMEOUT)
        while killed % 2 and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            if writing(run):
                break
            process.send_signal(signal.SIGCONT)
            time.sleep(0.001)
        if process.poll() is None:
            process.kill()
            process.wait()
            killed += 1
            in_checkpoints += writing(run)
            continue
        assert process.returncode == 0, errors.read_text()
        runs += 1
        if killed >= KILLS:
            break
    assert in_checkpoints
    whole = train("whole", *own, "--max_steps", 20, drop="--checkpoint_every --val_every --max_steps")
    for i in range(runs):
        same(tmp_path / "log" / f"killed-{i}", whole, 20)


@pytest.mark.parametrize("ranks, flags", [(1, ()), (2, MUON)])
def test_resumed_it_is_the_same_run(train, ranks, flags):
    options = dict(ranks=ranks, drop="--checkpoint_every --val_every --max_steps")
    arguments = (*EVERY_3, *flags, "--max_steps", 8, "--deterministic")
    whole = train("whole", *arguments, **options)
    train("parts", *arguments, "--keep_checkpoints", 1, **options)
    parts = whole.with_name("parts")
    shutil.rmtree(parts / "checkpoint_000008")
    shutil.copytree(whole / "checkpoint_000006", parts / "checkpoint_000006", dirs_exist_ok=True)
    text = (train("parts", *arguments, **options) / "output.txt").read_text()
    assert "resumed from log/parts/checkpoint_000006" in text
    same(parts, whole, 8)


def test_resumed_with_other_micro_batches_and_ranks(train):
    drop = "--checkpoint_every --max_steps --micro_batch_size"
    arguments = (*MUON, "--checkpoint_every", 3, "--max_steps", 9, "--batch_warmup_ratio", 0.6)
    whole = train("whole", *arguments, "--micro_batch_size", 2, drop=drop)
    source = ("--resume", whole / "checkpoint_000003")
    for name, ranks, size in (("smaller", 1, 1), ("wider", 2, 1)):
        run = train(name, *arguments, *source, "--micro_batch_size", size, drop=drop, ranks=ranks)
        assert logged(run) == pytest.approx(logged(whole)[3:], rel=1e-4)
        assert [row["step"] for row in metrics(run)] == list(range(3, 9))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_during_the_first_step_ends_at_once(tmp_path, corpus, train, number, code):
    """While it compiles, which takes seconds: there is nothing to save, and the run starts by the same command."""
    flags, cache = [*TINY, "--data_dir", str(corpus), "--run_name", "compiling", "--compile"], tmp_path / "cache"
    process, output, errors = fork(tmp_path, flags, TORCHINDUCTOR_CACHE_DIR=str(cache))
    wait_until(lambda: any(cache.rglob("*.cpp")), process, errors)
    os.kill(process.pid, number)
    process.wait(TIMEOUT)
    assert process.returncode == code and "step     0" not in output.read_text()
    assert errors.read_text() == ("interrupted\n" if code == 130 else "")
    train("compiling")


@pytest.mark.parametrize(
    "number, flags", [(signal.SIGTERM, MUON), (signal.SIGINT, ()), (signal.SIGUSR1, ()), (signal.SIGHUP, MUON)]
)
def test_a_signal_saves_and_ends_well(tmp_path, corpus, number, flags):
    flags = [*longer(5000), "--data_dir", str(corpus), "--run_name", "stopped", *map(str, EVERY_3), *flags]
    process, output, errors = fork(tmp_path, flags)
    run = tmp_path / "log" / "stopped"
    wait_until(lambda: has_checkpoint(run), process, errors)
    os.kill(process.pid, number)
    process.wait(TIMEOUT)
    assert process.returncode == 0, errors.read_text()
    out = output.read_text()
    newest = max(run.glob("checkpoint_??????"))
    step = int(newest.name[-6:])
    assert f"{number.name}: stopped at step {step}; to continue from log/stopped/{newest.name}: " in out
    assert out.endswith("train_gpt2.py --resume log/stopped\n")
    assert (run / "report.html").exists()
    assert len(logged(run)) == step and json.loads((newest / "training.json").read_text())["step"] == step


def test_an_output_that_goes_away_is_not_missed():
    """A full disk under it, a pipe that nobody reads any more, an encoding without the character, a closed one."""
    read, write = os.pipe()
    os.close(read)
    script = "import sys; from common import errors; "
    script += "errors.run(lambda: [print('step 0 \\u0101') for _ in range(3)] and sys.stderr.write('end'))"
    for output in (os.open("/dev/full", os.O_WRONLY), write, os.open("/dev/null", os.O_WRONLY)):
        environment = os.environ | dict(PYTHONIOENCODING="ascii")
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.PIPE
        )
        os.close(output)
        assert (done.returncode, done.stderr) == (0, b"end")
    closed = "import os; from common import errors; errors.run(lambda: (print('step 0'), os._exit(os.dup(1))))"
    shell = 'exec "$0" -c "$1" <&- >&- 2>&-'
    code = subprocess.run(["sh", "-c", shell, sys.executable, closed], cwd=ROOT).returncode
    assert code > 2  # a file opened now is none of the standard streams


def test_a_wandb_that_dies_is_not_missed(tmp_path, corpus):
    """It is said once, and training goes on: until it is asked to stop."""
    alone = dict(WANDB_SERVICE="")  # not the process of another test's wandb, which it would share
    process, output, errors = fork(tmp_path, long_run("alone", 5000, "--wandb", "offline"), **alone)
    wait_until(lambda: has_checkpoint(tmp_path / "log" / "alone"), process, errors)
    for child in children(process):
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: "wandb run failed" in output.read_text(), process, errors)
    os.kill(process.pid, signal.SIGTERM)
    process.wait(TIMEOUT)
    assert process.returncode == 0 and "to continue from" in output.read_text()
    assert output.read_text().count("wandb run failed") == 1 and "Traceback" not in errors.read_text()


def test_ctrl_c_that_also_ends_who_reads_the_output(tmp_path, corpus):
    """As in `train_gpt2.py 2>&1 | tee out.txt`: all is saved."""
    flags = [*longer(100_000), "--data_dir", "corpus", "--run_name", "tee", "--checkpoint_every", "100000"]
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # otherwise it would wait for a writer, and the writer for it
    os.set_blocking(reader, True)
    process = begin([ROOT / "train_gpt2.py", *flags], tmp_path, [pipe, pipe])
    with open(reader, "rb") as output:
        assert any(b"step     3/" in line for line in output)
    os.kill(process.pid, signal.SIGINT)
    process.wait(TIMEOUT)
    assert process.returncode == 0
    newest, start = checkpoints_of(tmp_path / "log" / "tee")
    assert step_of(newest) >= 4 and step_of(start) == 0


@pytest.mark.parametrize("later, code", [(0.9, 7), (1.1, 130)])
def test_a_second_ctrl_c_ends_at_once(later, code):
    """But not one that torchrun passes on, right after the terminal's."""
    script = (
        "import os, signal, time; from common.interrupt import StopSignal; stop = StopSignal(); stop.listen()\n"
        f"moments = iter([10, 10 + {later}]); time.monotonic = lambda: next(moments)\n"
        "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\n"
        "os._exit(7 if stop.name == 'SIGINT' else 1)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == code


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, corpus, train):
    """No file may grow beyond a size that the logs stay below and the optimizer's state does not."""
    flags, drop = (*MUON, *EVERY_3, "--max_steps", 7), "--checkpoint_every --val_every --max_steps"
    whole = train("whole", *flags, drop=drop)
    run = shutil.copytree(whole, whole.with_name("full"))
    for step in (6, 7):
        shutil.rmtree(run / f"checkpoint_{step:06d}")
    limit = (whole / "checkpoint_000003" / "model.safetensors").stat().st_size + 1000

    script = tmp_path / "limited.py"
    script.write_text(
        "import resource\nfrom common import errors\nimport train_gpt2\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "errors.run(train_gpt2.main)\n"
    )

    def train_limited(name):
        return train(name, *flags, drop=drop, script=script, fails=True)

    done = train_limited("full")
    expect_error(done, "step 7 is not saved", "newest checkpoint is log/full/checkpoint_000003")
    assert done.stdout.count("the checkpoint was not written") == 2
    assert [path.name for path in run.glob("checkpoint_*")] == ["checkpoint_000003"]
    assert logged(run) == logged(whole)

    done = train_limited("new")
    expect_error(done, "step 7 is not saved", "there is no checkpoint")
    assert done.stdout.count("the checkpoint was not written") == 4
    same(train("new", *flags, drop=drop), whole, 7)


def test_pieces_on_disks_that_are_not_shared(train, script):
    """Each rank's relative log_dir is in a folder of its own."""
    code = script(
        "import os\nfrom common import errors\nimport train_gpt2\n"
        'os.makedirs(os.environ["RANK"])\nos.chdir(os.environ["RANK"])\nerrors.run(train_gpt2.main)\n'
    )
    flags = ("--parallel", "zero3", "--max_steps", 3, "--checkpoint_every", 3)
    done = train("x", *flags, drop="--max_steps --checkpoint_every", script=code, ranks=2, fails=True)
    expect_error(done, "step 3 is not saved")
    assert "all machines must share --log_dir" in done.stdout


def test_a_rank_that_dies_is_replaced(tmp_path, corpus, train):
    drop = "--checkpoint_every --val_every --max_steps"
    whole = train("whole", *MUON, *EVERY_3, "--max_steps", 12, ranks=2, drop=drop)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=4"]
    process, output, errors = fork(tmp_path, long_run("restarted", 12, *MUON), launcher)
    wait_until(lambda: has_checkpoint(tmp_path / "log" / "restarted"), process, errors)
    os.kill(children(process)[0], signal.SIGKILL)
    process.wait(TIMEOUT)
    assert process.returncode == 0, errors.read_text()
    assert "resumed from log/restarted/checkpoint_" in output.read_text()
    same(tmp_path / "log" / "restarted", whole, 12)


def test_a_rank_that_dies_ends_the_others(tmp_path, corpus):
    """Of a training that torchrun starts, without any fork."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [ROOT / "train_gpt2.py", *long_run("died", 5000, *MUON)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: has_checkpoint(tmp_path / "log" / "died"), process)
    os.kill(children(process)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=TIMEOUT)  # the ranks' own timeout is longer
    assert process.returncode
    assert "error: another rank has ended (" in errors and "RuntimeError" not in errors


def test_a_damaged_checkpoint_gives_way_to_the_one_before(train):
    flags, drop = (*MUON, *EVERY_3, "--max_steps", 7), "--checkpoint_every --val_every --max_steps"
    whole = train("whole", *flags, drop=drop)
    run = shutil.copytree(whole, whole.with_name("damaged"))
    for step, name in ((7, "model.safetensors"), (6, "config.json")):
        path = run / f"checkpoint_{step:06d}" / name
        path.write_bytes(path.read_bytes()[:-100])
    text = (train("damaged", *flags, drop=drop) / "output.txt").read_text()
    assert "checkpoint_000007 is damaged" in text and "checkpoint_000006 is damaged" in text
    assert "resumed from log/damaged/checkpoint_000003" in text
    same(run, whole, 7)


def test_steps_that_are_not_finite_are_skipped_and_then_end_the_run(train):
    drop = "--lr --max_steps --checkpoint_every"
    good = train("wild", "--lr", 1e-3, "--max_steps", 2, "--checkpoint_every", 1, drop=drop)
    wild = ("--grad_clip", 0, "--max_steps", 50, "--checkpoint_every", 1, "--keep_checkpoints", 1, "--rollbacks", 0)
    done = train("wild", *wild, "--lr", 1e30, drop=drop, fails=True)
    expect_error(done, "10 of the last 13 steps", "--resume log/wild/checkpoint_000002 and a lower --lr")
    assert done.stdout.count("not finite, skipped") == 10
    assert "step     3/50 | the weights are not finite: no checkpoint" in done.stdout
    done = train("wild", *wild, "--lr", 1e12, drop=drop, fails=True)  # the weights stay finite, their loss does not
    expect_error(done, "--resume log/wild/checkpoint_000002 and a lower --lr")
    assert sorted(path.name for path in good.glob("checkpoint_*")) == ["checkpoint_000002", "checkpoint_000003"]


def test_a_run_that_ends_with_ruined_weights_fails(train):
    ruined = ("--lr", 1e30, "--grad_clip", 0, "--warmup_steps", 0, "--max_steps", 1, "--checkpoint_every", 1)
    drop = "--lr --warmup_steps --max_steps --checkpoint_every --val_every --sample_every"
    done = train("ruined", *ruined, "--val_every", 1, "--sample_every", 1, drop=drop, fails=True)
    expect_error(done, "validation loss of step 1 is not finite", "start over", "--lr")
    assert "sample 0: (the model's logits are not finite" in done.stdout
    drop = "--lr --warmup_steps --max_steps --checkpoint_every"
    done = train("blind", *ruined, "--rollbacks", 0, drop=drop, fails=True)
    expect_error(done, "step 1 is not saved: its loss, gradient or weights are not finite", "start over")


def test_what_cannot_be_resumed(train):
    run = train("run", *EVERY_3, drop="--checkpoint_every --val_every")
    for arguments, words in (
        (("--resume", "nowhere"), ("nowhere",)),
        (("--n_layer", 3), ("n_layer is 3, but 2 in", "--resume log/run")),
        (("--seed", 5), ("seed",)),
        (MUON, ("checkpoint_000003 was trained with --optimizer=adamw", "--init_from")),
        (("--resume", "never"), ("already holds a run",)),
    ):
        drop = "--checkpoint_every --val_every --max_steps" + (" --n_layer" if "--n_layer" in arguments else "")
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        expect_error(train("run", *EVERY_3, "--max_steps", 5, *arguments, drop=drop, fails=True), *words)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_out_of_memory_says_what_to_lower(capsys):
    def main():
        with errors.out_of_memory("use --micro_batch_size 8"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...\nmore")

    with pytest.raises(SystemExit) as stop:
        errors.run(main)
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: out of memory (CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert error.endswith("): use --micro_batch_size 8\n")
    with pytest.raises(torch.OutOfMemoryError), load.explained("a checkpoint, which is not to blame"):
        raise torch.OutOfMemoryError()
    with pytest.raises(RuntimeError, match="a bug"), errors.out_of_memory("a smaller model"):
        raise RuntimeError("a bug")


def test_a_model_that_does_not_fit_says_so(train):
    expect_error(train("wide", "--n_embd", 16777216, drop="--n_embd", fails=True), "out of memory", "use --parallel")
