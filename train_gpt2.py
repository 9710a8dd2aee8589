"""Train GPT-2.

    python train_gpt2.py --demo                                       # a few minutes, on anything
    python train_gpt2.py                                              # one GPU
    python train_gpt2.py --ladder                                     # what each optimization buys here
    torchrun --standalone --nproc_per_node=8 train_gpt2.py            # eight GPUs

Every optimization is a flag: see --help. The plan is printed before the first step; then one line a step.
"""

import common.interrupt  # first: Ctrl-C during the other imports
from common.interrupt import Stopped, StopSignal

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from checkpoints import resume
from checkpoints.checkpointer import Checkpointer
from common.device import be_deterministic
from common.errors import out_of_memory, run
from config import Config, gpt_config, read_command_line, resolve
from data.loader import Loader, TokenStream, open_streams
from evaluation import evaluate_if_due
from hellaswag import Tasks, tasks_in_training
from kernels.attention import limit_sdpa
from kernels.compile import compile_model
from model import GPT
from optim.optimizer import make_optimizer, update_if_finite
from optim.schedules import batch_share, micro_batches, set_learning_rates, steps_in_time
from optimizations import plan_switches, saved_operators
from parallel import activation_checkpointing, gradients, memory, place, process_group
from watch import plan, rollback
from watch.hardware import flops_per_token
from watch.ranks import RankMonitor, watched
from watch.run_log import RunLog


def main():
    if any(argument.lower() in ("--ladder", "--ladder=on", "--ladder=true", "--ladder=1") for argument in sys.argv):
        from ladder import main as climb  # measures, and has more flags: no run imports it

        return climb()
    flags, typed = read_command_line()
    distributed = process_group.start(flags.device, flags.tensor, flags.context, flags.pipeline)
    stop = StopSignal()
    with out_of_memory(memory.less_memory()):
        while checkpoint := train(flags, distributed, typed, stop):  # to go back to, if the run has diverged
            flags = rollback.again(flags, checkpoint)
    process_group.stop()


@dataclass
class Trainer:
    """The state of a training step, made by build()."""

    config: Config
    distributed: process_group.Distributed
    model: GPT  # the plain module, which is saved and sampled from
    forward: Callable  # the same weights, compiled: for evaluations
    train_forward: Callable  # forward, in DDP where ddp has several ranks
    accumulate: Callable  # accumulate() below, or that of parallel/pipeline.py
    autocast: torch.autocast
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    monitor: RankMonitor


def build(config, distributed, weights=None, sizes=None):
    """The Trainer of a resolved Config. weights: a path for load_weights, with `sizes`; None: random weights."""
    if config.deterministic:
        be_deterministic()
    # tf32: float32 GEMMs on tensor cores, inputs rounded to 10 mantissa bits (no effect under autocast)
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    # autocast: GEMMs and attention in 16 bits, at twice TF32's rate and half its bytes; master weights stay float32
    half = torch.float16 if config.autocast == "fp16" else torch.bfloat16
    autocast = torch.autocast(distributed.device.type, half, enabled=config.autocast != "off")
    # fp16's smallest positive number is 6e-8: the loss is scaled up so that gradients stay above it
    scaler = torch.amp.GradScaler(distributed.device.type, enabled=config.autocast == "fp16")
    limit_sdpa(config.attention)

    torch.manual_seed(config.seed)
    with torch.device("meta"):  # shapes only: one rank may not have memory for all weights
        model = GPT(gpt_config(config, sizes))
    # activation_checkpointing: less memory, for up to a third more computation
    activation_checkpointing.checkpoint_activations(model, config.activation_checkpointing, saved_operators())
    # parallel: a rank holds the whole model with ddp, a shard of it with zero1 to zero3 and hsdp, a part with tensor
    model = place.place(model, config, distributed, autocast)
    resume.initialize(model, weights)
    optimizer = make_optimizer(model, config)
    # compile: fuses element-wise operations and reductions into one kernel, without Python between kernels.
    # tuned_gemms: GEMMs by the fastest of cuBLASLt's algorithms. A Pipeline compiles its stage itself.
    forward = compile_model(model, config) if config.pipeline == 1 else model
    # cuda_graphs: small micro-batches, for whose kernels the GPU would wait, are launched as a whole
    graphed = compile_model(model, config, graphs=True) if config.cuda_graphs else forward
    monitor = RankMonitor(distributed)
    # ddp: each rank has all weights and a share of the batch; the last backward averages gradients over the ranks
    train_forward = gradients.wrap_ddp(graphed, config, distributed, monitor.begin_averaging)
    # fp8: the blocks' GEMMs in 8 bits, at twice the rate. The modules change in place, before the first call compiles
    if config.fp8:
        from kernels import fp8  # needs Triton

        fp8.convert(model, optimizer, targets=batch_share(0, config) * config.total_batch_size / distributed.world_size)
    steps = model.accumulate if config.pipeline > 1 else accumulate
    return Trainer(config, distributed, model, forward, train_forward, steps, autocast, optimizer, scaler, monitor)


def accumulate(trainer, next_batch, micro_steps, stop):
    """Forward and backward over a step's micro-batches: gradients accumulate. Returns the mean loss, () float32.

    Raises Stopped where a signal arrives between micro-batches of one rank; several ranks finish the step."""
    loss_sum = torch.zeros((), device=trainer.distributed.device)
    for micro_step in range(micro_steps):
        last = micro_step == micro_steps - 1
        batch = next_batch()
        # ddp all-reduces gradients in the last backward, a sharded model reduce-scatters in each
        with gradients.accumulation(trainer, last):
            with trainer.autocast:
                loss = trainer.train_forward(*batch) / micro_steps
            trainer.scaler.scale(loss).backward()
        loss_sum += loss.detach()
        if stop.requested and trainer.distributed.world_size == 1 and not last:
            raise Stopped
    return loss_sum


@dataclass
class StepResult:
    lr: float  # of this step; --lr is its peak
    loss: float  # nats, the mean over the step's tokens
    grad_norm: float  # before clipping
    tokens: int
    finite: bool  # whether loss and gradient norm are; with fp16 the loss alone, while its scale is 1 or more
    loss_scale: float | None  # fp16's
    trained_seconds: float  # of this process's earlier steps, without compilation; the mean over the ranks
    seconds: float  # of the whole step, data loading included
    own_ms: list  # each rank's own time in the step before, see watch/ranks.py


def train_step(trainer, step, next_batch, stop):
    """Forward and backward over the micro-batches of step `step`, clip, update: a StepResult. next_batch:
    Loader.next_batch. stop: a StopSignal. Raises Stopped as accumulate: no weight has changed."""
    config, distributed, scaler = trainer.config, trainer.distributed, trainer.scaler
    micro_steps, size = micro_batches(step, config, distributed.data_size)
    trainer.monitor.start_step(size)
    lr = set_learning_rates(trainer.optimizer, step, config)
    loss = trainer.accumulate(trainer, lambda: next_batch(size), micro_steps, stop)
    scaler.unscale_(trainer.optimizer)
    norm = gradients.clip(trainer.model, config.grad_clip)
    means = (value / distributed.world_size for value in (loss, norm, trainer.monitor.trained_seconds))
    wait = distributed.begin_all_reduce(*means, stop.requested, trainer.monitor.report())
    update_if_finite(trainer.optimizer, scaler, norm)
    gradients.zero(trainer)
    mean_loss, mean_norm, trained, stops, *own_ms = wait()  # for the all-reduce, not for the update: the GPU stays busy
    stop.agreed = stops > 0
    scale = scaler.get_scale() if scaler.is_enabled() else None
    # fp16: GradScaler skips an update that overflows and halves its scale, which is normal until the scale is below 1
    finite = math.isfinite(mean_loss if scale and scale >= 1 else mean_loss + mean_norm)
    tokens = micro_steps * size * config.seq_len * distributed.data_size
    return StepResult(lr, mean_loss, mean_norm, tokens, finite, scale, trained, trainer.monitor.end_step(), own_ms)


@dataclass
class Run:
    """A training run: what its loop, its plan and its end share."""

    trainer: Trainer
    loader: Loader
    val_stream: TokenStream
    tasks: Tasks | None  # HellaSwag and those of --tasks
    log: RunLog | None  # on rank 0
    checkpointer: Checkpointer
    start: resume.Start
    step: int  # steps so far
    tokens: int  # trained on so far


def train(flags, distributed, typed, stop):
    """Train with the flags of a Config; typed: those on the command line. Returns what loop() returns."""
    start = resume.find_start(flags, distributed)
    config, notes = resolve(flags, distributed, memory.free_memory(distributed), start, typed)
    config = rollback.as_left(config, start, notes)
    notes += resume.changed_flags(start, config)
    train_stream, val_stream, data = open_streams(config, distributed)
    resume.check_same(start, config, data)
    tasks = tasks_in_training(config)
    loader = Loader(train_stream, config.micro_batch_size, config.seq_len, distributed, start.position)
    trainer = build(config, distributed, start.weights, start.sizes)
    if start.resumed:
        resume.restore(start, trainer.model, trainer.optimizer, trainer.scaler, distributed)
    flops = flops_per_token(trainer.model, config.seq_len)
    log = distributed.on_main(lambda: RunLog(config, flags, distributed, flops, start.resumed, start.training))
    config.run_name = distributed.broadcast(log and log.folder.name)  # RunLog names a run that has no name
    checkpointer = Checkpointer(trainer, data, log, start)
    run = Run(trainer, loader, val_stream, tasks, log, checkpointer, start, start.step, start.tokens)
    plan.print_plan(run, notes, plan_switches(config))
    with out_of_memory(memory.less_memory(config.micro_batch_size)), watched(run) as tracer:
        return loop(run, tracer, stop)


def loop(run, tracer, stop):
    """The training loop, and the run's end. Returns the checkpoint that a diverged run goes back to, or else None."""
    config, checkpointer, log = run.trainer.config, run.checkpointer, run.log
    health = rollback.Health(run.start)
    common.interrupt.end_at_once()  # until the first step, which compiles, is done: there is nothing to save

    while True:  # save before evaluating: an evaluation that fails loses nothing
        last = stop.agreed or run.step >= config.max_steps
        checkpointer.save_if_due(run.step, run.tokens, health, last=last)
        try:
            if not stop.agreed:
                evaluate_if_due(run, stop)
            if last:
                break
            result = train_step(run.trainer, run.step, run.loader.next_batch, stop)
        except Stopped:  # between batches, on all ranks: nothing of this evaluation or step is kept
            stop.agreed = True
            continue
        stop.listen()  # from now on: finish the micro-batch (several ranks: the step), save, stop
        run.tokens += result.tokens
        health.observe(run.step, result)
        if log:
            log.train_step(run.step, run.tokens, result, health.bad_steps)
        tracer.step()
        run.step += 1
        config.max_steps = steps_in_time(config, run.step, run.start, result.trained_seconds)
        if health.problem and (checkpoint := rollback.go_back(run, health, result.tokens)):
            return checkpoint
        if health.problem:  # and no way back
            break

    problem = checkpointer.finish(run.step, health.problem, finished=not stop.agreed)
    plan.print_summary(run, stop, problem)


if __name__ == "__main__":
    run(main)
