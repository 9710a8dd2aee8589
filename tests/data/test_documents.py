import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import UserError
from data import documents
from data.documents import list_tasks
from data.tokenizer import tokenize

TEXTS = ["One story.\n\nIts end.", "  Another, indented", "naïve 日本語 🙂 " * 9, "x" * 300, "a\r\nb", "the last"]
LIMIT = 2**22
# what GPT-2's split pattern treats differently, and white space that is not ASCII
PIECES = ["word", " word", "'ll", "7", ".", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\xa0", "\u3000", "\x85", "日"]


@pytest.fixture(params=[16, 64, 2**20])
def task_size(request, monkeypatch):
    monkeypatch.setattr(documents, "BYTES_PER_TASK", request.param)


def read(*paths, state=(0, 0)):
    """(state, tokens) of every task from `state` on."""
    tasks = list_tasks(paths, state, LIMIT)
    return [(position, function(*arguments)[0]) for position, function, *arguments in tasks]


def join(tasks):
    return np.concatenate([tokens for _, tokens in tasks])


def write(path, content):
    """Write bytes, compressed as the path's suffix says."""
    with pa.output_stream(str(path), compression="detect") as file:
        file.write(content)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_every_task_continues(tmp_path, task_size, kind, compression):
    """The tokens do not depend on the tasks, and from every state on they are the same again."""
    paths = [tmp_path / f"{name}{kind}{compression}" for name in "ab"]
    for path, texts in zip(paths, (TEXTS[:4], TEXTS[4:])):
        lines = "".join(json.dumps(dict(id=7, text=text), ensure_ascii=False) + "\n" for text in texts)
        write(path, ("\n<|endoftext|>\n".join(texts) if kind == ".txt" else lines).encode())
    tasks = read(*paths)
    assert np.array_equal(join(tasks), tokenize(TEXTS))
    for i, (state, _) in enumerate(tasks):
        rest = read(*paths, state=state)
        assert [state for state, _ in rest] == [state for state, _ in tasks[i:]]
        assert np.array_equal(join(rest), join(tasks[i:]))


def test_parquet_batches_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "DOCUMENTS_PER_TASK", 2)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(dict(text=TEXTS)), path, row_group_size=4)
    tasks = read(path)
    assert len(tasks) == 3 and np.array_equal(join(tasks), tokenize(TEXTS))
    for state, tokens in tasks:
        documents.batches_of.cache_clear()  # as in another process
        assert np.array_equal(read(path, state=state)[0][1], tokens)


def test_byte_order_marks(tmp_path):
    (tmp_path / "a.txt").write_text("words", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"text": "words"}', encoding="utf-8-sig")
    for name in ("a.txt", "a.jsonl"):
        assert np.array_equal(join(read(tmp_path / name)), tokenize(["words"]))
    (tmp_path / "a.txt").write_text("words", encoding="utf-16")
    with pytest.raises(UserError, match="UTF-16"):
        read(tmp_path / "a.txt")


def test_a_text_without_separator_is_one_document(tmp_path, task_size):
    """Cutting it into tasks changes no token, whatever its white space."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        text = "".join(rng.choice(PIECES, 500)).strip("\r\n")
        (tmp_path / "a.txt").write_bytes(text.encode())
        tasks = read(tmp_path / "a.txt")
        assert np.array_equal(join(tasks), tokenize([text]))
    assert (len(tasks) > 1) == (documents.BYTES_PER_TASK < 2**20)


def test_separators_and_line_breaks_around_them_are_no_text(tmp_path, task_size):
    content = "<|endoftext|>\r\none\r\n<|endoftext|><|endoftext|>\n \ntwo \n\n<|endoftext|>three<|endoftext|>\n"
    (tmp_path / "a.txt").write_text(content, newline="")
    assert np.array_equal(join(read(tmp_path / "a.txt")), tokenize(["one", " \ntwo ", "three"]))


def test_bytes_that_are_not_utf8(tmp_path, task_size):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 \xff\xfe " + "日本".encode()[:4])
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "caf\xe9"}\n\n{"text": "\\ud83d\\ude42 \\ud83d"}')
    expected = ["caf\ufffd \ufffd\ufffd 日\ufffd", "caf\ufffd", "🙂 \ufffd"]
    assert np.array_equal(join(read(tmp_path / "a.txt", tmp_path / "b.jsonl")), tokenize(expected))


@pytest.mark.parametrize("line", ["hello", "[1]", '"x"', '{"texts": "x"}', '{"text": 7}', "[" * 99_999])
def test_a_line_that_is_no_document(tmp_path, task_size, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 9 + line + "\n")
    with pytest.raises(UserError, match="a.jsonl, line 10: .*must be a JSON object") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_compressed_files_that_are_damaged(tmp_path):
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"a.txt{suffix}"
        write(path, b"two members " * 1000)
        content = path.read_bytes()
        path.write_bytes(content * 2)
        assert np.array_equal(join(read(path)), tokenize(["two members " * 2000]))
        for wrong in (b"plain text", content[: len(content) // 2], content[:-1], content[:9] + bytes(9)):
            path.write_bytes(wrong)
            with pytest.raises(UserError, match=f"cannot read .*a.txt{suffix}"):
                read(path)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b""))
    assert read(tmp_path / "b.txt.gz") == []
