import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_model import SIZES, batch, tiny
from transformers import GPT2Config, GPT2LMHeadModel

from checkpoints import hugging_face, load
from checkpoints.hugging_face import host_weights
from common.errors import UserError
from model import GPT, GPTConfig


def read(folder, **options):
    model = GPT(replace(hugging_face.read_config(folder), **options))
    load.load_weights(folder, model)
    return model


def hugging_face_model():
    sizes = dict(n_positions=24, vocab_size=301, n_layer=3, n_head=4, n_embd=32, bos_token_id=300, eos_token_id=300)
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # biases too: at 0 they would hide a swap
            parameter.normal_(std=0.3)
    return model.eval()


@pytest.mark.parametrize("attention", ["sdpa", "written_out"])
@pytest.mark.parametrize("pad_vocab", [True, False])
def test_from_hugging_face(tmp_path, attention, pad_vocab):
    theirs = hugging_face_model()
    theirs.save_pretrained(tmp_path)
    ours = read(tmp_path, attention=attention, pad_vocab=pad_vocab)
    x, y = batch()
    expected = theirs(x, labels=x)
    torch.testing.assert_close(ours(x), expected.logits, rtol=1e-4, atol=2e-5)
    assert ours(x[:, :-1], x[:, 1:]).item() == pytest.approx(expected.loss.item(), rel=1e-5)


@pytest.mark.parametrize("pad_vocab", [True, False])
def test_to_hugging_face(tmp_path, pad_vocab):
    ours = tiny(pad_vocab=pad_vocab)
    hugging_face.write(ours, tmp_path)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    x, _ = batch()
    expected = theirs(x, labels=x)
    torch.testing.assert_close(expected.logits, ours(x), rtol=1e-4, atol=1e-5)
    assert ours(x[:, :-1], x[:, 1:]).item() == pytest.approx(expected.loss.item(), rel=1e-5)


def test_saved_weights_come_back_bit_for_bit(tmp_path):
    model = tiny(pad_vocab=True)
    hugging_face.write(model, tmp_path)
    for pad_vocab in (True, False):
        again = read(tmp_path, pad_vocab=pad_vocab)
        for name, weight in host_weights(model).items():
            assert torch.equal(host_weights(again)[name], weight), name


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(folder, weights):
    """Two files and their index."""
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for part, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / part)
    index = dict(weight_map={name: part for part, own in parts.items() for name in own})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def untie(folder, weights):
    change_config(folder, tie_word_embeddings=False, activation_function="gelu_pytorch_tanh")
    save_file(weights | {"lm_head.weight": weights["transformer.wte.weight"].clone()}, folder / "model.safetensors")


def head_alone(folder, weights):
    table = weights.pop("transformer.wte.weight")
    save_file(weights | {"lm_head.weight": table}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "write",
    [
        shard,
        untie,
        head_alone,
        lambda folder, weights: torch.save(weights, folder / "pytorch_model.bin"),
    ],
)
def test_folders_as_others_write_them(tmp_path, write):
    model = tiny(pad_vocab=True)
    hugging_face.write_config(model.config, tmp_path)
    write(tmp_path, host_weights(model))
    x, _ = batch()
    torch.testing.assert_close(read(tmp_path, pad_vocab=True)(x), model(x))


@pytest.mark.parametrize("rows", [50258, 50304])
def test_a_longer_table_is_padding(tmp_path, rows):
    model = GPT(GPTConfig(seq_len=8, n_layer=1, n_head=1, n_embd=2))
    weights = host_weights(model)
    weights["transformer.wte.weight"] = F.pad(weights["transformer.wte.weight"], (0, 0, 0, rows - 50257), value=7.0)
    hugging_face.write_config(model.config, tmp_path)
    change_config(tmp_path, vocab_size=rows)
    save_file(weights, tmp_path / "model.safetensors")
    x = torch.randint(50257, (2, 8))
    assert load.load_config(tmp_path).vocab_size == 50257
    torch.testing.assert_close(load.load_model(tmp_path)(x), model(x))


def test_an_untied_head_is_refused(tmp_path):
    model = tiny()
    hugging_face.write_config(model.config, tmp_path)
    weights = host_weights(model)
    weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight differs from wte.weight"):
        read(tmp_path)


@pytest.mark.parametrize("weights", [{}, host_weights(GPT(GPTConfig(**{**SIZES, "n_embd": 16})))])
def test_weights_of_another_model_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        hugging_face.fill_weights(tiny(), weights)
