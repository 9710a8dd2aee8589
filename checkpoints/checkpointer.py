"""When a run is saved, and which of its checkpoints stay."""

import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.nn.utils import get_total_norm

from checkpoints.pieces import has_dtensors
from checkpoints.run_folder import checkpoints_of, step_of
from checkpoints.save import snapshot, write
from common.cli import print_over_bar, python_command
from common.device import full_tensor
from common.files import is_disk_full


class Checkpointer:
    """Saves a run when a checkpoint is due, and writes it in a thread while training continues.

    Every rank has one, since a snapshot is a collective. Rank 0 writes; the ranks of a sharded model all write.
    """

    def __init__(self, trainer, data, log, start):
        """trainer: train_gpt2.Trainer. data: the shards' identity(). log: rank 0's RunLog, None on the other ranks.
        start: a resume.Start."""
        self.config, self.distributed = trainer.config, trainer.distributed
        self.model, self.optimizer, self.scaler = trainer.model, trainer.optimizer, trainer.scaler
        self.monitor = trainer.monitor
        self.data, self.log, self.start = data, log, start
        self.folder = Path(self.config.log_dir) / self.config.run_name
        self.group = dist.new_group(backend="gloo") if has_dtensors(self.model) else None
        # The step of the last snapshot, written or not. A new run, or a branch, is saved before its first step: to have
        # where to go back to
        self.saved = start.step if start.goes_on or not self.config.rollbacks else start.step - 1
        self.sound = start.step  # the newest step that was well, see watch/rollback.py
        self.pending = False  # a checkpoint is due, and waits for a finite step
        self._thread = ThreadPoolExecutor(1)
        self._writing = None
        self._failed = False  # whether the last write failed
        if self.distributed.is_main:
            for torn in self.folder.glob("checkpoint_*.unfinished"):
                shutil.rmtree(torn, ignore_errors=True)
        if self.config.checkpoint_every and self.distributed.device.type == "cuda":
            snapshot(self.model, self.optimizer, self.distributed)  # allocates page-locked memory before the first step

    def save_if_due(self, step, tokens, health, last):
        """Save if this step is due. last: the run ends here. health: a watch.rollback.Health; if the last loss or
        gradient or the weights are not finite, the checkpoint waits for a step where they are. If the ranks' copies of
        the weights differ, it says so."""
        every = self.config.checkpoint_every
        due = last or step == self.start.step or (every > 0 and step % every == 0)
        self.pending = step > self.saved and (self.pending or due)
        self.sound = health.sound
        if not (every and self.pending) or health.bad_steps:
            return
        norm = full_tensor(get_total_norm(self.model.parameters()))
        if not math.isfinite(self.distributed.all_reduce(norm)[0]):
            if self.log:
                print(f"step {step:5d}/{self.config.max_steps} | the weights are not finite: no checkpoint")
            return
        if not self.group and len({own.item() for own in self.distributed.all_gather(checksum(self.model))}) > 1:
            if self.log:
                what = "the ranks' copies of the weights differ, and rank 0's are saved: python -m measure.preflight"
                print(f"step {step:5d}/{self.config.max_steps} | {what} finds a faulty GPU")
        self.wait()
        tensors = snapshot(self.model, self.optimizer, self.distributed)
        self.saved, self.pending = step, False
        if not (self.distributed.is_main or self.group):
            return
        training = dict(step=step, tokens=tokens, scaler=self.scaler.state_dict()) | self.data
        training["trained_seconds"] = self.start.trained_seconds + self.monitor.trained_seconds
        training["health"] = health.state()
        if self.log:
            training["run"] = dict(self.log.facts)
            self.log.flush()
        self._writing = self._thread.submit(self._write, step, tensors, training)

    def wait(self):
        """Wait until the checkpoint under way is on disk. If that fails, print why; training continues."""
        if not self._writing:
            return
        error, self._writing = self._writing.result(), None
        self._failed = error is not None
        if error and self.distributed.is_main:
            print(f"the checkpoint was not written ({error}); {self.newest()}")

    def finish(self, step, problem, finished):
        """Wait until everything is on disk, on all ranks, and close the log. problem: why the run diverged, or None.
        Returns on rank 0 that or, unless checkpoint_every is 0, why `step` is not saved, with what to do; or None."""
        self.wait()
        if self.log:
            self._prune()  # the last validation loss is known now
        self.distributed.all_reduce(0)  # all wait: a scheduler may end the job when one process exits
        if not self.log:
            return None
        every = self.config.checkpoint_every
        if every and not math.isfinite(self.log.val_losses.get(step, 0.0)):
            problem = f"the validation loss of step {step} is not finite; {self._way_back()}"
        elif problem:
            problem = f"{problem}; {self._way_back()}"
        elif every and self.saved < step:
            problem = f"step {step} is not saved: its loss, gradient or weights are not finite; {self._way_back()}"
        elif every and self._failed:
            problem = f"step {step} is not saved; {self.newest()}"
        self.log.close(finished=finished and not problem)
        return problem

    def _way_back(self):
        """What to do after the run diverged, in words."""
        if followed := [path for path in self._followed(checkpoints_of(self.folder)) if step_of(path)]:
            return f"go back with --resume {followed[0]} and a lower --lr"
        return "start over with another --run_name and a lower --lr"

    def newest(self):
        """The newest checkpoint, in words."""
        found = checkpoints_of(self.folder)
        return f"the newest checkpoint is {found[0]}" if found else "there is no checkpoint"

    def how_to_continue(self):
        """How a stopped run continues, in words."""
        found = checkpoints_of(self.folder)
        command = python_command("train_gpt2.py", "--resume", self.folder)
        if self.distributed.world_size > 1:  # torchrun's own flags are not known here
            command = f"the same command with --resume {self.folder}"
        return f"to continue from {found[0]}: {command}" if found else self.newest()

    # ---- in the thread

    def _write(self, step, tensors, training, retry=True):
        """Write a checkpoint. If the disk is full, an older checkpoint makes room, and all ranks write once more.

        Returns None or the error, as text: the exception's traceback would keep the snapshot in memory.
        """
        folder, main = self.folder / f"checkpoint_{step:06d}", self.distributed.is_main
        error, full = None, False
        try:
            write(folder, self.model, tensors, training, self.group)
        except (OSError, SafetensorError) as raised:
            error, full = str(raised) or type(raised).__name__, is_disk_full(raised)
            if main:
                shutil.rmtree(folder.with_name(folder.name + ".unfinished"), ignore_errors=True)
        again = [retry and full and main and self._make_room()]
        if self.group:
            dist.broadcast_object_list(again, group=self.group)  # from rank 0, which has the errors of all ranks
        if again[0]:
            return self._write(step, tensors, training, retry=False)
        if main and not error:
            print_over_bar(f"step {step:5d}/{self.config.max_steps} | checkpoint {folder}")
            self._prune()
        return error

    def _prune(self):
        """Remove all checkpoints but the newest keep_checkpoints, the newest whose next step was well, and the one with
        the lowest validation loss. One whose validation loss is not finite is always removed."""
        sound, best = self._sound_and_best()
        keep = sound[: self.config.keep_checkpoints] + self._followed(sound) + best
        for path in checkpoints_of(self.folder):
            if path not in keep:
                self._remove(path)

    def _make_room(self):
        """Remove one checkpoint: one that is not sound, else the oldest, else the best; the only one, if no step
        preceded it. Returns whether that worked."""
        sound, best = self._sound_and_best()
        keep = best + self._followed(sound)
        worth = lambda path: (path in sound[:1], path in keep, path in sound, step_of(path))  # noqa: E731
        found = sorted(checkpoints_of(self.folder), key=worth)
        spare = len(found) > 1 or (not self.start.goes_on and [*map(step_of, found)] == [self.start.step])
        if spare:
            print_over_bar(f"the disk is full: {found[0]} makes room")
        return spare and self._remove(found[0])

    def _sound_and_best(self):
        """The checkpoints whose validation loss is finite or unknown, the newest first; [the one with the lowest]."""
        losses = {path: self.log.val_losses.get(step_of(path)) for path in checkpoints_of(self.folder)}
        sound = [path for path in losses if losses[path] is None or math.isfinite(losses[path])]
        return sound, sorted((path for path in sound if losses[path] is not None), key=losses.get)[:1]

    def _followed(self, paths):
        """[The newest of these checkpoints whose next step was well], if there is one."""
        return [path for path in paths if step_of(path) <= self.sound][:1]

    def _remove(self, path):
        """Remove a checkpoint; returns whether that worked."""
        doomed = path.with_name(path.name + ".unfinished")  # a half-deleted folder must not look complete
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            print_over_bar(f"an older checkpoint could not be removed: {error}")
            return False
        return True


def checksum(model):
    """() int64: the sum of a model's float32 weights, each read as an integer. Copies that are equal have the same."""
    return sum(parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in model.parameters())
