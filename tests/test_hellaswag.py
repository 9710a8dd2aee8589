import json

import pytest
import torch
from conftest import expect_error

from cli import UserError
from hellaswag import HellaSwag, encode, load_items
from model import GPT, GPTConfig
from parallel import Ranks
from tokenizer import VOCAB_SIZE, get_tokenizer

WORDS = "the man then woman sits down on a chair and starts to read his book while dog runs past it quickly".split()


def make_items(count):
    generator = torch.Generator().manual_seed(4)

    def text(longest):
        n = int(torch.randint(1, longest, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator))

    return [dict(ctx=text(20), endings=[text(9) for _ in range(4)], label=i % 4) for i in range(count)]


def tiny():
    torch.manual_seed(2)
    model = GPT(GPTConfig(seq_len=64, vocab_size=VOCAB_SIZE, n_layer=2, n_head=2, n_embd=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def score_by_hand(model, item):
    """One item the slow way: each ending's loss summed, and per token, from probabilities of one token at a time."""
    tokenizer = get_tokenizer()
    sums, means = [], []
    for ending in item["endings"]:
        tokens, new = tokenizer.encode_ordinary(item["ctx"]), tokenizer.encode_ordinary(" " + ending)
        loss = 0.0
        for token in new:
            probabilities = model(torch.tensor([tokens]))[0, -1].double().softmax(-1)
            loss -= probabilities[token].log().item()
            tokens = [*tokens, token]
        sums.append(loss)
        means.append(loss / len(new))
    return sums.index(min(sums)) == item["label"], means.index(min(means)) == item["label"]


@pytest.mark.parametrize("rows", [4, 12, 64])
def test_scores_are_those_by_hand(rows):
    model, items = tiny(), make_items(11)
    with torch.no_grad():
        right, right_norm = zip(*(score_by_hand(model, item) for item in items))
    assert 0 < sum(right) < 11 and right != right_norm  # the items tell the two measures apart
    hellaswag = HellaSwag(items, 64, rows)
    shapes = set()

    def losses_of(x, y):
        shapes.add(x.shape)
        return model(x, y, reduction="none")

    acc, acc_norm = hellaswag.evaluate(losses_of, Ranks(0, 1, torch.device("cpu")))
    assert (acc, acc_norm) == (sum(right) / 11, sum(right_norm) / 11)
    assert len(shapes) == 1  # one shape, so one graph under torch.compile


def test_ranks_divide_the_items(monkeypatch):
    model = tiny()
    hellaswag = HellaSwag(make_items(11), 64, 8)
    whole = hellaswag.evaluate(lambda x, y: model(x, y, reduction="none"), Ranks(0, 1, torch.device("cpu")))
    parts = []
    monkeypatch.setattr(Ranks, "sum", lambda self, *values: [float(value) for value in values])
    for rank in range(4):
        ranks = Ranks(rank, 4, torch.device("cpu"))
        parts.append(hellaswag.evaluate(lambda x, y: model(x, y, reduction="none"), ranks))
    assert [sum(part) for part in zip(*parts)] == pytest.approx(whole)


def test_targets_are_the_endings():
    item = dict(ctx="The man", endings=[" ".join(WORDS[:n]) for n in (1, 2, 3, 4)], label=0)
    x, y = HellaSwag([item], 64, 4).batch(0)
    context, endings = encode([item])[0]
    for row, ending in enumerate(endings):
        assert y[row][y[row] >= 0].tolist() == ending
        assert x[row, : len(context)].tolist() == context


def test_long_rows_lose_the_start_of_their_context():
    item = dict(ctx=" ".join(WORDS * 5), endings=["sits", "runs past", "reads", "starts to read"], label=1)
    hellaswag = HellaSwag([item], 32, 4)
    x, y = hellaswag.batch(0)
    context, endings = encode([item])[0]
    assert x.shape == (4, 32)
    for row, ending in enumerate(endings):
        assert y[row][y[row] >= 0].tolist() == ending
        assert x[row].tolist() == (context + ending)[-33:-1]


def test_the_command_and_its_errors(command, tmp_path):
    tiny().save_pretrained(tmp_path)
    good = tmp_path / "items.jsonl"
    good.write_text("".join(json.dumps(item) + "\n" for item in make_items(6)))
    done = command("hellaswag.py", tmp_path, "--data", good, "--device", "cpu")
    assert done.returncode == 0 and "6 items: acc 0." in done.stdout, done.stderr
    expect_error(command("hellaswag.py", tmp_path, "--data", "nothing.jsonl", "--device", "cpu"), "nothing.jsonl")
    expect_error(command("hellaswag.py", tmp_path, "--data", good, "--limit", 0), "--rows and --limit")
    expect_error(command("hellaswag.py", "nothing/here/x", "--data", good, "--device", "cpu"), "nothing/here/x", "gpt2")


@pytest.mark.parametrize("text", ["not json", '{"ctx": "a"}', '{"ctx": "a", "endings": ["b"], "label": 0}', ""])
def test_files_that_are_no_hellaswag(tmp_path, text):
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="items.jsonl"):
        load_items(path)
