import io
import sys

import pytest
import torch
from conftest import expect_error
from test_checkpoint import save
from test_checkpoint import tiny as tiny_gpt2
from test_model import tiny

import sample as sample_module
from common.cli import UserError
from sample import by_kernels, choose, generate, read_prompt, sample


def continued(model, tokens, count, **options):
    return torch.cat([tokens, *generate(model, tokens, count, **options)], dim=1)


def greedy_without_cache(model, tokens, count):
    for _ in range(count):
        logits = model(tokens[:, -model.config.seq_len :])[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens


def restless(**options):
    """Far from the residual stream's identity, so that text moves on."""
    model = tiny(**options)
    for name, parameter in model.named_parameters():
        if "wte" not in name and "ln_" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("length", [1, 5, 24, 30])
@pytest.mark.parametrize("flash", [True, False])
def test_cached_generation_is_the_plain_loop(flash, length):
    model = restless(flash=flash)
    model.transformer.wte.weight.data[301:] = 9  # and no padding is ever sampled, whatever stands in it
    prompt = torch.randint(301, (2, length))
    expected = greedy_without_cache(model, prompt, 30)  # past seq_len = 24
    assert torch.equal(continued(model, prompt, 30, temperature=0), expected)
    assert len(expected[:, length:].unique()) > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("count", [1, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 5, 24, 30])
def test_a_recorded_step_is_the_plain_loop(monkeypatch, count, length):
    """Of up to four texts by the kernels; a prompt that takes all positions is not recorded."""
    calls = []
    monkeypatch.setattr(sample_module, "by_kernels", lambda *args, **kw: calls.append(1) or by_kernels(*args, **kw))
    model = restless().cuda()
    prompt = torch.randint(301, (count, length), device="cuda")
    with torch.no_grad():
        expected = greedy_without_cache(model, prompt, 30)
    assert torch.equal(continued(model, prompt, 30, temperature=0, graph=True), expected)
    assert bool(calls) == (count <= 4 and length < 24)


@pytest.mark.skipif(sample_module.kernels is None, reason="needs Triton")
def test_a_token_by_kernels_is_the_models():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = restless().to(device)
    prompt = torch.randint(301, (3, 5), device=device)
    caches = model.new_cache(24), model.new_cache(24)
    with torch.no_grad():
        for cache in caches:
            model(prompt, cache=cache)
        for token in torch.randint(301, (2, 3, 1), device=device):
            plain, ours = model(token, cache=caches[0]), by_kernels(model, token, caches[1])
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_sampling_follows_its_settings():
    model = tiny()
    prompt = torch.randint(301, (64, 3))

    def draw(**settings):
        return continued(model, prompt, 4, generator=torch.Generator().manual_seed(7), **settings)

    assert torch.equal(draw(top_k=5), draw(top_k=5))
    assert torch.equal(draw(top_k=1), draw(temperature=0)) and torch.equal(draw(top_p=1e-6), draw(temperature=0))
    assert not torch.equal(draw(), draw(top_k=5))
    likely = model(prompt)[:, -1].topk(5).indices
    assert (draw(top_k=5)[:, 3:4] == likely).any(dim=1).all()


@pytest.mark.parametrize("top_p, allowed", [(0.49, {2}), (0.51, {2, 0}), (0.85, {2, 0, 3}), (1.0, {0, 1, 2, 3})])
def test_the_nucleus_is_the_fewest_that_have_the_probability(top_p, allowed):
    logits = torch.tensor([0.25, 0.1, 0.5, 0.15]).log().expand(500, 4)
    found = choose(logits, top_p=top_p, generator=torch.Generator().manual_seed(1))
    assert set(found.flatten().tolist()) == allowed
    both = choose(logits, top_k=2, top_p=top_p, generator=torch.Generator().manual_seed(1))  # 2/3 and 1/3 are left
    assert set(both.flatten().tolist()) == ({2} if top_p < 0.66 else {2, 0})


def test_samples_start_with_the_prompt_and_end_at_a_documents_end(monkeypatch):
    model = tiny_gpt2()
    texts = sample(model, "Hello, world", count=3, max_new_tokens=5, seed=1)
    assert len(texts) == 3 and all(text.startswith("Hello, world") for text in texts)
    assert texts == sample(model, "Hello, world", count=3, max_new_tokens=5, seed=1)
    assert texts != sample(model, "Hello, world", count=3, max_new_tokens=5, seed=2)
    rows = torch.tensor([[995, 50256, 995, 995], [995, 995, 50256, 995]])  # " world<|endoftext|> world"
    taken = []
    monkeypatch.setattr(sample_module, "generate", lambda *_, **__: (taken.append(1) or row[:, None] for row in rows.T))
    assert sample(model, "Hello", count=2, max_new_tokens=4) == ["Hello world", "Hello world world"]
    assert len(taken) == 3  # until all have ended


def test_the_prompt_from_a_file(monkeypatch, tmp_path):
    (tmp_path / "story.txt").write_text("Once\nupon")
    assert read_prompt(tmp_path / "story.txt") == "Once\nupon"
    monkeypatch.setattr(sys, "stdin", io.StringIO("a time"))
    assert read_prompt("-") == "a time"
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("bytes", "nothing"):
        with pytest.raises(UserError, match="--prompt_file"):
            read_prompt(tmp_path / name)


def test_the_command_and_its_errors(command, tmp_path):
    save(tmp_path / "c", tiny_gpt2())
    save(tmp_path / "checkpoint_000009", tiny_gpt2())
    arguments = ("sample.py", "c", "--prompt", "Once upon", "--max_new_tokens", 12, "--device", "cpu", "--top_p", 0.9)
    done = command(*arguments, "--count", 2)
    assert done.returncode == 0 and done.stdout.count("Once upon") == 2, done.stderr
    one, streamed = command(*arguments, "--count", 1), command(*arguments, "--stream")
    assert streamed.stdout == one.stdout != "", streamed.stderr  # characters of several tokens and all
    expect_error(command("sample.py", ".", "--device", "cpu"), "run's folder", "checkpoint_000009")
    expect_error(command("sample.py", "c", "--temperature", -1, "--device", "cpu"), "--temperature")
    expect_error(command("sample.py", "c", "--stream", "--count", 2, "--device", "cpu"), "--stream", "--count")
    expect_error(command("sample.py", "some-name-that-is-not-there", "--device", "cpu"), "some-name-that-is-not-there")
    expect_error(command("sample.py", "c", "--tempreature", 1), "--tempreature", "--temperature")
