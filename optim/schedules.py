"""What the learning rate and the batch size are at each step."""

import math


def learning_rate(step, config):
    """The learning rate of step `step` (from 0): linear warm-up, then cosine to min_lr_ratio * lr at max_steps, or
    constant.

    GPT-3 (Brown et al. 2020, appendix B): linear warm-up over 375M tokens, cosine decay to 10%.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
    floor = config.min_lr_ratio * config.lr
    return floor + 0.5 * (1 + math.cos(math.pi * progress)) * (config.lr - floor)


def accumulation_steps(step, config, world_size):
    """Micro-batches that each rank accumulates in step `step`; over all ranks they make total_batch_size tokens.

    With batch_warmup_steps the batch grows linearly from one micro-batch a rank to its full size over that many steps
    (Brown et al. 2020, appendix B: from 32k tokens over the first 4 to 12 billion).
    """
    full = config.total_batch_size // (config.micro_batch_size * config.seq_len * world_size)
    if step >= config.batch_warmup_steps:
        return full
    return 1 + (full - 1) * step // config.batch_warmup_steps
