import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, expect_error
from parallel.distributed import Distributed

import config as config_module
from common import device as device_module
from common.cli import UserError, parse
from config import DEMO, Config, defaults, flags, resolve
from kernels import cublaslt
from model import GPTConfig


def resolved(world_size=1, device="cpu", **flags):
    config, reasons = resolve(Config(**flags), Distributed(0, world_size, torch.device(device)), GPTConfig())
    return config, " ".join(reasons)


def test_every_flag_is_explained_in_help():
    done = subprocess.run([sys.executable, ROOT / "train_gpt2.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for name in vars(Config()):
        assert f"--{name} " in done.stdout or f"--{name}," in done.stdout
    for flag in ("--no_tf32", "--no_compile", "--no_flash", "--no_pad_vocab", "--no_fused_adamw", "--no_shuffle"):
        assert flag in done.stdout


def test_sizes_follow_the_model_and_give_way_to_their_own_flags():
    config, _ = resolved(model="gpt2-xl")
    assert (config.n_layer, config.n_head, config.n_embd) == (48, 25, 1600)
    config, _ = resolved(model="gpt2-xl", n_layer=2)
    assert (config.n_layer, config.n_head, config.n_embd) == (2, 25, 1600)


def test_the_micro_batch_fits_and_divides(monkeypatch):
    gigabytes = 2**30
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(device_module.shutil, "which", lambda name: name)
    monkeypatch.setattr(device_module, "import_error", lambda module, package: None)
    monkeypatch.setattr(config_module, "fit_attention", lambda config, device, reasons: None)
    monkeypatch.setattr(config_module, "averaging_rate", lambda ranks: 3e11)
    sizes = []
    for free in (4, 14, 22, 78, 139):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * gigabytes, 0))
        config, why = resolved(device="cuda")
        assert 524288 % (config.micro_batch_size * 1024) == 0 and f"{free} GB" in why
        sizes.append(config.micro_batch_size)
    assert sizes == sorted(sizes) and sizes[0] < 8 and sizes[-2:] == [64, 64]
    assert resolved(8, "cuda")[0].micro_batch_size == 64  # the README's run: no accumulation on eight GPUs
    assert resolved(8, "cuda", total_batch_size=8 * 4 * 1024)[0].micro_batch_size == 4
    assert resolved(1, "cuda", model="gpt2-xl")[0].micro_batch_size < 64
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (78 * gigabytes, 0))
    large = dict(n_layer=32, n_head=32, n_embd=4096)
    _, why = resolved(4, "cuda", **large)
    assert "more than what fits" in why  # 6.7 billion weights, 16 bytes each
    sizes = [
        resolved(4, "cuda", **large, parallel="zero3", activation_checkpointing=how)[0].micro_batch_size
        for how in ("off", "selective", "full")
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    ranks, config = Distributed(0, 4, torch.device("cuda")), Config(**large, parallel="zero2")
    bf16, float32 = (device_module.bytes_of_weights(replace(config, autocast=a), ranks) for a in ("bf16", "off"))
    assert float32 - bf16 > 2 * device_module.count_params(config)  # gathered in float32


def test_a_gpu_without_bf16_gets_fp16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (14 * 2**30, 0))
    config, why = resolved(device="cuda")
    assert config.autocast == "fp16" and not config.tf32
    assert "Tesla T4 has no bf16" in why


def test_without_a_compiler_it_runs_uncompiled(monkeypatch):
    monkeypatch.setattr(device_module.shutil, "which", lambda name: None)
    config, why = resolved()
    assert not config.compile and "C++ compiler" in why


@pytest.mark.parametrize(
    "words, world_size, flags",
    [
        ("--micro_batch_size 4 ", 1, dict(total_batch_size=8192, seq_len=1024, micro_batch_size=5)),
        ("516096 or 522240", 6, dict(micro_batch_size=1, total_batch_size=518000)),
        ("522240 or 528384", 6, dict()),
        ("--n_head 4", 1, dict(n_embd=64, n_head=5)),
        ("--init_from", 1, dict(init_from="gpt2", n_layer=2)),
        ("--seq_len 1024", 1, dict(init_from="gpt2", seq_len=2048)),
        ("--init_from", 1, dict(init_from="gpt2", model="gpt2-xl")),
        ("--max_steps 0", 1, dict(max_steps=0)),
        ("--n_layer 0", 1, dict(n_layer=0)),
        ("--seed -1", 1, dict(seed=-1)),
        ("--lr -1", 1, dict(lr=-1)),
        ("--peak_tflops 0", 1, dict(peak_tflops=0)),
        ("--seed 9223372036854775808", 1, dict(seed=2**63)),
        ("--shard_ranks is for --parallel hsdp, this is zero3", 4, dict(parallel="zero3", shard_ranks=2)),
        ("--shard_ranks 3 does not divide the 4 ranks", 4, dict(parallel="hsdp", shard_ranks=3)),
        ("goes with --parallel ddp, not zero3", 2, dict(parallel="zero3", autocast="fp16")),
        ("--grad_clip -1", 1, dict(grad_clip=-1)),
        ("--beta2 1", 1, dict(beta2=1)),
        ("--seq_len -1", 1, dict(seq_len=-1)),
    ],
)
def test_flags_that_contradict_each_other(words, world_size, flags):
    with pytest.raises(UserError) as error:
        resolved(world_size, **flags)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_has_no_effect_is_noted():
    assert "lr never gets to" in resolved(max_steps=715)[1] and "lr never" not in resolved(max_steps=716)[1]
    _, why = resolved(micro_batch_size=8, total_batch_size=8192, batch_warmup_steps=10)
    assert "batch_warmup_steps has nothing to do" in why


def test_one_rank_has_nothing_to_share():
    config, why = resolved(parallel="zero3", bf16_gradients=True)
    assert (config.parallel, config.bf16_gradients) == ("ddp", False)
    assert "parallel is off: there is one rank" in why and "bf16_gradients is off" in why
    assert "bf16_gradients is off: NCCL alone" in resolved(2, bf16_gradients=True, total_batch_size=8192)[1]
    for ranks, note in ((2, "hsdp is zero3 here"), (1, "hsdp spreads nothing here")):
        assert note in resolved(2, parallel="hsdp", shard_ranks=ranks, total_batch_size=8192)[1]


@pytest.mark.parametrize(
    "rate, flags, expected",
    [
        (3e11, {}, "off"),
        (1e10, {}, "on"),
        (3e11, dict(overlap_gradients="on"), "on"),
        (1e10, dict(compile=False), "auto"),
        (1e10, dict(overlap_gradients="on", parallel="zero3"), "off"),
    ],
)
def test_gradients_are_averaged_beside_backward_where_links_are_slow(monkeypatch, rate, flags, expected):
    monkeypatch.setattr(config_module, "averaging_rate", lambda ranks: rate)
    config, reasons = Config(**flags), []
    config_module.fit_ranks(config, Distributed(0, 4, torch.device("cuda")), reasons)
    assert config.overlap_gradients == expected and bool(reasons) == (not flags or "parallel" in flags)
    assert resolved(4, total_batch_size=8192)[0].overlap_gradients == "on"  # without a GPU nothing is measured


def test_every_rank_takes_the_smallest_micro_batch(monkeypatch):
    monkeypatch.setattr(Distributed, "min", lambda self, value: value / 2)  # another rank has less room
    assert resolved(world_size=2, device="mps", seq_len=128)[0].micro_batch_size == 4


def test_the_demo_is_small():
    config, _ = resolve(DEMO, Distributed(0, 1, torch.device("cpu")))
    assert config.micro_batch_size * config.seq_len <= 128 and config.n_layer * config.n_embd <= 512


def test_errors_on_the_command_line(command):
    expect_error(command("train_gpt2.py", "--tf23"), "--tf23", "--tf32")
    expect_error(command("train_gpt2.py", "--lr", "fast"), "--lr", "fast")
    expect_error(command("train_gpt2.py", "--model", "gpt3"), "gpt3", "gpt2-xl")
    expect_error(command("train_gpt2.py", "--device", "cpu"), "no train shards", "fineweb.py", "--demo")
    if not torch.cuda.is_available():
        expect_error(command("train_gpt2.py", "--device", "cuda"), "--device cuda", "--device cpu")
    done = command("train_gpt2.py", "--device", "cpu", ranks=2)  # under torchrun the line comes once
    assert done.returncode == 1 and done.stderr.count("no train shards") == 1


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(tf32=False, autocast="off", lr=1e-3, micro_batch_size=4, data_dir="my data", shuffle=False, n_head=3),
        replace(DEMO, compile=True, max_steps=7),
    ],
)
def test_flags_parse_into_the_config_they_came_from(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags(config)])
    assert parse(Config, default=defaults(sys.argv)) == config


@pytest.mark.parametrize(
    "generation, flags, off",
    [
        ((9, 0), dict(), {}),
        (
            (9, 0),
            dict(autocast="off"),
            dict(
                fused_gelu="goes with --autocast",
                packed_qkv="--flash and --autocast",
                fp8="--autocast bf16",
                autotune="goes with --autocast",
            ),
        ),
        ((9, 0), dict(flash=False), dict(packed_qkv="goes with --flash and --autocast")),
        ((8, 0), dict(), dict(fp8="A GPU is older than Hopper")),
        (
            (7, 5),
            dict(),
            dict(
                fused_gelu="on Ampere or newer",
                packed_qkv="older than Ampere",
                fp8="older than Hopper",
                autotune="on Ampere or newer",
            ),
        ),
    ],
)
def test_kernels_are_for_gpus_that_have_them(monkeypatch, generation, flags, off):
    kernels = ("fused_loss", "fused_gelu", "packed_attention", "fp8", "autotune")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 0))
    monkeypatch.setattr(device_module, "missing_compiler", lambda device: None)
    monkeypatch.setattr(cublaslt, "library", lambda: "cuBLASLt")
    monkeypatch.setattr(device_module, "import_error", lambda module, package: None)
    monkeypatch.setattr(config_module, "fit_attention", lambda config, device, reasons: None)
    config, why = resolved(device="cuda", fp8=True, **flags)
    assert [name for name in kernels if not getattr(config, name)] == list(off)
    assert all(f"{name} is off: " in why and reason in why for name, reason in off.items())
    if config.fp8:
        with pytest.raises(UserError, match="--fp8 needs multiples of 16"):
            resolved(device="cuda", fp8=True, seq_len=8, micro_batch_size=1, total_batch_size=8, **flags)
    monkeypatch.setattr(device_module, "import_error", lambda module, package: f"no {module} (pip install {package})")
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    config, why = resolved(device="cuda", fp8=True, **flags)
    assert not any(getattr(config, name) for name in kernels)
    assert "pip install triton" in why and (generation < (8, 0) or flags or "install nvidia-cudnn-frontend" in why)
    monkeypatch.setattr(device_module, "missing_compiler", lambda device: "a C compiler (gcc)")
    config, why = resolved(device="cuda", fp8=True, **flags)
    assert "fused_loss is off: Triton needs a C compiler (gcc)" in why


def test_bf16_residual_is_for_gpus(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict(avx512_bf16=True))
    config, reasons = resolved(autocast="bf16")
    assert config.autocast == "bf16" and not config.bf16_residual and "bf16_residual is off: it is for GPUs" in reasons
    config, reasons = resolved(2, autocast="bf16", parallel="zero3", bf16_residual=False)
    assert config.bf16_residual and "bf16_residual is on: zero3 gathers the embeddings in bf16" in reasons
