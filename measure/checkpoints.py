"""Checkpoints: seconds of saving, loading and resharding, by model size and number of ranks.

    python -m measure.checkpoints --models gpt2 gpt2-xl
    torchrun --standalone --nproc_per_node=2 -m measure.checkpoints       # also zero3 on two ranks, each mode from each

With ddp one rank writes and every rank reads all of the files; with zero3 every rank writes its shards and reads the
parts that it needs, as in ByteCheckpoint (Wan et al. 2024, arXiv 2407.20143). Files are read from disk, not from the
page cache: first by rank 0, which verifies them, as when a run resumes.
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
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from checkpoints import load, pieces, save
from common.cli import parse, progress
from common.errors import UserError, out_of_memory, run
from config import SIZES, Config, gpt_config, set_sizes
from measure.results import Results, ResultsFlags
from model import GPT
from optim.optimizer import make_optimizer, named_state
from optimizations import turn_off_unavailable
from parallel import memory, place, process_group
from watch.hardware import environment

COLUMNS = ("model, saved -> read", "GB", "files", "snapshot s", "write s", "verify s", "load s")
NOTE = (
    "Snapshot: training waits for the copy to host memory. Write: in a thread, with hashes and flushes. Verify: rank 0 "
    "reads the files from disk and compares hashes. Load: weights and optimizer state, then in the page cache. A GB is "
    "2^30 bytes."
)


@dataclass
class Flags(ResultsFlags):
    """Time saving, loading and resharding of checkpoints, on the disk of --log_dir, which all machines share."""

    models: tuple[Literal[tuple(SIZES)], ...] = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    """Sizes."""
    modes: tuple[Literal["ddp", "zero3"], ...] = ("ddp", "zero3")
    """What saves and what reads, in all combinations; on one rank ddp alone."""


def main():
    flags = parse(Flags)
    distributed = process_group.start(flags.device)
    group = dist.new_group(backend="gloo") if distributed.world_size > 1 else None
    modes = flags.modes if group else ("ddp",)
    results = distributed.on_main(lambda: Results(flags, "checkpoints", distributed.device, COLUMNS))
    folder = distributed.broadcast(results and results.folder) / "checkpoint"
    try:
        with out_of_memory(memory.less_memory()):
            measure_all(flags, modes, folder, results, distributed, group)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write or read {folder}: {error}") from error
    finally:
        for path in (folder, folder.with_name(folder.name + ".unfinished")) if results else ():
            shutil.rmtree(path, ignore_errors=True)
    if results:
        print(results)
    process_group.stop()


def measure_all(flags, modes, folder, results, distributed, group):
    """Add a row to results, on rank 0, for each size and pair of modes. The folder has one checkpoint at a time."""
    facts = environment(distributed.device)
    for model, saved in progress([*itertools.product(flags.models, modes)], "checkpoints"):
        writing = measure_saving(model, saved, folder, distributed, group)
        for read in modes:
            row = dict(name=model, saved=saved, read=read, ranks=distributed.world_size, status="done", facts=facts)
            row |= writing | measure_loading(model, read, folder, distributed)
            if results:
                seconds = (f"{row[phase]:.2f}" for phase in ("snapshot", "write", "verify", "load"))
                cells = [f"{model}, {saved} -> {read}", f"{row['gb']:.2f}", str(row["files"]), *seconds]
                results.add(row, cells, NOTE)
        distributed.on_main(partial(shutil.rmtree, folder))


def make(name, mode, distributed):
    """(model, optimizer) of a size and a mode, on this rank's device; the weights are whatever memory holds."""
    config = Config(model=name, parallel=mode, device=distributed.device.type, micro_batch_size=1)
    set_sizes(config, None)
    config, _ = turn_off_unavailable(config, distributed)
    with torch.device("meta"):
        model = GPT(gpt_config(config))
    model = place.place(model, config, distributed, contextlib.nullcontext())
    return model, make_optimizer(model, config)


def measure_saving(name, mode, folder, distributed, group):
    """Save a checkpoint to the folder: dict(gb=, files=, snapshot=, write=), seconds until all ranks are done."""
    model, optimizer = make(name, mode, distributed)
    sharded = pieces.has_dtensors(model)
    save.snapshot(model, optimizer, distributed)  # allocates page-locked memory
    snapshot, tensors = timed(distributed, lambda: save.snapshot(model, optimizer, distributed))
    write = partial(save.write, folder, model, tensors, {}, group if sharded else None)
    seconds, _ = timed(distributed, write if distributed.is_main or sharded else lambda: None)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return dict(gb=sum(sizes) / 2**30, files=len(sizes), snapshot=snapshot, write=seconds)


def measure_loading(name, mode, folder, distributed):
    """Load the folder's checkpoint as a run of this mode does: dict(verify=, load=)."""
    model, optimizer = make(name, mode, distributed)
    files = load.read_training(folder)["sha256"]

    def load_all():
        load.load_weights(folder, model)
        tensors = [file for file in files if file.endswith(".safetensors")]
        pieces.load(folder, tensors, named_state(model, optimizer))

    distributed.on_main(lambda: [drop_from_page_cache(folder / file) for file in files])
    verify, _ = timed(distributed, lambda: distributed.is_main and load.compare(folder, files))
    return dict(verify=verify, load=timed(distributed, load_all)[0])


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
