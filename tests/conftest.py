"""Small real work for the tests: a corpus of a few documents in shards, and the training run as a child process."""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import random
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

# Read by what is imported below. Inductor's pool of compilers would be a process that stays behind a test
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCHINDUCTOR_COMPILE_THREADS="1")
# glibc keeps freed memory, which Linux would clear again for each new tensor: a third of a small training's time
os.environ.update(MALLOC_MMAP_THRESHOLD_=str(2**26), MALLOC_TRIM_THRESHOLD_=str(2**28))  # read by new processes
if sys.platform == "linux":
    ctypes.CDLL(None).mallopt(-3, 2**26)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of this process
    ctypes.CDLL(None).mallopt(-1, 2**28)

import pytest
import torch
from fork_server import PYTHON, TIMEOUT, Fork, adopt_orphans, end_descendants
from texts import write_corpus
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import errors
from common.device import missing_package
from kernels import cublaslt, flash4
from parallel.process_group import Distributed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's interpreter runs kernels on a CPU; read when Triton is imported

# A shell without job control has what it runs in the background ignore Ctrl-C, as nohup has it ignore SIGHUP, and so
# would the trainings here
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).parent.parent
TINY = (
    "--n_layer 2 --n_head 2 --n_embd 32 --seq_len 16 --total_batch_size 128 --micro_batch_size 4 --max_steps 3 "
    "--warmup_steps 2 --lr 1e-3 --device cpu --no_compile --autocast off --wandb disabled --val_every 0 "
    "--hellaswag_every 0 --sample_every 0 --checkpoint_every 0"
).split()


ALONE = Distributed(0, 1, torch.device("cpu"))


def pytest_runtest_setup(item):
    """Skip tests with the marker gpu where there is none, see pyproject.toml."""
    for mark in item.iter_markers("gpu"):
        if mark.kwargs.get("cpu_too"):
            continue
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        if mark.kwargs.get("hopper") and torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs a Hopper GPU")


def skip_without_flash4():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    if reason := flash4.missing():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_ranks():
    """A process group of two ranks, of which this is one and the other one does not exist: nothing is sent."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield Distributed(0, 2, torch.device("cpu"))
    torch.distributed.destroy_process_group()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(module, code): a module of this code, in place of the real one and its packages."""

    def install(module, code):
        *packages, name = module.split(".")
        folder = tmp_path / "installed" / Path(*packages)
        folder.mkdir(parents=True, exist_ok=True)
        for depth in range(len(packages)):
            (tmp_path / "installed" / Path(*packages[: depth + 1]) / "__init__.py").touch()
        (folder / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path / "installed")
        top = module.partition(".")[0]
        for loaded in modules_of(top):
            monkeypatch.delitem(sys.modules, loaded)
        replaced.add(top)
        forget()

    def modules_of(*packages):
        return [loaded for loaded in sys.modules if loaded.partition(".")[0] in packages]

    def forget():
        for cached in (missing_package, cublaslt.missing, cublaslt.library):
            cached.cache_clear()

    replaced = set()
    yield install
    for loaded in modules_of(*replaced):
        del sys.modules[loaded]
    forget()


@pytest.fixture
def tuned_gemms_calls(monkeypatch):
    """The (N, K, M) of each GEMM that --tuned_gemms computes in this process; short ones are replaced too."""
    from kernels import cublaslt, tuned_gemms

    torch.compiler.reset()  # of one function it compiles eight graphs in a process; after these it runs uncompiled
    calls, real = [], cublaslt.mm
    monkeypatch.setattr(tuned_gemms, "MIN_FLOPS", 1)
    monkeypatch.setattr(cublaslt, "mm", lambda a, b, *rest: calls.append((*a.shape, b.size(1))) or real(a, b, *rest))
    return calls


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder)
    return folder


# ----------------------------------------------------------------------------------------------------------------------
# Processes


BEGUN = []  # forks of the running test: one that nobody refers to would be killed


@functools.cache
def fork_server():
    """Start the server of tests/fork_server.py, which ends with this process; returns its process and its socket."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    path, code = folder / "socket", ROOT / "tests" / "fork_server.py"
    python = folder / PYTHON
    words = [sys.executable, "-IS", code, "launch", path, sys.executable]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
    python.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(128)
        number = listener.fileno()
        command = [sys.executable, code, "main", path, str(number)]
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        environment = os.environ | dict(PYTHONPATH=os.pathsep.join(paths))
        server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[number])
    return server, path


def begin(args, folder, outputs, env=None):
    """Begin what `python ARGS` does in a folder, its standard output and error added to two files; returns the process,
    a fork. It is killed when the test ends."""
    paths = [(os.devnull, os.O_RDONLY), *((path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in outputs)]
    files = [os.open(*path) for path in paths]
    try:
        BEGUN.append(Fork(fork_server()[1], args, folder, files, os.environ | (env or {})))
        return BEGUN[-1]
    finally:
        for number in files:
            os.close(number)


@pytest.fixture(autouse=True)
def no_process_stays():
    """What a test has started ends with it, also when the test fails."""
    adopt_orphans()
    yield
    BEGUN.clear()
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it has a process of its own, and starts another in the next test
    keep = [fork_server()[0].pid] if fork_server.cache_info().currsize else []
    # of measure/child_run.py
    keep += [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]
    end_descendants(os.getpid(), keep)


def wait_until(condition, process=None, errors=None):
    """Wait for an event: a file, a line of output, the end of a process. process: ends the wait if it ends, which is an
    error; errors: the file of what it says."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        goes_on = process is None or process.poll() is None
        assert goes_on and time.monotonic() < end, errors and errors.read_text()
        time.sleep(0.01)


def free_port():
    """A port without a listener, below the range of connections, one of which could take it before it is used."""
    while True:
        port = random.randrange(20000, 32768)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port


@pytest.fixture
def command(tmp_path, tmp_path_factory):
    """Run one of the project's commands in an empty folder, on several ranks as torchrun would (with less to import);
    returns the finished process."""

    def call(script, *args, ranks=1, machines=1, env=None):
        command = [str(ROOT / script), *map(str, args)]
        if env:  # which may be read before a fork begins
            return subprocess.run(
                [sys.executable, *command],
                cwd=tmp_path,
                env=os.environ | env,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        outputs = [tmp_path_factory.mktemp("outputs") / name for name in ("out", "err")]
        everybody = dict(MASTER_ADDR="localhost", MASTER_PORT=free_port(), WORLD_SIZE=ranks)
        everybody["LOCAL_WORLD_SIZE"] = ranks // machines
        processes = []
        for rank in range(ranks):
            own = everybody | dict(RANK=rank, LOCAL_RANK=rank) if ranks > 1 else {}
            processes.append(begin(command, tmp_path, outputs, {name: str(value) for name, value in own.items()}))
        while running := [process for process in processes if process.poll() is None]:
            if any(process.returncode for process in processes):
                for process in running:
                    process.send_signal(signal.SIGTERM)
            ended = select.select(running, [], [], TIMEOUT)[0]
            assert ended, f"still running after {TIMEOUT} s\n" + "".join(path.read_text() for path in outputs)
        code = next((process.returncode for process in processes if process.returncode), 0)
        return subprocess.CompletedProcess(command, code, *(path.read_text() for path in outputs))

    return call


@pytest.fixture
def call_main(tmp_path, monkeypatch):
    """What a command does when it is called in this process, for errors that a command ends with: in a tenth of the
    time that `command` takes. Returns what `command` does.

    script: one of the project's scripts, or "-m" and a module. An exception that is no UserError is the test's.
    """

    def call(script, *args):
        name, args = (args[0], args[1:]) if script == "-m" else (script.removesuffix(".py").replace("/", "."), args)
        main = importlib.import_module(name).main
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
        signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
        handlers = list(map(signal.getsignal, signals))
        precision, code = torch.get_float32_matmul_precision(), 0
        gc.freeze()  # the collection below visits what the command made
        try:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "argv", [script, *map(str, args)])
                patch.setattr(sys, "stdout", streams[0])
                patch.setattr(sys, "stderr", streams[1])
                patch.chdir(tmp_path)
                errors.run(main)
        except SystemExit as end:
            code = end.code
        finally:
            for number, handler in zip(signals, handlers):
                signal.signal(number, handler)
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(False)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            gc.collect()  # files of the command, open and locked, that its error's traceback refers to
            gc.unfreeze()
        texts = [stream.buffer.getvalue().decode() for stream in streams if not stream.flush()]
        return subprocess.CompletedProcess([script, *args], code, *texts)

    return call


@pytest.fixture
def train(command, call_main, corpus, tmp_path):
    """Train a tiny GPT-2 on the corpus; returns its run folder, in which output.txt is what it printed.

    drop: flags of TINY to leave out. fails=True expects an error, and returns what `command` does; on one rank the
    command is called in this process, as are commands whose runs have processes of their own.
    """

    def call(name, *args, drop="", fails=False, script="train_gpt2.py", **kwargs):
        flags = list(TINY)
        for flag in drop.split():
            del flags[flags.index(flag) : flags.index(flag) + 2]
        starts_runs = "--ladder" in args or str(script).startswith("measure/")
        here = starts_runs or fails and not kwargs and (ROOT / script).parent == ROOT
        begin = call_main if here else command
        done = begin(script, *flags, "--data_dir", corpus, "--run_name", name, *args, **kwargs)
        if fails:
            return done
        assert done.returncode == 0, done.stdout + done.stderr
        (tmp_path / "log" / name / "output.txt").write_text(done.stdout + done.stderr)
        return tmp_path / "log" / name

    return call


# With --mask_documents attention takes the offsets, as on a GPU; the single rank that these runs are compared with
# takes a mask
ON_SEVERAL = """
import warnings
import model, reference, torch.nn.attention.varlen, train_gpt2
model.has_varlen_attention = lambda *_: True
torch.nn.attention.varlen.varlen_attn = reference.varlen_attn
warnings.simplefilter("error", FutureWarning)  # a call that PyTorch deprecates
from checkpoints import pieces
pieces.FILE_BYTES = 100_000  # several files a rank
train_gpt2.main()
"""


# Begins a script for `script`: a run whose graphs are those of --compile, but not compiled by a C++ compiler
AOT_EAGER = """
import functools
import torch
import train_gpt2
torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write Python code that imports the project to a file, for command or train; returns its path."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def write(code):
        path = tmp_path / "script.py"
        path.write_text(code)
        return path

    return write


@pytest.fixture
def train_several(train, script):
    """Train tiny GPT-2s on so many ranks, {run's name: flags}, as on several machines; returns their folders."""

    def call(ranks, runs, machines=1):
        options = dict(script=script(ON_SEVERAL), ranks=ranks, machines=machines)
        return [train(name, *flags, **options) for name, flags in runs.items()]

    return call


def logged(run, stream="train"):
    """The values of a stream in a run's log.txt."""
    rows = [line.split() for line in (run / "log.txt").read_text().splitlines()]
    return [float(value) for _, name, value in rows if name == stream]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def expect_error(done, *words):
    """The process ended with exit code 1 and one line that says so."""
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines and lines[-1].startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[-1], lines[-1]
