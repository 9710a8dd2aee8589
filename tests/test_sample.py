import math

import pytest
import torch
from conftest import expect_error
from test_hellaswag import tiny as tiny_gpt2
from test_model import tiny

import sample as sample_module
from checkpoints import hugging_face
from common.errors import UserError
from data.tokenizer import get_tokenizer
from sample import draw_token, generate, sample


def continued(model, tokens, count, **options):
    return torch.cat([tokens, *generate(model, tokens, count, **options)], dim=1)


def greedy_without_cache(model, tokens, count):
    for _ in range(count):
        logits = model(tokens[:, -model.config.seq_len :])[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens


def varied(**options):
    """Large random weights, so that greedy decoding does not repeat one token."""
    model = tiny(**options)
    for name, parameter in model.named_parameters():
        if "wte" not in name and "ln_" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("length", [1, 5, 24, 30])
@pytest.mark.parametrize("attention", ["sdpa", "written_out"])
def test_the_cache_does_not_change_the_tokens(attention, length):
    model = varied(attention=attention)
    model.transformer.wte.weight.data[301:] = 9  # padding is never sampled
    prompt = torch.randint(301, (2, length))
    expected = greedy_without_cache(model, prompt, 30)  # beyond seq_len = 24
    assert torch.equal(continued(model, prompt, 30, temperature=0), expected)
    assert len(expected[:, length:].unique()) > 1


@pytest.mark.parametrize("options", [dict(), dict(temperature=0), dict(top_k=0, top_p=0.9)])
def test_logits_that_are_not_finite_are_an_error(options):
    """Also if only a later position has them."""
    model = tiny_gpt2()
    model.transformer.wpe.weight.data[5] = math.nan
    assert len(sample(model, "a chair", 2, 3, **options)) == 2
    with pytest.raises(UserError, match="not finite.*earlier checkpoint"):
        sample(model, "a chair", 2, 9, **options)


def test_temperature_top_k_and_top_p():
    model = tiny()
    prompt = torch.randint(301, (64, 3))

    def draw(**settings):
        return continued(model, prompt, 4, generator=torch.Generator().manual_seed(7), **settings)

    assert torch.equal(draw(top_k=5), draw(top_k=5))
    assert torch.equal(draw(temperature=1e-38), draw(temperature=0))
    assert torch.equal(draw(top_k=1), draw(temperature=0)) and torch.equal(draw(top_p=1e-6), draw(temperature=0))
    assert not torch.equal(draw(), draw(top_k=5))
    likely = model(prompt)[:, -1].topk(5).indices
    assert (draw(top_k=5)[:, 3:4] == likely).any(dim=1).all()


@pytest.mark.parametrize("top_p, allowed", [(0.49, {2}), (0.51, {2, 0}), (0.85, {2, 0, 3}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_fewest_tokens_with_the_probability(top_p, allowed):
    logits = torch.tensor([0.25, 0.1, 0.5, 0.15]).log().expand(500, 4)
    found = draw_token(logits, top_p=top_p, generator=torch.Generator().manual_seed(1))
    assert set(found.flatten().tolist()) == allowed
    both = draw_token(logits, top_k=2, top_p=top_p, generator=torch.Generator().manual_seed(1))  # 2/3 and 1/3 are left
    assert set(both.flatten().tolist()) == ({2} if top_p < 0.66 else {2, 0})


def test_samples_start_with_the_prompt_and_end_with_the_document(monkeypatch):
    model = tiny_gpt2()
    texts = sample(model, "Hello, world", count=3, max_new_tokens=5, seed=1)
    assert len(texts) == 3 and all(text.startswith("Hello, world") for text in texts)
    assert texts == sample(model, "Hello, world", count=3, max_new_tokens=5, seed=1)
    assert texts != sample(model, "Hello, world", count=3, max_new_tokens=5, seed=2)
    rows = torch.tensor([[995, 50256, 995, 995], [995, 995, 50256, 995]])  # " world<|endoftext|> world"
    taken = []
    monkeypatch.setattr(sample_module, "generate", lambda *_, **__: (taken.append(1) or row[:, None] for row in rows.T))
    assert sample(model, "Hello", count=2, max_new_tokens=4) == ["Hello world", "Hello world world"]
    assert len(taken) == 3  # until every text has ended


def test_end_of_text_in_a_prompt_is_the_token(monkeypatch):
    """And white space of any length is no error."""
    started = []
    monkeypatch.setattr(
        sample_module,
        "generate",
        lambda model, tokens, *_, **__: (started.append(tokens[0].tolist()), [tokens[:, :1]])[1],
    )
    encode = get_tokenizer().encode_ordinary
    for prompt, tokens in (
        ("", [50256]),
        ("one<|endoftext|>two", [*encode("one"), 50256, *encode("two")]),
        ("<|endoftext|>", [50256]),
        (" " * 1_000_000 + "x", [*encode(" ") * 999_999, *encode(" x")]),
    ):
        sample(tiny_gpt2(), prompt, count=1, max_new_tokens=1)
        assert started.pop() == tokens


def test_the_command_and_its_errors(call_main, tmp_path, monkeypatch):
    for name in ("c", "run/checkpoint_000009", "empty"):
        (tmp_path / name).mkdir(parents=True)
        hugging_face.write(tiny_gpt2(), tmp_path / name)
    (tmp_path / "empty" / "config.json").write_text('{"finished": false}')
    arguments = ("sample.py", "c", "--prompt", "Once upon", "--max_new_tokens", 12, "--device", "cpu", "--top_p", 0.9)
    done = call_main(*arguments, "--count", 2)
    assert done.returncode == 0 and done.stdout.count("Once upon") == 2, done.stderr
    assert call_main(*arguments[:1], "run", *arguments[2:], "--count", 2).stdout == done.stdout  # its newest checkpoint
    expect_error(call_main("sample.py", "empty", "--device", "cpu"), "empty is a run without checkpoints")
    expect_error(call_main("sample.py", "run/checkpoint_9", "--device", "cpu"), "run/checkpoint_9 is not a folder")
    for temperature in (-1, "nan"):
        expect_error(call_main("sample.py", "c", "--temperature", temperature, "--device", "cpu"), "--temperature")
    expect_error(call_main("sample.py", "c", "--count", 0, "--device", "cpu"), "--count")
    expect_error(
        call_main("sample.py", "some-name-that-is-not-there", "--device", "cpu"), "some-name-that-is-not-there"
    )
    expect_error(call_main("sample.py", "c", "--tempreature", 1), "--tempreature", "--temperature")
    several = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=29500)
    for name, value in several.items():
        monkeypatch.setenv(name, str(value))
    expect_error(call_main("sample.py", "c", "--device", "cpu"), "in one process")
