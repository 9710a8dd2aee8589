"""Small real work for the tests: a corpus of a few documents in shards, and the training run as a child process."""

import contextlib
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")  # read by what is imported below

import numpy as np
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.device import missing_package
from data.shards import write_shard
from data.tokenizer import END_OF_TEXT
from kernels import cublaslt, flash4
from parallel.process_group import Distributed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's interpreter runs kernels on a CPU; read when Triton is imported

# A shell without job control has what it runs in the background ignore Ctrl-C, as nohup has it ignore SIGHUP, and so
# would the trainings here
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Most commands run in forks of one process that has imported what they need: seconds less for each
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preload"])

ROOT = Path(__file__).parent.parent
TIMEOUT = 240  # seconds for one command
TINY = (
    "--n_layer 2 --n_head 2 --n_embd 32 --seq_len 32 --total_batch_size 256 --micro_batch_size 4 --max_steps 3 "
    "--warmup_steps 2 --lr 1e-3 --device cpu --no_compile --autocast off --wandb disabled --val_every 0 "
    "--hellaswag_every 0 --sample_every 0 --checkpoint_every 0"
).split()


ALONE = Distributed(0, 1, torch.device("cpu"))
WORDS = "the man then woman sits down on a chair and starts to read his book while dog runs past it quickly".split()


def skip_without_flash4():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    if reason := flash4.missing():
        pytest.skip(reason)


def make_items(count):
    """HellaSwag items of random words, with two to four endings."""
    generator = torch.Generator().manual_seed(4)

    def text(longest):
        n = int(torch.randint(1, longest, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator))

    return [dict(ctx=text(20), endings=[text(9) for _ in range(4 - i % 3)], label=i % 2) for i in range(count)]


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


def make_documents(count, rng, longest=60):
    """Documents of random tokens, each opening with <|endoftext|>."""
    return [np.append(END_OF_TEXT, rng.integers(0, 50256, rng.integers(1, longest))) for _ in range(count)]


def write_corpus(folder, sizes=(400, 2000, 1500, 700), seed=0):
    """Shards of the given sizes in tokens, 0 for validation, whose documents run on from one to the next."""
    rng = np.random.default_rng(seed)
    tokens = np.concatenate(make_documents(sum(sizes) // 10, rng)).astype(np.uint16)
    start = 0
    for index, size in enumerate(sizes):
        split = "train" if index else "val"
        write_shard(folder / f"edufineweb_{split}_{index:06d}.npy", tokens[start : start + size])
        start += size
    return tokens


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(module, code): a module of this code, in place of the real one and its packages."""

    def install(module, code):
        *packages, name = module.split(".")
        folder = tmp_path / "installed" / Path(*packages)
        folder.mkdir(parents=True)
        for depth in range(len(packages)):
            (tmp_path / "installed" / Path(*packages[: depth + 1]) / "__init__.py").touch()
        (folder / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path / "installed")
        top = module.partition(".")[0]
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == top]:
            monkeypatch.delitem(sys.modules, loaded)
        forget()

    def forget():
        for cached in (missing_package, cublaslt.missing, cublaslt.library):
            cached.cache_clear()

    yield install
    forget()


@pytest.fixture
def tuned_gemms_calls(monkeypatch):
    """The (N, K, M) of each GEMM that --tuned_gemms computes in this process; short ones are replaced too."""
    from kernels import compile, cublaslt

    torch.compiler.reset()  # of one function it compiles eight graphs in a process; after these it runs uncompiled
    calls, real = [], cublaslt.mm
    monkeypatch.setattr(compile, "MIN_FLOPS", 1)
    monkeypatch.setattr(cublaslt, "mm", lambda a, b, *rest: calls.append((*a.shape, b.size(1))) or real(a, b, *rest))
    return calls


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder)
    return folder


def begin(args, folder, outputs, env=None):
    """Begin what `python ARGS` does in a folder, its standard output and error added to two files; returns the process,
    a fork."""
    process = FORKS.Process(target=run_in, args=(list(map(str, args)), folder, outputs, env or {}))
    process.start()
    return process


def run_in(args, folder, outputs, env):
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    faulthandler.dump_traceback_later(TIMEOUT - 20, file=2)  # says where it hangs
    os.environ.update(env)
    os.chdir(folder)
    subprocess.Popen.__init__ = fork_training
    run_python(args)


def run_python(args):
    # the streams of this process's parent were made for files, and would seek, which a pipe cannot
    encoding = sys.stdout.encoding
    sys.stdout, sys.stderr = (open(number, "w", 1, encoding, closefd=False) for number in (1, 2))
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")


def fork_training(process, args, popen=subprocess.Popen.__init__, **kwargs):
    """subprocess.Popen(), but train_gpt2.py, also under torchrun, runs in a fork of this process."""

    def run():
        # no file of the parent stays open: Popen() waits until this process closes its end of a pipe
        null = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/dev/fd")):
            if number not in (0, 1, 2, null):
                # not closed: a new file would get the number, and the parent's objects would close it when they go
                os.dup2(null, number, inheritable=False)
        os.environ.clear()
        os.environ.update(kwargs["env"])
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 1
        try:
            run_python([arg for arg in args[1:] if arg != "-u"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    if str(ROOT / "train_gpt2.py") in args:
        kwargs["preexec_fn"] = run  # before the command would begin, which it never does
    popen(process, args, **kwargs)


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

    def call(script, *args, ranks=1, env=None):
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
        everybody = dict(MASTER_ADDR="localhost", MASTER_PORT=free_port(), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        processes = []
        for rank in range(ranks):
            own = everybody | dict(RANK=rank, LOCAL_RANK=rank) if ranks > 1 else {}
            processes.append(begin(command, tmp_path, outputs, {name: str(value) for name, value in own.items()}))
        running = list(processes)
        while running:
            ended = multiprocessing.connection.wait([process.sentinel for process in running], timeout=TIMEOUT)
            running = [process for process in running if process.sentinel not in ended]
            if not ended or any(process.exitcode for process in processes if process not in running):
                for process in running:
                    process.terminate() if ended else process.kill()
            assert ended, f"still running after {TIMEOUT} s\n" + "".join(path.read_text() for path in outputs)
        code = next((process.exitcode for process in processes if process.exitcode), 0)
        return subprocess.CompletedProcess(command, code, *(path.read_text() for path in outputs))

    return call


@pytest.fixture
def train(command, corpus, tmp_path):
    """Train a tiny GPT-2 on the corpus; returns its run folder, in which output.txt is what it printed.

    drop: flags of TINY to leave out. fails=True expects no run, and returns the finished process.
    """

    def call(name, *args, drop="", fails=False, script="train_gpt2.py", **kwargs):
        flags = list(TINY)
        for flag in drop.split():
            del flags[flags.index(flag) : flags.index(flag) + 2]
        done = command(script, *flags, "--data_dir", corpus, "--run_name", name, *args, **kwargs)
        if fails:
            return done
        assert done.returncode == 0, done.stdout + done.stderr
        (tmp_path / "log" / name / "output.txt").write_text(done.stdout + done.stderr)
        return tmp_path / "log" / name

    return call


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of some MB; the test is skipped where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(megabytes):
        options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# Trains once for each list of arguments, in the same processes. With --mask_documents attention takes the offsets, as
# on a GPU; the single rank that these runs are compared with takes a mask.
SEVERAL = """
import json, os, sys, warnings
import model, reference, train_gpt2
model.has_varlen_attention = lambda *_: True
model.document_attention = reference.document_attention
warnings.simplefilter("error", FutureWarning)  # a call that PyTorch deprecates
from checkpoints import pieces
pieces.FILE_BYTES = 100_000  # several files a rank
for port, arguments in json.load(open(sys.argv[1])):
    os.environ["MASTER_PORT"] = str(port)
    sys.argv = ["train_gpt2.py", *arguments]
    train_gpt2.main()
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
def train_several(command, script, corpus, tmp_path):
    """Train tiny GPT-2s on so many ranks, {run's name: flags}; returns their folders."""

    def call(ranks, runs):
        flags = [[*TINY, "--data_dir", str(corpus), "--run_name", name, *map(str, runs[name])] for name in runs]
        (tmp_path / "runs.json").write_text(json.dumps([(free_port(), each) for each in flags]))
        done = command(script(SEVERAL), "runs.json", ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        return [tmp_path / "log" / name for name in runs]

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
