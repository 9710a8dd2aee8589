"""Every row of the table, on against off, wherever this machine has what the row needs."""

from common.interrupt import StopSignal

import contextlib
import functools
import math
import operator
import re
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from conftest import AOT_EAGER, ROOT, logged, skip_without_flash4

from common.errors import UserError
from config import Config, resolve
from dev.tables import command
from kernels import attention, cublaslt
from model import GPTConfig
from optim.optimizer import update_if_finite
from optimizations import (
    OPTIMIZATIONS,
    RUNGS,
    SWITCHES,
    model_switches,
    refuse_unavailable_flags,
    turn_off_unavailable,
)
from parallel import gradients
from parallel.process_group import Distributed
from train_gpt2 import build, train_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALONE = Distributed(0, 1, DEVICE)
# All off but the batch size, on a model that every kernel takes
OFF = {
    flag: value
    for row in reversed(OPTIMIZATIONS)
    if row.name not in ("accumulation", "micro_batch")
    for flag, value in row.off.items()
}
PLAIN = replace(
    Config(**OFF), n_layer=2, n_head=2, n_embd=64, seq_len=64, micro_batch_size=2, total_batch_size=256, max_steps=3
)
SIZES = GPTConfig(seq_len=64, vocab_size=1000, n_layer=2, n_head=2, n_embd=64)
HALF = dict(autocast="bf16")
COMPILED = HALF | dict(compile=True, n_layer=1)  # two rows compile the same graph
SDPA = dict(flash=True, attention="sdpa")
SMALL = dict(n_layer=1, max_steps=2, micro_batch_size=1, total_batch_size=64)  # for Triton's interpreter
# {row: (relative tolerance of the losses, the flags that are on, the flags of both sides)}; tolerance None: it changes
# what is learnt
CASES = {
    "tf32": (1e-3, dict(tf32=True), {}),
    "bf16": (2e-3, HALF, {}),
    "compile": (2e-3, dict(compile=True), COMPILED | dict(compile=False)),
    "flash": (1e-5, SDPA, {}),
    "attention_kernel": (1e-3, dict(attention="efficient"), HALF | SDPA),
    "pad_vocab": (1e-5, dict(pad_vocab=True), {}),
    "fused_adamw": (1e-5, dict(fused_adamw=True), {}),
    "cuda_graphs": (1e-5, dict(cuda_graphs=True), COMPILED | dict(max_steps=6, fused_adamw=True)),
    "accumulation": (1e-5, dict(micro_batch_size=1), dict(micro_batch_size=4)),
    "micro_batch": (1e-5, dict(micro_batch_size=4), dict(micro_batch_size=1)),
    "bf16_residual": (2e-3, dict(bf16_residual=True), HALF),
    "tuned_gemms": (1e-3, dict(tuned_gemms=True), COMPILED),
    "fused_cross_entropy": (1e-5, dict(fused_cross_entropy=True), SMALL),
    "fused_gelu": (1e-3, dict(fused_gelu=True), HALF),
    "flash4": (1e-3, dict(attention="flash4"), HALF | SDPA),
    "mask_documents": (1e-5, dict(mask_documents=True), {}),  # these tokens are one document a row
    "fp8": (2e-2, dict(fp8=True), HALF | SMALL),
    "fp8_head": (2e-2, dict(fp8_head=True), HALF | dict(fp8=True, fused_cross_entropy=True, pad_vocab=True)),
    "activation_checkpointing": (1e-5, dict(activation_checkpointing="selective"), {}),
}
# {row: (relative tolerance, the flags that are on, the flags of both sides)}, on two ranks
TWO_RANKS = {
    "ddp": (1e-5, (), ()),
    "overlap_gradients": (1e-5, ("--overlap_gradients", "--compile"), ()),  # against an uncompiled run
    "bf16_gradients": (1e-3, ("--bf16_gradients",), ("--parallel", "zero2")),
}
# fp8_head is slow in Triton's interpreter: test_fp8_head.py has it
NEEDS_A_GPU = ("tf32", "cuda_graphs", "attention_kernel", "flash4", "fp8_head")


def three_steps(**flags):
    """The losses of max_steps steps on fixed tokens; and of the last one {(operator or GPU kernel, shapes): calls}."""
    config = replace(PLAIN, **flags)
    trainer = build(config, ALONE, sizes=replace(SIZES, n_layer=config.n_layer))
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(config.max_steps):
        shape = config.total_batch_size // config.seq_len, config.seq_len + 1
        tokens = torch.randint(SIZES.vocab_size - 1, shape, generator=generator)
        parts = iter(tokens.to(DEVICE).split(config.micro_batch_size))

        def next_batch(_, parts=parts):
            part = next(parts)
            return part[:, :-1].contiguous(), part[:, 1:].contiguous(), None

        last = step == config.max_steps - 1
        with torch.profiler.profile(record_shapes=True) if last else contextlib.nullcontext() as profile:
            found.append(train_step(trainer, step, next_batch, StopSignal()).loss)
    return found, Counter(
        (event.name, str(event.input_shapes))
        for event in profile.events()
        if event.name.startswith(("aten::", "gpt2::")) or event.device_type != torch.autograd.DeviceType.CPU
    )


three_steps_once = functools.cache(three_steps)  # many rows are compared with the same run


def losses(**flags):
    return three_steps(**flags)[0]


@pytest.mark.gpu(cpu_too=True)
@pytest.mark.parametrize("name", CASES)
def test_on_against_off(name, request, monkeypatch):
    """The losses are the same but for rounding. A flag that does nothing has the same bits from the same operators."""
    tolerance, on, both = CASES[name]
    if name in NEEDS_A_GPU and DEVICE.type == "cpu":
        pytest.skip("needs an NVIDIA GPU")
    if name in ("fused_cross_entropy", "fp8", "fp8_head"):
        pytest.importorskip("triton")
    if name == "flash4":
        skip_without_flash4()
    if name == "tuned_gemms":  # GEMMs of any size
        request.getfixturevalue("tuned_gemms_calls")
        monkeypatch.setattr(cublaslt, "MIN_TUNED_SIZE", 1)
    on = both | on
    if DEVICE.type == "cuda":
        wanted = replace(PLAIN, **on)
        assert turn_off_unavailable(wanted, ALONE)[0] == wanted
    (with_it, operators), (without, others) = three_steps(**on), three_steps_once(**both)
    assert with_it != without or operators != others, "the flag does nothing"
    assert tolerance is None or with_it == pytest.approx(without, rel=tolerance)


def test_the_same_flags_have_the_same_operators():
    assert three_steps() == three_steps_once() or DEVICE.type == "cuda"  # where sums have varying order


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, dict(fp8=True), dict(optimizer="muon"), dict(attention="flash4", flash=True)])
def test_a_cuda_graph_changes_no_bit(flags):
    """Of the losses of steps with two micro-batches: the first four are launched one by one."""
    both = COMPILED | dict(max_steps=6, deterministic=True, fused_adamw=True, n_embd=128)  # heads of 64
    both |= dict(fused_cross_entropy=True, fused_gelu=True) | flags
    if turn_off_unavailable(replace(PLAIN, **both), ALONE)[0] != replace(PLAIN, **both):
        pytest.skip("not on this GPU")
    assert losses(**both, cuda_graphs=True) == losses(**both)


def test_the_gradients_that_a_cuda_graph_adds_to_stay_allocated():
    trainer = build(replace(PLAIN, compile=True, cuda_graphs=True, fused_adamw=True), ALONE, sizes=SIZES)
    allocated = [parameter.grad for parameter in trainer.model.parameters()]
    assert all(gradient is not None for gradient in allocated)
    for norm in torch.tensor([1.0, math.inf]):
        update_if_finite(trainer.optimizer, trainer.scaler, norm)
        gradients.zero(trainer)
    assert all(map(operator.is_, allocated, (parameter.grad for parameter in trainer.model.parameters())))


@pytest.mark.parametrize("name", TWO_RANKS)
def test_on_against_off_on_two_ranks(train, script, name):
    tolerance, on, both = TWO_RANKS[name]
    both = (*both, "--n_layer", 1)
    without = logged(train("off", *both, ranks=1 if name == "ddp" else 2))
    with_it = logged(train("on", *both, *on, ranks=2, script=script(AOT_EAGER + "train_gpt2.main()\n")))
    assert with_it == pytest.approx(without, rel=tolerance)
    # overlap_gradients, whose buckets are larger than this model, is in tests/parallel/test_process_group.py
    assert with_it != without or name != "bf16_gradients", "the flag does nothing"


def test_each_flag_of_the_recipe_changes_the_losses_after_the_first():
    fast = dict(lr=1e-2)  # with 3e-4 some CPUs round the difference away
    without = losses(**fast)
    for flag in RUNGS["recipe"].off:
        with_it = losses(**fast | {flag: getattr(Config(), flag)})
        assert with_it[0] == without[0] and with_it[1:] != without[1:], flag


def test_every_row_has_its_case_and_its_paragraph():
    assert {*CASES, *TWO_RANKS, "recipe"} == {row.name for row in OPTIMIZATIONS}
    course = "".join((ROOT / "docs" / name).read_text() for name in ("optimizations.md", "recipes.md"))
    for row in OPTIMIZATIONS:
        assert f"`{command(row)}" in course, row.name


def test_rows_name_flags_and_fields_that_exist():
    names = {field.name for field in fields(Config)}
    assert all(flag in names for row in OPTIMIZATIONS for flag in row.off)
    sizes = {"seq_len", "vocab_size", "n_layer", "n_head", "n_embd", "pad_to"}
    assert model_switches(Config()).keys() == {field.name for field in fields(GPTConfig)} - sizes
    assert all(getattr(Config(), row.name) == row.default for row in SWITCHES)


@pytest.mark.parametrize(
    "device, flags, reasons",
    [
        (
            "cpu",
            {},
            dict.fromkeys(("tf32", "tuned_gemms", "fused_gelu", "attention"), "this is cpu, not an NVIDIA GPU"),
        ),
        ("mps", dict(autocast="off"), dict(bf16_residual="--autocast bf16")),
        ("mps", {}, dict(compile="not ready for Apple GPUs", fused_cross_entropy="this is mps, not an NVIDIA GPU")),
        ("mps", {}, dict(fused_adamw="gradients are not finite")),
        ("cpu", dict(attention="cudnn"), dict(attention="one kernel for attention")),
        ("cpu", dict(attention="flash4"), dict(attention="this is cpu, not an NVIDIA GPU")),
        ("cpu", dict(attention="triton"), dict(attention="this is cpu, not an NVIDIA GPU")),
        ("cpu", dict(overlap_gradients=True), dict(overlap_gradients="several ranks")),
        ("cpu", dict(bf16_gradients=True), dict(bf16_gradients="it needs NCCL")),
        (
            "cpu",
            dict(parallel="zero3"),
            dict(parallel="there is one rank"),
        ),
    ],
)
def test_what_a_device_does_not_have_is_off_and_noted(device, flags, reasons):
    config, notes = turn_off_unavailable(Config(**flags), Distributed(0, 1, torch.device(device)))
    said = {note.flag: note for note in notes}
    for flag, reason in reasons.items():
        assert reason in said[flag].reason and getattr(config, flag) == said[flag].value
        assert str(said[flag]).startswith(f"{flag} is ")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name, capability): the rows see this GPU, on which PyTorch has all its attention kernels."""

    def gpu(name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(attention, "missing_sdpa_kernel", lambda *_: None)
        return Distributed(0, 1, torch.device("cuda"))

    return gpu


@pytest.mark.parametrize(
    "name, capability, asked, flags, found, reason",
    [
        ("H200", (9, 0), "auto", {}, "flash4", None),
        ("B200", (10, 0), "auto", {}, "sdpa", "FlashAttention-4 is used on Hopper, and this is B200"),
        ("A100", (8, 0), "auto", {}, "sdpa", "FlashAttention-4 is used on Hopper, and this is A100"),
        ("H200", (9, 0), "auto", dict(autocast="off"), "sdpa", "it needs --autocast bf16 or fp16"),
        ("H200", (9, 0), "auto", dict(n_embd=1280, n_head=16), "sdpa", "of 32, 64, 96, 128, and it is 80"),
        ("H200", (9, 0), "auto", dict(flash=False), "written_out", None),
        ("H200", (9, 0), "written_out", {}, "written_out", None),
        ("H200", (9, 0), "sdpa", {}, "sdpa", None),
        ("H200", (9, 0), "efficient", {}, "efficient", None),
        (
            "H200",
            (9, 0),
            "efficient",
            dict(mask_documents=True),
            "sdpa",
            "--mask_documents runs on the kernels flash and",
        ),
        ("H200", (9, 0), "flash", dict(mask_documents=True), "flash", None),
        ("H200", (9, 0), "flash4", dict(mask_documents=True), "flash4", None),
        ("A100", (8, 0), "flash4", {}, "sdpa", "FlashAttention-4 is used on Hopper, and this is A100"),
        ("A100", (8, 0), "triton", {}, "triton", None),
        ("T4", (7, 5), "triton", {}, "sdpa", "T4 is older than Ampere"),
        ("A100", (8, 0), "triton", dict(autocast="off"), "sdpa", "it needs --autocast bf16 or fp16"),
        ("A100", (8, 0), "triton", dict(mask_documents=True), "sdpa", "--mask_documents runs on the kernels flash and"),
    ],
)
def test_what_computes_attention(gpu, install, name, capability, asked, flags, found, reason):
    install("flash_attn.cute.interface", "")
    config, notes = turn_off_unavailable(Config(attention=asked, **flags), gpu(name, capability))
    notes = [note for note in notes if note.flag == "attention"]
    assert config.attention == found and config.flash == (found != "written_out")
    assert len(notes) == (reason is not None) and (not reason or reason in str(notes[0]))
    assert model_switches(config)["attention"] == found
    given = {"attention": asked}
    if reason and asked != "auto":
        with pytest.raises(UserError, match=f"^--attention {asked} does nothing here: .*{re.escape(reason)}"):
            refuse_unavailable_flags(given, notes)
    else:
        refuse_unavailable_flags(given, notes)


def test_no_flash_excludes_another_attention():
    with pytest.raises(UserError, match="^--attention flash4 needs --flash: leave out --no_flash$"):
        resolve(Config(flash=False, attention="flash4"), ALONE)


@pytest.mark.parametrize("error", ["RuntimeError('built for CUDA 12')", "ImportError('libcudnn.so is missing')"])
@pytest.mark.parametrize(
    "module, flag, value",
    [
        ("flash_attn.cute.interface", "attention", "sdpa"),
        ("nvmath.bindings.cublasLt", "fused_gelu", False),
        ("nvmath.bindings.cublasLt", "tuned_gemms", False),
        ("triton", "fused_cross_entropy", False),
        ("triton", "fp8", False),
        ("triton", "compile", False),
    ],
)
def test_an_installed_package_that_cannot_be_imported_is_missing(gpu, install, module, flag, value, error):
    install(module, f"raise {error}")
    config, notes = turn_off_unavailable(Config(fp8=True), gpu("H200", (9, 0)))
    assert getattr(config, flag) == value
    reason = next(note.reason for note in notes if note.flag == flag)
    assert error.split("'")[1] in reason and module.partition(".")[0] in reason


@pytest.mark.parametrize(
    "capability, flags, reason",
    [
        ((8, 0), {}, None),
        ((9, 0), dict(tensor=2), None),
        ((7, 5), {}, "it needs --autocast bf16"),
        ((9, 0), dict(autocast="fp16"), "it needs --autocast bf16"),
        ((9, 0), dict(compile=False), "it needs --compile"),
    ],
)
def test_where_tuned_gemms_are_available(gpu, monkeypatch, capability, flags, reason):
    gpu("some GPU", capability)
    monkeypatch.setattr(cublaslt, "missing", lambda: None)
    distributed = Distributed(0, 2, torch.device("cuda"), tensor=flags.get("tensor", 1))
    config, notes = turn_off_unavailable(Config(**flags), distributed)
    assert config.tuned_gemms == (reason is None)
    assert reason is None or reason in next(note.reason for note in notes if note.flag == "tuned_gemms")


@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_on_a_cpu_all_kernels_for_gpus_are_off_for_one_reason(monkeypatch, parallel):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict(avx512_bf16=True))
    cpu = Distributed(0, 1, torch.device("cpu"))
    _, notes = turn_off_unavailable(Config(compile=False, parallel=parallel, fp8=True), cpu)
    off = {note.flag for note in notes if note.reason == "this is cpu, not an NVIDIA GPU"}
    gpu_flags = {"tf32", "bf16_residual", "tuned_gemms", "fused_cross_entropy", "fused_gelu", "attention", "fp8"}
    gpu_flags.add("cuda_graphs")
    assert off == gpu_flags and {note.flag for note in notes} - off <= {"parallel"}
