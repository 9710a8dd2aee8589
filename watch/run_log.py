"""RunLog: the folder of a run (its flags and facts, log.txt, metrics.jsonl), what training prints, the wandb page."""

import contextlib
import dataclasses
import json
import math
import os
import time
from pathlib import Path

from tqdm import tqdm

from checkpoints import run_folder
from common import flag_file
from common.errors import UserError
from common.files import atomic_write, write_json
from config import Config, chosen_flags
from data.shards import dataset_name
from optim.schedules import full_batches
from watch.hardware import environment, mfu, peak_flops, peak_memory
from watch.ranks import slowest
from watch.wandb_page import WandbPage

WAITING = 2**26  # bytes of a log that wait in its buffer while the disk is full: those of some 200,000 steps


class RunLog:
    """Prints and logs one run. Only rank 0 makes one.

    log.txt has lines of `{step} {stream} {value}`, stream one of train, val, hella; metrics.jsonl has
    everything, one object per line. A step's number is the number of steps before it, skipped ones included.
    """

    def __init__(self, config, flags, distributed, flops_per_token, resumed=None, training=None):
        """flags: the Config before resolve(), for flags.yaml. resumed: the checkpoint that the run continues from;
        training: the contents of its training.json.

        The logs keep all lines before the checkpoint's step, and at that step the evaluations that do not run again.
        Without a run_name the run gets a new folder, which names it. Raises UserError when the folder belongs to a
        finished or running run, or cannot be written, and when --wandb online has no login.
        """
        self.config = config
        self.flags = flags
        self.device = device = distributed.device
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops(device) * distributed.world_size
        self.first_step = training["step"] if training else 0
        self.wandb = WandbPage(config)
        weights = Path(config.init_from).resolve().name
        kind = "demo" if config.demo else config.model if weights == "scratch" else weights
        self.folder = run_folder.make_folder(config.log_dir, config.run_name, kind)
        try:
            self._lock = run_folder.lock(self.folder)
            earlier = self._earlier_facts(resumed)
            self.facts = dict(vars(config), run_name=self.folder.name, world_size=distributed.world_size)
            self.facts |= environment(device) | dict(started_in=os.getcwd(), finished=False, wandb_id=None)
            self.facts["dataset"] = dataset_name(config.data_dir)
            self.facts["rolled_back"] = training.get("rolled_back", []) if training else []
            if earlier and self.first_step >= config.max_steps:  # no step follows: the run stays as it is
                if run_folder.step_of(run_folder.checkpoints_of(self.folder)[0]) > self.first_step:
                    raise UserError(
                        f"{resumed} has reached --max_steps {config.max_steps}, and {self.folder} has newer "
                        "checkpoints: raise it to go back, or choose another --run_name"
                    )
                self.facts, self.flags = earlier | dict(finished=False, wandb_id=earlier.get("wandb_id")), None
            elif earlier:
                goes_back = run_folder.set_aside_newer(self.folder, self.first_step)
                # wandb's step cannot decrease, so a run that goes back has a new page
                self.facts["wandb_id"] = None if goes_back else earlier.get("wandb_id")
                self.facts["resume"] = earlier.get("resume")  # where a branch began; its command may be repeated
            self._write_facts()
            self.log_txt, lines = self._open("log.txt", parse_log_line, continues=bool(earlier))
            self.metrics_jsonl, _ = self._open("metrics.jsonl", parse_metrics_line, continues=bool(earlier))
            if wandb_id := self.wandb.start(self.folder, self.facts):
                self.facts["wandb_id"] = wandb_id
                self._write_facts()
        except OSError as error:
            raise UserError(
                f"cannot write the run's folder {self.folder}: {error.strerror}; choose another --log_dir"
            ) from error
        self.val_losses = {step: value for step, stream, value in lines if stream == "val"}
        self._first_end = None  # (step, time) of the end of this process's first step
        self._error = None  # the OSError of the last attempt to write the folder; the next one writes what waits

    def where_to_watch(self):
        """{"watch": where wandb's page is, or the path of metrics.jsonl}; of an offline page also how to upload it."""
        return self.wandb.where_to_watch() or dict(watch=f"{self.folder}/metrics.jsonl")

    def train_step(self, step, tokens, result, bad_steps=0):
        """Print and log a step that has just ended, a train_gpt2.StepResult.

        tokens: trained on so far, this step included. bad_steps: consecutive steps, up to this one, with a loss or
        gradient that is not finite; they are skipped.
        """
        loss, rate = result.loss, result.tokens / result.seconds
        utilization = mfu(rate, self.flops_per_token, self.peak_flops)
        of_ranks, slow_rank = slowest(result.own_ms)
        self._print(
            step,
            f"loss {loss:.6f} | lr {result.lr:.4e} | norm {result.grad_norm:.4f} | {result.seconds * 1000:.2f} ms",
            f"{rate:,.0f} tok/s",
            utilization and f"MFU {utilization:.1%}",
            self._time_left(step),
            slow_rank,
            bad_steps and f"not finite, skipped ({bad_steps} in a row)",
        )
        values = dict(train_loss=loss, lr=result.lr, grad_norm=result.grad_norm, step_ms=result.seconds * 1000)
        values |= dict(tokens_per_sec=rate, mfu=utilization, peak_gb=peak_memory(self.device), **of_ranks)
        rare = dict(bad_steps=bad_steps or None, loss_scale=result.loss_scale)
        values |= {name: value for name, value in rare.items() if value is not None}
        self._record(step, tokens, values, f"{step} train {loss:.6f}\n")

    def validation(self, step, tokens, loss, seconds, bits_per_byte):
        """Print and log a validation loss, in nats per token and in bits per byte."""
        self.val_losses[step] = loss
        self._print(step, f"validation loss {loss:.4f}", f"{bits_per_byte:.4f} bits/byte", f"{seconds:.1f} s")
        values = dict(val_loss=loss, val_bits_per_byte=bits_per_byte)
        self._record(step, tokens, values, f"{step} val {loss:.4f}\n")

    def tasks(self, step, tokens, scores, seconds):
        """Print and log scores, {"hellaswag": {"acc", "acc_norm", "items"}, other task: {metric: value}}.

        Accuracies are between 0 and 1. log.txt has HellaSwag's acc_norm, GPT-2's usual measure."""
        acc, acc_norm, items = (scores["hellaswag"][name] for name in ("acc", "acc_norm", "items"))
        count = f"{items:,} item{'s' * (items > 1)}"
        self._print(step, f"HellaSwag acc {acc:.4f} | acc_norm {acc_norm:.4f}", count, f"{seconds:.1f} s")
        values = {f"{task}_{metric}": value for task, own in scores.items() for metric, value in own.items()}
        others = [
            f"{name} {x:.4f}" for name, x in values.items() if not name.startswith("hella") and isinstance(x, float)
        ]
        if others:
            self._print(step, *others)
        self._record(step, tokens, values, f"{step} hella {acc_norm:.4f}\n")

    def samples(self, step, tokens, texts):
        """Print and log sampled texts."""
        for i, text in enumerate(texts):
            print(f"sample {i}: {text}")
        self._record(step, tokens, dict(samples=texts))

    def flush(self):
        """Return when all lines are on disk, if the folder can be written: no gap then precedes a checkpoint."""
        self._write(sync=True)

    def keep(self, **facts):
        """Add to config.json. Returns the OSError if that fails, or None."""
        self.facts |= facts
        try:
            self._write_facts()
        except OSError as error:
            return error

    def close(self, finished=True):
        """End the log. finished: whether the run is complete; a new run of this name must not overwrite it."""
        self._write(sync=True)
        self._error = self.keep(finished=finished) or self._error
        for file in (self.log_txt, self.metrics_jsonl):
            with contextlib.suppress(OSError):  # that of _write()
                file.close()
        self.wandb.finish()
        self._lock.close()

    def check_complete(self):
        """Raises UserError if a closed log lacks lines."""
        if self._error:
            raise UserError(
                f"{self.folder} could not be written completely ({self._error.strerror}): its logs lack lines that the "
                "output above has; make room, or choose another --log_dir"
            )

    def _earlier_facts(self, resumed):
        """config.json of the run in the folder, if this one continues it, else None.

        Raises UserError for a folder that is not a run's, and for a run that must not be overwritten.
        """
        if all(path.name == run_folder.LOCK or path.suffix == ".unfinished" for path in self.folder.iterdir()):
            return None
        facts = run_folder.facts_of(self.folder)
        if "finished" not in facts:
            raise UserError(f"{self.folder} is not a run's folder: choose another --run_name")
        own = resumed and run_folder.goes_on(resumed, self.folder)
        if not own and (facts["finished"] or run_folder.checkpoints_of(self.folder)):
            raise UserError(f"{self.folder} already holds a run: choose another --run_name, or delete it")
        return facts if own else None

    def _open(self, name, parse, continues):
        """(file, rows): a log opened for appending, and the parsed lines that it keeps from the earlier run."""
        path = self.folder / name
        if path.exists() and not continues:  # an earlier run ended before its first checkpoint
            path.rename(run_folder.unused_name(path.with_name(name + ".old")))
        # without an incomplete last line
        lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
        first, last = self.first_step, self.first_step == self.config.max_steps
        every = dict(val=self.config.val_every, hella=self.config.hellaswag_every, samples=self.config.sample_every)
        again = {"train", *(stream for stream, steps in every.items() if steps and (last or first % steps == 0))}
        rows = []
        with atomic_write(path) as file:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged line
                    row = parse(line)
                    if row[0] < first or (row[0] == first and row[1] not in again):
                        rows.append(row)
                        file.write(f"{line}\n".encode())
        return open(path, "ab", WAITING), rows

    def _write_facts(self):
        write_json(self.folder / "config.json", self.facts)
        flags = self.flags
        if not flags:
            return
        if flags.init_from != "scratch":  # sizes that were chosen by the weights and the data
            sizes = {name: getattr(self.config, name) for name in ("seq_len", "total_batch_size")}
            flags = dataclasses.replace(flags, **sizes)
        flag_file.write(self.folder / run_folder.FLAGS, chosen_flags(flags), Config)

    def _print(self, step, *columns):
        """Columns that are None, False or 0 are left out."""
        print(" | ".join([f"step {step:5d}/{self.config.max_steps}", *filter(None, columns)]))

    def _record(self, step, tokens, values, line=""):
        """Write values to metrics.jsonl and to wandb, and line to log.txt."""
        self.wandb.log(step, values)
        # JSON has no NaN and no infinity
        values = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self._write(line, json.dumps(dict(step=step, tokens=tokens, **values)) + "\n")

    def _write(self, line="", row="", sync=False):
        """Write to log.txt and metrics.jsonl what waits and these. After an error, which is printed once, training goes
        on."""
        before, self._error = self._error, None
        try:
            self.log_txt.write(line.encode())
            self.metrics_jsonl.write(row.encode())
            for file in (self.log_txt, self.metrics_jsonl):
                file.flush()  # after an error the buffer keeps the rest, also of a line
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            self._error = error
            if not before:
                print(f"cannot write {self.folder} ({error.strerror}): training goes on, log lines wait in memory")

    def _time_left(self, step):
        """The time to the end of the run, at the mean pace (evaluations and checkpoints included) since the end of this
        process's first step, which compiles."""
        now = time.perf_counter()
        if self._first_end is None:
            self._first_end = step, now
            return "time left unknown"
        first, end = self._first_end
        begun, done, all_steps = (
            full_batches(each, self.config) for each in (first + 1, step + 1, self.config.max_steps)
        )
        return f"{tqdm.format_interval((now - end) / (done - begun) * (all_steps - done))} left"


def parse_log_line(line):
    """(step, stream, value) of a line of log.txt. Raises ValueError for an incomplete line."""
    step, stream, value = line.split()
    return int(step), stream, float(value)


def parse_metrics_line(line):
    """(step, stream) of a line of metrics.jsonl. Raises ValueError, KeyError or TypeError for an incomplete line."""
    values = json.loads(line)
    streams = dict(train_loss="train", val_loss="val", hellaswag_acc="hella", samples="samples")
    return int(values["step"]), next((stream for key, stream in streams.items() if key in values), None)
