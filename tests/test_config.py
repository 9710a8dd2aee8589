import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train_gpt2
from common import device as device_module
from common.cli import given, parse
from common.errors import UserError
from config import Config, command_line, defaults, resolve, set_sizes
from model import GPTConfig
from optim import schedules
from optim.optimizer import OPTIMIZERS
from optim.schedules import TINY
from parallel.memory import bytes_of_weights, choose_micro_batch_size, params_of_rank
from parallel.process_group import Distributed

DEMO = Config(**schedules.DEMO)


def resolved(world_size=1, device="cpu", machine=None, **flags):
    """(the Config, its notes as text)"""
    distributed = Distributed(0, world_size, torch.device(device), ranks_of_machine=machine or world_size)
    config, notes = resolve(
        Config(**flags), distributed, None, SimpleNamespace(sizes=GPTConfig(), resumed=None, step=0)
    )
    return config, "\n".join(map(str, notes))


def test_help_explains_every_flag_in_sections(command):
    done = command("train_gpt2.py", "--help")
    assert done.returncode == 0
    for name in vars(Config()):
        assert f"--{name} " in done.stdout or f"--{name}," in done.stdout, name
    for flag in ("--no_tf32", "--no_compile", "--no_flash", "--no_pad_vocab", "--no_fused_adamw", "--no_shuffle"):
        assert flag in done.stdout
    titles = [f"─ {group.TITLE} options ─" for group in reversed(Config.__bases__)]
    assert sorted(titles, key=done.stdout.index) == titles


def test_there_are_few_flags():
    """Whoever adds one takes one away."""
    assert len(vars(Config())) <= 65


def test_sizes_follow_the_model_and_give_way_to_their_own_flags():
    config, _ = resolved(model="gpt2-xl")
    assert (config.n_layer, config.n_head, config.n_embd) == (48, 25, 1600)
    config, _ = resolved(model="gpt2-xl", n_layer=2)
    assert (config.n_layer, config.n_head, config.n_embd) == (2, 25, 1600)
    config = Config(
        demo=True, model="tiny", init_from="x", seq_len=64, total_batch_size=64
    )  # the demo's model is not a flag that was given
    set_sizes(config, SimpleNamespace(sizes=GPTConfig(64, n_layer=1, n_head=2, n_embd=32), resumed=None))
    assert (config.n_layer, config.n_head, config.n_embd) == (1, 2, 32)


def test_fine_tuning_fits_the_weights_and_the_data(corpus):
    """Unless flags say otherwise: the weights' positions, and a tenth of the data's tokens, 4,200, or less."""
    start = SimpleNamespace(sizes=GPTConfig(64, n_layer=1, n_head=2, n_embd=32), resumed=None)
    for flags, typed, expected in (
        ({}, (), (64, 256)),
        (dict(seq_len=32), (), (32, 256)),
        (dict(total_batch_size=128), (), (64, 128)),
        ({}, ("total_batch_size",), (64, 524288)),
    ):
        config = Config(init_from="x", data_dir=str(corpus), **flags)
        set_sizes(config, start, typed)
        assert (config.seq_len, config.total_batch_size) == expected
    # the same command again continues with the batch that the run has, whatever the data's tokens are now
    start = SimpleNamespace(sizes=start.sizes, resumed="log/x/checkpoint", training=dict(run=dict(total_batch_size=64)))
    config = Config(init_from="x", data_dir=str(corpus))
    set_sizes(config, start)
    assert config.total_batch_size == 64


def test_the_micro_batch_fits_and_divides():
    def chosen(free, world_size=1, **flags):
        gpus = Distributed(0, world_size, torch.device("cuda"))
        config = replace(Config(n_layer=12, n_head=12, n_embd=768), **flags)
        return choose_micro_batch_size(config, gpus, free * 2**30)

    sizes = []
    for free in (4, 14, 22, 78, 139):
        size, reason = chosen(free)
        assert 524288 % (size * 1024) == 0 and f"{free} GB" in reason
        sizes.append(size)
    assert sizes == sorted(sizes) and sizes[0] < 8 and sizes[-2:] == [128, 128]
    assert chosen(139, 8)[0] == 64  # the README's run: no accumulation on eight GPUs
    assert chosen(139, 8, total_batch_size=8 * 4 * 1024)[0] == 4
    assert chosen(139, n_layer=48, n_head=25, n_embd=1600)[0] < 64
    large = dict(n_layer=32, n_head=32, n_embd=4096)
    assert "may not fit" in chosen(78, 4, **large)[1]  # 6.7 billion weights, 16 bytes each
    sizes = [
        chosen(78, 4, **large, parallel="zero3", activation_checkpointing=mode)[0]
        for mode in ("off", "selective", "full")
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    distributed, config = Distributed(0, 4, torch.device("cuda")), Config(**large, parallel="zero2")
    bf16, float32 = (bytes_of_weights(replace(config, autocast=a), distributed) for a in ("bf16", "off"))
    assert float32 - bf16 > 2 * params_of_rank(config)  # gathered in float32


def test_a_gpu_without_bf16_gets_fp16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    config, notes = resolved(device="cuda", micro_batch_size=4)
    assert config.autocast == "fp16" and not config.tf32 and not config.bf16_residual
    assert "autocast is fp16: Tesla T4 has no bf16" in notes


def test_without_a_compiler_it_runs_uncompiled(monkeypatch):
    monkeypatch.setattr(device_module.shutil, "which", lambda name: None)
    config, why = resolved()
    assert not config.compile and "C++ compiler" in why


@pytest.mark.parametrize(
    "words, world_size, flags",
    [
        ("--micro_batch_size 4 ", 1, dict(total_batch_size=8192, seq_len=1024, micro_batch_size=5)),
        ("516096 or --total_batch_size 522240", 6, dict(micro_batch_size=1, total_batch_size=518000)),
        ("522240 or --total_batch_size 528384", 6, dict()),
        ("--n_head 4", 1, dict(n_embd=64, n_head=5)),
        ("--init_from", 1, dict(init_from="gpt2", n_layer=2)),
        ("--seq_len 1024", 1, dict(init_from="gpt2", seq_len=2048)),
        ("--init_from", 1, dict(init_from="gpt2", model="gpt2-xl")),
        ("--max_steps 0", 1, dict(max_steps=0)),
        ("--n_layer 0", 1, dict(n_layer=0)),
        ("--val_tokens 0", 1, dict(val_tokens=0)),
        ("--seed -1", 1, dict(seed=-1)),
        ("--lr -1", 1, dict(lr=-1)),
        ("--lr inf: it must be finite", 1, dict(lr=float("inf"))),
        ("--seed 9223372036854775808", 1, dict(seed=2**63)),
        ("needs --parallel ddp, not zero3", 2, dict(parallel="zero3", autocast="fp16")),
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
    assert "lr never reaches" in resolved(max_steps=714)[1] and "lr never" not in resolved(max_steps=715)[1]
    _, notes = resolved(adamw_lr=1e-4, cooldown_ratio=0.2)
    assert "adamw_lr is 0.0001: it has no effect without --optimizer muon or normuon" in notes
    assert "cooldown_ratio is 0.2: it has no effect without --lr_schedule wsd" in notes
    assert "adamw_lr" not in resolved(adamw_lr=1e-4, optimizer="muon")[1]


def test_gradients_do_not_accumulate_in_bf16():
    flags = dict(bf16_gradients=True, parallel="hsdp", machine=2, total_batch_size=8192)
    with pytest.raises(UserError, match="would also accumulate 2 micro-batches in bf16"):
        resolved(4, **flags, micro_batch_size=1)
    for fits in (dict(micro_batch_size=2), dict(micro_batch_size=1, parallel="zero3")):
        assert resolved(4, **flags | fits)[0].bf16_gradients


def test_one_rank_has_nothing_to_share():
    config, notes = resolved(parallel="zero3", bf16_gradients=True)
    assert (config.parallel, config.bf16_gradients) == ("ddp", False)
    assert "parallel is ddp: there is one rank" in notes and "bf16_gradients is off" in notes
    assert "bf16_gradients is off: it needs NCCL" in resolved(2, bf16_gradients=True, total_batch_size=8192)[1]
    assert "nothing is sharded" in resolved(2, parallel="hsdp", machine=1, total_batch_size=8192)[1]


def test_the_demo_is_small():
    config, _ = resolve(DEMO, Distributed(0, 1, torch.device("cpu")))
    assert config.micro_batch_size * config.seq_len <= 1024 and config.n_layer * config.n_embd <= 512


def test_errors_on_the_command_line(command, monkeypatch):
    for arguments, words in (
        (["--device", "cpu"], "no train shards.*fineweb.py.*--demo"),
        *([] if torch.cuda.is_available() else [(["--device", "cuda"], "--device cuda.*--device cpu")]),
    ):
        monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *arguments])
        with pytest.raises(UserError, match=words):
            train_gpt2.main()
    done = command("train_gpt2.py", "--device", "cpu", ranks=2)  # under torchrun the line comes once
    assert done.returncode == 1 and done.stderr.count("no train shards") == 1


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(tf32=False, autocast="off", lr=1e-3, micro_batch_size=4, data_dir="my data", shuffle=False, n_head=3),
        replace(DEMO, compile=True, max_steps=7),
        Config(**dict(TINY, data_dir="my data", seed=3)),
        Config(**dict(TINY, **OPTIMIZERS["muon"].defaults)),
    ],
)
def test_flags_parse_into_the_config_they_came_from(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *command_line(replace(config, resume="log/A", config="a.yaml"))])
    assert parse(Config, default=defaults(given(Config))) == config


def test_a_recipe_and_a_file_of_flags(tmp_path):
    """The command line chooses the recipe, and every value of the file counts, also one that is the usual default."""
    (tmp_path / "a.yaml").write_text("optimizer: muon\nlr: 5e-4\nwarmup_steps: 10\n")
    usual, adamw = (defaults(dict(config=str(tmp_path / "a.yaml")) | typed) for typed in ({}, dict(optimizer="adamw")))
    assert usual == Config(**dict(OPTIMIZERS["muon"].defaults, lr=5e-4, warmup_steps=10))
    assert replace(adamw, optimizer="adamw") == Config(lr=5e-4, warmup_steps=10)
    (tmp_path / "b.yaml").write_text(f"max_steps: {Config.max_steps}\n")
    assert defaults(dict(config=f"{tmp_path}/b.yaml", model="tiny")).max_steps == Config.max_steps
    assert defaults(dict(config=f"{tmp_path}/b.yaml", demo=True)) == replace(DEMO, max_steps=Config.max_steps)


def test_a_sharded_model_has_a_bf16_residual_stream(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict(avx512_bf16=True))
    config, notes = resolved(autocast="bf16")
    assert (
        config.autocast == "bf16"
        and not config.bf16_residual
        and "bf16_residual is off: this is cpu, not an NVIDIA GPU" in notes
    )
    config, notes = resolved(2, autocast="bf16", parallel="zero3", bf16_residual=False)
    assert config.bf16_residual and "bf16_residual is on: zero3 gathers the embeddings in bf16" in notes
