"""CUDA C++ compiled while Python runs, by NVRTC, a library among PyTorch's packages.

torch.utils.cpp_extension.load_inline needs nvcc and a C++ compiler; torch.cuda._compile_kernel needs a CUDA toolkit.
"""

import functools

import numpy as np
import torch

from common.device import missing_package


def missing(device):
    """Why a device cannot run CUDA C++, or None."""
    if device.type != "cuda" or torch.version.hip:
        return f"CUDA C++ is for NVIDIA GPUs, not {'AMD' if device.type == 'cuda' else device.type}"
    return missing_package("cuda.core")


def machine_code(source, name, capability):
    """A kernel of CUDA C++ source, named with its template arguments, for a compute capability, (major, minor)."""
    from cuda.core import Program, ProgramOptions

    program = Program(source, "c++", ProgramOptions(arch="sm_{}{}".format(*capability), std="c++17"))
    return program.compile("cubin", name_expressions=(name,))


@functools.cache
def kernel(source, name):
    """A kernel as a function of the present GPU: run(blocks, threads, *arguments), blocks and threads in x, y and z;
    arguments are tensors, and integers for C++'s int."""
    from cuda.core import LaunchConfig, Stream, launch

    function = machine_code(source, name, torch.cuda.get_device_capability()).get_kernel(name)

    def run(blocks, threads, *arguments):
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else np.int32(x) for x in arguments]
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        launch(stream, LaunchConfig(grid=blocks, block=threads), function, *values)

    return run
