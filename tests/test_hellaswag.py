import json
import os
import re

import pytest
import torch
from conftest import ALONE, expect_error
from texts import WORDS
from texts import make_items as make_rows

from checkpoints import hugging_face
from common.errors import UserError
from data.tasks import Item, load_items, read_hellaswag
from data.tokenizer import VOCAB_SIZE, get_tokenizer
from hellaswag import MultipleChoice, Tasks
from model import GPT, GPTConfig
from parallel.process_group import Distributed


def tiny():
    torch.manual_seed(2)
    model = GPT(GPTConfig(seq_len=64, vocab_size=VOCAB_SIZE, n_layer=2, n_head=2, n_embd=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_items(count):
    return [*map(read_hellaswag, make_rows(count))]


def score_token_by_token(model, item):
    """The reference: whether (acc, acc_norm) count one item, from the probability of one token at a time."""
    tokenizer = get_tokenizer()
    sums, means = [], []
    for context, ending in item.pairs:
        tokens, new = tokenizer.encode_ordinary(context), tokenizer.encode_ordinary(ending)
        loss = 0.0
        for token in new:
            probabilities = model(torch.tensor([tokens]))[0, -1].double().softmax(-1)
            loss -= probabilities[token].log().item()
            tokens = [*tokens, token]
        sums.append(loss)
        means.append(loss / len(new))
    return sums.index(min(sums)) == item.label, means.index(min(means)) == item.label


@pytest.mark.parametrize("tokens", [1, 100, 10_000])
def test_scores_equal_the_reference(tokens):
    """For each of 23 items with two to four endings."""
    model, items = tiny(), make_items(23)
    with torch.no_grad():
        right, right_norm = zip(*(score_token_by_token(model, item) for item in items))
    assert 0 < sum(right) < 23 and right != right_norm  # acc and acc_norm differ
    task = MultipleChoice(items, 64, tokens)
    shapes = set()

    def losses_of(batch, at):
        shapes.add((batch.inputs.shape, batch.targets.shape))
        return model(*batch, reduction="none", at=at)

    assert [*map(tuple, task.right(losses_of, ALONE).tolist())] == [right, right_norm]
    scores = Tasks(dict(hellaswag=items), 64, tokens).evaluate(losses_of, ALONE)["hellaswag"]
    assert scores == pytest.approx(dict(acc=sum(right) / 23, acc_norm=sum(right_norm) / 23, items=23))
    assert len(shapes) <= 3  # one graph each under torch.compile


def test_ranks_divide_the_batches():
    model, task = tiny(), MultipleChoice(make_items(11), 64, 60)
    losses_of = lambda batch, at: model(*batch, reduction="none", at=at)  # noqa: E731
    total = task.sum_losses(losses_of, ALONE)
    parts = [task.sum_losses(losses_of, Distributed(rank, 4, torch.device("cpu"))) for rank in range(4)]
    assert torch.equal(sum(parts), total) and all((part == 0).any() and (part != 0).any() for part in parts)
    idle = Distributed(100, 101, torch.device("cpu"))  # more ranks than batches
    assert not task.sum_losses(losses_of, idle).any()


def rows_of(task, seq_len):
    """{ending: (inputs, targets)} of all batches, each (width,); a target is -1 outside of the ending."""
    rows = {}
    for inputs, targets, positions, endings in task.batches:
        assert inputs.size(1) <= seq_len and (targets[len(endings) :] == -1).all()
        for position, target, ending in zip(positions.tolist(), targets.tolist(), endings.tolist()):
            row, column = divmod(position, inputs.size(1))
            _, own = rows.setdefault(ending, (inputs[row], torch.full((inputs.size(1),), -1)))
            own[column] = target
    return rows


def test_targets_are_the_endings():
    row = dict(ctx="The man", endings=[" ".join(WORDS[:n]) for n in (1, 2, 3, 4)], label=0)
    encode = get_tokenizer().encode_ordinary
    context = encode("The man")
    for i, (x, y) in rows_of(MultipleChoice([read_hellaswag(row)], 64, 100), 64).items():
        assert y[y >= 0].tolist() == encode(" " + row["endings"][i])
        assert x[: len(context)].tolist() == context and (y >= 0).nonzero()[0] == len(context) - 1


def test_long_rows_lose_the_start_of_their_context():
    row = dict(ctx=" ".join(WORDS * 5), endings=["sits", "runs past", "reads", " ".join(WORDS * 3)], label=1)
    encode = get_tokenizer().encode_ordinary
    for i, (x, y) in rows_of(MultipleChoice([read_hellaswag(row)], 32, 100), 32).items():
        ending = encode(" " + row["endings"][i])
        tokens = (encode(row["ctx"]) + ending)[-33:]
        assert x.tolist() == tokens[:-1]
        assert y[y >= 0].tolist() == (tokens[1:] if i == 3 else ending)


def test_a_limit_spreads_over_all_items(tmp_path):
    path, items = tmp_path / "items.jsonl", make_items(10)
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(10)))
    assert load_items(path, 4) == [items[i] for i in (0, 2, 5, 7)]
    assert load_items(path, 10) == load_items(path, 11) == load_items(path) == items


def test_the_command_and_its_errors(call_main, tmp_path):
    hugging_face.write(tiny(), tmp_path)
    good = tmp_path / "items.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in make_rows(6)))
    data = f"--tasks=hellaswag={good}"
    done = call_main("hellaswag.py", tmp_path, data, "--device", "cpu")
    assert done.returncode == 0 and "chance: 0." in done.stdout, done.stderr
    for value, error in re.findall(r" (0\.\d{4}) ± (0\.\d{4})", done.stdout):
        p = round(float(value) * 6) / 6
        assert float(error) == pytest.approx((p * (1 - p) / 6) ** 0.5, abs=1e-4)
    good.rename(tmp_path / "hellaswag_val.jsonl")
    done = call_main(
        "hellaswag.py", tmp_path, "--tasks", "hellaswag=hellaswag_val.jsonl", "--device", "cpu", "--limit", 5
    )
    assert done.returncode == 0 and "hellaswag_val.jsonl, 5 items: acc 0." in done.stdout, done.stderr
    assert "GPT-3 125M" in done.stdout  # the reference, for HellaSwag alone
    expect_error(call_main("hellaswag.py", tmp_path, "--tasks=hellaswag=no.jsonl", "--device", "cpu"), "no.jsonl")
    expect_error(call_main("hellaswag.py", tmp_path, data, "--limit", 0), "--limit 0: it must be at least 1")
    expect_error(call_main("hellaswag.py", "nothing/here/x", data, "--device", "cpu"), "nothing/here/x", "gpt2")


ROW = dict(ctx="a", endings=["b", "c"], label=1)
WRONG = [7, None, [1], "x", {}, dict(text="one")]
WRONG += [ROW | dict(label=label) for label in (2, -1, 10**30, 1.0, True, "", "x", "-1", None, [1], {})]
WRONG += [ROW | dict(endings=endings) for endings in ("bc", dict(b=0, c=1), 7, None, [], ["b"], ["b", 1], ["b", None])]
# blank: without a context, nothing predicts an ending's first token, and the mean of no losses is not a number
WRONG += [ROW | dict(endings=["b", blank]) for blank in ("", " ", "\n")]
WRONG += [ROW | dict(ctx=ctx) for ctx in (7, None, ["a"], "", "  ", "\n")]
LINES = [*map(json.dumps, WRONG), "not json", '{"ctx": "a"', "\udcff"]


def test_other_items_are_rejected_by_line(tmp_path):
    path = tmp_path / "items.jsonl"
    valid = json.dumps(ROW)
    for line in LINES:
        path.write_text(f"{valid}\n\n{line}\n{valid}\n", errors="surrogateescape")
        with pytest.raises(UserError, match="items.jsonl, line 3: ") as error:
            load_items(path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500
    path.write_text(f"{valid}\n\n{json.dumps(ROW | dict(label='1'))}")  # the hub's labels are text
    assert load_items(path) == [read_hellaswag(ROW)] * 2 == [Item([("a", " b"), ("a", " c")], 1, [0, 0])] * 2


def test_other_files_are_rejected(tmp_path):
    path = tmp_path / "items.jsonl"
    for make in (path.touch, lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to("nothing")):
        make()
        with pytest.raises(UserError, match="items.jsonl"):
            load_items(path)
        path.rmdir() if path.is_dir() else path.unlink()
