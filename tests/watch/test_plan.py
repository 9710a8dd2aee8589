from common.interrupt import StopSignal

from types import SimpleNamespace

import torch

from common.cli import python_command
from config import Config
from data.loader import TokenStream
from model import GPT, GPTConfig
from optimizations import Note
from parallel.process_group import Distributed
from watch import report, run_log
from watch.plan import count, print_plan, print_summary
from watch.run_log import RunLog

CPU = torch.device("cpu")
TINY = dict(n_layer=2, n_head=2, n_embd=32, seq_len=32, micro_batch_size=4, total_batch_size=2048, max_steps=10)
STREAMS = [SimpleNamespace(shards=range(3), total=10240), TokenStream([range(500)])]


def make_log(tmp_path, resumed=None, training=None, world_size=2, **flags):
    config = Config(log_dir=str(tmp_path), run_name="run", wandb="disabled", device="cpu", **TINY | flags)
    return config, RunLog(config, config, Distributed(0, world_size, CPU), 1e9, resumed, training)


def plan(capsys, config, log, world_size, notes=(), step=0, tokens=0, tasks=None, switches=None):
    sizes = {name: TINY[name] for name in ("n_layer", "n_head", "n_embd", "seq_len")}
    with torch.device("meta"):
        model = GPT(GPTConfig(**sizes))
    distributed = Distributed(0, world_size, CPU)
    trainer = SimpleNamespace(config=config, model=model, distributed=distributed)
    start = SimpleNamespace(resumed=None, weights=None, step=step, tokens=tokens)
    loader, val_stream = SimpleNamespace(stream=STREAMS[0]), STREAMS[1]
    run = SimpleNamespace(trainer=trainer, start=start, loader=loader, val_stream=val_stream, tasks=tasks, log=log)
    switches = switches or {"tf32": True}
    print_plan(run, notes, switches)
    lines = capsys.readouterr().out.splitlines()
    assert all(line[10] == " " for line in lines)
    return [(line[:10].rstrip(), line[11:]) for line in lines]


def test_the_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_log, "peak_flops", lambda device: 1e13)
    config, log = make_log(tmp_path, total_batch_size=1024)
    tasks = SimpleNamespace(items=dict(hellaswag=range(10042), piqa=range(1)))
    notes = [
        Note("tf32", False, "no GPU"),
        Note("micro_batch_size", 4, "it fits"),
        Note("compile", False, "no compiler"),
        Note("fp8", False, "no GPU"),
        Note("attention", "sdpa", "no GPU"),
    ]
    switches = {"tf32": True, "compile": False, "flash": True, "autocast bf16": True, "fp8": False}
    lines = plan(capsys, config, log, 2, notes, tasks=tasks, switches=switches)
    parameters = 50257 * 32 + 32 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    assert lines == [
        ("device", f"2 × {log.facts['hardware']}; PyTorch {torch.__version__}; MFU is of 10 TFLOP/s a device"),
        ("model", f"2 layers, 2 heads, 32 wide; {parameters:,} parameters"),
        ("init", "scratch, seed 1337"),
        ("batch", "1,024 tokens = 4 sequences × 32 tokens × 4 accumulated × 2 ranks"),
        ("parallel", "ddp"),
        ("recipe", "adamw, lr 0.0006, 715 warm-up steps, then cosine"),
        ("training", "10 steps, 10,240 tokens, 1.00 epochs"),
        ("on", "tf32, flash, autocast bf16 (off: compile, fp8)"),
        ("data", "edu_fineweb10B: 3 train shards, 10,240 tokens; 1 val, 480 of 500 tokens"),
        ("tasks", "hellaswag 10,042 items, piqa 1 item"),
        ("log", f"{tmp_path}/run/"),
        ("watch", f"{tmp_path}/run/metrics.jsonl"),
        ("note", "tf32, fp8 are off; attention is sdpa: no GPU"),
        ("note", "micro_batch_size is 4: it fits"),
        ("note", "compile is off: no compiler"),
    ]


def test_the_plan_of_a_resumed_run(tmp_path, capsys, monkeypatch):
    """Tokens of the steps that are left come on top of those trained on."""
    config, log = make_log(tmp_path, world_size=1)
    lines = dict(plan(capsys, config, log, 1, step=8, tokens=1_000_000))
    assert lines["training"] == "10 steps, 1,004,096 tokens, 98.06 epochs" and "parallel" not in lines
    assert lines["batch"].endswith(" × 16 accumulated × 1 rank")
    lines_at_end = dict(plan(capsys, config, log, 1, step=10, tokens=1_000_000))
    assert lines_at_end["training"] == "none: at step 10 of 10"
    assert lines["on"] == "tf32" and lines["tasks"] == "off"
    assert [count(number, "layer") for number in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]


def summarize(config, log, problem=None):
    trainer = SimpleNamespace(config=config)
    print_summary(SimpleNamespace(trainer=trainer, log=log, tokens=12345, step=8), StopSignal(), problem)


def test_the_summary(tmp_path, capsys, monkeypatch):
    config, log = make_log(tmp_path, demo=True)
    for step, loss in ((0, 10.0), (4, 7.5), (8, 6.25)):
        log.validation(step, 100 * step, loss, seconds=1.0, bits_per_byte=1.0)
    capsys.readouterr()
    (log.folder / "checkpoint_000008").mkdir()
    summarize(config, log)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "validation loss 10.0000 -> 6.2500 in 8 steps; 12,345 tokens in all"
    assert out[1].startswith("peak memory ") and out[1].endswith(" GB")
    assert out[2:5] == [
        f"log: {tmp_path}/run/ (log.txt, metrics.jsonl, config.json, flags.yaml)",
        f"report: {tmp_path}/run/report.html (curves.png is its figure)",
        f"watch: {tmp_path}/run/metrics.jsonl",
    ]
    sample = python_command("sample.py", log.folder, "--prompt", "Hello, my name is")
    assert out[5] == f"Next: {sample}"
    assert ["fineweb.py" in line and line.startswith("Next, ") for line in out[6:]] == [True, True]
    (log.folder / "checkpoint_000008").rmdir()
    log.close(finished=False)

    config, log = make_log(tmp_path, tmp_path / "run" / "checkpoint_000006", dict(step=6))
    log.validation(6, 600, 7.0, seconds=1.0, bits_per_byte=1.0)
    capsys.readouterr()
    config.max_steps = 9
    summarize(config, log)
    out = capsys.readouterr().out
    assert out.startswith("validation loss 10.0000 -> 7.0000 in 6 steps; 12,345 tokens in all\n")  # of the whole run
    assert "Next" not in out and "report" not in out

    def fail(folder):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(report, "write", fail)
    config.max_steps = 10
    summarize(config, log)
    assert "no report.html: ZeroDivisionError: a bug\n" in capsys.readouterr().out  # a run ends as it would without
