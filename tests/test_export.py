"""`transformers` and EleutherAI's lm_eval read what export.py writes."""

import base64
import http.server
import json
import threading

import pytest
import torch
import yaml
from conftest import ALONE, expect_error
from test_hellaswag import tiny as tiny_gpt2
from texts import make_items
from transformers import AutoModelForCausalLM

from checkpoints import hugging_face
from checkpoints.run_folder import TRAINING
from common.files import digest, json_digest, write_json
from data.tasks import read_hellaswag
from hellaswag import Tasks

TASK = """
task: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {validation: ITEMS}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{ctx}}"
doc_to_target: "{{label}}"
doc_to_choice: endings
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_the_export_has_no_training_state(command, call_main, tmp_path):
    model = tiny_gpt2()
    (tmp_path / "checkpoint_000003").mkdir()
    hugging_face.write(model, tmp_path / "checkpoint_000003")
    (tmp_path / "checkpoint_000003" / "optimizer.safetensors").write_bytes(b"large")
    (tmp_path / "some" / "where.unfinished").mkdir(parents=True)  # of somebody else, who keeps it
    (tmp_path / "some" / "where.unfinished" / "notes").write_text("")
    done = command("export.py", "checkpoint_000003", "some/where")
    assert done.returncode == 0 and "from_pretrained" in done.stdout, done.stderr
    names = {path.name for path in (tmp_path / "some" / "where").iterdir()}
    assert names == {"config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer_config.json"}
    assert [path.name for path in (tmp_path / "some").rglob("*unfinished*/*")] == ["notes"]
    assert len(list((tmp_path / "some").iterdir())) == 2
    where = json.loads((tmp_path / "some" / "where" / "tokenizer_config.json").read_text())
    assert where["model_max_length"] == model.config.seq_len
    x = torch.randint(50257, (2, 64))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "some" / "where").eval()
    torch.testing.assert_close(theirs(x).logits, model(x), rtol=1e-4, atol=1e-3)
    (tmp_path / "file").write_text("")
    expect_error(call_main("export.py", "checkpoint_000003", "file/out"), "cannot write file/out")


def test_lm_eval_computes_the_same_accuracy(command, tmp_path):
    """acc only: lm_eval's acc_norm divides by bytes."""
    import lm_eval  # slow to import
    from lm_eval.tasks import TaskManager

    model, rows = tiny_gpt2(), [row | dict(endings=(row["endings"] * 2)[:4]) for row in make_items(12)]
    (tmp_path / "c").mkdir()
    hugging_face.write(model, tmp_path / "c")
    assert command("export.py", "c", "out").returncode == 0
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.replace("ITEMS", str(tmp_path / "items.jsonl")))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'out'},dtype=float32",
        tasks=["multiple_choice"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    tasks = Tasks(dict(hellaswag=[*map(read_hellaswag, rows)]), 64, 1000)
    acc = tasks.evaluate(lambda batch, at: model(*batch, reduction="none", at=at), ALONE)["hellaswag"]["acc"]
    assert results["results"]["multiple_choice"]["acc,none"] == pytest.approx(acc) and 0 < acc < 1


class Uploads(http.server.BaseHTTPRequestHandler):
    """The part of the hub's protocol that uploads a folder. The server's `repositories` are {name: {path: bytes}}."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.reply(200)

    def do_POST(self):
        hub, content = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        hub.log.append(self.path)
        if self.headers["Authorization"] != "Bearer right":
            self.reply(401, dict(error="Invalid username or password."))
        elif self.path == "/api/repos/create":
            asked = json.loads(content)
            hub.visibility.append(asked["visibility"])
            name = f"{asked['organization']}/{asked['name']}"
            hub.repositories.setdefault(name, {})
            self.reply(200, dict(url=f"{hub.url}/{name}", name=name))
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(content)["files"]]
            modes = [dict(path=path, uploadMode="lfs" if ".safe" in path else "regular") for path in files]
            self.reply(200, dict(files=[mode | dict(shouldIgnore=False) for mode in modes]))
        elif self.path.endswith("/objects/batch"):
            objects = [each | dict(actions=dict(upload=dict(href=hub.url))) for each in json.loads(content)["objects"]]
            self.reply(200, dict(transfer="basic", objects=objects))
        elif hub.fails and "/commit/" in self.path:
            self.reply(403, dict(error="Your storage is full."))
        elif "/commit/" in self.path:
            repository = hub.repositories[self.path.removeprefix("/api/models/").partition("/commit/")[0]]
            for line in map(json.loads, content.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    repository[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    repository[value["path"]] = hub.large
            self.reply(200, dict(commitUrl=f"{hub.url}/me/model/commit/{'a' * 40}", commitOid="a" * 40))
        else:
            self.reply(200, {})  # validate-yaml

    def do_PUT(self):
        self.server.large = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(200)

    def reply(self, status, content=None):
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


PUSH = """
import os, sys
os.environ.update(HF_ENDPOINT="{url}", HF_HUB_OFFLINE="", HF_HOME="home", HF_HUB_DISABLE_XET="1", HF_TOKEN="{token}")
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
import export
from common.errors import run
sys.argv[0] = "export.py"
run(export.main)
"""


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a run that has facts and evaluations."""
    facts = dict(dataset="HuggingFaceFW/fineweb-edu", data_dir="/data/edu", world_size=8, hardware="NVIDIA H100")
    facts |= dict(
        tasks="lambada=/data/words.jsonl",
        torch="2.15.0",
        cuda=None,
        init_from="scratch",
        command="train_gpt2.py --lr 1e-3",
        finished=True,
    )
    training = dict(step=3, tokens=3000, run=facts)
    folder = tmp_path / "log" / "run" / "checkpoint_000003"
    folder.mkdir(parents=True)
    (folder.parent / "config.json").write_text(json.dumps(facts))
    rows = [dict(step=2, tokens=2000, val_loss=9.0), dict(step=3, tokens=3000, val_loss=3.25)]
    scores = dict(hellaswag_acc=0.25, hellaswag_acc_norm=0.3, hellaswag_items=10042)
    scores |= dict(lambada_acc=0.5, lambada_perplexity=9.5, lambada_items=7)
    rows += [dict(step=3, tokens=3000, **scores)]
    (folder.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hugging_face.write(tiny_gpt2(), folder)
    hashes = {name: digest(folder / name) for name in ("config.json", "model.safetensors")}
    training["sha256"] = hashes | {TRAINING: json_digest(training | dict(sha256=hashes))}
    write_json(folder / TRAINING, training)
    return folder


def test_push(command, call_main, script, checkpoint, tmp_path):
    """The folder arrives with a model card of the run; what fails is one line."""
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Uploads)
    hub.url, hub.repositories, hub.visibility = f"http://127.0.0.1:{hub.server_port}", {}, []
    hub.daemon_threads, hub.fails, hub.log = True, False, []
    threading.Thread(target=hub.serve_forever, daemon=True).start()

    def push(out, *args, token="right", url=hub.url):
        path = script(PUSH.format(url=url, token=token))
        return command(path, "log/run", out, *to, *args)

    to = "--push", "me/model"
    expect_error(call_main("export.py", "log/run", "a", *to), "--push needs --license")
    dry = call_main("export.py", "log/run", "b", *to, "--license", "mit", "--dry_run")
    assert dry.returncode == 0 and "would upload model.safetensors" in dry.stdout, dry.stderr
    assert not hub.log and not (tmp_path / "b").exists()
    error = push("c", "--license", "mit", token="wrong")
    expect_error(error, "cannot push to me/model (", "401", "c is complete: hf upload me/model c --private")
    error = push("d", "--license", "mit", "--public", url="http://127.0.0.1:9")
    expect_error(error, "cannot push to me/model (offline", "d is complete: hf upload me/model d")
    assert not hub.repositories
    done = push("b", "--license", "mit")
    assert done.returncode == 0 and f"{hub.url}/me/model" in done.stdout, done.stderr
    assert hub.repositories["me/model"] == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert hub.repositories["me/model"]["README.md"].decode() in dry.stdout
    hub.fails = True
    error = push("e", "--license", "mit", "--public")
    expect_error(error, "cannot push to me/model (", "403", "e is complete: hf upload me/model e")
    assert hub.visibility == ["private", "public"]
    hub.shutdown()

    head, text = (tmp_path / "b" / "README.md").read_text().removeprefix("---\n").split("\n---\n")
    card = yaml.safe_load(head)
    assert card["license"] == "mit" and card["datasets"] == "HuggingFaceFW/fineweb-edu"
    values = {m["type"]: m["value"] for result in card["model-index"][0]["results"] for m in result["metrics"]}
    scores = dict(hellaswag_acc=0.25, hellaswag_acc_norm=0.3, lambada_acc=0.5, lambada_perplexity=9.5)
    assert values == scores | dict(val_loss=3.25) and "- words.jsonl, lambada_acc: 0.5000 (7 items)" in text
    assert "fineweb-edu; 3,000 tokens in 3 steps" in text and "8 × NVIDIA H100; torch 2.15.0" in text
    assert "`train_gpt2.py --lr 1e-3`" in text and "/data" not in text
