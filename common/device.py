"""The device: which one "auto" means, what torch.compile and packages need on it, deterministic kernels; and tensors
that may be DTensors, of which a rank has a shard."""

import functools
import importlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from common.errors import UserError, first_line


def choose_device_type(choice):
    """The device type that a choice means here, "cuda", "mps" or "cpu"; "auto" is the first of them that exists. Raises
    UserError if the choice does not exist."""
    exists = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if choice == "auto":
        return next(filter(exists.get, exists))
    if not exists[choice]:
        raise UserError(f"--device {choice}, but PyTorch sees no such GPU: check its build, or use --device cpu")
    return choice


def missing_compiler(device):
    """Why torch.compile and Triton cannot compile for a device, or None."""
    cxx = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch._inductor.config.cpp.cxx
    # Debian's headers, as Triton finds them
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    missing = None
    if device.type == "cuda" and not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        missing = "a C compiler (gcc)"
    elif device.type != "cuda" and not shutil.which(cxx):
        missing = f"a C++ compiler ({cxx})"
    elif not Path(sysconfig.get_path("include", scheme), "Python.h").exists():
        missing = "Python's headers (python3-dev)"
    return f"torch.compile and Triton need {missing}, and this machine has none" if missing else None


@functools.cache
def missing_package(module):
    """Why a module cannot be imported, in words, or None."""
    package = module.partition(".")[0]
    try:
        importlib.import_module(module)
    except Exception as error:  # also releases that do not fit each other, a library or a folder that is not there
        return f"{package} cannot be imported ({first_line(error)}): pip install -r requirements-gpu.txt"


def be_deterministic():
    """Select kernels that sum in a fixed order. Call before cuDNN builds its plans.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no kernel here reads memory that it has not written


# ----------------------------------------------------------------------------------------------------------------------
# Tensors that may be DTensors


def local(x):
    """A DTensor's shard on this rank; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x):
    """The whole of a DTensor; a plain tensor as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def fill(x, whole):
    """Copy a whole tensor, the same on all ranks, into a tensor that may be a DTensor: each rank takes its shard."""
    if isinstance(x, DTensor):
        whole = distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)
    x.copy_(whole)
