from dataclasses import replace

import pytest
import torch
from test_model import SIZES, batch, tiny
from transformers import GPT2Config, GPT2LMHeadModel

from checkpoints import hugging_face, load
from checkpoints.hugging_face import host_weights
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


@pytest.mark.parametrize("weights", [{}, host_weights(GPT(GPTConfig(**{**SIZES, "n_embd": 16})))])
def test_weights_of_another_model_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        hugging_face.fill_weights(tiny(), weights)
