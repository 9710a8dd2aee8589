"""The hardware a run uses: its peak FLOP/s for MFU, peak memory, and the environment recorded in config.json."""

import hashlib
import importlib.metadata
import platform
import re
import resource
import shlex
import subprocess
import sys

import torch

from common.cli import ROOT

# Dense bf16 peak in TFLOP/s with float32 accumulation (fp16 for V100 and T4, which have no bf16), from NVIDIA's data
# sheets and white papers, which quote twice as much for Hopper and later: that is with sparsity. Of GB200 and GB300 it
# is a 72nd of the NVL72's, of B200 and B300 an 8th of the HGX board's. The first key that is a whole word of the
# device's name applies, so "H100 PCIe" comes before "H100".
PEAK_TFLOPS = {
    "GB300": 2500,
    "GB200": 2500,
    "B300": 2250,
    "B200": 2250,
    "H100 PCIe": 756,
    "H800 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "H100": 989.4,
    "H200": 989.4,
    "GH200": 989.4,
    "H800": 989.4,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 149.7,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX PRO 6000 Blackwell Workstation": 503.8,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090 Ti": 80,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}


def peak_flops(device):
    """The device's dense bf16 peak in FLOP/s; 0 if it is unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    # a laptop's card or China's (D) is slower, a MIG slice is a part of a card
    whole = r"\b{}\b(?! (Laptop|D\b)|.* MIG )"
    known = (1e12 * peak for part, peak in PEAK_TFLOPS.items() if re.search(whole.format(part), name))
    return next(known, 0)


def flops_per_token(model, seq_len):
    """FLOPs of forward and backward per token: 6N + 12·L·C·T (Chowdhery et al. 2022, PaLM, appendix B)."""
    c = model.config
    return 6 * model.num_params() + 12 * c.n_layer * c.n_embd * seq_len


def mfu(tokens_per_sec, flops_per_token, peak_flops):
    """Model FLOPs utilization, between 0 and 1; peak_flops: of all devices, in FLOP/s. None if it is unknown, 0."""
    return tokens_per_sec * flops_per_token / peak_flops if peak_flops else None


def peak_memory(device):
    """This process's peak memory so far in GB (2**30): allocated by PyTorch on a GPU, resident on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # ru_maxrss is in bytes on macOS, in KiB elsewhere (getrusage(2))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


# Packages whose version may change a step's time
PACKAGES = ("nvidia-cublas", "triton", "nvmath-python", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
GPU_FACTS = ("driver_version", "power.limit", "power.draw", "temperature.gpu", "clocks.sm", "clocks.mem")
GPU_FACTS += ("clocks.max.sm", "clocks.max.mem")
QUERY = (f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader,nounits")  # of nvidia-smi


def environment(device):
    """{name: value} of versions, hardware, command, git commit and code. A value that does not apply is None."""
    gpu = device.type == "cuda"
    return dict(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if gpu else None,
        cudnn=torch.backends.cudnn.version() if gpu else None,
        packages={name: installed_version(name) for name in PACKAGES} if gpu else None,
        hardware=torch.cuda.get_device_name(device) if gpu else f"{platform.machine()} {device.type}",
        command=shlex.join(sys.argv),
        git_commit=git_commit(),
        code_sha256=code_sha256(),
    )


def git_commit():
    """The commit of this code, followed by "-dirty" if files differ from it. None: no checkout, or no git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return git.stdout.strip() if git.returncode == 0 else None


def code_sha256():
    """The SHA-256 of this code's Python files. It tells what a commit that is "-dirty" or None does not."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in ("*.py", "*/*.py") for path in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)}\n{path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def installed_version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def ask_nvidia_smi(device, query=QUERY):
    """Start nvidia-smi, which takes a part of a second to answer(). None: no NVIDIA GPU, or no nvidia-smi."""
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", *query]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        return None


def answer(nvidia_smi):
    """What a process of ask_nvidia_smi() prints; "" without an answer."""
    if nvidia_smi is None:
        return ""
    try:
        return nvidia_smi.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        nvidia_smi.kill()
        return ""


def gpu_facts(nvidia_smi):
    """{name: text} of GPU_FACTS as ask_nvidia_smi() found them, in W, °C and MHz; None without an answer."""
    values = answer(nvidia_smi).strip().split(", ")
    return dict(zip(GPU_FACTS, values)) if len(values) == len(GPU_FACTS) else None
