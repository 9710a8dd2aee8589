"""A GPU's SM clock, power, temperature and energy, by NVML (package nvidia-ml-py).

A query of the driver may take milliseconds, so a thread asks, and no step waits for it.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

import math
import threading
import time
from typing import NamedTuple

import torch

from common.device import missing_package
from common.progress import print_over_bar

PERIOD = 0.25  # seconds between two samples
SHORTEST = 2  # seconds; NVML's power is a mean over 1 s, so the energy of less time can be off by more than 5%


class Sample(NamedTuple):
    time: float = math.nan  # of time.perf_counter(), seconds
    joules: float = math.nan  # since the driver was loaded
    watts: float = math.nan  # of the whole board, the driver's running mean
    sm_mhz: float = math.nan
    celsius: float = math.nan

    def joules_at(self, now):
        """The energy counter at a time soon after the sample."""
        return self.joules + self.watts * (now - self.time)


class PowerMeter:
    """The newest Sample of this process's GPU. Without NVML all values are NaN, and on a GPU `problem` says why; else
    it is None."""

    def __init__(self, device):
        self.sample, self.problem = Sample(), None
        if device.type != "cuda":
            return
        if torch.version.hip:
            self.problem = "NVML is NVIDIA's, and this is an AMD GPU"
        elif problem := missing_package("pynvml"):
            self.problem = problem
        else:
            self._start(device)

    def _start(self, device):
        import pynvml

        uuid = torch.cuda.get_device_properties(device).uuid
        try:
            pynvml.nvmlInit()
            # NVML and CUDA number GPUs differently, and CUDA_VISIBLE_DEVICES hides some from CUDA only
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.sample = read(handle)
        except pynvml.NVMLError as error:
            self.problem = f"NVML: {error}"
            return
        threading.Thread(target=self._watch, args=(handle, device), daemon=True).start()

    def _watch(self, handle, device):
        from pynvml import NVMLError

        while True:
            time.sleep(PERIOD)
            try:
                self.sample = read(handle)
            except NVMLError as error:
                self.sample = Sample()
                print_over_bar(f"{device}: power, clock and temperature are no longer logged: NVML: {error}")
                return

    def joules(self):
        """The GPU's energy counter now. The difference between two readings is the energy between them."""
        return self.sample.joules_at(time.perf_counter())


def read(handle):
    """A Sample of the GPU with this NVML handle. Raises pynvml.NVMLError."""
    import pynvml

    return Sample(
        time.perf_counter(),
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,  # NVML has millijoules
        pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # and milliwatts
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    )


def mj_per_token(joules, seconds, tokens):
    """Millijoules a token, from each step's joules and seconds, and the tokens of all steps.

    None if an energy is not known, or if the steps took less than SHORTEST.
    """
    total = sum(joules)
    return 1000 * total / tokens if sum(seconds) >= SHORTEST and math.isfinite(total) else None
