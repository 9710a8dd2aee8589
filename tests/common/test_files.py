import json
import os
import threading

import pytest
from fork_server import TIMEOUT

from common.errors import UserError
from common.files import digest, lock, read_json, regular_file


def irregular_files(path):
    """Functions that put something other than a regular file at `path`."""
    yield lambda: path.symlink_to("nothing")
    yield lambda: path.symlink_to(path.name)
    yield lambda: path.symlink_to("/dev/zero")
    yield lambda: os.mkfifo(path)
    yield path.mkdir


@pytest.mark.parametrize("case", range(5))
def test_only_regular_files_are_opened(tmp_path, case):
    path = tmp_path / "file"
    list(irregular_files(path))[case]()
    for read in (regular_file, digest, read_json):
        with pytest.raises(OSError):
            read(path)


NOT_JSON = ("", "hello", "1" * 10_000, "[" * 10_000, b"\xff\xfe\xff", '{"number": 1')
WRONG = ("7", "null", "[]", '"x"', "NaN", "{}", '{"number": null, "text": "x"}', '{"number": [1], "text": "x"}')


@pytest.mark.parametrize("text", NOT_JSON + WRONG, ids=range(len(NOT_JSON + WRONG)))
def test_everything_but_the_expected_json_is_a_value_error(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as error:
        read_json(path, number=int, text=str)
    assert "\n" not in str(error.value)
    content = dict(number=1, text="x", other=[])
    path.write_text(json.dumps(content))
    assert read_json(path, number=int, text=str) == content


def test_a_lock_is_refused_or_waited_for(tmp_path):
    first = lock(tmp_path / "lock", "busy")
    with pytest.raises(UserError, match="it is busy"):
        lock(tmp_path / "lock", "it is busy")
    waiting = threading.Thread(target=lambda: lock(tmp_path / "lock").close())
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    first.close()
    waiting.join(TIMEOUT)
    assert not waiting.is_alive()
    lock(tmp_path / "lock", "busy").close()
