"""The training script as a whole, on a tiny GPT-2."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import AOT_EAGER, ROOT, expect_error, logged, metrics
from safetensors.torch import load_file
from texts import WORDS, make_items, write_corpus
from transformers import GPT2LMHeadModel

from checkpoints import load
from common import errors, interrupt
from config import Config
from data.shards import open_shards
from hellaswag import MultipleChoice, load_items
from kernels import needs
from parallel.process_group import Distributed

EVALUATE = "--val_every 2 --hellaswag_every 2 --sample_every 2 --checkpoint_every 2 --val_tokens 128".split()


@pytest.fixture
def hellaswag_file(tmp_path):
    path = tmp_path / "hellaswag.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in make_items(5)))
    return path


def final_weights(run):
    return load_file(sorted(run.glob("checkpoint_*"))[-1] / "model.safetensors")


def test_batch_and_ranks_only_divide_the_work(train):
    """Micro-batches of 8, 4 or 1, one rank or two: the same losses, gradient norms and weights but for rounding."""
    flags = ["--checkpoint_every", 3, "--val_every", 3, "--val_tokens", 64]
    whole = train("whole", "--micro_batch_size", 8, *flags)
    for name, size, ranks in [("four", 4, 1), ("one", 1, 1), ("ranks", 2, 2)]:
        run = train(name, "--micro_batch_size", size, *flags, ranks=ranks)
        assert logged(run) == pytest.approx(logged(whole), abs=5e-6)
        assert logged(run, "val") == pytest.approx(logged(whole, "val"), abs=2e-4)
        norms = [[row["grad_norm"] for row in metrics(r) if "grad_norm" in row] for r in (run, whole)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        for key, weight in final_weights(whole).items():
            if not key.endswith("c_attn.bias"):  # the keys' bias has no gradient: AdamW blows its rounding up
                torch.testing.assert_close(final_weights(run)[key], weight, rtol=1e-3, atol=2e-5, msg=key)


LOG_RECOMPILES = """
torch._logging.set_logs(recompiles=True)
train_gpt2.main()
"""


def test_everything_runs_in_a_compiled_run(train, script, hellaswag_file):
    """Validation, HellaSwag, samples and checkpoints with compile and bf16 on: a graph a shape, none compiled twice."""
    flags = ["--compile", *EVALUATE, "--max_steps", 4]
    (hellaswag_file.parent / "lambada.jsonl").write_text(json.dumps(dict(text=" ".join(WORDS))))
    flags += ["--tasks", f"hellaswag={hellaswag_file},lambada={hellaswag_file.parent}/lambada.jsonl"]
    flags += ["--n_layer", 1, "--mask_documents", "--total_batch_size", 256]
    flags += ["--seq_len", 64]  # validation and HellaSwag then differ in shape
    run = train("compiled", *flags, script=script(AOT_EAGER + LOG_RECOMPILES))
    plain = train("plain", *flags, "--no_compile", "--autocast", "off")
    assert logged(run) == pytest.approx(logged(plain), rel=0.005)
    assert logged(run, "val") == pytest.approx(logged(plain, "val"), rel=0.005)
    assert len(logged(run, "val")) == len(logged(run, "hella")) == 3
    assert [row["hellaswag_items"] for row in metrics(run) if "hellaswag_acc" in row] == [5] * 3
    assert logged(run, "hella") == [row["hellaswag_acc_norm"] for row in metrics(run) if "hellaswag_acc" in row]
    output = (run / "output.txt").read_text()
    assert output.count("sample 0: Hello, I'm a language model,") == 2
    items = MultipleChoice(load_items(hellaswag_file), 64, tokens=4 * 64)
    shapes = {batch[0].shape for batch in items.batches}
    assert len(shapes) > 1  # then each has a graph, besides training's, validation's and that of LAMBADA's logits
    assert output.count("Recompiling function forward") == 2 + len(shapes)
    assert [path.name for path in sorted(run.glob("checkpoint_*"))] == [f"checkpoint_00000{step}" for step in (0, 2, 4)]


def test_fp16_unscales_gradients_before_it_clips_them(train):
    fp16, plain = train("fp16", "--autocast", "fp16"), train("plain")
    assert logged(fp16) == pytest.approx(logged(plain), rel=0.002)
    norms = [[row["grad_norm"] for row in metrics(run) if "lr" in row] for run in (fp16, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


def test_it_learns(train, tmp_path):
    write_corpus(tmp_path, sizes=(100, 300))
    batch = ("--total_batch_size", 64, "--micro_batch_size", 2)
    run = train("learn", "--data_dir", tmp_path, "--max_steps", 40, "--lr", 1e-2, *batch)
    assert logged(run)[0] > 10.7 and logged(run)[-1] < 7


def test_the_seed_fixes_weights_and_order(train):
    one, two, other = train("one", "--checkpoint_every", 3), train("two"), train("other", "--seed", 7)
    assert (one / "log.txt").read_text() == (two / "log.txt").read_text() != (other / "log.txt").read_text()
    same_start = dict(drop="--n_layer --n_head --n_embd")
    flags = ["--init_from", one / "checkpoint_000003"]
    orders = [["--seed", 1], ["--seed", 2], ["--no_shuffle"]]
    losses = {tuple(logged(train(f"order{i}", *flags, *order, **same_start))) for i, order in enumerate(orders)}
    assert len(losses) == 3
    assert not (one / "checkpoint_000003.unfinished").exists()


def test_validation_is_the_mean_over_its_tokens(train, corpus):
    """Also where the tokens do not fill the last micro-batch; --val_tokens limits them."""
    run = train("run", "--val_every", 3, "--val_tokens", 143, "--checkpoint_every", 3, "--micro_batch_size", 8)
    every = train("every", "--val_every", 3, "--checkpoint_every", 3, "--micro_batch_size", 8)
    model = load.load_model(run / "checkpoint_000003")
    tokens = torch.from_numpy(open_shards(corpus, "val")[0][:].astype("int64"))
    for sequences, shown in [(8, run), (24, every)]:  # 128 tokens, and 384 of the 400
        x = tokens[: sequences * 16].view(-1, 16)
        y = tokens[1 : sequences * 16 + 1].view(-1, 16)
        with torch.no_grad():
            expected = sum(model(x[i : i + 1], y[i : i + 1]).item() for i in range(sequences)) / sequences
        assert logged(shown, "val")[-1] == pytest.approx(expected, abs=1e-4)
        assert 0 < metrics(shown)[-1]["val_bits_per_byte"] < expected  # random tokens have several bytes each


def test_validation_computes_as_training_does(train, corpus):
    """Under the run's autocast, to the last bit of a bf16 product."""
    if reason := needs.bf16_instructions(Config(autocast="bf16"), Distributed(0, 1, torch.device("cpu"))):
        pytest.skip(reason)
    flags = ("--val_every", 3, "--val_tokens", 128, "--seq_len", 32, "--total_batch_size", 256)
    run = train("bf16", "--autocast", "bf16", "--checkpoint_every", 3, *flags)
    model = load.load_model(run / "checkpoint_000003")
    tokens = torch.from_numpy(open_shards(corpus, "val")[0][:129].astype("int64"))
    x, y = tokens[:-1].view(4, 32), tokens[1:].view(4, 32)
    with torch.no_grad():
        exact = model(x, y).item()
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(x, y).item()
    assert abs(exact - rounded) > 1e-5
    assert metrics(run)[-1]["val_loss"] == pytest.approx(rounded, abs=4e-6)


COUNT_REDUCTIONS = """
import os
import time
import train_gpt2
from parallel import gradients
count = 0
def hook(group, bucket, allreduce_hook=gradients.allreduce_hook):
    global count
    count += bucket.is_last()
    return allreduce_hook(group, bucket)
gradients.allreduce_hook = hook
train_gpt2.main()
def gloo_threads():
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                yield from (name for name in file if "gloo_run" in name)
        except OSError:  # it has just ended
            pass
until = time.monotonic() + 600  # a thread that has been joined is listed for a moment more
while any(gloo_threads()):  # one that outlives Python's end aborts the process
    assert time.monotonic() < until, list(gloo_threads())
    time.sleep(0.01)
os.write(1, f"reductions {count}\\n".encode())  # in one piece: the other rank writes to the same pipe
"""


def test_gradients_cross_once_a_step(train, script):
    run = train("count", "--micro_batch_size", 1, script=script(COUNT_REDUCTIONS), ranks=2)  # 4 micro-batches a step
    assert (run / "output.txt").read_text().count("reductions 3") == 2  # 3 steps, on each rank


def test_recipe_flags_reach_the_step(train):
    run = train("recipe", "--warmup_steps", 2, "--max_steps", 4, "--micro_batch_size", 2)
    assert re.search("training +4 steps, 512 tokens", (run / "output.txt").read_text())
    rows = [row for row in metrics(run) if "lr" in row]
    assert [row["lr"] for row in rows] == pytest.approx([5e-4, 1e-3, 1e-3, 5.5e-4])
    assert [row["tokens"] for row in rows] == [128, 256, 384, 512]
    run = train("grows", "--max_steps", 8, "--micro_batch_size", 1, "--batch_warmup_ratio", 0.5)
    assert re.search("training +8 steps, 704 tokens", (run / "output.txt").read_text())
    assert [row["tokens"] for row in metrics(run) if "lr" in row] == [32, 64, 128, 192, 320, 448, 576, 704]
    clipped = train("clipped", "--grad_clip", 1e-9, "--weight_decay", 0, "--checkpoint_every", 3)
    unclipped = train("unclipped", "--grad_clip", 0, "--weight_decay", 0, "--checkpoint_every", 3)
    norms = [[row["grad_norm"] for row in metrics(r) if "lr" in row][0] for r in (clipped, unclipped)]
    assert norms[0] == pytest.approx(norms[1])  # the norm shown is the one before clipping
    assert logged(clipped)[-1] > logged(unclipped)[-1]


def test_a_checkpoint_goes_everywhere(train, command):
    run = train("first", "--checkpoint_every", 3, "--val_every", 3)
    folder = run / "checkpoint_000003"
    again = train("again", "--init_from", folder, "--val_every", 3, drop="--n_layer --n_head --n_embd")
    assert logged(again, "val")[0] == logged(run, "val")[-1]
    assert GPT2LMHeadModel.from_pretrained(folder).num_parameters() > 1e6
    training = json.loads((folder / "training.json").read_text())
    assert training["step"] == 3 and training["tokens"] == 3 * 128
    refused = train("long", "--init_from", folder, "--seq_len", 64, drop="--n_layer --n_head --n_embd", fails=True)
    expect_error(refused, "--seq_len 16")


def test_the_plan_says_what_runs(train):
    run = train("plan", "--val_every", 3, "--checkpoint_every", 3)
    text = (run / "output.txt").read_text()
    for line in (
        r"device +1 × .*PyTorch",
        r"model +2 layers, 2 heads, 32 wide; 1,6\d\d,\d{3} parameters",
        r"batch +128 tokens = 4 sequences × 16 tokens × 2 accumulated × 1 rank",
        r"training +3 steps, 384 tokens, 0.09 epochs",
        r"on +flash, pad_vocab, fused_adamw \(off: tf32, bf16, compile, cuda_graphs, .*, flash4\)",
        r"data +.*corpus: 3 train shards, 4,200 tokens; 1 val, 384 of 400 tokens",
        r"step +2/3 \| loss 1\d\.\d{6} \| lr .* \| norm .* ms \| [\d,]+ tok/s \| 00:0\d left",
        r"validation loss 10\.\d{4} -> 10\.\d{4} in 3 steps; 384 tokens in all",
    ):
        assert re.search(line, text), line
    more = ("--resume", run / "checkpoint_000003", "--max_steps", 5, "--total_batch_size", 256)
    assert re.search(r"training +5 steps, 896 tokens, 0.21 epochs", (train("more", *more) / "output.txt").read_text())


def test_bad_runs_end_in_one_line(train, tmp_path):
    write_corpus(tmp_path, sizes=(16, 300))
    expect_error(train("x", "--data_dir", tmp_path, fails=True), "16 validation tokens", "17")
    train("taken")
    expect_error(train("taken", fails=True), "taken", "--run_name")
    refused = train("taken", fails=True, ranks=2)  # an error of rank 0 alone ends the others without a word
    expect_error(refused, "already holds a run")
    assert len(refused.stderr.splitlines()) == 1
    expect_error(train("x", "--micro_batch_size", 3, fails=True), "--micro_batch_size 2", "--total_batch_size 96")
    for name in ("fp8", "tf32", "bf16-residual"):  # by default they are noted as off
        expect_error(train("x", f"--{name}", fails=True), f"--{name.replace('-', '_')} does nothing here")
    expect_error(train("x", "--hellaswag_every", 1, "--tasks", "hellaswag=no.jsonl", fails=True), "no.jsonl")
    expect_error(
        train("x", "--hellaswag_every", 1, fails=True), "hellaswag", "--tasks hellaswag=FILE", "--hellaswag_every 0"
    )
    for name in ("no/such/folder", ""):
        flags = ("--init_from", name)
        expect_error(train("x", *flags, drop="--n_layer --n_head --n_embd", fails=True), f"cannot load {name} (")


def test_ctrl_c_during_imports():
    commands = [path for path in ROOT.glob("*.py") if "run(main)" in path.read_text()]
    assert len(commands) == 7
    for path in commands:
        command = [sys.executable, "-X", "importtime", str(path)]  # a line on standard error for each import
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert any("common.interrupt" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            lines = [line for line in process.stderr if not line.startswith("import time:")]
        assert (process.returncode, lines) == (130, ["interrupted\n"]), path


def test_importing_a_module_changes_nothing():
    """Also below the clone's folder, in a process without a script."""
    code = "import common.interrupt, gc, signal; print(gc.isenabled(), signal.getsignal(2).__name__)"
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "docs", env=environment, capture_output=True, text=True
    )
    assert done.stdout == "True default_int_handler\n", done.stderr


def test_ctrl_c_after_the_imports(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", sys.stdout)  # run() replaces both
    monkeypatch.setattr("sys.stderr", sys.stderr)
    before = signal.signal(signal.SIGINT, interrupt.end)
    cleaned = []

    def main():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            cleaned.append(True)

    try:
        with pytest.raises(SystemExit) as end:
            errors.run(main)
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130 and capsys.readouterr().err == "interrupted\n" and cleaned


def test_the_demo(command, corpus, tmp_path, call_main):
    done = command("train_gpt2.py", "--demo", "--max_steps", 3, "--val_tokens", 1024, "--wandb", "disabled")
    assert done.returncode == 0, done.stderr
    assert re.search(r"validation loss 10\.\d+ -> 10\.\d+ in 3 steps", done.stdout)
    assert "sample 3: Hello" in done.stdout and "fineweb.py" in done.stdout
    following = next(line for line in done.stdout.splitlines() if line.startswith("Next: "))
    python, *words = shlex.split(following.removeprefix("Next: "))
    assert shutil.which(python) and "Hello, my name is" in command(*words, "--max_new_tokens", 2).stdout
    expect_error(call_main("train_gpt2.py", "--demo", "--data_dir", "corpus"), "corpus already holds 4 other shards")
    train_shard, val_shard = sorted((tmp_path / "demo_data").glob("*.npy"))
    assert train_shard.stat().st_size > 5 * val_shard.stat().st_size > 50_000


def test_the_readmes_lines_run_in_their_order(call_main, tmp_path):
    """As they are written, but for names in capitals, the number of steps, and what takes a network or a compiler."""
    (tmp_path / "book.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=20_000)))
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    others = ("torchrun ", "source ", "python3 ", "python hellaswag.py ")
    large = ("python fineweb.py", "python train_gpt2.py --run_name NAME")
    lines = [line for line in lines if not line.startswith(others) and line not in large]
    assert len(lines) == 9
    for line in lines:
        for name, value in (("NAME", "book"), ("RUN", "book"), ("checkpoint_001000", "checkpoint_000002")):
            line = line.replace(name, value)
        script, *words = shlex.split(re.sub(r"--max_steps \d+", "", line))[1:]
        if script == "train_gpt2.py":
            words += ["--max_steps", 3 if "--resume" in words else 2, "--hellaswag_every", 0, "--sample_every", 0]
            words += ["--val_tokens", 1024, "--wandb", "disabled", "--device", "cpu", "--no_compile"]
        done = call_main(script, *words)
        assert done.returncode == 0, (line, done.stderr)
        if "--init_from" in words:  # the weights' positions, and a tenth of the data or less
            assert re.search(r"batch +1,024 tokens = 8 sequences × 128 tokens × 1 ", done.stdout), done.stdout


def test_the_readme_names_every_command_and_folder():
    readme = (ROOT / "README.md").read_text()
    folders = [path.parent.name + "/" for path in ROOT.glob("*/__init__.py")]
    for name in [path.name for path in ROOT.glob("*.py") if path.name != "setup.py"] + folders:
        assert name in readme, name


FAILING_EVALUATION = """
import evaluation, train_gpt2
def fail(*args, validation_loss=evaluation.validation_loss):
    fail.calls += 1
    if fail.calls == 2:
        raise RuntimeError("an evaluation that fails")
    return validation_loss(*args)
fail.calls = 0
evaluation.validation_loss = fail
train_gpt2.main()
"""


def test_an_evaluation_that_fails_loses_nothing(train, script, tmp_path):
    flags = ("--val_every", 3, "--checkpoint_every", 3, "--max_steps", 5)
    drop = "--val_every --checkpoint_every --max_steps"
    done = train("failed", *flags, drop=drop, script=script(FAILING_EVALUATION), fails=True)
    assert done.returncode and "an evaluation that fails" in done.stderr
    assert (tmp_path / "log" / "failed" / "checkpoint_000003" / "training.json").exists()
    again, whole = train("failed", *flags, drop=drop), train("whole", *flags, drop=drop)
    assert (again / "log.txt").read_text() == (whole / "log.txt").read_text()
