"""A sharded model's checkpoint: every rank writes its shards as safetensors, through torch.distributed.checkpoint.

Loading reshards: each rank reads the parts it needs, whatever number of ranks wrote the files.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import math
import traceback
import warnings
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors import SafetensorError
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from common.device import fill, local
from common.errors import UserError, first_line
from common.files import digest, flush_to_disk, regular_file

FILE_BYTES = 2**30  # a rank's files are about this large: each is copied in memory before it is written


def has_dtensors(model):
    """Whether a model's parameters are sharded, and its checkpoints pieces."""
    return isinstance(next(model.parameters()), DTensor)


def write(folder, tensors, group):
    """Write each rank's tensors to files in the folder; returns {file name: SHA-256} of all ranks' files.

    A collective over `group` (gloo), which no other thread may use. Raises OSError on all ranks if one cannot write.
    """
    rank, error, hashes = dist.get_rank(group), None, {}
    try:
        writer = HuggingFaceStorageWriter(str(folder), split_into_files(tensors, group), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, process_group=group)
        for path in Path(folder).glob(f"shard-{rank + 1:05d}-*.safetensors"):
            flush_to_disk(path)
            hashes[path.name] = digest(path)
    except CheckpointException as raised:
        error = first_failure(raised)
        traceback.clear_frames(raised.__traceback__)  # one has the exception as a local: a cycle, which keeps tensors
    except (OSError, SafetensorError) as raised:
        error = f"rank {rank}: {first_line(raised)}"
    reports = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, (error, hashes), group=group)
    if errors := [error for error, _ in reports if error]:
        raise OSError(errors[0])
    return {name: value for _, hashes in reports for name, value in hashes.items()}


def split_into_files(tensors, group):
    """{name: file number, from 1} for the tensors of all ranks."""
    distributed = [None] * dist.get_world_size(group)
    dist.all_gather_object(distributed, {name: local(tensor).nbytes for name, tensor in tensors.items()}, group=group)
    sizes = {name: size for rank in distributed for name, size in rank.items()}
    return {name: 1 + begin // FILE_BYTES for name, begin in zip(sizes, accumulate(sizes.values(), initial=0))}


def first_failure(error):
    """The first line of one rank's error."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {first_line(cause)}"


class ListedFiles(FileSystem):
    """A folder with these files alone."""

    def __init__(self, files):
        self.files = files

    def ls(self, path):
        return [str(regular_file(Path(path) / file)) for file in self.files]


def load(folder, files, targets, optional=(), alone=False):
    """Copy tensors from a checkpoint's files into targets, {name: tensor or DTensor} on any device.

    Each rank reads the parts that its shards of the targets need; a collective, unless `alone`.
    A tensor of the embedding table may have more or fewer padding rows than the saved one (pad_vocab).
    Returns the tensors of the names in `optional` that the checkpoint has, as new CPU tensors.
    Raises UserError if a tensor is missing or has another shape.
    """
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = ListedFiles(files)  # by default it reads every .safetensors file of the folder
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a malformed header raises any
        raise UserError(f"cannot read {folder}: {first_line(error)}") from error
    if missing := targets.keys() - saved.keys():
        raise UserError(
            f"{folder} has no {min(missing)}: another model or --optimizer wrote it; --init_from loads its weights"
        )
    for name in {*targets, *(saved.keys() & optional)}:
        if sum(math.prod(piece.sizes) for piece in saved[name].chunks) < math.prod(saved[name].size):
            raise UserError(f"{folder} lacks a piece of {name}")
    found = {
        name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in optional if name in saved
    }
    padded = {name: target for name, target in targets.items() if target.shape != saved[name].size}
    for name, target in padded.items():
        if not name.endswith("wte.weight") or target.shape[1:] != saved[name].size[1:]:
            raise UserError(f"{name} is {tuple(saved[name].size)} in {folder}, {tuple(target.shape)} in the model")
    unpadded = {name: torch.empty(saved[name].size) for name in padded}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # resuming on one process is fine
        try:
            alone = alone or not dist.is_initialized()
            dcp.load({**targets, **found, **unpadded}, storage_reader=reader, no_dist=alone)
        except CheckpointException as raised:
            raise UserError(f"cannot read {folder}: {first_failure(raised)}") from raised
    for name, target in padded.items():
        rows = unpadded[name][: len(target)]
        fill(target, F.pad(rows, (0, 0, 0, len(target) - len(rows))))
    return found
