import dataclasses
import itertools
import json
import signal
import sys
import types

import pytest
import torch
from conftest import ALONE, ROOT, TINY, begin, expect_error, metrics, wait_until
from fork_server import TIMEOUT, descendants, running

import ladder
import train_gpt2
from common.errors import UserError
from config import Config, defaults
from measure import child_run
from measure.turns import FIRST_STEPS
from optim import schedules
from optimizations import RUNGS

DEMO = Config(**schedules.DEMO)

KERNELS = ("fused_cross_entropy", "fused_gelu")
NAMES = ("tf32", "compile", "flash", "pad_vocab", "fused_adamw", "bf16_residual", *KERNELS)
OFF = dict.fromkeys(NAMES, False) | dict(autocast="off", attention="written_out")


def test_the_first_rung_has_everything_off_and_the_last_the_command_line():
    config = Config(seq_len=512, lr=1e-3)
    first = ladder.with_rungs(config, ["baseline"], first=8)
    assert OFF.items() < vars(first).items()
    assert (first.micro_batch_size, first.total_batch_size, first.lr, first.grad_clip) == (8, 524288, 3e-4, 0)
    assert ladder.with_rungs(config, list(RUNGS), first=8) == dataclasses.replace(config, cuda_graphs=False)
    one = ladder.with_rungs(config, ["flash"], first=8)
    assert one == dataclasses.replace(first, flash=True, attention="sdpa")
    spread = dict(parallel="hsdp", bf16_gradients=True, overlap_gradients=True)
    assert ladder.with_rungs(dataclasses.replace(config, **spread), ["baseline"], first=8) == first


def test_rungs_by_name():
    off = [name for name, row in RUNGS.items() if not row.default]
    everything = ladder.choose_rungs("all", 8, Config(**dict.fromkeys(off, True)))
    assert [names for names, _ in everything[:-3]] == [[name] for name in RUNGS][:-1]
    assert [rung for rung in everything if rung[0][0] not in off] == ladder.choose_rungs("all", 8, Config())
    assert everything[-3:] == [(["ddp"], 2), (["ddp"], 4), (["ddp"], 8)]
    assert ladder.choose_rungs("flash,tf32+accumulation,ddp", 6, Config()) == [
        (["flash"], 1),
        (["tf32", "accumulation"], 1),
        *[(["ddp"], n) for n in (2, 4, 6)],
    ]
    for text, complaint in [
        ("flash,sparse", "no 'sparse'; there are tf32, bf16"),
        ("flash,tf32,flash", "flash twice"),
        ("accumulation,ddp,flash", "ddp comes last"),
        ("flash,flash+ddp", "twice"),
        ("accumulation+ddp", "alone"),
        ("flash,ddp", "accumulation before it"),
    ]:
        with pytest.raises(UserError, match=complaint):
            ladder.choose_rungs(text, 1, Config())


def test_a_ladder_climbs(train, tmp_path):
    """With rungs that measure, change nothing here, turn on two."""
    rungs = "tf32 + flash+pad_vocab, compile,micro_batch,recipe+accumulation,ddp"
    folder = train("climb", "--ladder", "--rungs", rungs, "--ladder_steps", 5, "--ladder_seconds", 0)
    results = json.loads((folder / "ladder.json").read_text())["results"]
    assert [(r["rung"], r["status"], r.get("reason")) for r in results] == [
        ("baseline", "done", None),
        ("+ tf32", "skipped", "tf32 is off: this is cpu, not an NVIDIA GPU"),
        ("+ flash + pad_vocab", "done", None),
        ("+ compile", "skipped", "off on the command line"),
        ("+ micro-batch of 4", "done", None),
        ("+ cosine, β₂ 0.95, clipping + 128 tokens a step", "done", None),
        ("+ ddp", "skipped", "no GPUs here"),
        ("baseline again", "done", None),
    ]
    assert not (folder / "02_compile.txt").exists()  # nothing is started that would change nothing
    done = {r["rung"]: r for r in results if r["status"] == "done"}
    baseline, flash, larger, whole, again = done.values()
    assert [r["facts"]["total_batch_size"] for r in done.values()] == [16, 16, 64, 128, 16]
    assert OFF.items() < baseline["facts"].items() and again["loss"] == baseline["loss"]
    assert flash["facts"]["flash"] and flash["facts"]["pad_vocab"] and not flash["facts"]["fused_adamw"]
    # it learns the same: where only the way of computing changed
    assert flash["loss"] == pytest.approx(baseline["loss"], abs=1e-4)
    assert whole["loss"] != pytest.approx(larger["loss"], abs=1e-4)
    output = (folder / "output.txt").read_text()
    table = (folder / "ladder.md").read_text()
    for rung, r in done.items():
        assert r["ms"] == pytest.approx(1000 * r["facts"]["total_batch_size"] / r["tokens_per_sec"])
        assert 0.1 < r["peak_gb"] < 10
        assert f"{rung:30}  {r['ms']:11.2f}  {r['tokens_per_sec']:11,.0f}" in output
        assert f"| {rung} | {r['ms']:.2f} | {r['tokens_per_sec']:,.0f} |" in table
        if r is not baseline:
            low, ratio, high = (r["gain"][name] for name in ("low", "ratio", "high"))
            assert low < ratio < high and r["times_first"] == r["tokens_per_sec"] / baseline["tokens_per_sec"]
            mark = " ≈" if low <= 1 <= high else ""
            assert f" | {ratio:.3f}{mark} | {low:.3f}–{high:.3f} | {r['times_first']:.2f} |" in table
    assert f"\n{1 / again['gain']['ratio']:.1f} ×{mark} (95%: " in output and output.count("error") == 0  # again's mark
    assert (folder / "ladder.png").read_bytes().startswith(b"\x89PNG")

    # a rung is what its command trains
    again = train("again", *flash["command"].removeprefix("python train_gpt2.py ").split(), "--max_steps", FIRST_STEPS)
    assert metrics(again)[-1]["train_loss"] == flash["loss"]
    # its folder is taken, for a ladder and for a run
    expect_error(train("climb", "--ladder", fails=True), "climb", "--run_name")
    expect_error(train("climb", fails=True), "climb", "--run_name")


def test_a_step_of_one_micro_batch_has_nothing_to_accumulate():
    config = Config(seq_len=512, micro_batch_size=4, total_batch_size=2048, compile=False)
    before = dataclasses.replace(config, total_batch_size=2048)
    _, idle = ladder.fit_rung(config, ["micro_batch", "accumulation"], ["accumulation"], 4, ALONE, before)
    assert idle == dict(accumulation="its value is that of the rung before")


@pytest.mark.gpu
def test_processes_on_one_gpu_take_turns(train):
    """Compiled and eager; with several GPUs also in several processes."""
    flags = "--device cuda --autocast bf16 --compile --rungs bf16,compile,accumulation,ddp --ladder_steps 5"
    folder = train("gpu", "--ladder", *flags.split(), "--ladder_seconds", 0)
    results = json.loads((folder / "ladder.json").read_text())["results"]
    done = [r["facts"]["world_size"] for r in results if r["status"] == "done"]
    ranks = [2**i for i in range(1, torch.cuda.device_count().bit_length())]
    assert done == [1, 1, 1, 1, *ranks, 1], results


def test_bad_ladders_end_in_one_line(monkeypatch, corpus, tmp_path):
    def error(script, *arguments):
        monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *TINY, "--data_dir", str(corpus), *arguments])
        with pytest.raises(UserError) as caught:
            script.main()
        return str(caught.value)

    monkeypatch.chdir(tmp_path)
    assert "no 'sparse'; there are tf32" in error(train_gpt2, "--ladder", "--rungs", "sparse")
    assert "--ladder_steps 0" in error(train_gpt2, "--ladder=1", "--ladder_steps", "0")
    assert "--profile" in error(train_gpt2, "--ladder", "--profile", "1")
    assert "no train shards in nowhere" in error(train_gpt2, "--ladder", "--data_dir", "nowhere")


def test_help_names_every_rung(call_main):
    text = call_main("train_gpt2.py", "--ladder", "--help").stdout
    rungs = text[text.index("--rungs") : text.index("--ladder_steps")]
    assert [name for name in RUNGS if name not in rungs] == []


def test_a_mistake_in_the_flags_ends_the_ladder(train):
    expect_error(train("x", "--ladder", "--init_from", "no/such", fails=True), "no/such")  # as every rung would say


def test_a_stopped_ladder_leaves_no_run_behind(corpus, tmp_path):
    flags = [*TINY, "--data_dir", "corpus", "--run_name", "stop", "--ladder", "--ladder_steps", "100000"]
    errors = tmp_path / "err.txt"
    process = begin([ROOT / "train_gpt2.py", *flags], tmp_path, [tmp_path / "out.txt", errors])
    wait_until((tmp_path / "log/stop/00_baseline_B1.txt").exists, process, errors)
    runs = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    process.wait(TIMEOUT)
    assert process.returncode == 143 and runs
    wait_until(lambda: not any(map(running, runs)))


def test_defaults_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = dataclasses.replace(DEMO, compile=True)
    assert defaults(dict(ladder=True)) == defaults(dict(ladder=True, demo=True)) == small
    assert defaults(dict(ladder=True, demo=False)) == Config()
    assert defaults(dict(demo=True)) == DEMO and defaults(dict(lr=1.0)) == Config()
    for name in ("data_dir", "model", "init_from", "device"):
        assert defaults({"ladder": True, name: "x"}) == Config()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert defaults(dict(ladder=True)) == Config()


@pytest.fixture
def canned(monkeypatch, corpus, tmp_path):
    """Climb a ladder whose measurements are made up: results(rung's config) stands in for turns.measure."""

    def climb(results, **flags):
        monkeypatch.chdir(tmp_path)

        def measured(rung, ranks, folder, name, seconds, steps, before=None, accumulates=True):
            if not accumulates:
                rung = dataclasses.replace(rung, total_batch_size=rung.micro_batch_size * rung.seq_len)
            row = results(rung) | dict(name=name, command=f"{ranks} ranks", gain=None)
            if row["status"] != "done":
                return None, row
            if before:
                ratio = row["tokens_per_sec"] / before.rate
                row["gain"] = dict(ratio=ratio, low=ratio, high=ratio, is_clear=ratio != 1)
            return types.SimpleNamespace(close=lambda: None, losses=[9.0] * 10, rate=row["tokens_per_sec"]), row

        monkeypatch.setattr(ladder, "measure", measured)
        own = dict(data_dir=str(corpus), run_name="canned", device="cpu", compile=False, wandb="disabled")
        ladder.climb(ladder.LadderConfig(**own | flags))
        return json.loads((tmp_path / "log/canned/ladder.json").read_text())["results"]

    return climb


def done(config, rate):
    facts = dict(vars(config), world_size=1, hardware="none", torch="2", cuda=None, dataset=None)
    return dict(status="done", facts=facts, ms=1.0, tokens_per_sec=rate, mfu=None, peak_gb=1.0)


def test_the_first_micro_batch_is_halved_until_it_fits(canned, monkeypatch):
    monkeypatch.setattr("ladder.first_micro_batch", lambda config, device: 16)
    sizes = []

    def results(config):
        sizes.append(config.micro_batch_size)
        if config.micro_batch_size > 4:
            return dict(status="skipped", reason=child_run.OUT_OF_MEMORY)
        return done(config, 1000 * len(sizes))

    rows = canned(results, rungs="flash")
    assert sizes == [16, 8, 4, 4, 4]
    assert [r["status"] for r in rows] == ["done"] * 3


def test_the_first_micro_batch_leaves_room_for_the_rung_that_waits(monkeypatch):
    """An 80 GB GPU, and 16 layers of width 2,048: weights and AdamW's moments take 10.2 GB."""
    total = types.SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    rung = Config(n_layer=16, n_head=32, n_embd=2048, seq_len=2048)
    row = done(rung, 1000.0)
    for peak, device, fits in ((63, "cuda", True), (64, "cuda", False), (70, "cpu", True)):
        assert ladder.leaves_room(rung, row | dict(peak_gb=peak), torch.device(device)) == fits


def test_a_rung_that_does_not_fit_or_fails_is_left_out(canned, capsys):
    """The rungs after it climb on without it; a failure also ends the ladder with an error, at its end."""

    def results(config):
        if config.flash:
            return dict(status="skipped", reason=child_run.OUT_OF_MEMORY)
        if config.pad_vocab:
            return dict(status="failed", reason="exit code 1, a bug")
        return done(config, 3000.0 if config.fused_adamw else 1000.0)

    with pytest.raises(UserError, match="1 of 5 runs failed: 02_pad_vocab"):
        canned(results, rungs="flash,pad_vocab,fused_adamw")
    out = capsys.readouterr().out
    assert "+ flash                         skipped: out of memory" in out
    assert "+ pad_vocab                     failed: exit code 1, a bug" in out
    assert "3.0 × (95%: 3.00 to 3.00) from baseline to the last rung" in out and "compare × before" not in out


def test_a_ladder_on_a_busy_machine_says_so(canned, capsys):
    rates = itertools.chain([1000.0, 2000.0], itertools.repeat(800.0))
    canned(lambda config: done(config, next(rates)), rungs="flash")
    assert "the baseline is now 0.80 × as fast as at first: compare × before alone" in capsys.readouterr().out


def test_rungs_change_their_own_flags_alone():
    """With everything on, the next rung differs from the one before in the flags of its row, and in nothing else."""
    config = Config(fp8=True, cuda_graphs=False)
    names, before = [], ladder.with_rungs(config, [], first=16)
    for name, row in RUNGS.items():
        names.append(name)
        rung = ladder.with_rungs(config, names, first=16)
        changed = {flag for flag in vars(rung) if getattr(rung, flag) != getattr(before, flag)}
        assert changed == {
            flag
            for flag, off in row.off.items()
            if flag != "total_batch_size" and (getattr(config, flag) != off or name == "micro_batch")
        }
        before = rung
    assert before == config


def test_a_rung_that_changes_the_micro_batch_says_so():
    before, after = (done(Config(micro_batch_size=size), 1.0) for size in (32, 64))
    assert ladder.label(["flash"], after, [before]) == "+ flash (micro-batch 64)"
    assert ladder.label(["flash"], before, [before]) == "+ flash"
    assert ladder.label(["micro_batch"], after, [before]) == "+ micro-batch of 64"
    assert ladder.label(["ddp"], done(Config(parallel="zero3"), 1.0), []) == "+ ZERO3 × 1"


def test_a_gpu_without_bf16_and_tf32(canned, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=2**34))
    flags = dict(device="auto", rungs="tf32,bf16,bf16_residual,accumulation,ddp", n_layer=2, n_embd=32)
    rows = canned(lambda config: done(config, 1000.0), **flags)
    assert [(r["rung"], r["status"], r.get("reason")) for r in rows[1:]] == [
        ("+ tf32", "skipped", "tf32 is off: Tesla T4 is older than Ampere"),
        ("+ autocast fp16", "done", None),
        ("+ bf16_residual", "skipped", "bf16_residual is off: it needs --autocast bf16"),
        ("+ 524,288 tokens a step", "done", None),
        ("+ ddp", "skipped", "one GPU here"),
        ("baseline again", "done", None),
    ]


def test_the_first_micro_batch_divides_the_batch():
    gpu = torch.device("cuda")
    assert (
        ladder.first_micro_batch(Config(), gpu) == 32 and ladder.first_micro_batch(Config(), torch.device("cpu")) == 1
    )
    assert ladder.first_micro_batch(DEMO, gpu) == 8  # of 1,024 tokens in sequences of 128
    assert ladder.first_micro_batch(Config(micro_batch_size=4), gpu) == 4


def test_not_under_torchrun(monkeypatch, corpus):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it with python, not with torchrun"):
        ladder.climb(ladder.LadderConfig(data_dir=str(corpus)))


def test_naming_a_rung_that_is_off_by_default_turns_it_on(canned, capsys):
    seen = []
    rows = canned(lambda config: seen.append(config.mask_documents) or done(config, 1.0), rungs="flash,mask_documents")
    assert [row["status"] for row in rows] == ["done"] * 4 and seen == [False, False, True, False]
    assert "\n1.0 × ≈ (95%: 1.00 to 1.00) from baseline to the last rung\n" in capsys.readouterr().out
