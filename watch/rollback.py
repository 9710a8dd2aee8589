"""When a run has diverged, and going back: to an earlier checkpoint, past the data since, at half the learning rate.

The run's config.json, and so the next checkpoints, list the rollbacks. A resumed run starts as the last one left it.
"""

import collections
import contextlib
import dataclasses
import gc
import math
import os
import statistics

import torch

from checkpoints.load import first_intact, read_training
from checkpoints.run_folder import checkpoints_of, set_aside_newer, step_of
from optim.schedules import steps_in_time
from watch.by_layer import print_norms

MAX_BAD_STEPS = 10  # in a row, with a loss or gradient norm that is not finite
# A loss that stays above its trend: the median of the last TREND_STEPS losses is above the lowest such median before by
# MARGIN nats, and by SPREADS of their standard deviations. A spike is over sooner. In five simulations of 20,000 losses
# with normal noise and no trend the difference was 2.4 to 3.7 standard deviations
TREND_STEPS, MARGIN, SPREADS = 20, 0.5, 4
LR_FACTOR = 0.5  # of all learning rates, at each rollback


class Health:
    """Whether a run has diverged. All ranks see the same losses, so they agree without a collective."""

    def __init__(self, start):
        """start: a checkpoints.resume.Start."""
        self.bad_steps = 0  # in a row, up to the last one, with a loss or norm that is not finite
        self.sound = start.step  # the newest step that was well: so was the checkpoint from which it began
        self.forget()
        if start.rollbacks:
            self._trend = [(start.step - 1, start.rollbacks[-1]["lowest_loss"] or math.inf)]

    def forget(self):
        """Begin a new trend."""
        self._losses = collections.deque(maxlen=TREND_STEPS)
        self._median = -math.inf  # of the last TREND_STEPS losses
        self._trend = [(-1, math.inf)]  # (step, the lowest of these medians so far)

    def observe(self, step, result):
        """Take in the train_gpt2.StepResult of step `step`."""
        self.bad_steps = 0 if result.finite else self.bad_steps + 1
        if not math.isfinite(result.loss):
            return
        lowest = self._trend[-1][1]
        if result.finite and result.loss <= lowest + MARGIN / 2:
            self.sound = step
        self._losses.append(result.loss)
        if len(self._losses) == TREND_STEPS:
            self._median = statistics.median(self._losses)
            self._trend.append((step, min(lowest, self._median)))

    def lowest_before(self, step):
        """The lowest median loss before a step; infinite if there is none."""
        return next((lowest for other, lowest in reversed(self._trend) if other < step), math.inf)

    @property
    def problem(self):
        """Why the run has diverged, in words, or None."""
        lowest = self._trend[-1][1]
        if self.bad_steps >= MAX_BAD_STEPS:
            return f"the loss or the gradient was not finite in {self.bad_steps} steps in a row"
        if self._median > lowest + MARGIN and self._median > lowest + SPREADS * statistics.stdev(self._losses):
            return f"the median loss of {TREND_STEPS} steps is {self._median:.3f}, and was {lowest:.3f}"
        return None


def go_back(run, health, tokens):
    """The checkpoint that a diverged run goes back to, or None if there is none, or no rollback is left.

    tokens: of the last step. A collective. It prints what happened and the norms by layer, and notes the rollback in
    config.json. The run's log is closed; train_gpt2.train() begins again with the flags of again().
    """
    trainer, log, checkpointer = run.trainer, run.log, run.checkpointer
    config, distributed = trainer.config, trainer.distributed
    done = run.start.rollbacks
    checkpoint = None
    if len(done) < config.rollbacks:
        checkpointer.wait()
        sound = [path for path in checkpoints_of(checkpointer.folder) if step_of(path) <= health.sound]
        checkpoint = distributed.broadcast(distributed.on_main(lambda: first_intact(sound)))
    if not checkpoint:
        if log and not health.bad_steps:
            reason = "no rollback is left" if len(done) >= config.rollbacks else "there is no sound checkpoint"
            print(f"step {run.step:5d}/{config.max_steps} | {health.problem}: {reason}, training goes on")
        health.forget()
        return None
    print_norms(run, tokens)
    training = read_training(checkpoint)
    skipped = run.tokens - training["tokens"]
    lost = run.start.trained_seconds + trainer.monitor.trained_seconds - training.get("trained_seconds", 0.0)
    if log:
        print(
            f"step {run.step:5d}/{config.max_steps} | {health.problem}: back to {checkpoint}, with {LR_FACTOR:g} × the "
            f"learning rate and without the {skipped:,} tokens since (rollback {len(done) + 1} of {config.rollbacks})"
        )
        own = dict(problem=health.problem, diverged=run.step, step=training["step"])
        lowest = health.lowest_before(training["step"])
        own |= dict(skipped_tokens=skipped, lost_seconds=lost, lowest_loss=lowest if math.isfinite(lowest) else None)
        log.facts |= dict(rollbacks=[*done, own], wandb_id=None)  # wandb's step cannot decrease: a new page
        with contextlib.suppress(OSError):  # the next RunLog does it again, and says why it is impossible
            set_aside_newer(log.folder, training["step"])  # first: a process that ends here must not continue from them
        log.close(finished=False)
    distributed.all_reduce(0)  # until config.json is written, which all ranks read
    return checkpoint


def again(flags, checkpoint):
    """The flags with which a run begins again from a checkpoint. Frees the memory of the model, to which nothing must
    refer."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"  # a restart would continue from the run's newest checkpoint instead
    folder = checkpoint.parent
    own = dict(log_dir=str(folder.parent), run_name=folder.name, resume=str(checkpoint), profile=0, memory_snapshot=0)
    return dataclasses.replace(flags, **own)


def as_left(config, start):
    """A resolved Config with the learning rates and the remaining time that a checkpoints.resume.Start leaves."""
    factor = LR_FACTOR ** len(start.rollbacks)
    steps = steps_in_time(config, start.step, start)
    return dataclasses.replace(config, lr=config.lr * factor, adamw_lr=config.adamw_lr * factor, max_steps=steps)
