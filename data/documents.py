"""Tokens of documents in .parquet, .txt and .jsonl files: in order, by several processes, from any position on.

The parent cuts the files into tasks, the workers tokenize them. Every chunk of tokens comes with the position of its
task, [file, ...], from which an interrupted call reads it again.
"""

import codecs
import collections
import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from common.errors import UserError, first_line
from common.files import check_fields
from data.tokenizer import tokenize

DOCUMENTS_PER_TASK = 4096  # at most, of parquet: a task stays within one row group
BYTES_PER_TASK = 2**20  # of text, about
TASKS_PER_WORKER = 4  # in the queue
SEPARATOR = "<|endoftext|>"  # between the documents of a .txt file


def tokenize_files(paths, state, workers):
    """Yield (state, tokens) for the tasks of all files, in order, from `state` on; None: from the start.

    state: (file, row group, batch) of parquet, (file, byte, line) of text; tokens: (n,) uint16. Raises UserError if a
    file cannot be read.
    """
    import fsspec

    # the file system caches its queries to the hub; workers receive it so that they do not repeat the queries
    file_system = fsspec.core.url_to_fs(str(paths[0]))[0]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, (file_system,))
    queue = collections.deque()
    try:
        for position, function, *arguments in list_tasks(paths, state or (0, 0, 0)):
            queue.append((position, pool.submit(function, *arguments)))
            if len(queue) > TASKS_PER_WORKER * workers:
                position, tokens = queue.popleft()
                yield position, tokens.result()
        for position, tokens in queue:
            yield position, tokens.result()
    except BrokenProcessPool as error:
        raise UserError("a worker process was killed, probably for lack of memory: use fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def list_tasks(paths, state):
    """Yield (state, function, *arguments) for the tasks of all files, in order, from `state` on."""
    first, *position = (*state, 0, 0, 0)[:3]
    for file, path in enumerate(paths[first:], first):
        for a, b, *task in FORMATS[suffix(path)](path, *(position if file == first else (0, 0))):
            yield (file, a, b), *task


def suffix(path):
    """A file's suffix; .gz and .zst do not count."""
    return Path(re.sub(r"\.(gz|zst)$", "", str(path))).suffix


def start_worker(_):
    """Ignore Ctrl-C, which the parent handles, and exit if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def reading(path):
    """Turn errors of reading `path` into a UserError: a worker can pickle it, unlike some of the hub's exceptions."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"cannot read {path}: {first_line(error)}; when it can be read, run the same command again"
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# Parquet: workers read their documents themselves, so that no text passes between processes


def list_parquet(path, group, batch):
    """Yield (row group, batch, function, *arguments) from a position on."""
    metadata = open_parquet(path).metadata
    for g in range(group, metadata.num_row_groups):
        for b in range(-(-metadata.row_group(g).num_rows // DOCUMENTS_PER_TASK)):
            if (g, b) >= (group, batch):
                yield g, b, tokenize_parquet, path, g, b


def tokenize_parquet(path, group, batch):
    """The tokens of documents [batch * DOCUMENTS_PER_TASK, (batch + 1) * DOCUMENTS_PER_TASK) of a row group.

    A missing document counts as an empty one. Bytes that are not UTF-8 become U+FFFD.
    """
    with reading(path):
        column = next(each for number, each in batches_of(path, group) if number == batch).column(0)
    return tokenize([(text or b"").decode(errors="replace") for text in column.cast("large_binary").to_pylist()])


@functools.lru_cache(maxsize=1)
def batches_of(path, group):
    """(number, batch) of a row group's batches, read on from task to task: those of a worker ascend."""
    return enumerate(open_parquet(path).iter_batches(DOCUMENTS_PER_TASK, [group], columns=["text"], use_threads=False))


@functools.lru_cache(maxsize=4)
def open_parquet(path):
    """Open a local parquet file, or one on the hub by byte ranges. Raises UserError without a text column."""
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(path):
        files, name = fsspec.core.url_to_fs(str(path))
        # no read-ahead, which would fetch 5 MB beyond each range; the buffer holds the text of one row group
        file = pq.ParquetFile(files.open(name, "rb", cache_type="none"), buffer_size=2**23)
        types = dict(zip(file.schema_arrow.names, file.schema_arrow.types))
    if types.get("text") not in (pa.string(), pa.large_string()):
        columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise UserError(f"{path}: there is no column of strings named text, only {columns}")
    return file


# ----------------------------------------------------------------------------------------------------------------------
# Text: the parent reads and decompresses blocks. A position is (bytes, lines) before a block.


def list_lines(path, *position):
    """Yield (start, line, function, *arguments) for blocks of complete lines of a .jsonl file, from a position on."""
    for start, line, block in read_blocks(path, *position, lambda block: block.rfind(b"\n") + 1):
        yield start, line, tokenize_lines, path, line, block


def tokenize_lines(path, line, block):
    """The tokens of the documents in lines of JSON; line: their number in the file, from 0. Raises UserError."""
    texts = []
    for number, content in enumerate(decode(block, line == 0).split("\n"), line + 1):
        if not content.strip():
            continue
        try:
            document = json.loads(content)
            check_fields(document, text=str)
        except ValueError as error:
            raise UserError(
                f'{path}, line {number}: {first_line(error)}; a line must be a JSON object like {{"text": "..."}}'
            ) from error
        texts.append(re.sub("[\ud800-\udfff]", "\ufffd", document["text"]))  # halves of a \\u pair are not UTF-8
    return tokenize(texts)


def list_text(path, *position):
    """Yield (start, line, function, *arguments) for blocks of a .txt file, from a position on."""
    for start, line, block in read_blocks(path, *position, cut_text):
        yield start, line, tokenize_text, block, start == 0


def tokenize_text(block, first):
    """The tokens of a block that begins a file, or else goes on with the document of the block before.

    Line breaks around documents are dropped, and documents without text. Bytes that are not UTF-8 become U+FFFD.
    """
    text = (SEPARATOR if first else "") + decode(block, first)
    rest, *documents = text.split(SEPARATOR)
    documents = [text for document in documents if (text := document.strip("\r\n"))]
    return tokenize([rest.rstrip("\r\n"), *documents])[1:]  # no <|endoftext|> before the rest


def decode(block, first):
    """The text of a block; the first of a file may begin with a byte-order mark."""
    return block.decode("utf-8-sig" if first else "utf-8", errors="replace")


def cut_text(block):
    """Where a block of text can be cut so that its tokens stay the same; 0: nowhere.

    Before the last separator; inside a document, before the last space or line feed that follows a character other than
    white space: GPT-2's split pattern always splits there.
    """
    separator = SEPARATOR.encode()
    if (end := block.rfind(separator)) > 0:
        return end
    begin = len(separator) if end == 0 else 0
    match = re.match(r".*\S(?=[ \n])", block[begin:].decode(errors="surrogateescape"), re.DOTALL)
    return begin + len(match[0].encode(errors="surrogateescape")) if match else 0


def read_blocks(path, start, line, cut):
    """Yield (start, line, block) of a file of text from a position on, .gz and .zst decompressed.

    cut(block): the length of a block's part that can be tokenized by itself, 0 if there is none.
    """
    import pyarrow as pa

    with reading(path), pa.input_stream(str(path), compression="detect") as file:
        for skipped in range(0, start, BYTES_PER_TASK):
            file.read(min(BYTES_PER_TASK, start - skipped))
        buffer, size = b"", BYTES_PER_TASK
        while True:
            buffer += file.read(max(0, size - len(buffer)))
            at_end = len(buffer) < size
            if start == 0 and buffer.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise UserError(f"{path} is UTF-16: convert it to UTF-8, for example with iconv -f UTF-16 -t UTF-8")
            # cut() sees `size` bytes, whatever the buffer holds beyond them: from a position on the blocks are the same
            end = len(buffer) if at_end else cut(buffer[:size])
            if end:
                yield start, line, buffer[:end]
                start, line = start + end, line + buffer.count(b"\n", 0, end)
                buffer, size = buffer[end:], BYTES_PER_TASK
            elif at_end:
                return
            else:
                size *= 2


FORMATS = {".parquet": list_parquet, ".txt": list_text, ".jsonl": list_lines}
