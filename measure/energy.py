"""The energy of GPUs, from two readings of NVML's counter (package nvidia-ml-py).

https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

import time

import torch

from common.device import missing_package

SHORTEST = 2  # seconds; the counter follows the driver's mean over 1 s, so less time can be off by more than 5%


def read_joules(devices):
    """(seconds of time.perf_counter(), joules that these CUDA devices have used since the driver was loaded).

    devices: numbers or torch.devices; of none, and without NVIDIA GPUs, NVML or their counters, the reading is None.
    """
    if not devices or not torch.cuda.is_available() or torch.version.hip or missing_package("pynvml"):
        return None
    import pynvml

    joules = 0.0
    try:
        pynvml.nvmlInit()
        for device in devices:
            # NVML and CUDA number GPUs differently, and CUDA_VISIBLE_DEVICES hides some from CUDA only
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            joules += pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # NVML has millijoules
    except pynvml.NVMLError:
        return None
    return time.perf_counter(), joules


def mj_per_token(before, after, tokens):
    """Millijoules a token between two readings; None without them, or if they are less than SHORTEST apart."""
    if not before or not after or after[0] - before[0] < SHORTEST:
        return None
    return 1000 * (after[1] - before[1]) / tokens
