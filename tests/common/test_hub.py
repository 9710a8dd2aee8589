"""A hub that does not answer, and one that does."""

import http.server
import os
import socket
import threading

import pytest

from common.hub import check_hub

ASK = """
import os
os.environ.update(HF_ENDPOINT="{}", HF_HUB_OFFLINE="", HF_HUB_ETAG_TIMEOUT="1", HF_HOME="home")
from checkpoints.load import load_config
from common.errors import UserError
from fineweb import find_on_hub
from hellaswag import load_items

FINEWEB = ("HuggingFaceFW/fineweb-edu", "sample-10BT", "main")
for read in (lambda: load_config("gpt2"), load_items, lambda: find_on_hub(*FINEWEB)):
    try:
        read()
    except UserError as error:
        print(error)
"""


def test_a_hub_that_never_answers(command, tmp_path):
    """Connections are accepted, and that is all. With its own retries each of the three takes minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "ask.py").write_text(ASK.format(f"http://127.0.0.1:{server.getsockname()[1]}"))
        done = command(tmp_path / "ask.py")
        server.accept()[0].close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # it was asked once
            server.accept()
    assert done.returncode == 0, done.stderr
    said, *errors = done.stdout.splitlines()
    assert "does not answer (timed out)" in said and len(errors) == 3
    for error, name in zip(errors, ("gpt2", "HellaSwag", "fineweb-edu")):
        assert error.startswith("cannot ") and name in error


def test_a_hub_that_answers_is_asked(monkeypatch, capsys):
    """Also with an error, as for a page that does not exist."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:  # 501
        threading.Thread(target=server.handle_request).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        check_hub.__wrapped__()
    assert os.environ["HF_HUB_OFFLINE"] == capsys.readouterr().out == ""
