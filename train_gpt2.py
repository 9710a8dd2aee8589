"""Train GPT-2.

    python train_gpt2.py --demo                                       # a few minutes, on anything
    python train_gpt2.py                                              # one GPU
    python train_gpt2.py --ladder                                     # what each optimization buys here
    torchrun --standalone --nproc_per_node=8 train_gpt2.py            # eight

Every optimization is a flag: see --help. The plan is printed before the first step; then one line a step.
"""

import contextlib
import math
import sys
import time
from dataclasses import replace

import torch

import curves
import ladder
from checkpoints import checkpoint, pieces, resume
from common import cli
from common.cli import UserError, parse, run
from common.device import be_deterministic, less_memory
from common.signals import StopSignal
from config import MODEL_SWITCHES, Config, check_given, defaults, resolve
from data import demo
from data.loader import Loader, TokenStream
from data.shards import open_shards
from hellaswag import MultipleChoice, load_items
from kernels import cublaslt
from model import GPT, GPTConfig
from observe import profiler
from observe.metrics import RunLog, flops_per_token, peak_memory
from optim.optimizer import accumulation_steps, learning_rate, make_optimizer
from parallel import distributed
from sample import sample

PROMPT = "Hello, I'm a language model,"


def main():
    config = parse(Config, default=defaults(sys.argv))
    if config.ladder:
        return ladder.climb(config)
    distributed = distributed.start(config.device)
    train(config, distributed)
    distributed.stop()


def train(config, distributed):
    # ------------------------------------------------------------------------------------------------------------------
    # Where to start, and the flags that follow from others

    resumed = resume.find(config, distributed)
    start_from = resumed or config.init_from
    pretrained = None if start_from == "scratch" else checkpoint.load_config(start_from)
    training = checkpoint.read_training(resumed) if resumed else None
    if config.deterministic:
        be_deterministic()  # before cuDNN makes its plans
    config, reasons = resolve(config, distributed, pretrained, resumed, training["step"] if resumed else 0)
    check_given(sys.argv, reasons)
    if resumed:
        reasons += [f"resumed from {resumed}", *resume.differences(config, training, distributed)]
        if training["step"] >= config.max_steps:
            reasons.append(f"nothing is left to do at step {training['step']}: a larger --max_steps goes on")
    device = distributed.device
    B, T = config.micro_batch_size, config.seq_len

    # tf32: float32 products on tensor cores, with 10 bits of mantissa for 23 (autocast leaves none in float32)
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")

    # autotune: which of cuBLASLt's algorithms multiplies matrices of these sizes is measured, not guessed
    cublaslt.autotune = config.autotune

    # autocast: products and attention in 16 bits, twice tf32's rate and half its bytes; weights stay float32
    if config.autocast == "off":
        autocast = contextlib.nullcontext()
    else:
        autocast = torch.autocast(device.type, torch.bfloat16 if config.autocast == "bf16" else torch.float16)
    # fp16's smallest number is 6e-8: gradients are scaled up in backward so that they stay above it
    scaler = torch.amp.GradScaler(device.type, enabled=config.autocast == "fp16")

    # ------------------------------------------------------------------------------------------------------------------
    # Data

    if config.demo:
        distributed.on_main(lambda: demo.make_data(config.data_dir))
    train_stream = TokenStream(open_shards(config.data_dir, "train"), config.seed, config.shuffle)
    val_stream = TokenStream(open_shards(config.data_dir, "val"))
    if train_stream.total < config.total_batch_size:
        raise UserError(
            f"{config.data_dir} has {train_stream.total:,} training tokens, a step takes {config.total_batch_size:,}: "
            "use more data, or a smaller --total_batch_size"
        )
    if val_stream.total <= T:
        raise UserError(
            f"{val_stream.total} validation tokens in {config.data_dir}: at least seq_len + 1 = {T + 1} are needed"
        )
    loader = Loader(train_stream, B, T, device, distributed.rank, distributed.world_size)
    hellaswag = None
    if config.hellaswag_every:
        hellaswag = MultipleChoice(load_items("HellaSwag", config.hellaswag_data), T, tokens=B * T)

    # ------------------------------------------------------------------------------------------------------------------
    # Model: `model` is the plain module, which is saved and sampled from; `forward` computes with the same weights

    torch.manual_seed(config.seed)
    sizes = pretrained or GPTConfig(seq_len=T, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    with torch.device("meta"):  # shapes only, since all weights together may be more than a rank has memory for
        model = GPT(replace(sizes, **{name: getattr(config, name) for name in MODEL_SWITCHES}))
    # activation_checkpointing: less memory, so a larger model or micro-batch, for up to a third more computation
    distributed.checkpoint_activations(model, config.activation_checkpointing)
    # parallel: zero2, zero3 and hsdp leave each rank a part of the weights; with ddp it has all
    cli.out_of_memory_hint = less_memory()
    distributed.place(model, config, distributed)
    if pretrained:
        if not resumed:  # else they were when it was found
            distributed.on_main(lambda: checkpoint.verify_weights(start_from))
        checkpoint.load_weights(start_from, model)
    else:
        model.init_weights(pieces.fill)
    # fp8: the blocks' products in 8 bits, at twice the rate; tensors need scales, which follow the values they had
    if config.fp8:
        from kernels import fp8

        fp8.convert(model, targets=accumulation_steps(0, config, distributed.world_size) * B * T)
    # compile: one pass over memory for a chain of element-wise operations, and no Python between kernels. Every shape
    # gets its own graph (dynamic=False): training and validation have one, HellaSwag has three; none is compiled twice.
    forward = torch.compile(model, dynamic=False) if config.compile else model
    # ddp: every rank has all weights and a share of the batch; backward ends by averaging the gradients over the ranks
    train_forward = distributed.wrap_ddp(forward, config, distributed)
    optimizer = make_optimizer(model, config)
    if resumed:
        resume.restore(resumed, training, model, optimizer, scaler, loader, distributed)

    def losses_of(x, y, at=None):
        """Each target's loss, as y, for the evaluations."""
        with autocast:
            return forward(x, y, reduction="none", at=at)

    # ------------------------------------------------------------------------------------------------------------------
    # The plan

    step = training["step"] if resumed else 0  # updates so far
    tokens = training["tokens"] if resumed else 0  # trained on so far
    # rank 0 alone keeps the log
    log = distributed.on_main(lambda: RunLog(config, device, distributed.world_size, flops_per_token(model, T), resumed, training))
    if log:
        print_plan(config, reasons, step, tokens, model, distributed, train_stream, val_stream, hellaswag, log)
    cli.out_of_memory_hint = less_memory(B)
    tracer = profiler.start(config, model.config, log, step) if log and config.profile else None

    # ------------------------------------------------------------------------------------------------------------------
    # The loop

    saved = step  # the last step that a checkpoint has; there is nothing to save before the first
    pending = False  # a checkpoint is due, and waits for a step that is not bad
    writer = checkpoint.start_writer(config, step, distributed)
    if config.checkpoint_every and device.type == "cuda":
        checkpoint.snapshot(model, optimizer, distributed)  # page-locked memory takes its time now, not at a checkpoint
    evaluated = resumed and training["evaluated"]  # this step has been, before the run was resumed
    val_losses = {}  # by step
    bad_steps = 0  # in a row
    clock = None  # when the first step, which compiles, was over
    loader_state = loader.state()
    interrupt = StopSignal()  # SIGTERM and Ctrl-C: finish the micro-batch (with several ranks the step), save, stop
    stopping = False
    val_loss = None  # at this step

    while True:
        last = step >= config.max_steps
        evaluating = not (evaluated or stopping)

        if evaluating and due(step, config.max_steps, config.val_every):
            start = time.perf_counter()
            with distributed.gathered(model, config):
                val_loss = validation_loss(losses_of, val_stream, config, distributed)
            val_losses[step] = val_loss
            if log:
                text = f"validation loss {val_loss:.4f}"
                log.evaluation(step, tokens, "val", val_loss, text, time.perf_counter() - start, val_loss=val_loss)

        if hellaswag and evaluating and due(step, config.max_steps, config.hellaswag_every):
            start = time.perf_counter()
            with distributed.gathered(model, config):
                acc, acc_norm = hellaswag.evaluate(losses_of, distributed)
            if log:
                text = f"HellaSwag acc {acc:.4f} | acc_norm {acc_norm:.4f}"
                scores = dict(hellaswag_acc=acc, hellaswag_acc_norm=acc_norm)
                log.evaluation(step, tokens, "hella", acc_norm, text, time.perf_counter() - start, **scores)

        if step > 0 and evaluating and due(step, config.max_steps, config.sample_every):
            with distributed.gathered(model, config), autocast:
                texts = log and sample(model, PROMPT, count=4, max_new_tokens=24, seed=config.seed)
            if log:
                log.samples(step, tokens, texts)

        evaluated = evaluated or evaluating

        # not while steps are bad: what made them so may be in the weights
        healthy = not bad_steps and math.isfinite(val_loss or 0)
        pending = step > saved and (pending or last or stopping or due(step, config.max_steps, config.checkpoint_every))
        if config.checkpoint_every and pending and healthy:
            if writer:
                writer.wait()
            tensors = checkpoint.snapshot(model, optimizer, distributed)
            saved, pending = step, False
            if writer:
                facts = dict(step=step, tokens=tokens, evaluated=evaluated, val_loss=val_loss)
                facts |= dict(loader=loader_state, scaler=scaler.state_dict(), run=log.facts if log else None)
                if log:
                    log.flush(step)
                folder = writer.start(model, tensors, facts)
            if log:
                print(f"step {step:5d}/{config.max_steps} | checkpoint {folder}")
            del tensors  # once they are written, the next take their memory

        if last or stopping:
            break

        start = time.perf_counter()
        micro_steps = accumulation_steps(step, config, distributed.world_size)
        lr = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=device)
        for micro_step in range(micro_steps):
            x, y = loader.next_batch()
            # gradients add up over the micro-batches; those of several ranks are averaged in the last backward
            with distributed.micro_batch(model, train_forward, config, last=micro_step == micro_steps - 1):
                with autocast:
                    loss = train_forward(x, y) / micro_steps  # equal parts: the mean of their means is the mean of all
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
            if interrupt.name and distributed.world_size == 1:
                break
        if micro_step < micro_steps - 1:  # nothing of this step is kept
            stopping = True
            continue
        scaler.unscale_(optimizer)
        norm = distributed.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf")))
        read = distributed.begin_all_reduce(loss_sum / distributed.world_size, norm / distributed.world_size, bool(interrupt.name))
        step_if_finite(optimizer, scaler, norm)
        distributed.zero_gradients(optimizer, train_forward)
        if config.fp8:
            fp8.follow(model, micro_steps)
        # reading waits for the gradients, so the clock sees whole steps, but not for the update: the next step is ready
        # to run when that is over
        loss, norm, interrupted = read()
        end = time.perf_counter()

        # fp16 finds its scale by overflowing; one below 1 was not found
        scale = scaler.get_scale() if scaler.is_enabled() else None
        bad = not math.isfinite(loss if scale and scale >= 1 else loss + norm)
        bad_steps = bad_steps + 1 if bad else 0
        step_tokens = micro_steps * B * T * distributed.world_size
        tokens += step_tokens
        clock = clock or (end, step)
        if log:
            steps_timed = step - clock[1]
            seconds_left = (end - clock[0]) / steps_timed * (config.max_steps - step - 1) if steps_timed else None
            log.train_step(step, tokens, loss, lr, norm, end - start, step_tokens, seconds_left, scale, bad_steps)
        if tracer:
            tracer.step()
        step += 1
        if bad_steps >= config.max_bad_steps:
            break
        stopping = interrupted > 0
        evaluated, val_loss = False, None
        loader_state = loader.state()

    # ------------------------------------------------------------------------------------------------------------------
    # Goodbye

    if writer:
        writer.wait()
    distributed.all_reduce(0)  # none leaves before all is saved: a scheduler may end a job with the first of its processes
    if log:
        kept = next(iter(checkpoint.checkpoints(log.folder)), None)
        newest = f"the newest checkpoint is {kept}" if kept else "there is no checkpoint"
        if bad_steps >= config.max_bad_steps:
            log.close(finished=False)
            raise UserError(
                f"the loss or the gradient was not finite in {bad_steps} steps in a row; {newest}; try a lower --lr"
            )
        if config.checkpoint_every and (saved < step or writer.failed):
            log.close(finished=False)
            why = "" if healthy else ", since its loss or gradient is not finite"
            again = "goes on" if kept else "begins again"
            hint = f"the same command with this --run_name {again}" if healthy else "try a lower --lr"
            raise UserError(f"step {step} is not saved{why}; {newest}; {hint}")
        if stopping:
            print(
                f"{interrupt.name or 'a signal to another rank'}: stopped before step {step}; "
                + (f"--resume auto --run_name {config.run_name} goes on from {kept}" if kept else "no checkpoint")
            )
        if len(val_losses) > 1:
            first, *_, last = val_losses
            print(
                f"validation loss {val_losses[first]:.4f} -> {val_losses[last]:.4f} in {last - first} steps; "
                f"{tokens:,} tokens in all"
            )
        print(f"peak memory {peak_memory(device):.2f} GB")
        print(f"log: {log.folder}/ (log.txt, metrics.jsonl, config.json); watch: {log.where_to_watch()}")
        if config.demo:
            print("Next: `python fineweb.py` makes real data, then `python train_gpt2.py` trains GPT-2 124M on it.")
            print("`python train_gpt2.py --help` lists the flags.")
        log.close(finished=not stopping)
        curves.draw_own(log.folder)


def step_if_finite(optimizer, scaler, norm):
    """The update, unless the gradient has an infinity or a NaN: then nothing changes."""
    finite = torch.isfinite(norm)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    elif optimizer.defaults["fused"]:
        optimizer.found_inf = (~finite).float()  # the kernel looks at it itself: no waiting for the device
        optimizer.step()
    elif finite:
        optimizer.step()


def due(step, last, every):
    return every > 0 and (step % every == 0 or step == last)


@torch.no_grad()
def validation_loss(losses_of, stream, config, distributed):
    """Mean loss over the first val_steps * total_batch_size tokens of the stream, or all there are: the same tokens
    whatever the micro-batch size and the number of ranks."""
    B, T = config.micro_batch_size, config.seq_len
    sequences = min(config.val_steps * config.total_batch_size, stream.total - 1) // T
    sums = []
    for first in range(distributed.rank * B, sequences, distributed.world_size * B):
        n = min(B, sequences - first)
        tokens = torch.from_numpy(stream.read(first * T, n * T + 1)).to(distributed.device).long()
        x = torch.zeros((B, T), dtype=torch.long, device=distributed.device)
        y = torch.full_like(x, -1)  # rows beyond the last sequence stay without targets, and without loss
        x[:n], y[:n] = tokens[:-1].view(n, T), tokens[1:].view(n, T)
        sums.append(losses_of(x, y).float().sum())
    total = torch.stack(sums).cpu().double().sum() if sums else 0.0
    return distributed.all_reduce(total)[0] / (sequences * T)


def print_plan(config, reasons, step, tokens, model, distributed, train_stream, val_stream, hellaswag, log):
    """What is about to run, before it does."""
    facts = log.facts
    accumulated = accumulation_steps(config.batch_warmup_steps, config, distributed.world_size)
    full = max(step, min(config.batch_warmup_steps, config.max_steps))  # from here on steps have the whole batch
    micro_steps = sum(accumulation_steps(s, config, distributed.world_size) for s in range(step, full))
    micro_steps += max(0, config.max_steps - full) * accumulated
    total = tokens + micro_steps * config.micro_batch_size * config.seq_len * distributed.world_size
    switches = {name: getattr(config, name) for name in ("tf32", "compile", *MODEL_SWITCHES, "fp8", "fused_adamw")}
    switches[f"autocast {config.autocast}"] = config.autocast != "off"
    if config.activation_checkpointing != "off":
        switches[f"activation_checkpointing {config.activation_checkpointing}"] = True
    off = ", ".join(name.removesuffix(" off") for name, on in switches.items() if not on)
    peak = f"{log.peak_flops / 1e12 / distributed.world_size:g} TFLOP/s a device" if log.peak_flops else None
    lines = [
        (
            "device",
            f"{distributed.world_size} × {facts['hardware']}; PyTorch {facts['torch']}"
            + (f", CUDA {facts['cuda']}" if facts["cuda"] else ""),
        ),
        (
            "model",
            f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide; {model.num_params():,} parameters",
        ),
        ("init", f"{config.init_from}, seed {config.seed}"),
        (
            "batch",
            f"{config.total_batch_size:,} tokens = {config.micro_batch_size} sequences × {config.seq_len} tokens × "
            f"{accumulated} accumulated × {distributed.world_size} ranks"
            + (f", reached after {config.batch_warmup_steps} steps" if config.batch_warmup_steps else ""),
        ),
        *([("parallel", distributed.in_words(config, distributed))] if distributed.world_size > 1 else ()),
        ("training", f"{config.max_steps:,} steps, {total:,} tokens, {total / train_stream.total:.2f} epochs"),
        ("on", ", ".join(name for name, on in switches.items() if on) + (f" (off: {off})" if off else "")),
        (
            "data",
            f"{config.data_dir}: {len(train_stream.shards)} train shards, {train_stream.total:,} tokens; "
            f"{len(val_stream.shards)} val, {val_stream.total:,} tokens",
        ),
        ("HellaSwag", f"{len(hellaswag.labels):,} items" if hellaswag else "off"),
        ("MFU", f"of a peak of {peak}" if peak else "unknown for this device: give --peak_tflops"),
        ("log", f"{log.folder}/"),
        ("watch", log.where_to_watch()),
        *(("note", reason) for reason in reasons),
    ]
    for name, text in lines:
        print(f"{name:10s} {text}")


if __name__ == "__main__":
    run(main)
