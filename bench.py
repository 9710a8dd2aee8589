"""Time the training step on random tokens: no data, no evaluations, no files.

python bench.py                                    # GPT-2 124M with the default optimizations, on one GPU
python bench.py --steps 50 --fp8 --no_flash        # any flag of train_gpt2.py
torchrun --standalone --nproc_per_node=8 bench.py
"""

import common.interrupt  # first: Ctrl-C during the other imports
from common.interrupt import StopSignal

import statistics
from dataclasses import dataclass, replace

import torch

from common.cli import flag, progress
from common.errors import UserError, out_of_memory, run
from config import GROUPS, SETTLING_STEPS, Config, read_command_line, resolve
from data.loader import make_batch
from data.tokenizer import END_OF_TEXT
from parallel import place, process_group
from parallel.memory import free_memory, less_memory
from train_gpt2 import build, train_step
from watch.hardware import environment, flops_per_token, mfu, peak_flops, peak_memory
from watch.plan import note_lines


@dataclass
class Timing:
    """What is timed."""

    TITLE = "timing"

    steps: int = flag(20, at_least=1)
    """Steps that are timed, after a few that warm up."""


@dataclass
class BenchConfig(Timing, Config):
    """Time the training step on random tokens.

    Takes every flag of train_gpt2.py. It reads no data, evaluates nothing and writes nothing.
    """

    GROUPS = (Timing, *GROUPS)


def main():
    config, typed = read_command_line(BenchConfig)
    if config.profile or config.memory_snapshot:
        raise UserError("--profile and --memory_snapshot are for train_gpt2.py: both slow down what is measured here")
    if config.ladder:
        raise UserError("--ladder is for train_gpt2.py: leave it out")
    if config.init_from != "scratch" or config.resume not in ("auto", "never"):
        raise UserError("bench.py starts from random weights: leave out --init_from and --resume")
    distributed = process_group.start(config.device, config.tensor, config.context, config.pipeline)
    with out_of_memory(less_memory()):
        time_steps(config, distributed, typed)
    process_group.stop()


def time_steps(config, distributed, typed):
    # a warm-up would keep the weights near their random start, where the same kernels draw more power and so are slower
    config = replace(config, warmup_steps=0, lr_schedule="constant", hellaswag_every=0)
    config, notes = resolve(config, distributed, free_memory(distributed), typed=typed)
    for line in note_lines(notes) if distributed.is_main else ():
        print(f"note       {line}")
    trainer = build(config, distributed)
    B, T = config.micro_batch_size, config.seq_len
    tokens = torch.randint(END_OF_TEXT, (B, T + 1))
    tokens[torch.rand(B, T + 1) < 1e-3] = END_OF_TEXT  # documents of 1,000 tokens, FineWeb-Edu's mean
    batch = make_batch(tokens[:, :-1], tokens[:, 1:], distributed.device)
    results = []
    common.interrupt.end_at_once()  # a KeyboardInterrupt during compilation may abort the process
    with out_of_memory(less_memory(B)):
        for step in progress(range(SETTLING_STEPS + config.steps), "steps"):
            results.append(train_step(trainer, config.batch_warmup_steps + step, lambda: batch, StopSignal()))
    if distributed.is_main:
        report(trainer, results)


def report(trainer, results):
    """Print the median rate. results: the StepResult of every step, warm-up included."""
    config, distributed = trainer.config, trainer.distributed
    step = statistics.median(result.seconds for result in results[SETTLING_STEPS:])
    rate = results[-1].tokens / step
    peak = peak_flops(distributed.device) * distributed.world_size
    reached = mfu(rate, flops_per_token(trainer.model, config.seq_len), peak)
    share = f", MFU {reached:.1%}" if reached else ""
    memory = peak_memory(distributed.device)
    print(f"{rate:,.0f} tokens/sec, {1000 * step:.2f} ms a step{share}, peak memory {memory:.2f} GB")
    devices = f"{distributed.world_size} × {environment(distributed.device)['hardware']}"
    devices += f", {place.describe(config, distributed)}" if distributed.world_size > 1 else ""
    print(f"first step {results[0].seconds:.1f} s; {devices}; PyTorch {torch.__version__}")


if __name__ == "__main__":
    run(main)
