"""The ranges of train_gpt2.py's flags that are numbers."""

import math

from common.errors import UserError


def check_bounds(config):
    """Raises UserError for a number that no run can have."""
    positive = "n_layer n_head n_embd seq_len micro_batch_size total_batch_size max_steps val_tokens ladder_steps "
    positive += "keep_checkpoints max_bad_steps shard_ranks tensor context pipeline stages_per_rank hellaswag_limit"
    zero_or_more = "val_every hellaswag_every sample_every checkpoint_every seed profile lr min_lr_ratio warmup_steps "
    zero_or_more += "weight_decay grad_clip batch_warmup_steps adamw_lr memory_snapshot"
    for bound, names in ((1, positive), (0, zero_or_more)):
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not bound <= value < math.inf:
                raise UserError(f"--{name} {value}: it must be {f'at least {bound}' if value < bound else 'finite'}")
    if config.peak_tflops is not None and not 0 < config.peak_tflops < math.inf:
        raise UserError(f"--peak_tflops {config.peak_tflops}: it must be above 0 and finite")
    if config.seed >= 2**63:
        raise UserError(f"--seed {config.seed}: it must be below 2^63")
    for name in ("cooldown_ratio", "min_lr_ratio"):
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"--{name} {getattr(config, name)}: it must be from 0 to 1")
    for name in ("beta1", "beta2", "momentum"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"--{name} {getattr(config, name)}: it must be at least 0 and below 1")
    if config.adamw_states == "bf16" and max(config.beta1, config.beta2) > 1 - 2**-8:
        raise UserError(
            "--adamw_states bf16 needs --beta1 and --beta2 of at most 0.996: bf16 rounds a slower decay away"
        )
