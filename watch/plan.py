"""The lines printed before the first step (the plan) and after the last one (the summary)."""

from checkpoints.run_folder import checkpoints_of
from common.cli import python_command
from common.errors import UserError, first_line, word
from optim.schedules import accumulation_steps, batch_warmup_ends, full_batches
from parallel import memory, place
from watch.hardware import peak_memory

FEW_STEPS = 10  # a run with a smaller --max_steps gets no figure


def print_plan(run, notes, switches):
    """Print what is about to run, on rank 0, and keep it for the report.

    run: train_gpt2.Run; notes: of resolve(); switches: {name: on} of the optimizations, in the order and with the names
    to print, such as {"tf32": True, "autocast bf16": True, "fp8": False}.
    """
    config, distributed, start, log = run.trainer.config, run.trainer.distributed, run.start, run.log
    if not log:
        return
    train_stream, val_stream = run.loader.stream, run.val_stream
    facts, world_size = log.facts, distributed.world_size
    init = f"resumed from {start.resumed}" if start.resumed else f"{start.weights or 'scratch'}, seed {config.seed}"
    items = run.tasks.items if run.tasks else {}
    accumulated = accumulation_steps(config, distributed.data_size)
    batches = max(0, full_batches(config.max_steps, config) - full_batches(start.step, config))
    total = start.tokens + round(batches * config.total_batch_size)
    amount = f"{count(config.max_steps, 'step')}, {total:,} tokens, {total / train_stream.total:.2f} epochs"
    if start.step >= config.max_steps:
        amount = f"none: at step {start.step:,} of {config.max_steps:,}"
    elif config.max_minutes:
        amount = f"{config.max_minutes:g} minutes of steps"
    on = ", ".join(name for name, value in switches.items() if value)
    off = ", ".join(name for name, value in switches.items() if not value)
    sizes = f"{count(config.n_layer, 'layer')}, {count(config.n_head, 'head')}, {config.n_embd} wide"
    batch = f"{count(config.total_batch_size, 'token')} = {count(config.micro_batch_size, 'sequence')} × "
    batch += f"{count(config.seq_len, 'token')} × {accumulated} accumulated × {memory.data_ranks(distributed)}"
    if config.batch_warmup_ratio:
        batch += f"; smaller in the first {count(batch_warmup_ends(config)[1], 'step')}"
    data = f"{count(len(train_stream.shards), 'train shard')}, {count(train_stream.total, 'token')}; "
    evaluated = val_stream.sequences(config.val_tokens, config.seq_len) * config.seq_len
    data += f"{len(val_stream.shards)} val, {evaluated:,} of {val_stream.total:,} tokens"
    warmup = count(config.warmup_steps, "warm-up step") + (" (at most a tenth of all)" if config.max_minutes else "")
    device = f"{world_size} × {facts['hardware']}; PyTorch {facts['torch']}"
    device += f", CUDA {facts['cuda']}" if facts["cuda"] else ""
    device += f"; MFU is of {log.peak_flops / 1e12 / world_size:g} TFLOP/s a device" if log.peak_flops else ""
    lines = [
        ("device", device),
        ("model", f"{sizes}; {run.trainer.model.num_params():,} parameters"),
        ("init", init),
        ("batch", batch),
        *([("parallel", place.describe(config, distributed))] if world_size > 1 else []),
        *([("memory", memory.describe(config, distributed))] if facts["cuda"] else []),
        ("recipe", f"{config.optimizer}, lr {config.lr:g}, {warmup}, then {config.lr_schedule}"),
        ("training", amount),
        ("on", f"{on} (off: {off})" if off else on),
        ("data", f"{config.data_dir}: {data}"),
        ("tasks", ", ".join(f"{name} {count(len(each), 'item')}" for name, each in items.items()) or "off"),
        ("log", f"{log.folder}/"),
        *log.where_to_watch().items(),
        *(("note", line) for line in note_lines(notes)),
    ]
    plan = [f"{name:10s} {text}" for name, text in lines]
    print(*plan, sep="\n")
    if start.step < config.max_steps or "plan" not in facts:  # a run that is complete has its own
        log.keep(plan=plan)


def count(number, thing):
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def note_lines(notes):
    """Notes as text, one line for each reason."""
    reasons = {}
    for note in notes:
        reasons.setdefault(note.reason, {}).setdefault(word(note.value), []).append(note.flag)
    for reason, values in reasons.items():
        texts = [f"{', '.join(flags)} {'is' if len(flags) == 1 else 'are'} {value}" for value, flags in values.items()]
        yield f"{'; '.join(texts)}: {reason}"


def print_summary(run, stop, problem):
    """Write the run's report, print what it has reached and what to type next, on rank 0.

    run: train_gpt2.Run; stop: its StopSignal; problem: what Checkpointer.finish() returned. Raises UserError with the
    problem, and if the run's logs lack lines.
    """
    config, log = run.trainer.config, run.log
    if not log:
        return
    if len(log.val_losses) > 1:
        first, last = min(log.val_losses), max(log.val_losses)
        print(
            f"validation loss {log.val_losses[first]:.4f} -> {log.val_losses[last]:.4f} in "
            f"{count(last - first, 'step')}; {run.tokens:,} tokens in all"
        )
    print(f"peak memory {peak_memory(log.device):.2f} GB")
    print(f"log: {log.folder}/ (log.txt, metrics.jsonl, config.json, flags.yaml)")
    if config.max_steps >= FEW_STEPS:
        from watch import report  # only here: it takes matplotlib

        try:
            print(f"report: {report.write(log.folder)} (curves.png is its figure)")
        except Exception as error:
            print(f"no report.html: {type(error).__name__}: {first_line(error)}")  # the run is complete without it
    for name, text in log.where_to_watch().items():
        print(f"{name}: {text}")
    if checkpoints_of(log.folder):
        print(f"Next: {python_command('sample.py', log.folder, '--prompt', 'Hello, my name is')}")
    if config.demo:
        print(f"Next, on your own text: {python_command('fineweb.py', '--input', 'FILE.txt')}")
        print(f"Next, on FineWeb-Edu, GPT-2 124M's usual data (20 GB): {python_command('fineweb.py')}")
    if stop.agreed:
        signal = stop.name or "a signal to another rank"
        print(f"{signal}: stopped at step {run.step}; {run.checkpointer.how_to_continue()}")
    if problem:
        raise UserError(problem)
    log.check_complete()
