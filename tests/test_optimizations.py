"""Every row of the table, on against off, wherever this machine has what the row needs."""

import re
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, logged, skip_without_flash4

from config import Config
from kernels import cublaslt, needs, sdpa
from model import GPTConfig
from optimizations import OPTIMIZATIONS, RUNGS, SWITCHES, readme_table, turn_off_unavailable
from parallel.process_group import Distributed
from train_gpt2 import build, train_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALONE = Distributed(0, 1, DEVICE)
# All off but the batch size, on a model that every kernel takes
OFF = {
    flag: value
    for row in OPTIMIZATIONS
    if row.name not in ("accumulation", "micro_batch")
    for flag, value in row.off.items()
}
PLAIN = replace(
    Config(**OFF), n_layer=2, n_head=2, n_embd=64, seq_len=64, micro_batch_size=2, total_batch_size=256, max_steps=3
)
SIZES = GPTConfig(seq_len=64, vocab_size=1000, n_layer=2, n_head=2, n_embd=64)
HALF = dict(autocast="bf16")
# {row: (relative tolerance of the losses, the flags that are on, the flags of both sides)}
CASES = {
    "tf32": (1e-3, dict(tf32=True), {}),
    "bf16": (2e-3, HALF, {}),
    "compile": (1e-5, dict(compile=True), {}),
    "flash": (1e-5, dict(flash=True), {}),
    "attention_backend": (1e-3, dict(attention_backend="efficient"), HALF | dict(flash=True)),
    "pad_vocab": (1e-5, dict(pad_vocab=True), {}),
    "fused_adamw": (1e-5, dict(fused_adamw=True), {}),
    "accumulation": (1e-5, dict(micro_batch_size=1), dict(micro_batch_size=4)),
    "micro_batch": (1e-5, dict(micro_batch_size=4), dict(micro_batch_size=1)),
    "bf16_residual": (2e-3, dict(bf16_residual=True), HALF),
    "tuned_gemms": (1e-3, dict(tuned_gemms=True), HALF | dict(compile=True)),
    "fused_cross_entropy": (1e-5, dict(fused_cross_entropy=True), {}),
    "fused_gelu": (1e-3, dict(fused_gelu=True), HALF),
    "packed_qkv": (1e-3, dict(packed_qkv=True), HALF | dict(flash=True)),
    "flash4_backward": (1e-3, dict(flash4_backward=True), HALF | dict(flash=True, packed_qkv=True)),
    "mask_documents": (1e-5, dict(mask_documents=True), {}),  # these tokens are one document a row
    "fp8": (2e-2, dict(fp8=True), HALF),
    "fp8_head": (2e-2, dict(fp8_head=True), HALF | dict(fp8=True, fused_cross_entropy=True, pad_vocab=True)),
    "activation_checkpointing": (1e-5, dict(activation_checkpointing="selective"), {}),
}
# {row: (relative tolerance, the flags that are on, the flags of both sides)}, on two ranks
TWO_RANKS = {
    "ddp": (1e-5, (), ()),
    "overlap_gradients": (1e-5, ("--overlap_gradients", "--compile"), ()),  # against an uncompiled run
    "bf16_gradients": (1e-3, ("--bf16_gradients",), ("--parallel", "zero2")),
}
RECIPE = ("adamw", "schedule", "clipping")
# fp8_head is slow in Triton's interpreter: test_fp8_head.py has it
NEEDS_A_GPU = ("tf32", "attention_backend", "packed_qkv", "flash4_backward", "fp8_head")


def losses(**flags):
    """The losses of three steps on fixed tokens."""
    trainer = build(replace(PLAIN, **flags), ALONE, sizes=SIZES)
    generator = torch.Generator().manual_seed(0)
    config = trainer.config
    found = []
    for step in range(config.max_steps):
        shape = config.total_batch_size // config.seq_len, config.seq_len + 1
        tokens = torch.randint(SIZES.vocab_size - 1, shape, generator=generator)
        parts = iter(tokens.to(DEVICE).split(config.micro_batch_size))

        def next_batch(parts=parts):
            part = next(parts)
            return part[:, :-1].contiguous(), part[:, 1:].contiguous(), None

        found.append(train_step(trainer, step, next_batch).loss)
    return found


@pytest.mark.parametrize("name", CASES)
def test_on_against_off(name):
    tolerance, on, both = CASES[name]
    if name in NEEDS_A_GPU and DEVICE.type == "cpu":
        pytest.skip("needs an NVIDIA GPU")
    if name in ("fused_cross_entropy", "fp8", "fp8_head"):
        pytest.importorskip("triton")
    if name == "flash4_backward":
        skip_without_flash4()
    on = both | on
    if DEVICE.type == "cuda":
        wanted = replace(PLAIN, **on)
        assert turn_off_unavailable(wanted, ALONE)[0] == wanted
    assert losses(**on) == pytest.approx(losses(**both), rel=tolerance)


@pytest.mark.parametrize("checkpointing", ["off", "full", "selective"])
def test_tuned_gemms_of_any_size(checkpointing, monkeypatch, tuned_gemms_calls):
    monkeypatch.setattr(cublaslt, "MIN_TUNED_SIZE", 1)
    flags = HALF | dict(compile=True, activation_checkpointing=checkpointing)
    assert losses(tuned_gemms=True, **flags) == pytest.approx(losses(**flags), rel=1e-3)
    assert tuned_gemms_calls


@pytest.mark.parametrize("name", TWO_RANKS)
def test_on_against_off_on_two_ranks(train, name):
    tolerance, on, both = TWO_RANKS[name]
    both = (*both, "--n_layer", 1)
    alone = logged(train("off", *both, ranks=1 if name == "ddp" else 2))
    assert logged(train("on", *both, *on, ranks=2)) == pytest.approx(alone, rel=tolerance)


def test_each_part_of_the_recipe_changes_the_losses_after_the_first():
    without = losses()
    for name in RECIPE:
        on = {flag: getattr(Config(), flag) for flag in RUNGS[name].off}
        with_it = losses(**on)
        assert with_it[0] == without[0] and with_it[1:] != without[1:], name


def test_every_row_has_its_case_and_its_paragraph():
    assert {*CASES, *TWO_RANKS, *RECIPE} == {row.name for row in OPTIMIZATIONS}
    course = "".join((ROOT / "docs" / name).read_text() for name in ("optimizations.md", "recipes.md"))
    for row in OPTIMIZATIONS:
        assert (f"`--{next(iter(row.off))}" if row.name != "ddp" else "`torchrun") in course, row.name


def test_rows_name_flags_and_fields_that_exist():
    names = {field.name for field in fields(Config)}
    assert all(flag in names for row in OPTIMIZATIONS for flag in row.off)
    in_model = {row.name for row in OPTIMIZATIONS if row.in_model}
    assert in_model == {field.name for field in fields(GPTConfig) if field.type is bool}
    assert all(getattr(Config(), row.name) == row.default for row in SWITCHES)


def test_the_readme_has_the_table():
    readme = (ROOT / "README.md").read_text()
    table = re.search(r"<!-- optimizations -->\n(.*?)\n<!-- /optimizations -->", readme, re.S)
    assert table and table[1].strip() == readme_table(), "python optimizations.py prints the table for README.md"


@pytest.mark.parametrize(
    "device, flags, reasons",
    [
        (
            "cpu",
            {},
            dict.fromkeys(("tf32", "tuned_gemms", "fused_gelu", "packed_qkv"), "this is cpu, not an NVIDIA GPU"),
        ),
        ("cpu", dict(autocast="off"), dict(bf16_residual="--autocast bf16")),
        ("mps", {}, dict(compile="not ready for Apple GPUs", fused_cross_entropy="this is mps, not an NVIDIA GPU")),
        ("mps", {}, dict(fused_adamw="gradients are not finite")),
        ("cpu", dict(attention_backend="cudnn"), dict(attention_backend="one kernel for attention")),
        ("cpu", dict(attention_backend="flash", flash=False), dict(attention_backend="it needs --flash")),
        ("cpu", dict(attention_backend="written_out"), dict(flash="--attention_backend written_out takes its place")),
        ("cpu", dict(flash4_backward=True), dict(flash4_backward="it needs --packed_qkv")),
        ("cpu", dict(overlap_gradients=True), dict(overlap_gradients="several ranks")),
        ("cpu", dict(bf16_gradients=True), dict(bf16_gradients="it needs NCCL")),
        (
            "cpu",
            dict(parallel="zero3", shard_ranks=2),
            dict(parallel="there is one rank", shard_ranks="there is one rank"),
        ),
    ],
)
def test_what_a_device_does_not_have_is_off_and_noted(device, flags, reasons):
    config, notes = turn_off_unavailable(Config(**flags), Distributed(0, 1, torch.device(device)))
    said = {note.flag: note for note in notes}
    for flag, reason in reasons.items():
        assert reason in said[flag].reason and getattr(config, flag) == said[flag].value
        assert str(said[flag]).startswith(f"{flag} is ")


@pytest.mark.parametrize(
    "name, capability, flags, installed, reason",
    [
        ("B200", (10, 0), {}, True, "it is for Hopper, and this is B200"),
        ("H200", (9, 0), dict(attention_backend="cudnn"), True, "--attention_backend cudnn takes its place"),
        ("A100", (8, 0), {}, True, "it needs --packed_qkv"),
        ("H200", (9, 0), dict(n_embd=1280, n_head=16), True, "a head width of 32, 64, 96, 128, and it is 80"),
        ("H200", (9, 0), {}, False, "pip install -r requirements.txt"),
        ("H200", (9, 0), {}, True, None),
    ],
)
def test_where_flash_attention_4_is_available(monkeypatch, name, capability, flags, installed, reason):
    pytest.importorskip("cudnn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    module = SimpleNamespace(_flash_attn_bwd=None) if installed else None  # None: its import fails
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setattr(sdpa, "missing", lambda *_: None)
    config, notes = turn_off_unavailable(Config(**flags), Distributed(0, 1, torch.device("cuda")))
    assert config.flash4_backward == (reason is None)
    assert reason is None or reason in next(note.reason for note in notes if note.flag == "flash4_backward")


@pytest.mark.parametrize(
    "capability, flags, reason",
    [
        ((8, 0), {}, None),
        ((9, 0), dict(autocast="fp16", tensor=2), None),
        ((7, 5), {}, "an Ampere GPU or newer"),
        ((9, 0), dict(autocast="off"), "it needs --autocast bf16 or fp16"),
        ((9, 0), dict(compile=False), "it needs --compile"),
    ],
)
def test_where_tuned_gemms_are_available(monkeypatch, capability, flags, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(needs.cublaslt, "missing", lambda: None)
    monkeypatch.setattr(sdpa, "missing", lambda *_: None)
    distributed = Distributed(0, 2, torch.device("cuda"), tensor=flags.get("tensor", 1))
    config, notes = turn_off_unavailable(Config(**flags), distributed)
    assert config.tuned_gemms == (reason is None)
    assert reason is None or reason in next(note.reason for note in notes if note.flag == "tuned_gemms")


@pytest.mark.parametrize(
    "name, capability, on",
    [("A100", (8, 0), False), ("RTX 4090", (8, 9), False), ("H200", (9, 0), True), ("RTX 5090", (12, 0), False)],
)
def test_cudnn_attention_is_for_the_gpus_where_it_is_fast(monkeypatch, name, capability, on):
    pytest.importorskip("cudnn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    config, notes = turn_off_unavailable(Config(), Distributed(0, 1, torch.device("cuda")))
    assert config.packed_qkv == on and config.flash
    assert on or f"this is {name}" in next(note.reason for note in notes if note.flag == "packed_qkv")
    monkeypatch.setattr(sdpa, "missing", lambda *_: None)
    for backend in ("cudnn", "flash", "efficient", "written_out"):
        config, _ = turn_off_unavailable(Config(attention_backend=backend), Distributed(0, 1, torch.device("cuda")))
        assert config.packed_qkv == (backend == "cudnn") and config.flash == (backend != "written_out")
        assert config.attention_backend == backend


@pytest.mark.parametrize("backend, packed", [("efficient", True), ("cudnn", False)])
def test_backends_without_documents(backend, packed):
    flags = dict(attention_backend=backend, packed_qkv=packed, mask_documents=True)
    reason = needs.attention_backend(Config(**flags), Distributed(0, 1, torch.device("cuda")))
    assert reason == "--mask_documents runs on FlashAttention or packed_qkv"


def test_a_sharded_run_on_one_rank_is_ddp():
    reason = needs.bf16_gpu(Config(autocast="bf16", parallel="zero3"), Distributed(0, 1, torch.device("cpu")))
    assert reason.startswith("with ddp it is for GPUs")
