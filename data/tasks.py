"""The evaluation tasks: where their items come from, and which texts of an item the model reads.

HellaSwag is scored as build-nanogpt scores it. The other tasks have the prompts, splits and scores of EleutherAI's
lm_eval 0.4.13 without examples: its acc_norm is the lowest loss per character of an ending, HellaSwag's here per token.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError, first_line
from common.files import check_fields, regular_file


class Task(NamedTuple):
    repository: str  # on the hub
    file: str  # in it, .parquet or .jsonl
    read: Callable  # read(row) returns the Item in a row of the file, or raises ValueError
    metrics: tuple = ("acc", "acc_norm")  # ("acc", "perplexity"): an item has one ending


class Item(NamedTuple):
    pairs: list  # of texts, (context, ending) for each choice
    label: int  # the index of the true one
    characters: list  # in each ending, which acc_norm divides its loss by; 0: it divides by the ending's tokens


def load_items(path=None, limit=None, name="hellaswag"):
    """The Items of a task of TASKS.

    path: a .jsonl or .parquet file whose rows have the columns of the hub's; by default the hub's file itself.
    limit: at most this many, evenly spread: HellaSwag begins with its shortest third, captions of videos.
    Raises UserError if the items cannot be read or are something else.
    """
    task = TASKS[name]
    source = f"{name} from the hub" if path is None else path
    try:
        if path is None:
            from common.hub import download

            file = download(task.repository, task.file, "dataset")
        else:
            file = regular_file(path)
        if table := file.suffix == ".parquet":
            from pyarrow.parquet import read_table
        rows = read_table(file).to_pylist() if table else file.read_bytes().splitlines()
    except (OSError, ValueError) as error:
        hint = f"; --tasks {name}=FILE reads a local file, --hellaswag_every 0 trains without tasks"
        raise UserError(f"cannot read {source} ({first_line(error)}){'' if path else hint}") from error
    items = []
    for number, row in enumerate(rows, 1):
        if not table and not row.strip():
            continue
        try:
            items.append(task.read(row if table else json.loads(row)))
        except (ValueError, RecursionError) as error:
            text = str(row) if table else row.decode(errors="replace")
            raise UserError(f"{source}, line {number}: {error}, in {text:.80}") from error
    if not items:
        raise UserError(f"{source} has no items: it needs one a line")
    count = min(limit or len(items), len(items))
    return [items[i * len(items) // count] for i in range(count)]


def read_hellaswag(row):
    """The Item in a row of HellaSwag, whose label may be text. Raises ValueError if the row is something else."""
    check_fields(row, ctx=str, endings=list, label=int | str)
    ctx, endings = row["ctx"], row["endings"]
    check_texts(ctx, *endings)
    if len(endings) < 2:
        raise ValueError("it has fewer than 2 endings")
    label = index_of(row["label"], range(len(endings)))
    return Item([(ctx, " " + ending) for ending in endings], label, [0] * len(endings))


def read_arc(row):
    check_fields(row, question=str, choices=dict, answerKey=str)
    check_fields(row["choices"], text=list, label=list)
    texts, labels = row["choices"]["text"], row["choices"]["label"]
    if len(texts) != len(labels):
        raise ValueError(f"there are {len(texts)} choices and {len(labels)} labels")
    label = index_of(row["answerKey"], labels)
    return lm_eval_item([f"Question: {row['question']}\nAnswer:"] * len(texts), texts, label)


def read_piqa(row):
    check_fields(row, goal=str, sol1=str, sol2=str, label=int | str)
    label = index_of(row["label"], range(2))
    return lm_eval_item([f"Question: {row['goal']}\nAnswer:"] * 2, [row["sol1"], row["sol2"]], label)


def read_winogrande(row):
    """Each option in the place of the blank is a context; the text after the blank is the ending (Trinh & Le 2018)."""
    check_fields(row, sentence=str, option1=str, option2=str, answer=int | str)
    before, blank, after = row["sentence"].partition("_")
    if not blank:
        raise ValueError("the sentence has no _")
    label = index_of(row["answer"], (1, 2))
    return lm_eval_item([before + row["option1"], before + row["option2"]], [after.strip()] * 2, label)


def read_lambada(row):
    """The ending is the last word."""
    check_fields(row, text=str)
    context, _, word = row["text"].rpartition(" ")
    return lm_eval_item([context], [word], 0)


def lm_eval_item(contexts, endings, label):
    """The Item of lm_eval's requests. White space at the end of a context belongs to the ending, as GPT-2's tokens do.
    Raises ValueError for a blank text, which nothing predicts or which has nothing to score."""
    check_texts(*contexts, *endings)
    pairs = [(text.rstrip(), text[len(text.rstrip()) :] + " " + ending) for text, ending in zip(contexts, endings)]
    return Item(pairs, label, [len(ending) for ending in endings])


def check_texts(*texts):
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("a text is blank or not text")


def index_of(answer, answers):
    """The index of an answer, a number or text, among all. Raises ValueError if it is none of them."""
    answers = [*map(str, answers)]
    if str(answer) not in answers:
        raise ValueError(f"the answer is {answer}, not one of {', '.join(answers)}")
    return answers.index(str(answer))


TASKS = {
    "hellaswag": Task("Rowan/hellaswag", "data/validation-00000-of-00001.parquet", read_hellaswag),
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy/test-00000-of-00001.parquet", read_arc),
    "piqa": Task("baber/piqa", "piqa_validation.parquet", read_piqa),
    "lambada": Task("EleutherAI/lambada_openai", "data/lambada_test.jsonl", read_lambada, ("acc", "perplexity")),
    "winogrande": Task(
        "allenai/winogrande", "winogrande_xl/validation-00000-of-00001.parquet", read_winogrande, ("acc",)
    ),
}


def split_tasks(text):
    """{task: its local file, or None} of a flag such as arc_easy,piqa=FILE. Raises UserError for an unknown task."""
    tasks = {}
    for part in text.split(",") if text else ():
        name, _, file = part.strip().partition("=")
        if name not in TASKS:
            raise UserError(f"--tasks {text}: there is no task {name!r}; there are {', '.join(TASKS)}")
        tasks[name] = str(Path(file).expanduser()) if file else None
    return tasks


def join_tasks(tasks):
    """The flag that split_tasks() reads, or None without tasks."""
    return ",".join(f"{name}={file}" if file else name for name, file in tasks.items()) or None
