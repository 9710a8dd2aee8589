"""When a run is saved, and which of its checkpoints stay."""

import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError

from checkpoints.run_folder import checkpoints_of, step_of, unused_name
from checkpoints.save import snapshot, write
from common.cli import UserError


class Checkpointer:
    """Saves a run when a checkpoint is due, and writes it in a thread while training continues.

    Every rank has one, since a snapshot is a collective. Rank 0 writes; the ranks of a sharded model all write.
    """

    def __init__(self, trainer, loader, log, step):
        """trainer: train_gpt2.Trainer. log: rank 0's RunLog, None on the other ranks. step: where the run starts; newer
        checkpoints in its folder are renamed to *.abandoned."""
        self.config, self.distributed = trainer.config, trainer.distributed
        self.model, self.optimizer, self.scaler = trainer.model, trainer.optimizer, trainer.scaler
        self.loader = loader
        self.log = log
        self.folder = Path(self.config.log_dir) / self.config.run_name
        self.group = None if self.config.parallel == "ddp" else dist.new_group(backend="gloo")
        self.saved = step  # the step of the newest checkpoint; before the first update there is nothing to save
        self.pending = False  # a checkpoint is due, and waits for a finite step
        self._thread = ThreadPoolExecutor(1)
        self._writing = None
        self._failed = False  # whether the last write failed
        if self.distributed.is_main:
            self._tidy(step)
        if self.config.checkpoint_every and self.distributed.device.type == "cuda":
            snapshot(self.model, self.optimizer, self.distributed)  # allocates page-locked memory before the first step

    def save_if_due(self, step, tokens, healthy, last):
        """Save if this step is due. last: the run ends here. healthy: whether the last loss and gradient were finite;
        if they were not, the weights may be damaged, and the checkpoint waits for a healthy step."""
        every = self.config.checkpoint_every
        self.pending = step > self.saved and (self.pending or last or (every > 0 and step % every == 0))
        if not (every and self.pending and healthy):
            return
        self.wait()
        tensors = snapshot(self.model, self.optimizer, self.distributed)
        self.saved, self.pending = step, False
        if not (self.distributed.is_main or self.group):
            return
        training = dict(step=step, tokens=tokens, scaler=self.scaler.state_dict())
        training["loader"] = dict(self.loader.state(), position=tokens)  # the loader may be inside an interrupted step
        if self.log:
            training["run"] = dict(self.log.facts)
            self.log.flush(step)
        self._writing = self._thread.submit(self._write, step, tensors, training)

    def wait(self):
        """Wait until the checkpoint under way is on disk. If that fails, print why; training continues."""
        if not self._writing:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
            self._failed = False
        except (OSError, SafetensorError) as error:
            self._failed = True
            if self.distributed.is_main:
                print(f"the checkpoint was not written ({error}); {self.newest()}")

    def finish(self, step, bad_steps):
        """Wait until everything is on disk, on all ranks. bad_steps: how many steps in a row were not finite.

        Raises UserError on rank 0 if there are max_bad_steps of them, if `step` is not saved, or if its validation loss
        is not finite.
        """
        self.wait()
        if self.log:
            self._prune()  # the last validation loss is known now
        self.distributed.all_reduce(0)  # all wait: a scheduler may end the job when one process exits
        if not self.log:
            return
        problem = None
        if self.config.checkpoint_every and not math.isfinite(self.log.val_losses.get(step, 0.0)):
            problem = f"the validation loss of step {step} is not finite; {{}}; try a lower --lr"
        elif bad_steps >= self.config.max_bad_steps:
            problem = f"the loss or the gradient was not finite in {bad_steps} steps in a row; {{}}; try a lower --lr"
        elif self.config.checkpoint_every and (self.saved < step or self._failed):
            problem = f"step {step} is not saved; {{}}; the same command with this --run_name "
            problem += "continues" if checkpoints_of(self.folder) else "starts over"
            if bad_steps:
                problem = f"step {step} is not saved, its loss or gradient is not finite; {{}}; try a lower --lr"
        if problem:
            self.log.close(finished=False)
            raise UserError(problem.format(self.newest()))

    def newest(self):
        """The newest checkpoint, in words."""
        found = checkpoints_of(self.folder)
        return f"the newest checkpoint is {found[0]}" if found else "there is no checkpoint"

    def how_to_continue(self):
        """How a stopped run continues, in words."""
        found = checkpoints_of(self.folder)
        return f"--run_name {self.config.run_name} continues from {found[0]}" if found else "there is no checkpoint"

    # ---- in the thread

    def _write(self, step, tensors, training):
        folder = self.folder / f"checkpoint_{step:06d}"
        try:
            write(folder, self.model, tensors, training, self.group)
        except (OSError, SafetensorError):
            if self.distributed.is_main:
                shutil.rmtree(folder.with_name(folder.name + ".unfinished"), ignore_errors=True)
            raise
        if self.distributed.is_main:
            print(
                f"step {step:5d}/{self.config.max_steps} | checkpoint {folder}\n", end=""
            )  # one write, so that threads' lines do not mix
            self._prune()

    def _prune(self):
        """Remove all checkpoints but the newest keep_checkpoints and the one with the lowest validation loss. Those
        whose validation loss is not finite go first."""
        found = checkpoints_of(self.folder)
        losses = {path: self.log.val_losses.get(step_of(path)) for path in found}
        sound = [path for path in found if losses[path] is None or math.isfinite(losses[path])]
        best = sorted((path for path in sound if losses[path] is not None), key=losses.get)[:1]
        kept = sound[: self.config.keep_checkpoints] + best
        try:
            for path in found:
                if path not in kept:
                    doomed = path.with_name(path.name + ".unfinished")  # a half-deleted folder must not look complete
                    path.rename(doomed)
                    shutil.rmtree(doomed)
        except OSError as error:
            print(f"an older checkpoint could not be removed: {error}\n", end="")

    def _tidy(self, step):
        """Delete unfinished checkpoints, and rename those after `step` to *.abandoned."""
        for torn in self.folder.glob("checkpoint_*.unfinished"):
            shutil.rmtree(torn, ignore_errors=True)
        for path in checkpoints_of(self.folder):
            if step_of(path) > step:
                aside = path.rename(unused_name(path.with_name(path.name + ".abandoned")))
                print(f"{path} is newer than step {step}: renamed to {aside.name}")
