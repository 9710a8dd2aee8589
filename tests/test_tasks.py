"""The tasks of data/tasks.py equal EleutherAI's lm_eval, item by item."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ALONE, expect_error
from test_hellaswag import make_items, tiny
from texts import WORDS

from checkpoints import hugging_face
from common.errors import UserError
from data.tasks import TASKS, join_tasks, load_items, split_tasks
from data.tokenizer import encode, get_tokenizer, save_tokenizer
from hellaswag import MultipleChoice, Tasks
from parallel.process_group import Distributed

# lm_eval's own file of each task
LM_EVAL = dict(
    arc_easy="arc/arc_easy.yaml",
    piqa="piqa/piqa.yaml",
    lambada="lambada/lambada_openai.yaml",
    winogrande="winogrande/default.yaml",
)


def decode(token):
    return get_tokenizer().decode([token])


def make_rows(count, model):
    """{task: rows} of random words, with white space and characters that a tokenizer may split in two ways."""
    generator = torch.Generator().manual_seed(5)

    def text(longest):
        n = int(torch.randint(1, longest, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator))

    rows = {name: [] for name in LM_EVAL}
    for i in range(count):
        labels = ["1234", "ABCD"][i % 2][: 3 + i % 2]
        choices = dict(text=[text(6) for _ in labels], label=[*labels])
        rows["arc_easy"].append(dict(id=str(i), question=text(20) + "?", choices=choices, answerKey=labels[i % 3]))
        rows["piqa"].append(dict(goal=text(90), sol1=text(9) + " é", sol2=" " + text(9), label=i % 2))
        sentence = f"{text(9)} _ {text(9)}." if i % 3 else f"The {text(3)}'s _'s {text(4)} _."
        options = dict(option1=text(3), option2=text(3) + " " * (i % 2))
        rows["winogrande"].append(dict(sentence=sentence, **options, answer="12"[i % 2]))
        rows["lambada"].append(dict(text=text(20) + ["", " ", " \n", '\n\n"'][i % 4] + f" {WORDS[i % len(WORDS)]}"))
    for row in rows["lambada"][::2]:  # half of LAMBADA's last words are the model's likeliest, if that is a word
        tokens = torch.from_numpy(encode(row["text"]).astype("int64"))[None]
        likely = model(tokens)[0, -1].argsort(descending=True).tolist()
        row["text"] += next(word for word in map(decode, likely) if word[0] == " " and word.strip().isalpha())
    return rows


@pytest.fixture
def task_files(tmp_path):
    """{task: its file}, and the model."""
    model = tiny()
    files = {name: tmp_path / f"{name}.jsonl" for name in LM_EVAL}
    for name, rows in make_rows(16, model).items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files, model


def test_lm_eval_has_the_same_scores(task_files, tmp_path):
    import lm_eval  # slow to import
    from lm_eval.tasks import TaskManager

    files, model = task_files
    hugging_face.write(model, tmp_path)
    save_tokenizer(tmp_path, 64)
    folder = Path(lm_eval.__file__).parent / "tasks"
    for name, path in LM_EVAL.items():
        splits = {split: str(files[name]) for split in ("train", "validation", "test")}  # it asks for those of examples
        own = dict(include=str(folder / path), task=f"our_{name}", dataset_path="json", dataset_name=None)
        own["dataset_kwargs"] = dict(data_files=splits)
        (tmp_path / f"{name}.yaml").write_text(json.dumps(own))  # which is YAML
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path},dtype=float32",
        tasks=[f"our_{name}" for name in LM_EVAL],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    losses_of = lambda batch, at: model(*batch, reduction="none", at=at)  # noqa: E731
    items = {name: load_items(file, name=name) for name, file in files.items()}
    scores = Tasks(items, 64, 1000).evaluate(losses_of, ALONE)
    assert [*scores] == [*LM_EVAL] and scores["lambada"]["acc"] not in (0, 1)
    for name, task in TASKS.items():
        if name == "hellaswag":
            continue
        theirs, choice = results["samples"][f"our_{name}"], MultipleChoice(items[name], 64, 1000)
        logliks = [loglik for sample in theirs for loglik, _ in sample["filtered_resps"]]
        assert (-choice.sum_losses(losses_of, ALONE)).tolist() == pytest.approx(logliks, rel=1e-5)
        own = (choice.greedy if name == "lambada" else choice.right)(losses_of, ALONE)
        for metric, values in zip(task.metrics, own):
            if metric != "perplexity":
                assert values.tolist() == [bool(sample[metric]) for sample in theirs], (name, metric)
            assert scores[name][metric] == pytest.approx(results["results"][f"our_{name}"][f"{metric},none"], rel=1e-5)
        assert scores[name].keys() == {*task.metrics, "items"} and scores[name]["items"] == 16


def test_tasks_share_their_batches(task_files):
    """As many shapes as HellaSwag alone has, and one for logits. The ranks and stages divide the work."""
    files, model = task_files
    items = dict(hellaswag=make_items(9)) | {name: load_items(file, name=name) for name, file in files.items()}
    tasks, shapes = Tasks(items, 64, 1000), set()

    def losses_of(batch, at):
        shapes.add((batch.inputs.shape, at.shape, batch.targets is None))
        return model(*batch, reduction="none", at=at)

    scores = tasks.evaluate(losses_of, ALONE)
    assert len(shapes) <= 4 and sum(logits for *_, logits in shapes) == 1
    alone = Tasks(dict(hellaswag=items["hellaswag"]), 64, 1000).evaluate(losses_of, ALONE)
    assert scores["hellaswag"] == alone["hellaswag"]
    last_words = tasks.groups[1][1]
    whole = last_words.greedy(losses_of, ALONE)[1]
    ranks = [Distributed(rank, 2, torch.device("cpu"), pipeline=2) for rank in range(2)]  # both have all logits
    torch.testing.assert_close(sum(last_words.greedy(losses_of, rank)[1] for rank in ranks), whole)


def test_the_command_and_its_errors(task_files, call_main, tmp_path):
    files, model = task_files
    hugging_face.write(model, tmp_path)
    tasks = f"piqa={files['piqa']},lambada={files['lambada']}"
    done = call_main("hellaswag.py", tmp_path, "--tasks", tasks, "--limit", 5, "--device", "cpu")
    assert done.returncode == 0 and "piqa.jsonl, 5 items: acc 0." in done.stdout and "chance: 0.5000" in done.stdout
    assert "lambada.jsonl, 5 items: acc 0." in done.stdout and " | perplexity " in done.stdout
    expect_error(call_main("hellaswag.py", tmp_path, "--tasks", "piqa,arc"), "no task 'arc'", "arc_easy, piqa")


def test_the_flag():
    text = "arc_easy,piqa=a/b.jsonl,lambada"
    assert split_tasks(text) == dict(arc_easy=None, piqa="a/b.jsonl", lambada=None)
    assert join_tasks(split_tasks(text)) == text and join_tasks(split_tasks(None)) is None


CHOICES = dict(text=["one", "two"], label=["A", "B"])
RIGHT = dict(
    arc_easy=dict(question="q", choices=CHOICES, answerKey="B"),
    piqa=dict(goal="g", sol1="one", sol2="two", label=1),
    lambada=dict(text="a last word"),
    winogrande=dict(sentence="a _ is.", option1="one", option2="two", answer="2"),
)
WRONG = [
    ("arc_easy", dict(answerKey="C")),
    ("arc_easy", dict(choices=CHOICES | dict(text=["one"]))),
    ("arc_easy", dict(choices=CHOICES | dict(text=["one", 2]))),
    ("piqa", dict(label=2)),
    ("piqa", dict(label=True)),
    ("piqa", dict(sol2=" ")),
    ("lambada", dict(text="word")),
    ("lambada", dict(text="word ")),
    ("winogrande", dict(sentence="a is.")),
    ("winogrande", dict(sentence="a _")),
    ("winogrande", dict(answer="")),
]


def test_other_rows_are_rejected_by_line(tmp_path):
    path = tmp_path / "items.jsonl"
    for name, row in RIGHT.items():
        path.write_text(json.dumps(row))
        (item,) = load_items(path, name=name)
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "items.parquet")
        assert load_items(tmp_path / "items.parquet", name=name) == [item]
    for name, change in [*WRONG, *((name, {key: None}) for name, row in RIGHT.items() for key in row)]:
        path.write_text(f"{json.dumps(RIGHT[name])}\n{json.dumps(RIGHT[name] | change)}\n")
        with pytest.raises(UserError, match="items.jsonl, line 2: ") as error:
            load_items(path, name=name)
        assert "\n" not in str(error.value) and ", in {" in str(error.value)
    with pytest.raises(UserError, match="cannot read .*nothing.jsonl"):
        load_items(tmp_path / "nothing.jsonl", name="piqa")
