"""The processes of the tests themselves."""

import os
import signal
import subprocess
import sys

from conftest import begin, fork_server, wait_until
from fork_server import TIMEOUT, Fork, descendants, end_descendants

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"


def test_what_a_test_starts_ends_with_it(tmp_path):
    """Forks, processes, and those that these have started, in sessions of their own too."""
    fork_server()
    before = set(descendants(os.getpid()))  # the server, and multiprocessing's helpers
    (tmp_path / "sleep.py").write_text("import os; os.fork(); os.fork();\n" + SLEEP)
    outputs = [tmp_path / "out", tmp_path / "err"]
    begin([tmp_path / "sleep.py"], tmp_path, outputs)
    wait_until(lambda: outputs[0].exists() and outputs[0].read_text().count("begun") == 4)
    subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"])
    wait_until(lambda: len(set(descendants(os.getpid())) - before) == 4 + 3)
    end_descendants(os.getpid(), before)
    assert set(descendants(os.getpid())) == before


def test_a_fork_is_what_python_runs(tmp_path):
    """The same exit codes, streams and signals, and an end with whoever began it."""
    (tmp_path / "script.py").write_text("import os, sys; print(sys.argv[1:], os.environ['X'])\nsys.exit(sys.argv[1])")
    outputs = [tmp_path / "out", tmp_path / "err"]
    for args in (("7", "x y"), ("",)):
        process = begin([tmp_path / "script.py", *args], tmp_path, outputs, dict(X="z"))
        real = subprocess.run(
            [sys.executable, tmp_path / "script.py", *args],
            env=os.environ | dict(X="z"),
            capture_output=True,
            text=True,
        )
        assert process.wait(TIMEOUT) == process.poll() == real.returncode == 1
        assert [path.read_text() for path in outputs] == [real.stdout, real.stderr]
        for path in outputs:
            path.unlink()
    (tmp_path / "sleep.py").write_text(SLEEP)
    process = begin([tmp_path / "sleep.py"], tmp_path, outputs)
    wait_until(lambda: outputs[0].exists() and "begun" in outputs[0].read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == -signal.SIGTERM

    null = os.open(os.devnull, os.O_RDWR)
    server, path = fork_server()
    process = Fork(path, [tmp_path / "sleep.py"], tmp_path, [null] * 3, os.environ)
    os.close(null)
    assert process.pid in descendants(server.pid)
    del process
    wait_until(lambda: not descendants(server.pid))
