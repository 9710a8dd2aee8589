"""Train GPT-2.

    python train_gpt2.py --demo                                       # a few minutes, on anything
    python train_gpt2.py                                              # one GPU
    python train_gpt2.py --ladder                                     # what each optimization buys here
    torchrun --standalone --nproc_per_node=8 train_gpt2.py            # eight GPUs

Every optimization is a flag: see --help. The plan is printed before the first step; then one line a step.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import contextlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from checkpoints import load, resume
from checkpoints.checkpointer import MAX_BAD_STEPS, Checkpointer
from common.device import be_deterministic
from common.dtensors import fill
from common.errors import out_of_memory, run
from common.signals import Stopped, StopSignal
from config import Config, read_command_line, refuse_unavailable_flags, resolve
from data import demo
from data.loader import Loader, open_streams
from evaluation import bits_per_byte, validation_loss
from hellaswag import choice_in_training
from kernels.attention import limit_sdpa
from kernels.compile import compile_model
from model import GPT, GPTConfig
from optim.optimizer import make_optimizer, update_if_finite
from optim.schedules import accumulation_steps, learning_rate
from optimizations import model_switches, plan_switches, saved_operators
from parallel import context, fsdp, pipeline, process_group, tensor
from parallel.activation_checkpointing import checkpoint_activations
from parallel.ddp import micro_batch, wrap_ddp, zero_gradients
from parallel.memory import free_memory, less_memory
from sample import sample_in_training
from watch import curves, hang
from watch.hardware import flops_per_token
from watch.plan import print_plan, print_summary
from watch.ranks import RankMonitor
from watch.run_log import RunLog


def main():
    if any(argument.partition("=")[0] == "--ladder" for argument in sys.argv):
        from ladder import main as climb  # measures, and has more flags: no run imports it

        return climb()
    config, typed = read_command_line()
    distributed = process_group.start(config.device, config.tensor, config.context, config.pipeline)
    with out_of_memory(less_memory()):
        train(config, distributed, typed)
    process_group.stop()


# ----------------------------------------------------------------------------------------------------------------------
# Build


@dataclass
class Trainer:
    """The state of a training step, made by build()."""

    config: Config
    distributed: process_group.Distributed
    model: GPT  # the plain module, which is saved and sampled from
    forward: Callable  # the same weights, compiled: for evaluations
    train_forward: Callable  # forward, in DDP where ddp has several ranks
    autocast: torch.autocast
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    monitor: RankMonitor


def build(config, distributed, weights=None, sizes=None):
    """The Trainer of a resolved Config. weights: a path for load_weights, with `sizes`; None: random weights."""
    # tf32: float32 GEMMs on tensor cores, inputs rounded to 10 mantissa bits (no effect under autocast)
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    # autocast: GEMMs and attention in 16 bits, at twice TF32's rate and half its bytes; master weights stay float32
    half = torch.float16 if config.autocast == "fp16" else torch.bfloat16
    autocast = torch.autocast(distributed.device.type, half, enabled=config.autocast != "off")
    # fp16's smallest positive number is 6e-8: the loss is scaled up so that gradients stay above it
    scaler = torch.amp.GradScaler(distributed.device.type, enabled=config.autocast == "fp16")
    limit_sdpa(config.attention)

    torch.manual_seed(config.seed)
    sizes = sizes or GPTConfig(config.seq_len, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    with torch.device("meta"):  # shapes only: one rank may not have memory for all weights
        sizes = replace(sizes, pad_to=math.lcm(128, config.tensor), **model_switches(config))
        model = pipeline.Pipeline(sizes, config, distributed, autocast) if config.pipeline > 1 else GPT(sizes)
    # activation_checkpointing: less memory, for up to a third more computation
    checkpoint_activations(model, config.activation_checkpointing, saved_operators())
    # parallel: with ddp each rank holds all weights, with zero2, zero3 and hsdp a shard; tensor splits each layer
    fsdp.place(model, config, distributed)
    if weights:
        load.load_weights(weights, model)
    else:
        model.init_weights(fill)
    tensor.order_by_rank(model.named_parameters())
    context.split(model, config, distributed)  # each rank has some tokens of every sequence; in attention some heads
    # compile: fuses element-wise operations and reductions into one kernel, without Python between kernels.
    # tuned_gemms: GEMMs by the fastest of cuBLASLt's algorithms. A Pipeline compiles its stages.
    forward = compile_model(model, config) if config.pipeline == 1 else model
    # ddp: each rank has all weights and a share of the batch; the last backward averages gradients over the ranks
    train_forward = wrap_ddp(forward, config, distributed)
    optimizer = make_optimizer(model, config)
    # fp8: the blocks' GEMMs in 8 bits, at twice the rate, each tensor with a scale from its amax
    if config.fp8:
        from kernels import fp8  # needs Triton

        tokens = config.micro_batch_size * config.seq_len // config.context
        fp8.convert(model, optimizer, targets=accumulation_steps(0, config, distributed.data_size) * tokens)
    monitor = RankMonitor(model, train_forward, config, distributed)
    return Trainer(config, distributed, model, forward, train_forward, autocast, optimizer, scaler, monitor)


# ----------------------------------------------------------------------------------------------------------------------
# One step


@dataclass
class StepResult:
    loss: float  # nats, the mean over the step's tokens
    grad_norm: float  # before clipping
    tokens: int
    finite: bool  # whether loss and gradient norm are; with fp16 only the loss counts while its scale is 1 or more
    loss_scale: float | None  # fp16's
    stop: bool  # some rank has received a stop signal
    seconds: float  # of the whole step, data loading included
    own_ms: list  # each rank's own time in the step before, see watch/ranks.py


def train_step(trainer, step, next_batch, stop_signal=None):
    """Forward and backward over the micro-batches of step `step`, clip, update: a StepResult.

    next_batch: Loader.next_batch. Raises Stopped when there is one rank and a signal arrives between micro-batches: no
    weight has changed. Several ranks finish the step.
    """
    trainer.monitor.start_step()
    config, distributed, scaler = trainer.config, trainer.distributed, trainer.scaler
    world_size = distributed.world_size
    micro_steps = accumulation_steps(step, config, distributed.data_size)
    for group in trainer.optimizer.param_groups:
        group["lr"] = learning_rate(step, config, group["peak"])
    loss_sum = torch.zeros((), device=distributed.device)
    if config.pipeline > 1:  # a schedule overlaps the forwards and backwards of the stages
        loss_sum += trainer.model.accumulate(next_batch, micro_steps)
    else:
        for micro_step in range(micro_steps):
            last = micro_step == micro_steps - 1
            x, y, offsets = next_batch()
            # gradients accumulate: ddp all-reduces them in the last backward, zero2 and zero3 reduce-scatter in each
            with micro_batch(trainer.model, trainer.train_forward, config, last):
                with trainer.autocast:
                    loss = trainer.train_forward(x, y, offsets) / micro_steps
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
            if stop_signal and stop_signal.name and world_size == 1 and not last:
                raise Stopped
    scaler.unscale_(trainer.optimizer)
    norm = pipeline.clip_gradients(trainer.model, config.grad_clip)
    stop = bool(stop_signal and stop_signal.name)
    wait = distributed.begin_all_reduce(loss_sum / world_size, norm / world_size, stop, trainer.monitor.report())
    update_if_finite(trainer.optimizer, scaler, norm)
    zero_gradients(trainer.optimizer, trainer.train_forward)
    loss, norm, stop, *own_ms = wait()  # waits for the all-reduce, not for the update: the GPU stays busy
    scale = scaler.get_scale() if scaler.is_enabled() else None
    # fp16: GradScaler skips an update that overflows and halves its scale, which is normal until the scale is below 1
    finite = math.isfinite(loss if scale and scale >= 1 else loss + norm)
    tokens = micro_steps * config.micro_batch_size * config.seq_len * distributed.data_size
    return StepResult(loss, norm, tokens, finite, scale, stop > 0, trainer.monitor.end_step(), own_ms)


# ----------------------------------------------------------------------------------------------------------------------
# Training


def train(flags, distributed, typed):
    """Train as a Config says. typed: the flags on the command line; one that is unavailable here is an error."""
    if flags.deterministic:
        be_deterministic()
    fsdp.check_machines(flags, distributed)
    start = resume.find_start(flags, distributed)
    config, notes = resolve(flags, distributed, free_memory(distributed), start.sizes, start.resumed, start.step)
    refuse_unavailable_flags(typed, notes)
    notes += resume.changed_flags(start, config, distributed.world_size)
    if config.demo:
        distributed.on_main(lambda: demo.make_data(config.data_dir))
    train_stream, val_stream, data = open_streams(config)
    resume.check_data(start, config, data)
    hellaswag = choice_in_training(config)
    place = (distributed.device, distributed.data_rank, distributed.data_size)
    loader = Loader(train_stream, config.micro_batch_size, config.seq_len, *place)
    trainer = build(config, distributed, start.weights, start.sizes)
    if start.resumed:
        resume.restore(start, trainer.model, trainer.optimizer, trainer.scaler, loader, distributed)
    flops = flops_per_token(trainer.model, config.seq_len)
    log = distributed.on_main(lambda: RunLog(config, flags, distributed, flops, start.resumed, start.training))
    config.run_name = distributed.broadcast(log and log.folder.name)  # RunLog names a run that has no name
    if log:  # on rank 0
        print_plan(trainer, notes, start, train_stream, val_stream, hellaswag, log, plan_switches(config))
    checkpointer = Checkpointer(trainer, loader, data, log, start.step)
    oom = out_of_memory(less_memory(config.micro_batch_size))
    trace = contextlib.nullcontext()
    if config.profile or config.memory_snapshot:
        from measure import profile

        trace = profile.trace(trainer, log, start.step)
    with oom, hang.watch(checkpointer.folder, distributed), trace as tracer:
        loop(trainer, loader, val_stream, hellaswag, checkpointer, log, tracer, start)


def loop(trainer, loader, val_stream, hellaswag, checkpointer, log, tracer, start):
    """The training loop and the end of the run. log and tracer are None on ranks other than 0."""
    config = trainer.config
    step, tokens = start.step, start.tokens  # steps, and tokens trained on, so far
    stopping, stop_signal, bad_steps = False, None, 0  # bad_steps: consecutive ones with a loss or norm not finite
    # until the first step, which compiles, is done, a signal ends the process at once: there is nothing to save
    common.interrupt.end_at_once()

    while True:
        last = stopping or step >= config.max_steps
        checkpointer.save_if_due(step, tokens, healthy=not bad_steps, last=last)
        try:
            if not stopping:
                evaluate_if_due(trainer, step, tokens, val_stream, hellaswag, log, stop_signal)
            if last:
                break
            result = train_step(trainer, step, loader.next_batch, stop_signal)
        except Stopped:  # between batches, on all ranks: nothing of this evaluation or step is kept
            stopping = True
            continue
        stop_signal = stop_signal or StopSignal()  # finish the micro-batch (several ranks: the step), save, stop
        tokens += result.tokens
        bad_steps = 0 if result.finite else bad_steps + 1
        if log:
            log.train_step(step, tokens, result, learning_rate(step, config, config.lr), bad_steps)
        if tracer:
            tracer.step()
        step += 1
        stopping = result.stop
        if bad_steps >= MAX_BAD_STEPS:
            break

    checkpointer.finish(step, bad_steps)
    if log:
        log.close(finished=not stopping)
        print_summary(config, log, tokens, curves.draw_own(log.folder, config.max_steps))
        if stopping:
            signal = stop_signal.name or "a signal to another rank"
            print(f"{signal}: stopped at step {step}; {checkpointer.how_to_continue()}")
        log.check_complete()


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation


def evaluate_if_due(trainer, step, tokens, val_stream, hellaswag, log, stop_signal):
    """Validation, HellaSwag and samples, each when its flag says so and after the last step. All ranks must call it.

    Raises Stopped, on all ranks, if any rank received a signal; an unfinished result is not logged.
    """
    config, distributed, model = trainer.config, trainer.distributed, trainer.model

    def due(every):
        return every > 0 and (step % every == 0 or step == config.max_steps)

    def losses_of(x, y, offsets, at=None):
        with trainer.autocast:
            return trainer.forward(x, y, offsets, reduction="none", at=at)

    if due(config.val_every):
        began = time.perf_counter()
        with fsdp.gathered(model, config):
            loss = validation_loss(losses_of, val_stream, config, distributed, stop_signal)
        if log:
            log.validation(step, tokens, loss, time.perf_counter() - began, bits_per_byte(loss, val_stream, config))
    if hellaswag and due(config.hellaswag_every):
        began = time.perf_counter()
        with fsdp.gathered(model, config):
            acc, acc_norm = hellaswag.evaluate(losses_of, distributed, stop_signal=stop_signal)
        if log:
            log.hellaswag(step, tokens, acc, acc_norm, len(hellaswag.labels), time.perf_counter() - began)
    if step > 0 and due(config.sample_every):
        with fsdp.gathered(model, config), trainer.autocast:
            texts = sample_in_training(model, config.seed, distributed, stop_signal)
        if log:
            log.samples(step, tokens, texts)


if __name__ == "__main__":
    run(main)
