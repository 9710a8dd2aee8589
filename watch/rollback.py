"""When a run has diverged, and going back: to an earlier checkpoint, past the data since, at half the learning rate.

The run's config.json, and so the next checkpoints, list the rollbacks. A resumed run starts as the last one left it.
"""

import collections
import contextlib
import dataclasses
import gc
import itertools
import math
import os
import statistics

import torch

from checkpoints.load import first_intact, read_training
from checkpoints.resume import position_of
from checkpoints.run_folder import checkpoints_of, set_aside_newer, step_of
from common.errors import Note
from optim.schedules import steps_in_time
from watch.by_layer import norms_by_layer

# The last WINDOW steps have MAX_BAD_STEPS with a loss or gradient norm that is not finite, or a median loss above the
# lowest such median before by MARGIN nats and by SPREADS standard deviations of that lowest window's losses. A spike is
# over sooner. In simulations of 5,000 losses with an autocorrelation up to 0.6, as steps of few tokens have it, the
# median was at most 5.0 standard deviations above the lowest; in nine runs of 64 to 256 tokens a step at most 3.6
WINDOW, MAX_BAD_STEPS, MARGIN, SPREADS = 20, 10, 0.5, 6
PATIENCE = 200  # steps that are not well and no divergence; after that they are the new trend
LR_FACTOR = 0.5  # of all learning rates, at each rollback


class Health:
    """Whether a run has diverged. All ranks see the same losses, so they agree without a collective."""

    def __init__(self, start):
        """start: a checkpoints.resume.Start, whose checkpoint has the state() before it."""
        state = start.health or dict(losses=[], bad=[], lowest=None, spread=0.0, sound=start.step)
        self._losses, self._bad = (collections.deque(state[name], maxlen=WINDOW) for name in ("losses", "bad"))
        self._lowest = math.inf if state["lowest"] is None else state["lowest"]  # of the medians
        self._spread = state["spread"]  # the standard deviation of its window
        # the newest step that was well; of a checkpoint after such a step the next one counts too
        self.sound = start.step if state["sound"] >= start.step - 1 else state["sound"]

    def state(self):
        """What a checkpoint keeps: a resumed run finds what an uninterrupted one does."""
        lowest = self._lowest if math.isfinite(self._lowest) else None  # JSON has no infinity
        lists = dict(losses=list(self._losses), bad=list(self._bad))
        return lists | dict(lowest=lowest, spread=self._spread, sound=self.sound)

    def forget(self):
        """Begin a new trend."""
        self._losses.clear()
        self._lowest, self._spread = math.inf, 0.0

    def observe(self, step, result):
        """Take in the train_gpt2.StepResult of step `step`."""
        self._bad.append(not result.finite)
        if not math.isfinite(result.loss):
            return
        if result.finite and result.loss <= self._lowest + MARGIN / 2:
            self.sound = step
        self._losses.append(result.loss)
        if len(self._losses) == WINDOW and (median := statistics.median(self._losses)) < self._lowest:
            self._lowest, self._spread = median, statistics.stdev(self._losses)
        if step - self.sound >= PATIENCE:
            self.forget()

    @property
    def bad_steps(self):
        """Steps in a row, up to the last one, with a loss or norm that is not finite."""
        return len([*itertools.takewhile(bool, reversed(self._bad))])

    @property
    def is_lost(self):
        """Whether training cannot go on without a rollback."""
        return sum(self._bad) >= MAX_BAD_STEPS

    @property
    def problem(self):
        """Why the run has diverged, in words, or None."""
        if self.is_lost:
            return f"the loss or the gradient was not finite in {sum(self._bad)} of the last {len(self._bad)} steps"
        if len(self._losses) == WINDOW:
            median = statistics.median(self._losses)
            if median > self._lowest + max(MARGIN, SPREADS * self._spread):
                return f"the median loss of {WINDOW} steps is {median:.3f}, and was {self._lowest:.3f}"
        return None


def go_back(run, health, tokens):
    """The checkpoint that a diverged run goes back to, or None if there is none, or no rollback is left.

    tokens: of the last step. A collective. It prints what happened and the norms by layer, and notes both in
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
    norms = norms_by_layer(run, tokens)
    if not checkpoint:
        if log:
            log.facts["norms"] = norms
        if log and not health.is_lost:
            reason = "no rollback is left" if len(done) >= config.rollbacks else "there is no sound checkpoint"
            print(f"step {run.step:5d}/{config.max_steps} | {health.problem}: {reason}, training goes on")
        health.forget()
        return None
    training = read_training(checkpoint)
    # the data since, and of WINDOW more steps, which may be bad too; twice as much if the run comes back once more
    before = [rollback["skipped_tokens"] for rollback in done if rollback["step"] == training["step"]]
    position = position_of(training["tokens"], done)
    skipped = max(run.loader.position - position + WINDOW * tokens, 2 * max(before, default=0))
    lost = run.start.trained_seconds + trainer.monitor.trained_seconds - training.get("trained_seconds", 0.0)
    if log:
        print(
            f"step {run.step:5d}/{config.max_steps} | {health.problem}: back to {checkpoint}, with {LR_FACTOR:g} × the "
            f"learning rate and without the next {skipped:,} tokens (rollback {len(done) + 1} of {config.rollbacks})"
        )
        own = dict(problem=health.problem, diverged=run.step, step=training["step"], tokens=training["tokens"])
        own |= dict(skipped_tokens=skipped, position=position + skipped, lost_seconds=lost, norms=norms)
        log.facts |= dict(rolled_back=[*done, own], wandb_id=None)  # wandb's step cannot decrease: a new page
        with contextlib.suppress(OSError):  # the next RunLog does it again, and says why it is impossible
            # first: a process that ends here must not continue from them
            set_aside_newer(log.folder, training["step"], logs=True)
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


def as_left(config, start, notes):
    """A resolved Config with the learning rates and the time that a checkpoints.resume.Start leaves. Notes the rate."""
    factor = LR_FACTOR ** len(start.rollbacks)
    if start.rollbacks:
        notes.append(Note("lr", config.lr * factor, f"it is {factor:g} × --lr since the run's rollbacks"))
    steps = steps_in_time(config, start.step, start)
    adamw_lr = config.adamw_lr * (1 if config.optimizer == "adamw" else factor)
    return dataclasses.replace(config, lr=config.lr * factor, adamw_lr=adamw_lr, max_steps=steps)
