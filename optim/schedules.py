"""Training recipes: sets of flags, and what the learning rate and the batch size are at each step."""

import math

from common.errors import Note, UserError
from optim.optimizer import optimizer_defaults

# The defaults with --model tiny: it learns something on two CPU cores within three minutes
TINY = dict(
    model="tiny",
    seq_len=128,
    total_batch_size=1024,
    max_steps=200,
    compile=False,
    lr=2e-3,
    warmup_steps=20,
    val_every=50,
    val_tokens=8192,
    hellaswag_every=0,
    sample_every=100,
    checkpoint_every=100,
)
# The defaults with --demo
DEMO = dict(TINY, demo=True, data_dir="demo_data")
LONGEST_WARMUP = 0.1  # of the steps: with --max_minutes, and of the recipes that measure.to_loss compares


def recipe_defaults(flags):
    """The defaults of --demo, --model tiny and --optimizer, where they are among flags: {name: value}."""
    small = DEMO if flags.get("demo") else TINY if flags.get("model") == "tiny" else {}
    return small | optimizer_defaults(flags)


def check_flags(config, distributed, notes):
    """Note flags without effect, and a learning-rate warm-up that is longer than the run."""
    if config.batch_warmup_ratio:
        check_batch_warmup(config, distributed)
    for flag, other, values in (
        ("adamw_lr", "optimizer", ("muon", "normuon")),
        ("cooldown_ratio", "lr_schedule", ("wsd",)),
    ):
        if getattr(config, flag) != getattr(type(config), flag) and getattr(config, other) not in values:
            notes.append(Note(flag, getattr(config, flag), f"it has no effect without --{other} {' or '.join(values)}"))
    if config.warmup_steps > config.max_steps and not config.max_minutes:
        reason = f"the run ends at step {config.max_steps}, so lr never reaches {config.lr:g}"
        notes.append(Note("warmup_steps", config.warmup_steps, reason))


def check_batch_warmup(config, distributed):
    """Raises UserError if the number of steps is not known, or the smaller batches are no whole micro-batches."""
    if config.max_minutes:
        raise UserError("--batch_warmup_ratio needs a number of steps: use --max_steps instead of --max_minutes")
    ranks, size = distributed.data_size, config.micro_batch_size
    quarter, odd = divmod(config.total_batch_size, 4 * config.seq_len * ranks)  # sequences of a rank
    if odd or not quarter:
        raise UserError(
            "--batch_warmup_ratio divides the batch by 4: --total_batch_size must be a multiple of "
            f"{4 * config.seq_len * ranks} = 4 × {config.seq_len} tokens × {ranks}, and is {config.total_batch_size}"
        )
    if any(sequences % min(size, sequences) for sequences in (quarter, 2 * quarter)):
        raise UserError(
            f"--batch_warmup_ratio: --micro_batch_size {size} does not divide a quarter and half of the batch, "
            f"{quarter} and {2 * quarter} sequences on each rank: use {math.gcd(size, quarter)}"
        )


def learning_rate(step, config, peak):
    """The learning rate of step `step` (from 0) for a peak rate: linear warm-up to the peak, then by lr_schedule.

    cosine and linear decay to min_lr_ratio * peak at max_steps. wsd (warm-up, stable, decay; Hu et al. 2024, "MiniCPM")
    stays at the peak, and decays linearly over the last cooldown_ratio of all steps. constant: the peak. With
    max_minutes the warm-up is at most LONGEST_WARMUP of the steps that fit. A step on a share s of the batch has √s
    times the rate, since its gradient has 1/s times the variance (Krizhevsky 2014, arXiv 1404.5997, for SGD; Malladi et
    al. 2022, arXiv 2205.10287, for Adam).
    GPT-3 (Brown et al. 2020, appendix B): linear warm-up over 375M tokens, cosine decay to 10%.
    """
    warmup_steps, peak = config.warmup_steps, peak * math.sqrt(batch_share(step, config))
    if config.max_minutes:  # the steps are not known before the run; 715 may be all of them
        warmup_steps = min(warmup_steps, round(LONGEST_WARMUP * config.max_steps))
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if config.lr_schedule == "constant":
        return peak
    decay_start = warmup_steps
    if config.lr_schedule == "wsd":
        decay_start = max(decay_start, round((1 - config.cooldown_ratio) * config.max_steps))
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, config.max_steps - decay_start)))
    coeff = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_schedule == "cosine" else 1 - progress
    min_lr = config.min_lr_ratio * peak
    return min_lr + coeff * (peak - min_lr)


def steps_in_time(config, step, start, seconds=0.0):
    """The steps of the whole run, at least `step`. With max_minutes: those that fit, if all take as long as the first
    `step` steps. As the estimate gets better the schedule ends with the time.

    start: a checkpoints.resume.Start; seconds: of the steps since."""
    seconds += start.trained_seconds
    if not (config.max_minutes and seconds):
        return max(step, config.max_steps)
    return max(step, math.ceil(step * (60 * config.max_minutes - start.lost_seconds) / seconds))


def set_learning_rates(optimizer, step, config):
    """Set the rate of every parameter group, from its "peak". Returns the rate that --lr is the peak of."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config, group["peak"])
    return learning_rate(step, config, config.lr)


def batch_warmup_ends(config):
    """(the first step on half of the batch, the first on all of it) with batch_warmup_ratio."""
    steps = config.batch_warmup_ratio * config.max_steps
    return math.ceil(0.5 * steps), math.ceil(steps)


def batch_share(step, config):
    """The share of total_batch_size that step `step` trains on. A quarter in the first half of batch_warmup_ratio, then
    half: early gradients are large against their noise, so more steps gain more than less noise (McCandlish et al.
    2018, arXiv 1812.06162)."""
    quarter, half = batch_warmup_ends(config)
    return 0.25 if step < quarter else 0.5 if step < half else 1.0


def full_batches(steps, config):
    """The tokens of the first `steps` steps, over total_batch_size."""
    quarter, half = batch_warmup_ends(config)
    return steps - 0.25 * min(steps, quarter) - 0.5 * min(steps, half)


def accumulation_steps(config, data_size):
    """Micro-batches of a full batch that a rank accumulates: data_size ranks compute different ones at a time."""
    return config.total_batch_size // (config.micro_batch_size * config.seq_len * data_size)


def micro_batches(step, config, data_size):
    """(micro-batches that each rank accumulates in step `step`, sequences in each): fewer than micro_batch_size where
    all of a small batch are fewer."""
    sequences = int(batch_share(step, config) * config.total_batch_size / (config.seq_len * data_size))
    size = min(config.micro_batch_size, sequences)
    return sequences // size, size
