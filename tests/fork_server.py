"""A fork server: a Python that has imported what trainings need. Its forks start at once, where `python` takes seconds.

A client sends a command line, folder, environment and standard streams; the server answers with the fork's number and,
when it has ended, with its status. A client that goes away takes its fork with it, as does the end of the tests.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

TIMEOUT = 600  # seconds for one command, on a machine that is busy with other work too
PYTHON = "python"  # beside the server's socket: what runs in forks as sys.executable; see launch()


class Fork:
    """A process with the attributes and methods of subprocess.Popen. files: its standard streams."""

    def __init__(self, server, args, folder, files, env):
        self.args, self.returncode = args, None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(server))
        message = json.dumps([list(map(str, args)), str(folder), dict(env)]).encode()
        socket.send_fds(self._connection, [len(message).to_bytes(4, "big")], files)
        self._connection.sendall(message)
        self.pid = int.from_bytes(self._connection.recv(4), "big")

    def fileno(self):
        return self._connection.fileno()

    def poll(self):
        if self.returncode is None and select.select([self], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self], [], [], timeout)[0]:
                import subprocess

                raise subprocess.TimeoutExpired(self.args, timeout)
            status = self._connection.recv(4)
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "big")) if status else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # as subprocess.Popen: it ended meanwhile
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


# ----------------------------------------------------------------------------------------------------------------------
# The server


def serve(listener, tests):
    """Fork for each client until `tests`, a file, ends; returns in each fork, with its command line."""
    import selectors

    forks = {}  # {number: its client}
    waker, wakened = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    for source in (listener, wakened, tests):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is tests:
                end_descendants(os.getpid())
                os._exit(0)
            elif key.fileobj is wakened:
                wakened.recv(1000)
                while pid_and_status := reap():
                    if client := forks.pop(pid_and_status[0], None):
                        selector.unregister(client)
                        try:
                            client.sendall(pid_and_status[1].to_bytes(4, "big"))
                        except OSError:  # it has gone away
                            pass
                        client.close()
            elif key.fileobj is listener:
                client, _ = listener.accept()
                length, files, _, _ = socket.recv_fds(client, 4, 3)
                message = client.makefile("rb").read(int.from_bytes(length, "big"))
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for source in (selector, listener, waker, wakened, client, *forks.values()):
                        source.close()
                    return become(files, *json.loads(message))
                for number in files:
                    os.close(number)
                forks[pid] = client
                selector.register(client, selectors.EVENT_READ)
                client.sendall(pid.to_bytes(4, "big"))
            elif pid := next((pid for pid, client in forks.items() if client is key.fileobj), None):
                os.kill(pid, signal.SIGKILL)  # a client sends nothing more: it has gone away
                selector.unregister(forks.pop(pid))


def reap():
    """A child that has ended: its number and status, or None."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def become(files, args, folder, env):
    """In a fork: what a new process would have."""
    os.setsid()  # the terminal's Ctrl-C is for the tests, which end their forks
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    encoding = sys.stdout.encoding
    sys.stdout, sys.stderr = (open(number, "w", 1, encoding, closefd=False) for number in (1, 2))
    return args


def run_python(args):
    """What `python ARGS` does, from its first line to its end."""
    import atexit
    import runpy
    import threading
    import traceback

    code = 0
    try:
        if args[0] == "-m":
            sys.argv = args[1:]
            sys.path.insert(0, "")
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = args  # the project is on the path
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # Python's own end takes half a second, for the objects of all modules


def main(socket_file, listener):
    adopt_orphans()
    import faulthandler

    import tests.preload  # noqa: F401

    sys.executable = os.path.join(os.path.dirname(socket_file), PYTHON)
    args = serve(socket.socket(fileno=int(listener)), sys.stdin.buffer)
    faulthandler.enable(file=2)  # says where PyTorch's C++ crashes
    faulthandler.dump_traceback_later(TIMEOUT - 20, file=2)  # says where it hangs
    run_python(args)


# ----------------------------------------------------------------------------------------------------------------------
# What runs in place of python, in forks


def launch(server, python, *args):
    """Run `python ARGS`; a training, also under torchrun, in a fork, with the signals and the end of this process."""
    words = [word for word in args if word != "-u"]
    if not words[0].endswith("train_gpt2.py") and words[:2] != ["-m", "torch.distributed.run"]:
        os.execv(python, [python, *args])
    fork = Fork(server, words, os.getcwd(), (0, 1, 2), os.environ)

    def forward(number, _):
        try:
            os.kill(fork.pid, number)
        except ProcessLookupError:
            pass  # it has ended

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, forward)
    code = fork.wait()
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ----------------------------------------------------------------------------------------------------------------------
# Nothing is left behind


def adopt_orphans():
    """From now on a descendant whose parent ends becomes a child of this process, and not of process 1 (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def descendants(pid):
    """The processes that a process has started, and those that these have started, and so on (Linux)."""
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *descendants(child)]
    except OSError:
        pass  # it has ended
    return found


def running(pid):
    """Whether a process exists and is not a zombie (Linux)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_descendants(pid, keep=()):
    """Kill what a process has started, except for the numbers in `keep`, and wait for its end."""
    import time

    while left := set(descendants(pid)) - set(keep):
        for each in left:
            try:
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                pass  # it has ended, or is a child of another process
        time.sleep(0.01)


if __name__ == "__main__":
    {"main": main, "launch": launch}[sys.argv[1]](*sys.argv[2:])
