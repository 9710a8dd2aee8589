import errno
import gc
import json
import math
import os
import resource
import shutil
import subprocess
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ALONE, TINY
from transformers import AutoTokenizer

from checkpoints import hugging_face, load, resume, save
from checkpoints.checkpointer import Checkpointer
from checkpoints.run_folder import checkpoints_of, step_of
from common.device import local
from common.errors import UserError
from config import Config
from data.tokenizer import END_OF_TEXT, VOCAB_SIZE, get_tokenizer
from model import GPT, GPTConfig
from optim.optimizer import allocate_state, make_optimizer, named_state
from parallel import place
from watch.rollback import Health


def tiny(n_embd=16):
    torch.manual_seed(3)
    return GPT(GPTConfig(seq_len=64, vocab_size=VOCAB_SIZE, n_layer=2, n_head=2, n_embd=n_embd))


def write(folder, model, **training):
    """A checkpoint without the optimizer's state."""
    training = dict(step=0, tokens=0, scaler={}, run={}, shards={}) | training
    save.write(folder, model, (hugging_face.host_weights(model), dict(nothing=torch.zeros(1))), training)
    return folder


def test_what_is_saved_comes_back(tmp_path):
    model = tiny()
    folder = write(tmp_path / "checkpoint_000007", model, step=7)
    assert json.loads((folder / "training.json").read_text())["step"] == 7
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("Hello world") == get_tokenizer().encode_ordinary("Hello world")
    assert (tokenizer.eos_token_id, len(tokenizer)) == (END_OF_TEXT, VOCAB_SIZE)
    x = torch.randint(VOCAB_SIZE, (2, 16))
    random = torch.get_rng_state()
    assert torch.equal(load.load_model(folder)(x), model(x))
    assert torch.equal(torch.get_rng_state(), random)  # no weights are drawn that others replace


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_follow_the_umask(tmp_path, group, layout, umask, mode):
    before = os.umask(umask)
    try:
        checkpointer, _ = make_checkpointer(tmp_path, layout, checkpoint_every=1)
        checkpointer.save_if_due(1, 0, health(1), last=False)
        checkpointer.wait()
    finally:
        os.umask(before)
    files = list((tmp_path / "run" / "checkpoint_000001").iterdir())
    assert len(files) > 5 and {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(model, folder, weights):
        (folder / "config.json").write_text("{}")
        raise OSError("no space left on device")

    model = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(hugging_face, "write", fail)
        with pytest.raises(OSError):
            write(tmp_path / "checkpoint_000001", model)
    assert not (tmp_path / "checkpoint_000001").exists()
    write(tmp_path / "checkpoint_000001", model)  # what the failure left is no obstacle
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_000001"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux")
def test_the_thread_that_writes_starts_no_others(tmp_path):
    """More threads than cores would slow down the training thread."""
    model = tiny()
    tensors = (hugging_face.host_weights(model), dict(nothing=torch.zeros(1)))
    threads = lambda: len(list(Path("/proc/self/task").iterdir()))  # noqa: E731
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        torch.set_num_threads(2)
        try:
            before = threads()
            pool.submit(save.write, tmp_path / "checkpoint_000001", model, tensors, {}).result()
            assert threads() == before
        finally:
            torch.set_num_threads(1)


def damage(folder, how):
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "missing weights":
        weights.unlink()
    elif how == "other sizes":
        hugging_face.write(tiny(n_embd=8), folder)
        (folder / "config.json").write_text((folder / "config.json").read_text().replace('"n_embd": 8', '"n_embd": 16'))
    elif how == "uneven heads":
        (folder / "config.json").write_text((folder / "config.json").read_text().replace('"n_head": 2', '"n_head": 3'))
    elif how == "absurd width":
        text = (folder / "config.json").read_text().replace('"n_embd": 16', '"n_embd": 6000000000000')
        (folder / "config.json").write_text(text)
    elif how == "not a GPT-2":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif how == "a list":
        (folder / "config.json").write_text("[]")
    elif how == "other vocabulary":
        other = GPT(GPTConfig(seq_len=8, vocab_size=100, n_layer=1, n_head=1, n_embd=8))
        hugging_face.write(other, folder)
    elif how == "not json":
        (folder / "config.json").write_text("{")
    elif how == "a file":
        return weights
    return folder


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "missing weights",
        "other sizes",
        "uneven heads",
        "absurd width",
        "not a GPT-2",
        "not json",
        "a file",
        "a list",
        "other vocabulary",
    ],
)
def test_damage_is_said_in_one_line(tmp_path, how):
    write(tmp_path / "c", tiny())
    with pytest.raises(UserError) as error:
        load.load_model(damage(tmp_path / "c", how))
    assert "\n" not in str(error.value)


def make_checkpointer(log_dir, layout="ddp", **flags):
    """A Checkpointer of a tiny model, and {step: validation loss} of its log."""
    config = Config(run_name="run", log_dir=str(log_dir), max_steps=10**7, parallel=layout, autocast="off", **flags)
    with torch.device("meta"):
        model = tiny()
    model = place.place(model, config, ALONE, None)
    resume.initialize(model, None)
    optimizer, scaler = make_optimizer(model, config), torch.amp.GradScaler("cpu", enabled=False)
    trainer = SimpleNamespace(config=config, distributed=ALONE, model=model, optimizer=optimizer, scaler=scaler)
    trainer.monitor = SimpleNamespace(trained_seconds=0.0)
    log = SimpleNamespace(facts={}, val_losses={}, flush=lambda: None)
    return Checkpointer(trainer, {}, log, resume.Start(None, None, None, None)), log.val_losses


def health(step, bad_steps=0):
    """The Health of a run whose newest step that was well is this one."""
    result = Health(resume.Start(None, None, None, None))
    result.sound = step
    for _ in range(bad_steps):
        result.observe(step, SimpleNamespace(loss=math.nan, finite=False))
    return result


def test_folders_of_other_names_are_no_checkpoints(tmp_path):
    for name in ("checkpoint_000001", "checkpoint_²", "checkpoint_", "checkpoint_1.old"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints_of(tmp_path)] == ["checkpoint_000001"]


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_write_that_fails_keeps_no_snapshot(tmp_path, group, monkeypatch, capsys, layout):
    """Also where Python collects no cycles."""
    checkpointer, _ = make_checkpointer(tmp_path, layout, checkpoint_every=1)
    snapshots = []

    def snapshot(*args):
        tensors = save.snapshot(*args)
        parts = [tensors] if layout == "zero3" else tensors
        snapshots.extend(weakref.ref(local(tensor)) for part in parts for tensor in part.values())
        return tensors

    monkeypatch.setattr("checkpoints.checkpointer.snapshot", snapshot)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.disable()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        for step in range(1, 6):
            checkpointer.save_if_due(step, 0, health(step), last=False)
            checkpointer.wait()
        # the thread may still hold the last one
        assert sum(tensor() is not None for tensor in snapshots) <= len(snapshots) / 5
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        gc.enable()
    assert capsys.readouterr().out.count("the checkpoint was not written (") == 5


def test_the_newest_and_the_best_stay(tmp_path):
    """Also past step 999,999; a validation loss may be missing or not finite."""
    checkpointer, val_losses = make_checkpointer(tmp_path, checkpoint_every=1, keep_checkpoints=2)
    losses = {999_998: 5.0, 999_999: 3.0, 1_000_000: 4.0, 1_000_001: None, 1_000_002: float("nan")}
    for step, loss in losses.items():
        checkpointer.save_if_due(step, 0, health(step), last=False)
        checkpointer.wait()
        if loss is not None:
            val_losses[step] = loss  # evaluated after it is saved
    names = [path.name for path in checkpoints_of(tmp_path / "run")]
    assert names == ["checkpoint_1000002", "checkpoint_1000001", "checkpoint_999999"]


def test_a_checkpoint_waits_for_a_finite_step(tmp_path, capsys):
    """And for finite weights."""
    checkpointer, _ = make_checkpointer(tmp_path, checkpoint_every=2)
    saved, weight = [], checkpointer.model.transformer.h[1].mlp.c_fc.bias
    steps = ((0, 1, 0), (1, 1, 0), (2, 0, 0), (3, 0, 0), (4, 1, math.nan), (5, 1, math.inf), (6, 1, 0))
    for step, finite, value in steps:
        weight.data[3] = value
        checkpointer.save_if_due(step, 0, health(step, bad_steps=1 - finite), last=False)
        checkpointer.wait()
        saved.append([path.name for path in checkpoints_of(tmp_path / "run")])
    start = ["checkpoint_000000"]  # of a new run
    assert saved == [start] * 6 + [["checkpoint_000006", *start]]
    out = capsys.readouterr().out
    assert "step     4/10000000 | the weights are not finite: no checkpoint\n" in out


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of some MB; the test is skipped where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(megabytes):
        options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_on_a_full_disk_the_next_to_be_pruned_makes_room(small_disk, capsys):
    """The oldest, and never the newest."""
    disk = small_disk(27)  # two checkpoints have 22 MB
    (disk / "filler").write_bytes(bytes(11 * 2**20))
    checkpointer, val_losses = make_checkpointer(disk, checkpoint_every=1, keep_checkpoints=3)
    saved = []
    for step, loss in enumerate((3.0, 5.0, 4.0, 2.0, 1.0), 1):
        if step == 3:
            (disk / "filler").unlink()
        checkpointer.save_if_due(step, 0, health(step), last=False)
        checkpointer.wait()
        val_losses[step] = loss
        saved.append([step_of(path) for path in checkpoints_of(disk / "run")])
    assert saved == [[1], [1], [3, 1], [4, 3], [5, 4]]
    out = capsys.readouterr().out
    assert out.count("the checkpoint was not written (") == 1 and out.count("makes room") == 2


def test_on_a_full_disk_a_runs_start_makes_room(small_disk):
    """And no other checkpoint that is the only one."""
    checkpointer, _ = make_checkpointer(small_disk(17), checkpoint_every=1)  # one checkpoint has 11 MB
    saved = []
    for step in range(3):
        checkpointer.save_if_due(step, 0, health(step), last=False)
        checkpointer.wait()
        saved.append([step_of(path) for path in checkpoints_of(checkpointer.folder)])
    assert saved == [[0], [1], [1]]


def test_on_a_full_disk_all_ranks_write_again(small_disk, command, corpus):
    """Of a sharded run without a name, which all ranks know."""
    disk = small_disk(50)  # two checkpoints have 41 MB
    flags = [*TINY, "--data_dir", corpus, "--log_dir", disk, "--parallel", "zero3", "--checkpoint_every", 1]
    done = command("train_gpt2.py", *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    (run,) = (path for path in disk.iterdir())
    assert [step_of(path) for path in checkpoints_of(run)] == [3, 2]
    assert done.stdout.count("makes room") == 2  # for steps 2 and 3


@pytest.mark.parametrize("others", [0, 1])
def test_a_checkpoint_that_did_not_fit_on_the_disk_never_appears(tmp_path, monkeypatch, capsys, others):
    """Neither at once nor after an older one has made room, and nothing of it is left."""
    checkpointer, _ = make_checkpointer(tmp_path, checkpoint_every=1)

    def save_until(step):
        checkpointer.save_if_due(step, 0, health(step), last=False)
        checkpointer.wait()
        return [path.name for path in (tmp_path / "run").iterdir()]

    def fill_the_disk(state, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in range(others + 1):
        save_until(step + 1)
    with monkeypatch.context() as patch:
        patch.setattr(save, "save_file", fill_the_disk)
        assert save_until(others + 2) == [f"checkpoint_{others + 1:06d}"]
    assert capsys.readouterr().out.count("the checkpoint was not written ([Errno 28]") == 1
    assert f"checkpoint_{others + 3:06d}" in save_until(others + 3)


class Momentum(torch.optim.Optimizer):
    """Any optimizer: its state has other names than AdamW's, and a scalar."""

    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=0.1))

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"], state["updates"] = torch.zeros_like(parameter), torch.zeros(())
            state["momentum"].mul_(0.9).add_(parameter.grad)
            state["updates"] += 1
            parameter -= self.param_groups[0]["lr"] * state["momentum"]


@pytest.mark.parametrize("make", [Momentum, torch.optim.AdamW, torch.optim.Adagrad])
def test_the_state_of_any_optimizer_is_restored(tmp_path, make):
    model = tiny()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = make(model.parameters())
    allocate_state(optimizer)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model(*torch.randint(VOCAB_SIZE, (2, 2, 16))).backward()
    optimizer.step()
    state = {name: tensor.clone() for name, tensor in named_state(model, optimizer).items()}
    assert any(name.endswith(".transformer.h.0.mlp.c_fc.weight") for name in state)
    training = dict(step=1, tokens=64, scaler={}, run={}, shards={}, manifest=None)
    folder = tmp_path / "checkpoint_000001"
    save.write(folder, model, save.snapshot(model, optimizer, ALONE), training)
    other = make(model.parameters())
    allocate_state(other)
    start = resume.Start(folder, load.read_training(folder) | dict(rollbacks=[]), folder, None)
    resume.restore(start, model, other, scaler, ALONE)
    restored = named_state(model, other)
    assert restored.keys() == state.keys() and all(torch.equal(restored[name], state[name]) for name in state)
    wrong = torch.optim.SGD(model.parameters(), momentum=0.9)
    allocate_state(wrong)
    with pytest.raises(UserError, match="another model or --optimizer wrote it"):
        resume.restore(start, model, wrong, scaler, ALONE)
