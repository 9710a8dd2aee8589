"""Time the training step on random tokens: no data, no evaluations.

python bench.py                                    # GPT-2 124M with the default optimizations, on one GPU
python bench.py --steps 50 --fp8 --no_flash        # any flag of train_gpt2.py
python bench.py --record my_gpu.json               # a file to send
torchrun --standalone --nproc_per_node=8 bench.py
"""

import common.interrupt  # first: Ctrl-C during the other imports
from common.interrupt import StopSignal

import os
import shlex
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.cli import flag, progress
from common.errors import UserError, out_of_memory, run
from common.files import write_json
from config import SETTLING_STEPS, Config, read_command_line, resolve
from data.loader import make_batch
from data.tokenizer import END_OF_TEXT
from optimizations import plan_switches
from parallel import place, process_group
from parallel.memory import free_memory, less_memory
from train_gpt2 import build, train_step
from watch.hardware import ask_nvidia_smi, environment, flops_per_token, gpu_facts, mfu, peak_flops, peak_memory
from watch.plan import note_lines

SIZES = ("n_layer", "n_head", "n_embd", "seq_len", "micro_batch_size", "total_batch_size", "seed")  # in a record


@dataclass
class Timing:
    """What is timed."""

    TITLE = "timing"

    steps: int = flag(20, at_least=1)
    """Steps that are timed, after a few that warm up."""
    record: str | None = None
    """Write command, versions, GPU, clocks and the time of every step to this new JSON file, to send or to keep."""


@dataclass
class BenchConfig(Config, Timing):
    """Time the training step on random tokens.

    Takes every flag of train_gpt2.py. It reads no data, evaluates nothing and writes nothing but --record's file.
    """


def main():
    config, typed = read_command_line(BenchConfig)
    for name in ("profile", "memory_snapshot", "ladder", "init_from", "resume"):
        if getattr(config, name) not in (getattr(Config, name), "never"):
            raise UserError(f"--{name} is for train_gpt2.py: bench.py times steps from random weights; leave it out")
    distributed = process_group.start(config.device, config.tensor, config.context, config.pipeline)
    distributed.on_main(lambda: check_new(config.record))
    with out_of_memory(less_memory()):
        time_steps(config, distributed, typed)
    process_group.stop()


def check_new(path):
    """Raises UserError if a file exists or cannot be written. path: None is no file."""
    try:
        if path is not None:
            open(path, "x").close()
            os.unlink(path)
    except OSError as error:
        raise UserError(f"--record {path}: it cannot be written as a new file: {error.strerror}") from error


def time_steps(config, distributed, typed):
    # a warm-up would keep the weights near their random start, where the same kernels draw more power and so are slower
    config = replace(config, warmup_steps=0, batch_warmup_ratio=0.0, lr_schedule="constant", hellaswag_every=0)
    config, notes = resolve(config, distributed, free_memory(distributed), typed=typed)
    for line in note_lines(notes) if distributed.is_main else ():
        print(f"note       {line}")
    if distributed.is_main and distributed.device.type == "cpu" and config.model != "tiny":
        print(f"note       a step of {config.total_batch_size:,} tokens takes long on a CPU: --model tiny has 1,024")
    trainer = build(config, distributed)
    B, T = config.micro_batch_size, config.seq_len
    tokens = torch.randint(END_OF_TEXT, (B, T + 1))
    tokens[torch.rand(B, T + 1) < 1e-3] = END_OF_TEXT  # documents of 1,000 tokens, FineWeb-Edu's mean
    batch = make_batch(tokens[:, :-1], tokens[:, 1:], distributed.device)
    results, asked = [], None
    common.interrupt.end_at_once()  # a KeyboardInterrupt during compilation may abort the process
    with out_of_memory(less_memory(B)):
        for step in progress(range(SETTLING_STEPS + config.steps), "steps"):
            if step == SETTLING_STEPS and config.record and distributed.is_main:
                asked = ask_nvidia_smi(distributed.device)  # answers while the steps run
            results.append(train_step(trainer, step, lambda _: batch, StopSignal()))
    if distributed.is_main:
        measured = report(trainer, results)
        if config.record:
            write_record(config, distributed, measured, gpu_facts(asked))


def report(trainer, results):
    """Print the median rate; returns the record's measurements. results: the StepResult of every step, warm-up
    included."""
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
    return dict(
        tokens_per_second=round(rate),
        mfu_percent=reached and round(100 * reached, 1),
        peak_gb=round(memory, 2),
        first_step_seconds=round(results[0].seconds, 1),
        ms=[round(1000 * result.seconds, 2) for result in results],
        settling_steps=SETTLING_STEPS,  # the first of ms, which the median leaves out
    )


def write_record(config, distributed, measured, gpu):
    """Write --record's file. measured: of report(); gpu: rank 0's, of gpu_facts()."""
    # paths may be private: neither the folder of bench.py nor that of the record
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    for own in (f"--record {shlex.quote(config.record)}", shlex.quote(f"--record={config.record}")):
        command = command.replace(f" {own}", "")
    facts = environment(distributed.device) | dict(command=command, gpus=distributed.world_size, gpu=gpu)
    facts |= {name: getattr(config, name) for name in SIZES}
    on = [name for name, is_on in plan_switches(config).items() if is_on]
    write_json(config.record, facts | dict(on=on) | measured)
    print(f"record: {config.record}")


if __name__ == "__main__":
    run(main)
