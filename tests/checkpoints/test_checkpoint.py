import json

import pytest
import torch
from transformers import AutoTokenizer

from checkpoints import checkpoint
from common.cli import UserError
from data.tokenizer import END_OF_TEXT, VOCAB_SIZE, get_tokenizer
from model import GPT, GPTConfig


def tiny(n_embd=16):
    torch.manual_seed(3)
    return GPT(GPTConfig(seq_len=64, vocab_size=VOCAB_SIZE, n_layer=2, n_head=2, n_embd=n_embd))


def save(folder, model, **training):
    """A checkpoint without the optimizer's state."""
    return checkpoint.write(folder, model, (model.to_hugging_face(), dict(nothing=torch.zeros(1))), training)


def test_what_is_saved_comes_back(tmp_path):
    model = tiny()
    folder = save(tmp_path / "checkpoint_000007", model, step=7)
    assert json.loads((folder / "training.json").read_text())["step"] == 7
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("Hello world") == get_tokenizer().encode_ordinary("Hello world")
    assert (tokenizer.eos_token_id, len(tokenizer)) == (END_OF_TEXT, VOCAB_SIZE)
    assert all(path.stat().st_mode & 0o044 for path in folder.iterdir())  # others may read it
    x = torch.randint(VOCAB_SIZE, (2, 16))
    random = torch.get_rng_state()
    assert torch.equal(checkpoint.load_model(folder)(x), model(x))
    assert torch.equal(torch.get_rng_state(), random)  # no weights are drawn that others replace
    torch.testing.assert_close(checkpoint.load_model(folder, flash=False, pad_vocab=False)(x), model(x))


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(folder, weights):
        (folder / "config.json").write_text("{}")
        raise OSError("no space left on device")

    model = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(model, "save_pretrained", fail)
        with pytest.raises(OSError):
            save(tmp_path / "checkpoint_000001", model)
    assert not (tmp_path / "checkpoint_000001").exists()
    save(tmp_path / "checkpoint_000001", model)  # what the failure left is no obstacle
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_000001"]


def damage(folder, how):
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "missing weights":
        weights.unlink()
    elif how == "other sizes":
        tiny(n_embd=8).save_pretrained(folder)
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
        GPT(GPTConfig(seq_len=8, vocab_size=100, n_layer=1, n_head=1, n_embd=8)).save_pretrained(folder)
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
    save(tmp_path / "c", tiny())
    with pytest.raises(UserError) as error:
        checkpoint.load_model(damage(tmp_path / "c", how))
    assert "\n" not in str(error.value)


def test_the_newest_and_the_best_stay(tmp_path):
    model = tiny()
    tensors = (model.to_hugging_face(), dict(nothing=torch.zeros(1)))
    writer = checkpoint.Writer(tmp_path, keep=2)
    losses = {999_998: 5.0, 999_999: 3.0, 1_000_000: 4.0, 1_000_001: None, 1_000_002: float("nan")}
    for step, loss in losses.items():
        loader = dict(position=0, total=1, seed=1, shuffle=True)
        facts = dict(step=step, tokens=0, evaluated=True, loader=loader, scaler={}, run={}, val_loss=loss)
        writer.start(model, tensors, facts)
        writer.wait()
        if step == 1_000_000:
            (tmp_path / "checkpoint_1000000" / "training.json").write_text("{")  # which stops nothing
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "checkpoint_1000002",
        "checkpoint_1000001",
        "checkpoint_999999",
    ]
