"""Checkpoints and models that something has happened to, and what reading them says."""

import json
import os
import shutil

import pytest
import torch
from conftest import ALONE, logged
from safetensors.torch import load_file, save_file

from checkpoints import load, resume, save
from common.device import full_tensor
from common.errors import UserError
from common.files import digest, json_digest
from config import Config
from model import GPT, GPTConfig
from optim.optimizer import make_optimizer, named_state
from parallel import place

SIZES = GPTConfig(seq_len=16, n_layer=1, n_head=1, n_embd=2, pad_vocab=False)
TRAINING = dict(step=2, tokens=64, scaler={}, run={}, shards={}, manifest=None)


class Scaled(torch.nn.Module):
    """Has fp8 scales, as a module of kernels/fp8.py."""

    def __init__(self):
        super().__init__()
        self.scales = torch.full((3, 4), 7.0)


def make(layout="ddp"):
    """A model and its optimizer, whose state is all ones."""
    torch.manual_seed(3)
    with torch.device("meta"):
        model = GPT(SIZES)
    model = place.place(model, Config(parallel=layout, autocast="off"), ALONE, None)
    resume.initialize(model, None)
    optimizer = make_optimizer(model, Config())
    for value in named_state(model, optimizer).values():
        value.fill_(1)
    return model, optimizer


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    model, optimizer = make()
    folder = tmp_path_factory.mktemp("original") / "checkpoint_000002"
    save.write(folder, model, save.snapshot(model, optimizer, ALONE), TRAINING)
    return folder


@pytest.fixture
def checkpoint(original, tmp_path):
    return shutil.copytree(original, tmp_path / "checkpoint_000002")


@pytest.fixture
def sharded(group, tmp_path):
    model, optimizer = make("zero3")
    tensors = save.snapshot(model, optimizer, ALONE)
    save.write(tmp_path / "checkpoint_000002", model, tensors, TRAINING, torch.distributed.group.WORLD)
    return tmp_path / "checkpoint_000002"


def restore(folder, layout="ddp", scaled=None):
    """Verify a checkpoint and restore a new model from it, as --resume does. Returns the model and its optimizer."""
    load.verify(folder)
    model, optimizer = make(layout)
    for value in named_state(model, optimizer).values():
        value.zero_()
    if scaled:
        model.scaled = scaled
    start = resume.Start(folder, load.read_training(folder) | dict(rollbacks=[]), folder, load.load_config(folder))
    load.load_weights(folder, model)
    resume.restore(start, model, optimizer, torch.amp.GradScaler("cpu", enabled=True), ALONE)
    return model, optimizer


def rewrite(folder, **changes):
    """Change training.json, and hash it and the files as they are now."""
    training = json.loads((folder / "training.json").read_text()) | changes
    training["sha256"] = {name: digest(folder / name) for name in training["sha256"] if name != "training.json"}
    training["sha256"]["training.json"] = json_digest(training)
    (folder / "training.json").write_text(json.dumps(training))


def add_tensors(folder, name="optimizer.safetensors", **tensors):
    save_file(load_file(folder / name) | tensors, folder / name)
    rewrite(folder)


def one_line(function, *args):
    """The error of a call, which is one line that a person can act on."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_fp8_can_be_turned_off_and_on(group, checkpoint, layout):
    """Scales that do not fit the model are ignored."""
    restore(checkpoint, layout, scaled := Scaled())
    assert (scaled.scales == 7).all()
    add_tensors(checkpoint, **{"scales.0": torch.arange(3.0)})
    restore(checkpoint, layout)
    restore(checkpoint, layout, scaled)
    assert scaled.scales[:, 0].tolist() == [0, 1, 2] and (scaled.scales[:, 1:] == 7).all()
    for scales in (torch.zeros(4), torch.zeros(3, 1)):
        add_tensors(checkpoint, **{"scales.0": scales})
        restore(checkpoint, layout, scaled := Scaled())
        assert (scaled.scales == 7).all()


def test_the_plan_says_that_fp8_was_turned_off(checkpoint):
    start = resume.Start(checkpoint, TRAINING | dict(run=dict(fp8=True)), None, None)
    notes = resume.changed_flags(start, Config(fp8=False))
    assert [str(note) for note in notes] == ["fp8 is off: the checkpoint was made with on"]


def assert_untouched(model, optimizer):
    expected = load_weights_of(make()[0])
    assert all(torch.equal(weight, expected[name]) for name, weight in load_weights_of(model).items())
    assert all((full_tensor(value) == 1).all() for value in named_state(model, optimizer).values())


def load_weights_of(model):
    return {name: full_tensor(weight.detach()) for name, weight in model.named_parameters()}


def test_files_that_are_not_listed_are_not_read(checkpoint):
    for name in ("optimizer", "model"):
        tensors = load_file(checkpoint / f"{name}.safetensors")
        save_file(
            {key: tensor.clone().fill_(5) for key, tensor in tensors.items()}, checkpoint / f"{name} (1).safetensors"
        )
    (checkpoint / "._model.safetensors").write_bytes(b"\0\5\26\7")
    (checkpoint / "shard-00009-model-00001-of-00001.safetensors").write_bytes(b"")
    assert_untouched(*restore(checkpoint))
    load.load_model(checkpoint)
    (checkpoint / "training.json").unlink()  # then it is a Hugging Face folder
    load.load_model(checkpoint)


def test_pieces_that_are_not_listed_are_not_read(sharded):
    (piece,) = sharded.glob("shard-*")
    tensors = {key: tensor.clone().fill_(5) for key, tensor in load_file(piece).items()}
    save_file(tensors, sharded / "shard-00009-model-00001-of-00001.safetensors")
    (sharded / f"._{piece.name}").write_bytes(b"\0\5\26\7")
    assert_untouched(*restore(sharded, "zero3"))
    os.mkfifo(sharded / "x.safetensors")
    load.load_model(sharded)


def test_training_json_has_a_hash(checkpoint):
    path = checkpoint / "training.json"
    training = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(training.items()))))  # says the same
    load.read_training(checkpoint)
    training["tokens"] += 16
    path.write_text(json.dumps(training))
    assert "training.json: it is not what was written" in one_line(load.verify, checkpoint)
    assert "without that file its weights load" in one_line(load.load_model, checkpoint)
    del training["sha256"]["training.json"]
    path.write_text(json.dumps(training))
    assert "training.json: it is not what was written" in one_line(load.verify, checkpoint)
    rewrite(checkpoint)
    assert load.read_training(checkpoint)["tokens"] == 80


def test_a_file_that_may_not_be_read_is_not_damaged(checkpoint, monkeypatch):
    """An older checkpoint must not take its place, which a change of its permissions mends."""
    monkeypatch.setattr(load, "digest", lambda path: (_ for _ in ()).throw(PermissionError(13, "denied", str(path))))
    with pytest.raises(UserError, match="cannot read .*: denied"):
        load.first_intact([checkpoint])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "training.json", "optimizer.safetensors"])
def test_a_run_means_its_newest_checkpoint_with_undamaged_weights(checkpoint, tmp_path, capsys, name):
    newer = shutil.copytree(checkpoint, tmp_path / "checkpoint_000010")
    os.truncate(newer / name, 10)
    of_weights = not name.startswith("optimizer")
    assert load.locate(tmp_path) == (checkpoint if of_weights else newer)
    assert (f"{newer} is damaged: {name}" in capsys.readouterr().out) == of_weights
    load.load_model(tmp_path)
    if of_weights:
        assert f"{newer} is damaged: {name}" in one_line(load.load_model, newer)
        shutil.rmtree(checkpoint)
        assert f"every checkpoint in {tmp_path} is damaged: give another" in one_line(load.load_model, tmp_path)


def test_files_outside_the_folder_are_not_read(checkpoint, tmp_path):
    (tmp_path / "other").write_text("")
    training = json.loads((checkpoint / "training.json").read_text())
    rewrite(checkpoint, sha256=training["sha256"] | {"../other": ""})
    assert "lists ../other, which is not a file's name" in one_line(load.verify, checkpoint)


def test_the_error_lists_the_models_that_there_are(checkpoint, tmp_path):
    """For a checkpoint that was deleted, a folder of models, and one with nanoGPT's file in it."""
    deleted = tmp_path / "checkpoint_000009"
    assert f"; {tmp_path} has checkpoint_000002; give a run" in one_line(load.load_model, deleted)
    config = Config(resume=str(deleted))
    assert f"no checkpoint; {tmp_path} has checkpoint_000002; give a ch" in one_line(resume.find_start, config, ALONE)
    checkpoint.rename(tmp_path / "model")
    (tmp_path / "ckpt.pt").touch()
    assert f"; {tmp_path} has model, ckpt.pt; give a run" in one_line(load.load_model, tmp_path)
    assert " has " not in one_line(load.load_model, tmp_path / "no" / "x")
    for age in range(1, 6):  # seconds
        (tmp_path / f"{age}.pt").touch()
        os.utime(tmp_path / f"{age}.pt", times=(0, os.stat(tmp_path / "model").st_mtime - age))
    assert " has 3.pt, 2.pt, 1.pt, model, ckpt.pt and 2 more; give" in one_line(load.load_model, tmp_path)


@pytest.mark.parametrize("value", [None, "x", -1, True, 0.5, float("nan"), []])
def test_training_of_wrong_kinds(checkpoint, value):
    for changes in (dict(step=str(value)), dict(run=value or 0), dict(shards=value or 0)):
        rewrite(checkpoint, **TRAINING | changes)
        one_line(restore, checkpoint)
    (checkpoint / "training.json").write_text(json.dumps(TRAINING | dict(sha256=value)))
    one_line(restore, checkpoint)


def offsets(value):
    return json.dumps({"transformer.wte.weight": dict(saved_offsets=value)})


@pytest.mark.parametrize(
    "metadata",
    ["x", "[]", "{}", offsets(None), offsets(["0", "0"]), offsets([0.5, 0]), offsets([-1, 0])],
)
def test_shard_metadata_of_wrong_kinds(sharded, metadata):
    (piece,) = sharded.glob("shard-*")
    save_file(load_file(piece), piece, metadata={"DCP_SHARDING_INFO": metadata})
    rewrite(sharded)
    one_line(load.load_model, sharded)
    one_line(restore, sharded)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("header", [b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0[]", b'\7\0\0\0\0\0\0\0{"a":1}'])
def test_headers_of_wrong_kinds(checkpoint, name, header):
    (checkpoint / name).write_bytes(header)
    rewrite(checkpoint)
    one_line(restore, checkpoint)


@pytest.mark.parametrize("name", ["training.json", "config.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "dangling"])
def test_files_that_are_no_files(checkpoint, name, kind):
    path = checkpoint / name
    path.unlink()
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero" if kind == "device" else "nothing")
    assert name in one_line(load.verify, checkpoint)
    if "optimizer" in name:
        return
    if name != "training.json":
        one_line(load.load_model, checkpoint)
        (checkpoint / "training.json").unlink()
        one_line(load.load_model, checkpoint)
        path.rename(checkpoint / "model.pt")
        one_line(load.load_model, checkpoint / "model.pt")
    else:
        load.load_model(checkpoint)


@pytest.mark.parametrize(
    "option, value",
    [
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("activation_function", "relu"),
        ("n_layer", "1"),
        ("n_embd", float("nan")),
    ],
)
def test_models_that_are_not_ours(checkpoint, option, value):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {option: value}))
    (checkpoint / "training.json").unlink()
    assert option.removeprefix("n_") in one_line(load.load_model, checkpoint)


def test_a_link_is_as_good_as_its_checkpoint(train, tmp_path):
    """From the run's folder to another disk, or from elsewhere to a checkpoint in the run's folder."""
    flags, drop = ("--checkpoint_every", 1), "--checkpoint_every --max_steps"
    run = train("run", *flags, "--max_steps", 2, drop=drop)
    inside, outside = run / "checkpoint_000002", tmp_path / "link"
    weights = load.load_model(inside).state_dict()
    inside.rename(tmp_path / "disk")
    inside.symlink_to(tmp_path / "disk")
    outside.symlink_to(run / "checkpoint_000001")
    for link in (inside, outside):
        config = Config(resume=str(link))
        assert resume.find_checkpoint(config, ALONE) == link
        assert (config.log_dir, config.run_name) == (str(run.parent), "run")
    assert all(torch.equal(weight, weights[name]) for name, weight in load.load_model(inside).state_dict().items())
    train("run", *flags, "--max_steps", 3, "--resume", inside, drop=drop)
    assert len(logged(run)) == 3
