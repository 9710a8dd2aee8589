"""A check of the GPUs before a long run: it names the one that is slow or faulty, and ends with exit code 1.

    torchrun --standalone --nproc_per_node=8 -m measure.preflight
    python -m measure.preflight                                       # one GPU, against its data sheet

All ranks multiply matrices at the same time, as in training, then copy memory; then every pair of ranks all-reduces.
MegaScale (Jiang et al. 2024, arXiv 2402.15627, section 4.3) tests its machines in this way before it restarts a run.
"""

import common.interrupt  # first: Ctrl-C during the other imports

import contextlib
import os
import platform
import re
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import torch
import torch.distributed as dist

from common.cli import flag, parse, progress
from common.errors import UserError, first_line, is_out_of_memory, run
from measure.kernels import memory_bandwidth
from measure.results import Results
from measure.timing import TimingFlags, dtype_of_activations, mean_ms
from parallel import process_group
from watch.hardware import answer, ask_nvidia_smi, environment, peak_flops

COLUMNS = ("rank", "GEMM TFLOP/s", "copy GB/s", "pairs GB/s", "slowest pair", "MHz", "of MHz", "°C")
RATES = dict(gemm="its GEMMs are", copy="its copies in memory are", pairs="its all-reduces with one other rank are")
NOTE = "Pairs: the mean of all-reduces with each other rank, and the slowest. Clock and temperature: during GEMMs."


@dataclass
class Flags(TimingFlags):
    """Check the GPUs before a long run. Exit code 1 and the GPU's name if one is slow or faulty."""

    seconds: float = flag(3.0, above=0)
    """Time of the GEMMs, in which a GPU warms up, and of the copies."""
    tolerance: float = flag(0.07, above=0, below=1)
    """A rank is slow if a rate is below the median of the other ranks by more than this; CPUs vary by over 0.07."""
    share: float = flag(0.5, at_least=0, at_most=1)
    """A GPU is slow if a rate is below this share of its peak, where that is known."""


def main():
    flags = parse(Flags)
    start = dict(imports=seconds_since_start())
    distributed = process_group.start(flags.device)
    start["process group"] = seconds_since_start() - start["imports"]  # with its first collective
    facts = environment(distributed.device)
    results = distributed.on_main(lambda: Results(flags, "preflight", distributed.device, COLUMNS))
    name = f"{facts['hardware']} {distributed.device.index or 0} of {platform.node()}"
    try:
        own = check(distributed, flags) | dict(name=name, hardware=facts["hardware"], start=start)
    except RuntimeError as error:
        if "CUDA error" not in str(error) and not is_out_of_memory(error):  # such as that another rank has ended
            raise
        raise UserError(f"rank {distributed.rank} ({name}) fails: {first_line(error)}") from error
    rows = [own] * distributed.world_size
    if dist.is_initialized():
        dist.all_gather_object(rows, own)
    if results:
        for rank, row in enumerate(rows):
            results.add(row | dict(rank=rank, status="done", facts=facts), cells(rank, row), NOTE)
        phases = (f"{max(row['start'][phase] for row in rows):.1f} s {phase}" for phase in start)
        print(f"start, of the slowest rank: {', '.join(phases)}\n{results}")
    process_group.stop()
    if problems := find_problems(rows, flags):
        raise UserError("; ".join(problems))


def seconds_since_start():
    """The age of this process by the kernel's clock; on other systems than Linux the CPU's seconds that it took."""
    if (stat := Path("/proc/self/stat")).exists():
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # since the machine's start, see proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.process_time()


def check(distributed, flags):
    """This rank's rates and their peaks, a sum over the bits of a GEMM's result, and what its driver reports.

    A collective. Returns dict(gemm=, copy=, pairs=, peaks=, partners=, bits=, driver=); pairs is the mean of partners.
    """
    device, gpu = distributed.device, distributed.device.type == "cuda"
    n, dtype = (8192, dtype_of_activations(device)) if gpu else (512, torch.float32)
    torch.manual_seed(0)  # the same numbers on every rank
    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))
    product = torch.empty_like(a)
    gemm = partial(torch.mm, a, b, out=product)
    rate_of(device, gemm, 2 * n**3, flags.seconds)  # the GPU warms up
    asked = ask_nvidia_smi(device, ["-q", "-x"])  # answers during the GEMMs
    distributed.all_reduce(0)  # the ranks begin together
    rates = dict(gemm=rate_of(device, gemm, 2 * n**3, flags.seconds) / 1e12)
    source = torch.ones(2**30 if gpu else 2**24, dtype=torch.int8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    rates["copy"] = rate_of(device, copy, 2 * source.nbytes, flags.seconds) / 1e9  # each byte is read and written
    partners = rates_of_pairs(distributed, flags.repeats)
    rates["pairs"] = statistics.fmean(partners.values() or [0])
    rates["peaks"] = dict(gemm=peak_flops(device) / 1e12, copy=memory_bandwidth(device) or 0)
    rates["bits"] = product.view(torch.int16).sum().item()
    return rates | dict(partners=partners, driver=read_driver(asked and answer(asked)))


def rate_of(device, function, amount, seconds):
    """The amount a second of a function that handles `amount`, over many calls in a row."""
    count = max(1, int(1e3 * seconds / mean_ms(device, function, 1)))
    return 1e3 * amount / mean_ms(device, function, count)


def rates_of_pairs(distributed, count):
    """{other rank: GB/s of an all-reduce with it alone}; pairs without a common rank all-reduce at the same time."""
    values = torch.zeros(2**24 if distributed.device.type == "cuda" else 2**18, device=distributed.device)
    rates = {}
    for pairs in progress(rounds(distributed.world_size), "pairs"):
        group, _ = dist.new_subgroups_by_enumeration(pairs)
        if group:
            reduce = partial(dist.all_reduce, values, group=group)
            mean_ms(distributed.device, reduce, 1)  # connects the two
            partner = sum(dist.get_process_group_ranks(group)) - distributed.rank
            rates[partner] = 1e-6 * values.nbytes / mean_ms(distributed.device, reduce, count)
            dist.destroy_process_group(group)
        distributed.all_reduce(0)
    return rates


def rounds(n):
    """All pairs of n ranks, in rounds in which each rank has one partner at most (the circle method of tournaments)."""
    ranks = [*range(n + n % 2)]  # of an odd number of ranks one waits in each round
    result = []
    for _ in range(len(ranks) - 1 if n > 1 else 0):
        result.append([[a, b] for a, b in zip(ranks, ranks[::-1]) if a < b < n])
        ranks.insert(1, ranks.pop())
    return result


def read_driver(xml):
    """dict(mhz=, max_mhz=, celsius=, faults=) of the XML of nvidia-smi. None, where it is not installed: no facts, no
    faults. No answer within ten seconds, or one without a GPU, is a fault."""
    gpu = None
    with contextlib.suppress(ElementTree.ParseError):
        gpu = ElementTree.fromstring(xml or "").find("gpu")
    if gpu is None:
        unknown = dict.fromkeys(("mhz", "max_mhz", "celsius"))
        return unknown | dict(faults=[] if xml is None else ["nvidia-smi does not answer"])
    number = lambda path: next(iter(re.findall(r"\d+", gpu.findtext(path, ""))), None)  # noqa: E731
    faults = []
    for element in gpu.iter():
        name, value = element.tag.removeprefix("clocks_event_reason_"), (element.text or "").strip()
        slowed = name.endswith("slowdown") and value == "Active"
        unmapped = name in ("remapped_row_pending", "remapped_row_failure") and value == "Yes"
        if slowed or unmapped or name == "gpu_recovery_action" and value not in ("None", "N/A"):
            faults.append(f"{name} is {value}")
    for element in gpu.iterfind("ecc_errors/volatile/*"):  # since the driver was loaded
        if "uncorrectable" in element.tag and re.fullmatch(r"[1-9]\d*", (element.text or "").strip()):
            faults.append(f"{element.text.strip()} memory errors {element.tag}")
    width, full = (number(f"pci/pci_gpu_link_info/link_widths/{name}_link_width") for name in ("current", "max"))
    if width != full:
        faults.append(f"PCIe has {width} of {full} lanes")
    mhz, max_mhz = number("clocks/sm_clock"), number("max_clocks/sm_clock")
    return dict(mhz=mhz, max_mhz=max_mhz, celsius=number("temperature/gpu_temp"), faults=faults)


def find_problems(rows, flags):
    """In words, what is slow or faulty. rows: check() of all ranks."""
    problems = []
    for rank, row in enumerate(rows):
        found = [*row["driver"]["faults"]]
        for rate, words in RATES.items():
            value, peak = row[rate], row["peaks"].get(rate)
            usual = statistics.median([other[rate] for other in rows if other is not row] or [0])
            if value < (1 - flags.tolerance) * usual:
                found.append(f"{words} {1 - value / usual:.0%} slower than the other ranks'")
            elif peak and value < flags.share * peak:
                found.append(f"{words} at {value / peak:.0%} of the peak, {peak:,.0f}")
        if statistics.multimode(r["bits"] for r in rows if r["hardware"] == row["hardware"]) != [row["bits"]]:
            found.append("its GEMM's result is not that of the other GPUs")
        if found:
            problems.append(f"rank {rank} ({row['name']}): {', '.join(found)}")
    return problems


def cells(rank, row):
    """A rank's row of the table as text."""
    partners, driver = row["partners"], row["driver"]
    slowest = min(partners, key=partners.get, default=None)
    texts = [f"{rank} {row['name']}", f"{row['gemm']:.4g}", f"{row['copy']:,.0f}"]
    texts += [f"{row['pairs']:.1f}", f"{partners[slowest]:.1f} with {slowest}"] if partners else ["–", "–"]
    return [*texts, *(driver[name] or "–" for name in ("mhz", "max_mhz", "celsius"))]


if __name__ == "__main__":
    run(main)
