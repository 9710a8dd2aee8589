"""Files as nanoGPT and build-nanogpt write them."""

import sys

import pytest
import torch
from conftest import expect_error
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import formats, hugging_face, load
from common.errors import UserError
from data.tokenizer import VOCAB_SIZE
from model import GPT, GPTConfig

SIZES = dict(n_layer=2, n_head=4, n_embd=32)


class GPTConfig_:  # as a script that is run has it
    def __init__(self, **sizes):
        vars(self).update(sizes)


GPTConfig_.__module__, GPTConfig_.__qualname__ = "__main__", "GPTConfig"


def weights(bias=True, rows=VOCAB_SIZE, prefix=""):
    """A model, and its weights as these two name and lay them out."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(seq_len=16, pad_vocab=False, **SIZES))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        if not bias and name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    state = {prefix + name: weight.detach() for name, weight in model.named_parameters() if bias or "bias" not in name}
    table = torch.cat([model.transformer.wte.weight.detach(), torch.full((rows - VOCAB_SIZE, 32), 7.0)])
    return model, state | {prefix + "transformer.wte.weight": table, prefix + "lm_head.weight": table}


@pytest.mark.parametrize("bias, rows, prefix", [(True, 50304, "module._orig_mod."), (False, VOCAB_SIZE, "")])
def test_nanogpts(tmp_path, bias, rows, prefix):
    model, state = weights(bias, rows, prefix)
    state = {name: torch.nn.Parameter(weight) for name, weight in state.items()}  # as some save them
    state[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    args = dict(SIZES, block_size=16, bias=bias, vocab_size=rows, dropout=0.0)
    torch.save(dict(model=state, optimizer={}, model_args=args, iter_num=3, config={}), tmp_path / "ckpt.pt")
    assert load.load_config(tmp_path / "ckpt.pt") == GPTConfig(seq_len=16, **SIZES)
    x = torch.randint(VOCAB_SIZE, (2, 16))
    torch.testing.assert_close(load.load_model(tmp_path / "ckpt.pt")(x), model(x))
    assert not any(weight.requires_grad for weight in formats.load(tmp_path / "ckpt.pt")[1].values())


def test_another_vocabulary_is_refused(tmp_path):
    state = {name: weight[:65] if len(weight) > 50_000 else weight for name, weight in weights()[1].items()}
    torch.save(dict(model=state, model_args=dict(SIZES, block_size=16, vocab_size=65)), tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="ckpt.pt has a vocabulary of 65, but GPT-2's has 50257"):
        load.load_model(tmp_path / "ckpt.pt")


def test_build_nanogpts(tmp_path, monkeypatch, command, call_main):
    """Whose settings are an object of its own script's; and on to transformers."""
    model, state = weights(rows=50304)
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig_, raising=False)
    saved = dict(model=state, config=GPTConfig_(**SIZES, block_size=16, vocab_size=50304), step=5, val_loss=3.0)
    torch.save(saved, tmp_path / "model_00005.pt")
    monkeypatch.undo()
    x = torch.randint(VOCAB_SIZE, (2, 16))
    torch.testing.assert_close(load.load_model(tmp_path / "model_00005.pt")(x), model(x))
    done = command("export.py", "model_00005.pt", "out")
    assert done.returncode == 0, done.stderr
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(theirs(x).logits, model(x), rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("Hello world")["input_ids"] == [15496, 995]
    expect_error(call_main("export.py", "model_00005.pt", "out"), "already exists")
    expect_error(call_main("export.py", "nothing.pt", "other"), "nothing.pt")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["a.pt", "model.safetensors", "pytorch_model.bin"])
def test_files_that_are_not_there_themselves(tmp_path, name):
    """A clone without Git LFS has pointers; PyTorch before 1.6 wrote another format."""
    hugging_face.write_config(GPTConfig(seq_len=16, **SIZES), tmp_path)
    model = tmp_path / name if name == "a.pt" else tmp_path
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(UserError, match=f"{name} is a Git LFS pointer: git lfs pull"):
        load.load_model(model)
    if "safetensors" not in name:
        torch.save(dict(model=weights()[1]), tmp_path / name, _use_new_zipfile_serialization=False)
        with pytest.raises(UserError, match="no zip file, as torch.save writes since PyTorch 1.6"):
            load.load_model(model)


class Trap:
    def __reduce__(self):
        return (open, ("executed", "w"))


@pytest.mark.parametrize("saved", [dict(model=Trap()), dict(model={}), [1], dict(model={}, config=Trap())])
def test_nothing_in_them_is_executed(tmp_path, monkeypatch, saved):
    monkeypatch.chdir(tmp_path)
    torch.save(saved, "bad.pt")
    with pytest.raises(UserError, match="cannot load bad.pt"):
        load.load_model("bad.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "bad.pt").read_bytes()[:200])
    with pytest.raises(UserError, match="cannot load torn.pt"):
        load.load_model("torn.pt")
    assert not (tmp_path / "executed").exists()
