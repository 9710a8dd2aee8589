"""Checkpoints: seconds of saving, loading and resharding, by model size and number of ranks.

    python -m measure.checkpoints --models gpt2 gpt2-xl
    torchrun --standalone --nproc_per_node=2 -m measure.checkpoints       # also zero3 on two ranks, each mode from each
    torchrun --standalone --nproc_per_node=2 -m measure.checkpoints --checkpoint log/RUN/checkpoint_019073

With ddp one rank writes and every rank reads all of the files; with zero3 every rank writes its shards and reads the
parts that it needs, as in ByteCheckpoint (Wan et al. 2024, arXiv 2407.20143). "broadcast" is ddp where rank 0 alone
reads and sends what it has read, as in MegaScale (Jiang et al. 2024, arXiv 2402.15627). As when a run resumes, rank 0
reads the files from disk first, to verify them; then they are in its machine's page cache.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import contextlib
import gc
import itertools
import os
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from checkpoints import load, pieces, save
from checkpoints.run_folder import checkpoints_of
from common.cli import parse, progress
from common.errors import UserError, out_of_memory, run
from config import SIZES, Config, gpt_config, set_sizes
from measure.results import Results, ResultsFlags
from model import GPT
from optim.optimizer import make_optimizer, named_state
from optimizations import turn_off_unavailable
from parallel import place, process_group
from watch.hardware import environment

COLUMNS = ("model, saved -> read", "GB", "files", "snapshot s", "write s", "verify s", "load s")
NOTE = (
    "Snapshot: training waits for the copy to host memory. Write: in a thread, with hashes and flushes. Verify: rank 0 "
    "reads the files from disk and compares hashes. Load: weights and optimizer state, after verification, so on one "
    "machine from the page cache. A GB is 2^30 bytes."
)


@dataclass
class Flags(ResultsFlags):
    """Time saving, loading and resharding of checkpoints, on the disk of --log_dir, which all machines share."""

    models: tuple[Literal[tuple(SIZES)], ...] = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    """Sizes."""
    modes: tuple[Literal["ddp", "zero3"], ...] = ("ddp", "zero3")
    """What saves and what reads, in all combinations; on one rank ddp alone."""
    checkpoint: str | None = None
    """Read this checkpoint, or a run's newest, of any mode and number of ranks, in place of saving some of --models."""


def main():
    flags = parse(Flags)
    distributed = process_group.start(flags.device)
    group = dist.new_group(backend="gloo") if distributed.world_size > 1 else None
    modes = flags.modes if group else ("ddp",)
    if not (flags.models or flags.checkpoint) or not set(modes).intersection(flags.modes):
        raise UserError("nothing to measure: give --models and --modes; one rank measures ddp, torchrun starts several")
    existing = None
    if flags.checkpoint is not None:
        flags.checkpoint = str(next(iter(checkpoints_of(flags.checkpoint)), flags.checkpoint))
        existing = load.read_training(flags.checkpoint, **load.FIELDS)
    results = distributed.on_main(lambda: Results(flags, "checkpoints", distributed.device, COLUMNS))
    folder = distributed.broadcast(results and results.folder) / "checkpoint"
    try:
        with out_of_memory("use more ranks, or smaller --models"):
            if existing:
                untimed = dict(snapshot=None, write=None)
                measure_readers(existing["run"], untimed, Path(flags.checkpoint), modes, results, distributed)
            else:
                measure_all(flags.models, modes, folder, results, distributed, group)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write or read {flags.checkpoint or folder}: {error}") from error
    finally:
        for path in (folder, folder.with_name(folder.name + ".unfinished")) if results else ():
            shutil.rmtree(path, ignore_errors=True)
    if results:
        print(results)
    process_group.stop()


def measure_all(models, modes, folder, results, distributed, group):
    """Add rows to results, on rank 0, for each size and mode. The folder has one checkpoint at a time."""
    for model, saved in progress([*itertools.product(models, modes)], "checkpoints"):
        run = dict(model=model, parallel=saved, world_size=distributed.world_size)
        phases = measure_saving(run, folder, distributed, group)
        measure_readers(run, phases, folder, modes, results, distributed)
        distributed.on_main(partial(shutil.rmtree, folder))


def measure_readers(run, phases, folder, modes, results, distributed):
    """Add a row to results, on rank 0, for each way to read the folder's checkpoint. run: the flags and world_size of
    what saved it; phases: the seconds that it took."""
    facts, splits = environment(distributed.device), ("tensor", "context", "pipeline")
    saved = f"{run['world_size']} x {run['parallel']}"
    saved += "".join(f", {split} {run[split]}" for split in splits if run.get(split, 1) > 1)
    name = run["model"]
    if run.get("n_embd", 0) and tuple(run[size] for size in ("n_layer", "n_head", "n_embd")) != SIZES[name]:
        name = f"L = {run['n_layer']}, C = {run['n_embd']}"
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    for read in (*modes, *(("broadcast",) if distributed.world_size > 1 and "ddp" in modes else ())):
        row = dict(name=name, saved=saved, read=read, ranks=distributed.world_size, status="done", facts=facts)
        row |= dict(gb=sum(sizes) / 2**30, files=len(sizes)) | phases
        broadcasts = read == "broadcast"
        mode = "ddp" if broadcasts else read
        row |= measure_loading(run | dict(parallel=mode), folder, distributed, broadcasts)
        if results:
            seconds = (row[phase] for phase in ("snapshot", "write", "verify", "load"))
            cells = [f"{name}, {saved} -> {row['ranks']} x {read}", f"{row['gb']:.2f}", str(row["files"])]
            results.add(row, [*cells, *("" if each is None else f"{each:.2f}" for each in seconds)], NOTE)


def make(run, distributed, weights=None):
    """(model, optimizer) with a run's flags and, if there are any, the sizes of `weights`, a GPTConfig, on this rank's
    device; the weights are whatever memory holds."""
    names = ("model", "n_layer", "n_head", "n_embd", "seq_len", "optimizer", "parallel")
    config = Config(**{name: run[name] for name in names if name in run}, micro_batch_size=1)
    config.device = distributed.device.type
    set_sizes(config, None)
    config, _ = turn_off_unavailable(config, distributed)
    with torch.device("meta"):
        model = GPT(gpt_config(config, weights))
    model = place.place(model, config, distributed, contextlib.nullcontext())
    return model, make_optimizer(model, config)


def measure_saving(run, folder, distributed, group):
    """Save a checkpoint to the folder: dict(snapshot=, write=), seconds until all ranks are done."""
    model, optimizer = make(run, distributed)
    sharded = pieces.has_dtensors(model)
    save.snapshot(model, optimizer, distributed)  # allocates page-locked memory
    snapshot, tensors = timed(distributed, lambda: save.snapshot(model, optimizer, distributed))
    write = partial(save.write, folder, model, tensors, {}, group if sharded else None)
    seconds, _ = timed(distributed, write if distributed.is_main or sharded else lambda: None)
    return dict(snapshot=snapshot, write=seconds)


def measure_loading(run, folder, distributed, broadcasts):
    """Load the folder's checkpoint as a run of this mode does: dict(verify=, load=)."""
    model, optimizer = make(run, distributed, load.load_config(folder))
    files = load.read_training(folder)["sha256"]
    state = named_state(model, optimizer)

    def load_all(alone=False):
        load.load_weights(folder, model, alone)
        pieces.load(folder, [file for file in files if file.endswith(".safetensors")], state, alone=alone)

    def load_and_broadcast():
        distributed.on_main(partial(load_all, alone=True))
        for tensor in (*model.parameters(), *state.values()):
            dist.broadcast(tensor.detach(), src=0)

    distributed.on_main(lambda: [drop_from_page_cache(folder / file) for file in files])
    verify, _ = timed(distributed, lambda: distributed.is_main and load.compare(folder, files))
    seconds, _ = timed(distributed, load_and_broadcast if broadcasts else load_all)
    return dict(verify=verify, load=seconds)


def timed(distributed, work):
    """(seconds until all ranks have done it, this rank's result)."""
    gc.collect()  # the model before
    distributed.all_reduce(0)
    began = time.perf_counter()
    result = work()
    distributed.all_reduce(0)  # on a GPU its copies are done then, too
    return time.perf_counter() - began, result


def drop_from_page_cache(path):
    """The next read of this file is one from disk. On systems without posix_fadvise it is not."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    run(main)
