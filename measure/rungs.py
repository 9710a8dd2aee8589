"""The flags of a rung of the ladder, and its first rung, which ladder.py and measure.to_loss share."""

from dataclasses import replace

from common.errors import Note, UserError
from config import SETTLING_STEPS
from measure.child_run import OUT_OF_MEMORY, measure, short_run
from optimizations import RUNGS, is_off, turn_off_unavailable
from parallel.memory import choose_micro_batch_size
from parallel.process_group import Distributed

FIRST_MICRO_BATCH = 16  # of the first rungs on a GPU, halved until it fits; an 80 GB A100 can hold it


def measure_baseline(config, timed, device, results, bar):
    """(Config, result of measure()) of the first rung, with all optimizations off, in the folder 00_baseline.

    timed: steps to measure. Its micro-batch is halved until it fits into memory. Raises UserError if it cannot run for
    another reason.
    """
    B, name, steps = first_micro_batch(config, device), "00_baseline", SETTLING_STEPS + timed
    bar.set_description("baseline")
    while True:
        rung, *_ = fit_rung(config, [], (), B, Distributed(0, 1, device), None)
        row = measure(short_run(rung, timed), results, name, 1, steps, bar)
        if row.get("reason") != OUT_OF_MEMORY or B == 1:
            break
        B //= 2
        name = f"00_baseline_B{B}"
        bar.update(-steps)
    if row["status"] == "skipped" and row["reason"] != OUT_OF_MEMORY:
        raise UserError(row["reason"])  # a mistake in the flags fails every rung
    return rung, row


def first_micro_batch(config, device):
    """Micro-batch size of the first rungs: at most 16 on a GPU and 1 elsewhere, halved until it divides the batch."""
    size = min(FIRST_MICRO_BATCH, config.micro_batch_size or FIRST_MICRO_BATCH) if device.type == "cuda" else 1
    while size > 1 and config.total_batch_size % (size * config.seq_len):
        size //= 2
    return size


def fit_rung(config, on, names, first, distributed, before):
    """(Config, {name: why it changes nothing}, Notes of what the rung before had and this one cannot have) of the rung
    that adds `names` to those in `on`.

    The Config is what this machine can run. before: that of the rung before, None for the first.
    """
    rung, notes = turn_off_unavailable(with_rungs(config, [*on, *names], first), distributed)
    lost = [note for note in notes if before and is_off(note) and getattr(before, note.flag) != note.value]
    if distributed.device.type != "cuda" and rung.micro_batch_size is None:
        rung.micro_batch_size, reason = choose_micro_batch_size(rung, Distributed(0, 1, distributed.device), None)
        notes.append(Note("micro_batch_size", rung.micro_batch_size, reason))
    idle = {}
    for name in names if before and names[0] != "ddp" else ():
        flags = RUNGS[name].off
        if all(getattr(rung, flag) == getattr(before, flag) for flag in flags):
            same = "off on the command line" if RUNGS[name].is_switch else "its value is that of the rung before"
            idle[name] = "; ".join(str(note) for note in notes if note.flag in flags) or same
    if names == ("ddp", 1):
        alone = "one GPU here" if distributed.device.type == "cuda" else "no GPUs here: torchrun starts more processes"
        idle = {"ddp": alone}
    return rung, idle, lost


def with_rungs(config, on, first):
    """config with only the rungs in `on`; first: the micro-batch size before the micro_batch rung."""
    changes = {}
    for row in reversed(RUNGS.values()):  # where two rows share a flag, the first that is off decides
        if row.name not in on and row.is_on(config):
            changes |= row.off
    if "micro_batch" not in on:
        changes["micro_batch_size"] = first
    if "ddp" not in on:
        changes |= dict(bf16_gradients=False, overlap_gradients=False)
    if "accumulation" not in on:
        changes["total_batch_size"] = first * config.seq_len
    return replace(config, **changes)
