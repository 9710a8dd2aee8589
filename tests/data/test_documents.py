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


@pytest.fixture(autouse=True)
def no_open_parquet():
    documents.open_parquet.cache_clear()
    documents.batches_of.cache_clear()


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


def test_byte_order_marks_and_binary_files(tmp_path):
    (tmp_path / "a.txt").write_text("words", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"text": "words"}', encoding="utf-8-sig")
    for name in ("a.txt", "a.jsonl"):
        assert np.array_equal(join(read(tmp_path / name)), tokenize(["words"]))
    (tmp_path / "a.txt").write_text("words", encoding="utf-16")
    with pytest.raises(UserError, match="UTF-16"):
        read(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"GIF89a\0\1")
    with pytest.raises(UserError, match="a.txt is not text: it has NUL bytes"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.TXT", "a.md", "A.Txt.GZ", "a.JSONL", "a.json", "a.json.zst", "a::b.parquet"])
def test_names_of_files(tmp_path, name):
    if ".parquet" in name:
        pq.write_table(pa.table(dict(text=["words"])), tmp_path / name)
    else:
        content = b'{"text": "words"}' if "json" in name.lower() else b"words"
        (tmp_path / name).write_bytes(gzip.compress(content) if "GZ" in name else content)
        if "zst" in name:
            write(tmp_path / name, content)
    assert np.array_equal(join(read(tmp_path / name)), tokenize(["words"]))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_types_of_parquet_columns(tmp_path, kind):
    pq.write_table(pa.table(dict(text=pa.array(["one", None, "two", "one"]).cast(kind))), tmp_path / "a.parquet")
    assert np.array_equal(join(read(tmp_path / "a.parquet")), tokenize(["one", "", "two", "one"]))


def test_documents_without_text_and_in_other_encodings(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "one"}\n{"text": ""}')
    (tmp_path / "b.txt").write_bytes("caf\xe9, na\xefve".encode("latin-1") + " \ufffd".encode())
    column = pa.array([b"\xff", None, b"two"], pa.binary()).view(pa.string())
    pq.write_table(pa.table(dict(text=column)), tmp_path / "c.parquet")
    results = [function(*rest) for _, function, *rest in list_tasks(sorted(tmp_path.iterdir()), (0, 0), LIMIT)]
    assert [wrong for _, wrong in results] == [0, 2, 1]
    expected = ["", "one", "", "caf\ufffd, na\ufffdve \ufffd", "\ufffd", "", "two"]
    assert np.array_equal(np.concatenate([tokens for tokens, _ in results]), tokenize(expected))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("too_long", [False, True])
def test_the_largest_document(tmp_path, name, too_long):
    """Of a file of text, the largest part that cannot be cut."""
    path, limit = tmp_path / name, 2**21
    texts = ["fine", "a" * (limit + 1 if too_long else limit - 100), "fine"]
    if name == "a.parquet":
        pq.write_table(pa.table(dict(text=texts)), path)
    else:
        lines = texts if "txt" in name else [json.dumps(dict(text=text)) for text in texts]
        write(path, "\n".join(lines).encode())
    tasks = (function(*arguments) for _, function, *arguments in list_tasks([path], (0, 0), limit))
    if not too_long:
        assert sum(len(tokens) for tokens, _ in tasks) > limit // 5
        return
    where = dict(jsonl="line 2", parquet="row 2 of row group 0").get(name.split(".")[1], "line [12]")
    with pytest.raises(UserError, match=f"{name}, {where}: a document of more than 2 MB; --max_document_mb"):
        list(tasks)


def test_a_zst_file_with_a_long_window(tmp_path):
    """Of 256 MB, as zstd --long=28 writes it: Arrow decodes up to 128 MB."""
    content = b"words"
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, 18 << 3]) + (len(content) << 3 | 1).to_bytes(3, "little") + content
    (tmp_path / "a.txt.zst").write_bytes(frame)
    with pytest.raises(UserError, match="window is above 128 MB: decompress it with zstd -d --long=31 .*a.txt.zst"):
        read(tmp_path / "a.txt.zst")


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
