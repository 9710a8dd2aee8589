"""Tokens of documents in files of text, JSON or Parquet: in order, by several processes, from any position on.

The parent cuts the files into tasks, the workers tokenize them. Every chunk of tokens comes with the position of its
task, [file, task of the file], from which an interrupted call reads it again.
"""

import codecs
import collections
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from common.cli import print_over_bar
from common.errors import UserError, first_line
from common.files import check_fields
from common.hub import answered
from data.tokenizer import tokenize

DOCUMENTS_PER_TASK = 4096  # at most, of parquet: a task stays within one row group
BYTES_PER_TASK = 2**20  # of text, about
TASKS_PER_WORKER = 4  # in the queue
SEPARATOR = "<|endoftext|>"  # between the documents of a text file


def tokenize_files(paths, state, workers, limit):
    """Yield (state, tokens) for the tasks of all files, in order, from `state` on; None: from the start.

    tokens: (n,) uint16. limit: the most bytes of a document. At the end this prints how much is not UTF-8. Raises
    UserError if a file cannot be read.
    """
    import fsspec

    # the file system of hf:// caches its queries to the hub; workers receive it so that they do not repeat the queries
    file_system = None if isinstance(paths[0], Path) else fsspec.core.url_to_fs(paths[0])[0]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, (file_system,))
    tasks, queue = list_tasks(paths, state or (0, 0), limit), collections.deque()
    wrong, first = 0, None  # not UTF-8
    try:
        while True:
            for position, function, *arguments in itertools.islice(tasks, TASKS_PER_WORKER * workers - len(queue)):
                queue.append((position, pool.submit(function, *arguments)))
            if not queue:
                break
            position, task = queue.popleft()
            tokens, own = task.result()
            wrong, first = wrong + own, first or (paths[position[0]] if own else None)
            yield position, tokens
    except BrokenProcessPool as error:
        raise UserError("a worker process was killed, probably for lack of memory: use fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)
        if wrong:
            hint = "of Latin-1? iconv -f LATIN1 -t UTF-8 converts it"
            print_over_bar(f"{wrong:,} times bytes that are not UTF-8 became U+FFFD, first in {first} ({hint})")


def list_tasks(paths, state, limit):
    """Yield (state, function, *arguments) for the tasks of all files, in order, from `state` on.

    The function returns (tokens, count): (n,) uint16, and how many times bytes are not UTF-8.
    """
    for file, path in enumerate(paths[state[0] :], state[0]):
        for number, task in enumerate(FORMATS[suffix(path)](path, limit)):
            if (file, number) >= tuple(state):
                yield (file, number), *task


def suffix(path):
    """A file's suffix, in lower case; .gz and .zst do not count."""
    return Path(re.sub(r"\.(gz|zst)$", "", str(path).lower())).suffix


def start_worker(_):
    """Ignore Ctrl-C, which the parent handles, and exit if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def reading(path):
    """Turn errors of reading `path` into a UserError: a worker can pickle it, unlike some of the hub's exceptions."""
    import pyarrow as pa

    try:
        with contextlib.nullcontext() if isinstance(path, Path) else answered():
            yield
    except (OSError, ValueError, pa.ArrowException) as error:
        hint = "when it can be read, run the same command again"
        if "too much memory" in str(error):
            hint = f"its window is above 128 MB: decompress it with zstd -d --long=31 {path}"
        raise UserError(f"cannot read {path}: {first_line(error)}; {hint}") from error


def too_long(where, limit):
    return UserError(f"{where}: a document of more than {limit / 2**20:g} MB; --max_document_mb sets the limit")


def decode(data):
    """(text, how many times bytes are not UTF-8 and became U+FFFD)."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return text, text.count("\ufffd") - data.count("\ufffd".encode())


# ----------------------------------------------------------------------------------------------------------------------
# Parquet: workers read their documents themselves, so that no text passes between processes


def list_parquet(path, limit):
    """Yield (function, *arguments) for the batches of each row group."""
    metadata = open_parquet(path).metadata
    for group in range(metadata.num_row_groups):
        for batch in range(-(-metadata.row_group(group).num_rows // DOCUMENTS_PER_TASK)):
            yield tokenize_parquet, path, group, batch, limit


def tokenize_parquet(path, group, batch, limit):
    """The (tokens, count) of documents [batch * DOCUMENTS_PER_TASK, (batch + 1) * DOCUMENTS_PER_TASK) of a row group.

    A missing document counts as an empty one.
    """
    import pyarrow.compute as pc

    with reading(path):
        column = next(each for number, each in batches_of(path, group) if number == batch).column(0)
        column = column.cast("large_binary")
    if (longest := pc.max(pc.binary_length(column)).as_py() or 0) > limit:
        row = batch * DOCUMENTS_PER_TASK + pc.index(pc.binary_length(column), longest).as_py() + 1
        raise too_long(f"{path}, row {row} of row group {group}", limit)
    texts, wrong = zip(*(decode(text or b"") for text in column.to_pylist()))
    return tokenize(texts), sum(wrong)


@functools.lru_cache(maxsize=1)
def batches_of(path, group):
    """(number, batch) of a row group's batches, read on from task to task: those of a worker ascend."""
    return enumerate(open_parquet(path).iter_batches(DOCUMENTS_PER_TASK, [group], columns=["text"], use_threads=False))


@functools.lru_cache(maxsize=4)
def open_parquet(path):
    """Open a local parquet file (a Path), or one on the hub (a URL) by byte ranges. Raises UserError without a text
    column."""
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(path):
        source = path
        if not isinstance(path, Path):
            files, name = fsspec.core.url_to_fs(path)
            source = files.open(name, "rb", cache_type="none")  # no read-ahead of 5 MB beyond each range
        file = pq.ParquetFile(source, buffer_size=2**23)  # a buffer, not all the text of a row group
        types = dict(zip(file.schema_arrow.names, file.schema_arrow.types))
    if types.get("text") not in (pa.string(), pa.large_string(), pa.string_view()):
        columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise UserError(f"{path}: there is no column of strings named text, only {columns}")
    return file


# ----------------------------------------------------------------------------------------------------------------------
# Text: the parent reads and decompresses blocks


def list_lines(path, limit):
    """Yield (function, *arguments) for blocks of complete lines of JSON."""
    for line, block in read_blocks(path, lambda block: block.rfind(b"\n") + 1, limit):
        yield tokenize_lines, path, line, block


def tokenize_lines(path, line, block):
    """The (tokens, count) of the documents in lines of JSON; line: their number in the file, from 0.

    A document whose text is null counts as an empty one. Raises UserError.
    """
    texts = []
    content, wrong = decode(block)
    for number, each in enumerate(content.split("\n"), line + 1):
        if not each.strip():
            continue
        try:
            document = json.loads(each)
            check_fields(document, text=str | None)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f'{path}, line {number}: {first_line(error)}; a line must be a JSON object like {{"text": "..."}}: '
                "jq -c .[] makes such lines of an array"
            ) from error
        # halves of a \\u pair are not UTF-8
        texts.append(re.sub("[\ud800-\udfff]", "\ufffd", document["text"] or ""))
    return tokenize(texts), wrong


def list_text(path, limit):
    """Yield (function, *arguments) for blocks of a file of text."""
    for number, (_, block) in enumerate(read_blocks(path, cut_text, limit)):
        yield tokenize_text, block, number == 0


def tokenize_text(block, first):
    """The (tokens, count) of a block that begins a file, or else goes on with the document of the block before.

    It drops line breaks around documents, and documents without text.
    """
    text, wrong = decode(block)
    rest, *documents = ((SEPARATOR if first else "") + text).split(SEPARATOR)
    documents = [text for document in documents if (text := document.strip("\r\n"))]
    return tokenize([rest.rstrip("\r\n"), *documents])[1:], wrong  # no <|endoftext|> before the rest


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


def read_blocks(path, cut, limit):
    """Yield (lines before it, block) of a file of text, .gz and .zst decompressed, without a byte-order mark.

    cut(block): the length of a block's part that can be tokenized by itself, 0 if there is none. Raises UserError if
    `limit` bytes cannot be cut, and for UTF-16 and binary files.
    """
    import pyarrow as pa

    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    with reading(path), pa.input_stream(str(path), compression=compression) as file:
        buffer, line, size = file.read(BYTES_PER_TASK), 0, BYTES_PER_TASK
        if buffer.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path} is UTF-16: convert it to UTF-8, for example with iconv -f UTF-16 -t UTF-8")
        if b"\0" in buffer[:8000]:  # git's test
            raise UserError(f"{path} is not text: it has NUL bytes")
        buffer = buffer.removeprefix(codecs.BOM_UTF8)
        while True:
            missing = max(0, size - len(buffer))
            rest = file.read(missing)
            buffer += rest
            end = cut(buffer) if len(rest) == missing else len(buffer)
            if end:
                yield line, buffer[:end]
                line += buffer.count(b"\n", 0, end)
                buffer, size = buffer[end:], BYTES_PER_TASK
            elif len(rest) < missing:
                return
            elif size >= limit:
                raise too_long(f"{path}, line {line + 1}", limit)
            else:
                size = min(2 * size, limit)


FORMATS = {".parquet": list_parquet}
FORMATS |= dict.fromkeys((".txt", ".md"), list_text) | dict.fromkeys((".jsonl", ".json"), list_lines)
