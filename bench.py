"""Time the training step on random tokens: no data, no evaluations, no files.

python bench.py                                    # GPT-2 124M, everything on, on one GPU
python bench.py --steps 50 --fp8 --no_flash        # any flag of train_gpt2.py
torchrun --standalone --nproc_per_node=8 bench.py
"""

import statistics
import sys
import time
from dataclasses import dataclass

import torch
from tqdm import trange

from checkpoints import pieces
from common import cli
from common.cli import UserError, parse, run
from common.device import be_deterministic, less_memory
from config import MODEL_SWITCHES, SETTLING_STEPS, Config, check_given, defaults, resolve
from kernels import cublaslt
from model import GPT, GPTConfig
from observe.metrics import environment, flops_per_token, peak_memory, peak_tflops
from optim.optimizer import accumulation_steps, make_optimizer
from parallel import distributed


@dataclass
class BenchConfig(Config):
    """Time the training step on random tokens.

    Takes every flag of train_gpt2.py; those of data, evaluations and logs have nothing to do here.
    """

    steps: int = 20
    """Steps that are timed, after a few that warm up."""


def main():
    config = parse(BenchConfig, default=BenchConfig(**vars(defaults(sys.argv))))
    if config.steps < 1:
        raise UserError(f"--steps {config.steps}: it must be at least 1")
    if config.init_from != "scratch":
        raise UserError("bench.py starts from random weights: leave out --init_from")
    distributed = distributed.start(config.device)
    time_steps(config, distributed)
    distributed.stop()


def time_steps(config, distributed):
    if config.deterministic:
        be_deterministic()  # before cuDNN makes its plans
    config, reasons = resolve(config, distributed)
    check_given(sys.argv, reasons)
    device, B, T = distributed.device, config.micro_batch_size, config.seq_len
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    cublaslt.autotune = config.autotune
    kind = torch.float16 if config.autocast == "fp16" else torch.bfloat16
    autocast = torch.autocast(device.type, kind, enabled=config.autocast != "off")
    scaler = torch.amp.GradScaler(device.type, enabled=config.autocast == "fp16")
    torch.manual_seed(config.seed)
    sizes = dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    with torch.device("meta"):
        model = GPT(GPTConfig(seq_len=T, **sizes, **{name: getattr(config, name) for name in MODEL_SWITCHES}))
    distributed.checkpoint_activations(model, config.activation_checkpointing)
    cli.out_of_memory_hint = less_memory()
    distributed.place(model, config, distributed)
    model.init_weights(pieces.fill)
    if config.fp8:
        from kernels import fp8

        fp8.convert(model, targets=accumulation_steps(0, config, distributed.world_size) * B * T)
    forward = distributed.wrap_ddp(torch.compile(model, dynamic=False) if config.compile else model, config, distributed)
    optimizer = make_optimizer(model, config)
    tokens = torch.randint(model.config.vocab_size, (B, T + 1), device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    micro_steps = accumulation_steps(config.batch_warmup_steps, config, distributed.world_size)
    for reason in reasons if distributed.is_main else ():
        print(f"note       {reason}")

    cli.out_of_memory_hint = less_memory(B)
    seconds = []
    for _ in trange(SETTLING_STEPS + config.steps, unit="step", leave=False, disable=None if distributed.is_main else True):
        start = time.perf_counter()
        loss_sum = torch.zeros((), device=device)
        for micro_step in range(micro_steps):
            with distributed.micro_batch(model, forward, config, last=micro_step == micro_steps - 1):
                with autocast:
                    loss = forward(x, y) / micro_steps
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf"))
        read = distributed.begin_all_reduce(loss_sum)
        scaler.step(optimizer)
        scaler.update()
        distributed.zero_gradients(optimizer, forward)
        if config.fp8:
            fp8.follow(model, micro_steps)
        read()  # waits for the gradients, not for the update, as train_gpt2.py does
        seconds.append(time.perf_counter() - start)

    if distributed.is_main:
        step = statistics.median(seconds[SETTLING_STEPS:])
        rate = micro_steps * B * T * distributed.world_size / step
        peak = config.peak_tflops or peak_tflops(device)
        mfu = f", MFU {rate * flops_per_token(model, T) / (peak * 1e12 * distributed.world_size):.1%}" if peak else ""
        print(f"{rate:,.0f} tokens/sec, {1000 * step:.2f} ms a step{mfu}, peak memory {peak_memory(device):.2f} GB")
        devices = f"{distributed.world_size} × {environment(device)['hardware']}"
        devices += f", {distributed.in_words(config, distributed)}" if distributed.world_size > 1 else ""
        print(f"first step {seconds[0]:.1f} s; {devices}; PyTorch {torch.__version__}")


if __name__ == "__main__":
    run(main)
