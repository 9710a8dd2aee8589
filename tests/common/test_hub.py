"""A hub that does not answer, one that does, and one that answers badly."""

import hashlib
import http.server
import io
import json
import os
import re
import socket
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from texts import make_items

from checkpoints import hugging_face
from common.hub import check_hub
from data.shards import open_shards
from data.tasks import read_hellaswag
from data.tokenizer import VOCAB_SIZE, tokenize
from model import GPT, GPTConfig

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
    for error, name in zip(errors, ("gpt2", "hellaswag", "fineweb-edu")):
        assert error.startswith("cannot ") and name in error and "offline: HF_HUB_OFFLINE is set, or" in error


def test_a_hub_that_answers_is_asked(monkeypatch, capsys):
    """Also with an error, as for a page that does not exist."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:  # 501
        threading.Thread(target=server.handle_request).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        check_hub.__wrapped__()
    assert os.environ["HF_HUB_OFFLINE"] == capsys.readouterr().out == ""


# ----------------------------------------------------------------------------------------------------------------------
# A hub of this process


class Hub(http.server.ThreadingHTTPServer):
    """Speaks the hub's protocol as far as the commands use it.

    commits: {SHA: {"datasets/OWNER/NAME/PATH" or "NAME/PATH": bytes}}; the last one is main. faults: a list of
    (pattern of "METHOD /path", what happens), each for one request: a status, "drop", or "truncate".
    """

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits, self.faults, self.log = {"a" * 40: files}, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0].replace("%2F", "/")
        request = f"{self.command} {path}"
        hub.log.append(request)
        fault = next((each for each in hub.faults if re.search(each[0], request)), None)
        if fault:
            hub.faults.remove(fault)
        main = next(reversed(hub.commits))
        found = re.fullmatch(r"/(api/)?((?:datasets/)?.+?)/(resolve|revision|tree)/([^/]+)/?(.*)", path)
        if fault and fault[1] == "drop":
            self.close_connection = True
        elif fault and fault[1] != "truncate":
            self.reply(fault[1])
        elif not found or not (files := hub.commits.get(main if found[4] == "main" else found[4])):
            self.reply(200 if path == "/" else 404)
        elif found[3] == "resolve":
            content = files.get(f"{found[2]}/{found[5]}")
            headers = {"X-Repo-Commit": main if found[4] == "main" else found[4]}
            if content is None:
                self.reply(404, headers={"X-Error-Code": "EntryNotFound"} | headers)
                return
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-")).groups()
            part = content[int(first) : int(last or len(content)) + 1]
            headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            headers |= {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
            self.reply(206 if "Range" in self.headers else 200, part, headers, truncate=bool(fault))
        elif found[3] == "revision":
            siblings = [
                dict(rfilename=name.removeprefix(f"{found[2]}/")) for name in files if name.startswith(found[2])
            ]
            self.reply(200, json.dumps(dict(id=found[2], sha=main, siblings=siblings)).encode())
        else:
            inside = {name[len(found[2]) + 1 :]: files[name] for name in files if name.startswith(found[2])}
            rows = [
                dict(type="file", path=name, size=len(content), oid=hashlib.sha1(content).hexdigest())
                for name, content in inside.items()
                if name.rpartition("/")[0] == found[5]
            ]
            folders = {"/".join(name.split("/")[: found[5].count("/") + (2 if found[5] else 1)]) for name in inside}
            rows += [dict(type="directory", path=name, oid="0" * 40) for name in sorted(folders - inside.keys())]
            self.reply(200, json.dumps(rows).encode())

    do_HEAD = do_GET

    def reply(self, status, content=b"", headers=None, truncate=False):
        self.send_response(status)
        for name, value in ({"Content-Length": len(content)} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if truncate else content)
        self.close_connection = truncate


USE = """
import os, sys, time
os.environ.update(HF_ENDPOINT="{url}", HF_HUB_OFFLINE="", HF_HOME="home", HF_HUB_DISABLE_PROGRESS_BARS="1")
time.sleep = lambda seconds: None  # between tries; also in the workers of fineweb.py
if __name__ == "__main__":
    from checkpoints.load import load_model
    from common.errors import UserError
    import fineweb, hellaswag
    sys.argv = "fineweb.py --shard_size 300 --workers 1 --out out".split()
    try:
        {code}
    except UserError as error:
        print("error:", error)
"""
README = "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"


def parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=10)
    return file.getvalue()


def test_a_hub_with_faults(command, tmp_path):
    """Each passes, or the error has the hub's answer. Waits between tries are skipped."""
    texts = [[f"Document {i} of file {file}. " * 3 for i in range(100)] for file in range(2)]
    edu, hellaswag, items = "datasets/HuggingFaceFW/fineweb-edu", "datasets/Rowan/hellaswag/data", make_items(7)
    files = {f"{edu}/sample/10BT/{i:03}_00000.parquet": parquet([dict(text=t) for t in texts[i]]) for i in range(2)}
    files[f"{edu}/README.md"] = README.encode()
    for split in ("train", "test", "validation"):
        files[f"{hellaswag}/{split}-00000-of-00001.parquet"] = parquet([item | dict(label="1") for item in items])
    hugging_face.write(GPT(GPTConfig(seq_len=8, vocab_size=VOCAB_SIZE, n_layer=1, n_head=1, n_embd=8)), tmp_path)
    for name in ("config.json", "model.safetensors"):
        files[f"gpt2/{name}"] = (tmp_path / name).read_bytes()
    hub = Hub(files)

    def use(code, *faults):
        hub.faults, hub.log = list(faults), []
        (tmp_path / "use.py").write_text(USE.format(url=hub.url, code=code))
        done = command(tmp_path / "use.py")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def read():
        return np.concatenate(
            [shard[:] for split in ("val", "train") for shard in open_shards(tmp_path / "out", split)]
        )

    always = 20  # more often than anything is tried
    error = use("fineweb.main()", *[("HEAD .*README", 500)] * always)
    assert "cannot read HuggingFaceFW/fineweb-edu sample-10BT from the hub: " in error and "500 Internal" in error
    passing = ("tree", 429), ("GET .*/000", "drop"), ("GET .*/000", 500), ("GET .*/000", "truncate")
    error = use("fineweb.main()", *passing, *[("GET .*/001", 403)] * always)
    assert "001_00000.parquet: " in error and "403" in error and "run the same command again" in error
    assert len(list((tmp_path / "out").glob("*.npy"))) > 1
    hub.commits["b" * 40] = {name: b"another commit" for name in files}
    assert "4,000 tokens in out: " in use("fineweb.main()")
    assert np.array_equal(read(), tokenize(texts[0] + texts[1]))
    assert json.loads((tmp_path / "out" / "shards.json").read_text())["source"]["revision"] == "a" * 40

    del hub.commits["b" * 40]
    error = use("hellaswag.load_items()", *[("HEAD .*validation", 500)] * always)
    assert "error: cannot read hellaswag from the hub (Server error '500 Internal" in error
    error = use("load_model('gpt2')", *[("HEAD .*safetensors", 429)] * always)
    assert "error: cannot load gpt2 (" in error and "429" in error
    code = "print(load_model('gpt2').num_params(), hellaswag.load_items())"
    passing = [(f"GET .*{file}", fault) for file in ("safetensors", "validation") for fault in ("truncate", "drop")]
    expected = f"{403_008} {[read_hellaswag(item | dict(label=1)) for item in items]}\n"
    assert use(code, *passing, ("HEAD .*safetensors", 429), ("HEAD .*validation", 429)) == expected
    assert not hub.faults and not any("train-" in request or "test-" in request for request in hub.log)
    assert use(code, *[("resolve", 500)] * always) == expected  # downloaded once
