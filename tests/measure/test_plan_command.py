"""Plans against the measurements of docs/scaling.md and dev/LOG.md, and against what is known by counting."""

import re
import shlex
import sys
from dataclasses import replace

import pytest
import torch

from common.cli import given, parse
from common.errors import UserError
from config import Config, defaults, set_sizes
from data.tokenizer import VOCAB_SIZE
from measure import plan as planner
from measure.step_time import COPIES, averaging_seconds, split_seconds, step_time
from model import GPT, GPTConfig
from optim.optimizer import OPTIMIZERS, make_optimizer, named_state
from parallel.memory import (
    LOGIT_ROWS,
    bytes_of_activations,
    bytes_of_states,
    bytes_of_weights,
    describe,
    params_of_rank,
    peak_bytes,
)
from parallel.pipeline import blocks_in_flight
from parallel.process_group import Distributed

GB = 2**30
LARGE = dict(n_layer=32, n_head=32, n_embd=4096)  # 6.7B
FULL = dict(LARGE, activation_checkpointing="full")
WITHOUT_EVALUATIONS = dict(val_every=0, hellaswag_every=0)


def sized(**flags):
    config = planner.PlanConfig(**flags)
    set_sizes(config, None)
    config.bf16_residual = True
    return config


def ranks(config):
    splits = config.tensor, config.context, config.pipeline
    return Distributed(0, config.gpus, torch.device("cuda"), *splits, min(8, config.gpus))


def estimate(gpus, **flags):
    """(peak bytes, tokens/sec)"""
    config = sized(gpus=gpus, **WITHOUT_EVALUATIONS, **flags)
    return peak_bytes(config, ranks(config)), config.total_batch_size / step_time(config, ranks(config))[0]


def plan(gpus, memory=80.0, typed=(), **flags):
    """The Layouts of the table."""
    return planner.fastest(planner.find_layouts(sized(gpus=gpus, memory=memory, **flags), typed), memory)


def test_memory_and_speed_are_those_measured():
    xl = dict(model="gpt2-xl", total_batch_size=262144, micro_batch_size=32)
    rates = {}
    small, half = dict(micro_batch_size=64), dict(micro_batch_size=32)
    for gpus, flags, gb, rate in (
        (1, small, 21.4, 596300),
        (1, half, 12.3, 0.965 * 596300),
        (1, dict(small, activation_checkpointing="selective"), 14.5, 571800),
        (1, dict(small, activation_checkpointing="full"), 5.3, 485200),
        (2, small, 21.4, 1172100),
        (4, small, 21.9, 2321200),
        (2, dict(micro_batch_size=128, parallel="zero1"), 39.56, 1235698),
        (2, dict(micro_batch_size=128, parallel="zero2"), 39.56, 1233237),
        (2, dict(micro_batch_size=128, parallel="zero3"), 39.56, 1232882),
        (2, dict(micro_batch_size=128, parallel="hsdp"), 39.13, 1197140),
        (2, dict(micro_batch_size=128), 40.7, 1246421),
        (1, xl, 102.9, 53800),
        (2, xl, 102.9, 106000),
        (2, dict(xl, parallel="zero2"), 91.6, 103500),
        (2, dict(xl, parallel="zero3"), 88.8, 101600),
        (4, dict(xl, parallel="zero3"), 83.3, 202000),
        (1, dict(FULL, total_batch_size=16384, micro_batch_size=8), 125.4, 10670),
        (2, dict(FULL, total_batch_size=32768, micro_batch_size=8), 125.4, 19550),
        (2, dict(FULL, total_batch_size=131072, micro_batch_size=64, parallel="zero2"), 77.0, 22640),
        (2, dict(FULL, total_batch_size=131072, micro_batch_size=64, parallel="zero3"), 66.2, 22540),
        (4, dict(FULL, total_batch_size=131072, micro_batch_size=32, parallel="zero3"), 35.1, 41300),
    ):
        memory, estimated = estimate(gpus, **flags)
        assert memory / GB == pytest.approx(gb, rel=0.05), flags
        assert estimated == pytest.approx(rate, rel=0.2 if "n_embd" in flags else 0.05), flags
        if gpus == 2:
            newer = flags["micro_batch_size"] == 128  # another PyTorch
            rates.setdefault((flags.get("model"), flags.get("n_embd"), newer), []).append((estimated, rate))
    # the modes of each model on two GPUs are in the measured order
    for of_model in rates.values():
        assert sorted(of_model) == sorted(of_model, key=lambda pair: pair[1])
    assert sorted(map(len, rates.values())) == [1, 3, 3, 5]


def test_the_plans_memory_adds_up_to_the_peak():
    config = sized(gpus=1, micro_batch_size=64, **WITHOUT_EVALUATIONS)
    parts = [float(number) for number in re.findall(r"([\d.]+) GB", describe(config, ranks(config)))]
    assert parts[1] == pytest.approx(8 * 124.4e6 / GB, abs=0.05)
    assert sum(parts) == pytest.approx(peak_bytes(config, ranks(config)) / GB, abs=0.2)


def test_long_sequences_are_as_fast_as_measured():
    """On H100s; attention's rate is fitted to these."""
    for gpus, T, flags, gb, rate in (
        (1, 8192, dict(micro_batch_size=16), 41.08, 389200),
        (2, 8192, dict(micro_batch_size=8), 22.03, 746100),
        (2, 32768, dict(micro_batch_size=2), 22.31, 342400),
        (2, 262144, dict(micro_batch_size=1, context=2), 46.74, 55000),
    ):
        memory, estimated = estimate(gpus, seq_len=T, total_batch_size=max(T, 131072), **flags)
        assert memory / GB == pytest.approx(gb, rel=0.05), flags
        assert estimated == pytest.approx(rate, rel=0.04), flags


def test_averaging_over_slow_links_takes_what_was_measured():
    """On two H200s over TCP, at 4.5 GB/s."""
    for flags, rate in (({}, 972200), (dict(bf16_gradients=True), 1085800)):
        assert estimate(2, link=4.5, micro_batch_size=128, **flags)[1] == pytest.approx(rate, rel=0.02), flags


# --tensor turns these off
TENSOR = dict(tensor=2, fused_cross_entropy=False, fused_gelu=False)


def test_measurements_to_which_no_formula_is_fitted():
    """(GPUs, flags, peak GB, tokens/sec), each group from the fastest mode to the slowest, but for those within 2%."""
    small, long = dict(micro_batch_size=128), dict(seq_len=32768, total_batch_size=131072)
    longer = dict(seq_len=8192, total_batch_size=131072)
    half, xl = dict(micro_batch_size=64), dict(model="gpt2-xl", total_batch_size=131072)
    large = dict(FULL, seq_len=4096, total_batch_size=65536)
    of_others, zero3 = dict(total_batch_size=262144), dict(parallel="zero3")
    blocks = dict(parallel="hsdp")  # in one machine this is zero3 by blocks, also for small models
    medium, gpt2_large = dict(model="gpt2-medium", micro_batch_size=64), dict(model="gpt2-large", micro_batch_size=32)
    for rows in (
        ((1, small, 41.02, 597900),),
        ((1, dict(of_others, **medium), 55.46, 225800),),
        ((1, dict(of_others, **gpt2_large), 59.67, 102500),),
        ((1, dict(of_others, model="gpt2-xl", micro_batch_size=16), 65.50, 50500),),
        (
            (2, small, 41.48, 1168100),
            (2, dict(small, **blocks), 39.91, 1114300),
            (2, dict(half, pipeline=2), 27.62, 1011800),
            (2, dict(small, context=2), 23.08, 908100),
            (2, dict(small, **TENSOR), 52.50, 671900),
        ),
        (
            (2, dict(long, context=2, micro_batch_size=4), 23.44, 316000),
            (2, dict(long, **TENSOR, micro_batch_size=4), 52.51, 283200),
        ),
        (
            (2, small, 40.73, 1223200),
            (2, dict(small, **blocks), 39.16, 1178900),
            (2, dict(half, pipeline=2), 27.21, 1061100),
            (2, dict(small, context=2), 22.66, 974700),
            (2, dict(small, **TENSOR), 52.50, 748500),
        ),
        (
            (2, dict(longer, micro_batch_size=8), 21.62, 757600),
            (2, dict(longer, **blocks, micro_batch_size=8), 20.32, 738900),
            (2, dict(longer, context=2, micro_batch_size=16), 22.74, 661600),
            (2, dict(longer, pipeline=2, micro_batch_size=2), 7.30, 628500),
            (2, dict(longer, **TENSOR, micro_batch_size=16), 52.29, 543900),
        ),
        (
            (2, dict(long, micro_batch_size=2), 21.90, 348800),
            (2, dict(long, **blocks, micro_batch_size=2), 20.46, 341800),
            (2, dict(long, context=2, micro_batch_size=4), 23.02, 324500),
            (2, dict(long, **TENSOR, micro_batch_size=4), 52.51, 293300),
            (2, dict(long, pipeline=2, micro_batch_size=1), 11.43, 267400),
        ),
        (
            (2, dict(xl, **zero3, micro_batch_size=16), 51.16, 90180),
            (2, dict(xl, pipeline=2, micro_batch_size=16), 54.52, 90210),
            (2, dict(xl, **zero3, context=2, micro_batch_size=32), 53.89, 78960),
        ),
        (
            (2, dict(large, **zero3, micro_batch_size=8), 56.88, 20400),
            (2, dict(large, **zero3, context=2, micro_batch_size=16), 57.13, 18790),
            (2, dict(large, **TENSOR, micro_batch_size=4), 62.57, 18300),
            (2, dict(large, pipeline=2, micro_batch_size=2), 61.94, 18050),
        ),
        *(
            [(2, dict(of_others, parallel=mode, **sizes), gb, rate) for mode, gb, rate in modes]
            for sizes, modes in (
                (small, (("ddp", 41.48, 1162900), ("hsdp", 39.91, 1114200))),
                (medium, (("ddp", 56.79, 438700), ("zero2", 53.02, 426900), ("zero3", 52.50, 419800))),
                (gpt2_large, (("ddp", 62.55, 199200), ("zero2", 53.89, 193300), ("zero3", 52.64, 189200))),
            )
        ),
    ):
        estimates = [estimate(gpus, **flags) for gpus, flags, _, _ in rows]
        for (memory, estimated), (_, flags, gb, rate) in zip(estimates, rows):
            assert memory / GB == pytest.approx(gb, rel=0.07), flags
            assert estimated == pytest.approx(rate, rel=0.2 if "tensor" in flags or "n_embd" in flags else 0.09), flags
        rates = [rate for _, rate in estimates]
        assert rates == sorted(rates, reverse=True)


def test_memory_speed_and_order_of_split_models_are_those_measured():
    """On two GPUs; each model's modes from the fastest to the slowest."""
    xl = dict(model="gpt2-xl", total_batch_size=262144, micro_batch_size=32)
    large = dict(FULL, seq_len=4096, total_batch_size=131072)
    for rows in (
        (
            (dict(micro_batch_size=64), 21.95, 1197259),
            (dict(micro_batch_size=64, pipeline=2), 27.62, 1068483),
            (dict(micro_batch_size=64, context=2), 13.36, 940087),
            (dict(micro_batch_size=64, **TENSOR), 26.86, 709265),
        ),
        ((dict(xl, parallel="zero3"), 88.89, 101670), (dict(xl, pipeline=2), 94.39, 95029)),
        (
            (dict(large, micro_batch_size=16, parallel="zero3"), 69.88, 21063),
            (dict(large, micro_batch_size=32, **TENSOR), 91.88, 19934),
            (dict(large, micro_batch_size=4, pipeline=2), 65.82, 18858),
        ),
    ):
        estimates = [estimate(2, **flags) for flags, _, _ in rows]
        for (memory, estimated), (flags, gb, rate) in zip(estimates, rows):
            assert memory / GB == pytest.approx(gb, rel=0.07), flags
            assert estimated == pytest.approx(rate, rel=0.25 if "n_embd" in flags else 0.1), flags
        rates = [rate for _, rate in estimates]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_states_take_what_is_estimated(optimizer):
    sizes = dict(n_layer=24, n_head=2, n_embd=64)
    flags = dict(optimizer=optimizer, compile=False)
    config = sized(seq_len=64, micro_batch_size=1, **flags, **sizes)
    model = GPT(GPTConfig(seq_len=64, **sizes))
    states = named_state(model, make_optimizer(model, config)).values()
    assert sum(tensor.nbytes for tensor in states) == pytest.approx(bytes_of_states(config), rel=0.02)


def test_evaluations_have_all_logits_and_no_chunk_of_the_fused_cross_entropy():
    config = sized(micro_batch_size=64, activation_checkpointing="full")
    assert bytes_of_activations(config) == 64 * 1024 * VOCAB_SIZE * 2


def test_the_rows_of_logits_are_those_of_the_kernel():
    pytest.importorskip("triton", reason="needs Triton")
    from kernels import cross_entropy

    assert LOGIT_ROWS == cross_entropy.LOGIT_ROWS


def test_a_pipelines_last_rank_has_the_logits():
    config = sized(model="gpt2-xl", micro_batch_size=8, pipeline=4, fused_cross_entropy=False, **WITHOUT_EVALUATIONS)
    assert blocks_in_flight(config) == [4 * 12, 3 * 13, 2 * 13, 10]
    # they are less than what the first rank has beyond the last
    assert bytes_of_activations(config) == bytes_of_activations(replace(config, fused_cross_entropy=True))
    config.activation_checkpointing = "full"
    assert bytes_of_activations(config) > 8 * 1024 * VOCAB_SIZE * 2.7


def test_memory_by_purpose():
    def weights(**flags):
        return bytes_of_weights(replace(config, **flags), ranks(config))

    config = sized(model="gpt2-xl", micro_batch_size=4, **WITHOUT_EVALUATIONS)
    params = params_of_rank(config)
    assert bytes_of_states(config) == 8 * params and weights() == (4 + 4 + 2) * params
    zero1, zero2, zero3 = (weights(parallel=mode) for mode in ("zero1", "zero2", "zero3"))
    assert zero1 == zero2 + 4 * params
    assert zero3 < zero2 / 1.5 and zero2 > (8 / 8 + 2) * params
    tensor, pipeline = replace(config, tensor=5), replace(config, pipeline=4)
    assert bytes_of_states(tensor) == 8 * params / 5 and bytes_of_states(pipeline) < 0.4 * 8 * params
    whole = bytes_of_activations(config)
    assert whole / 2 < bytes_of_activations(replace(config, context=2)) < 0.6 * whole


def test_bytes_on_the_links():
    """What the docstring of step_time.py says, of three micro-batches."""
    config = sized(model="gpt2-xl", micro_batch_size=4, network=50.0)
    params = params_of_rank(config)

    def sent(gpus, **flags):
        new = replace(config, gpus=gpus, **flags)
        new.total_batch_size = 3 * 4 * 1024 * ranks(new).data_size
        each, once = averaging_seconds(new, ranks(new))
        return pytest.approx(3 * (split_seconds(new) + each) + once, rel=0.02)

    assert sent(8) == 2 * 7 / 8 * 4 * params / 300e9
    assert sent(8, bf16_gradients=True) == 2 * 7 / 8 * 2 * params / 300e9
    assert sent(16) == 2 * 7 / 8 * 4 * params / 300e9 + 2 * 1 / 2 * 4 * params / 50e9
    assert sent(8, parallel="zero1") == 7 / 8 * (2 + 4) * params / 300e9
    assert sent(8, parallel="zero2") == 7 / 8 * (2 + 3 * 4) * params / 300e9
    assert sent(8, parallel="zero3") == 7 / 8 * 3 * (2 + 2 + 4) * params / 300e9
    hsdp = 7 / 8 * 3 * (2 + 2 + 4) * params / 300e9 + 2 * 1 / 2 * 4 * params / 50e9
    assert sent(16, parallel="hsdp") == hsdp
    x = COPIES * 2 * 4 * 1024 * 1600  # a micro-batch's residual stream in bytes, and its copies
    assert sent(4, tensor=4) == 3 * (8 * 48 + 4) * (3 / 4 * x / 300e9 + 20e-6)
    # half of the tokens are on each rank of a pair; gradients are averaged over all four ranks
    exchanged = 3 * 48 * (8 * 1 / 2 * x / 2 / 300e9 + 2 * 20e-6)
    assert sent(4, context=2) == exchanged + 2 * 3 / 4 * 4 * params / 300e9


def test_what_is_known_of_modes():
    layouts = plan(8)
    assert str(layouts[0]) == "ddp" and layouts[0].config.micro_batch_size == 64
    alone = [str(layout) for layout in layouts if ranks(layout.config).data_size == 8]
    assert alone == ["ddp", "zero1", "zero2", "zero3"]  # but for zero1 measured; in one machine hsdp is zero3
    names = [str(layout) for layout in plan(8, **LARGE)]
    assert names[0] == "zero2" and "zero3" in names and "ddp" not in names
    layouts = plan(8, memory=26.0, **LARGE)  # weights gathered for a step would not fit
    assert [layout.config.parallel for layout in layouts if ranks(layout.config).data_size == 8] == ["zero3"]
    # with several micro-batches, hsdp sends least between machines of the modes that shard gradients
    layouts = plan(32, network=12.5, total_batch_size=2**21, micro_batch_size=4, **LARGE)
    modes = [layout.config.parallel for layout in layouts if ranks(layout.config).data_size == 32]
    assert modes == ["zero1", "hsdp", "zero2", "zero3"]
    # one sequence of 131,072 tokens takes more than a GPU
    long = dict(seq_len=131072, total_batch_size=2**20, model="gpt2-large", **WITHOUT_EVALUATIONS)
    best = plan(8, memory=40.0, activation_checkpointing="selective", typed={"activation_checkpointing"}, **long)[0]
    assert best.config.context > 1 or best.config.tensor > 1


def test_the_command_is_one_that_a_run_takes(monkeypatch, capsys):
    flags = "--model gpt2-xl --gpus 16 --memory 80 --parallel hsdp --lr 1e-4".split()
    monkeypatch.setattr(sys, "argv", ["plan.py", *flags])
    planner.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "524,288 tokens a step in sequences of 1,024, on 16 × H100 with 80 GB"
    rows = [line for line in lines if line.startswith("hsdp")]
    assert len(rows) > 1 and not any(line.startswith(("ddp", "zero")) for line in lines)
    launcher, _, arguments = lines[-1].partition("train_gpt2.py")
    assert launcher.startswith("torchrun --nnodes=2 --nproc_per_node=8 ")
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *shlex.split(arguments)])
    config = parse(Config, default=defaults(given(Config)))
    assert (config.model, config.parallel, config.lr, config.micro_batch_size) == ("gpt2-xl", "hsdp", 1e-4, 16)


def test_one_gpu_needs_no_torchrun(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan.py", "--gpus", "1"])
    planner.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("python train_gpt2.py ")


@pytest.mark.parametrize(
    "gpus, layout", [(8, "--parallel zero2 --tensor 4 --pipeline 2"), (4, "--parallel zero2 --tensor 4")]
)
def test_a_layout_that_is_given_is_planned(monkeypatch, capsys, gpus, layout):
    """Also where one rank is left to shard over: a run takes it."""
    monkeypatch.setattr(sys, "argv", ["plan.py", "--gpus", str(gpus), *layout.split()])
    planner.main()
    assert capsys.readouterr().out.splitlines()[-1].endswith(layout)


def test_a_plan_that_is_impossible(monkeypatch):
    large = " ".join(f"--{name} {value}" for name, value in LARGE.items())
    for flags, words in (
        (f"{large} --gpus 1", "nothing fits 80 GB, ddp takes 123.9 GB a GPU: use more --gpus"),
        ("--gpus 0", "--gpus 0: it must be at least 1"),
        ("--gpus 12", "--gpus 12 is not a multiple of --gpus_per_machine 8"),
        ("--gpu Abacus", "invalid choice 'Abacus' for argument '--gpu'"),
        ("--mfu 50", "it must be at most 1"),
        ("--fp8", "does not know --fp8"),
        ("--tensor 5", "--tensor 5 does not divide 12 attention heads"),
        ("--total_batch_size 1000", "--total_batch_size 1000 is not a multiple"),
    ):
        monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split()])
        with pytest.raises(UserError) as error:
            planner.main()
        assert words in str(error.value) and "\n" not in str(error.value)
