"""Python commands as forks of a process that has imported torch, torchft, Composer and our package.

``ForkedCommand`` is ``subprocess.Popen`` in everything but its start: the process is a child of the
one that started it, with the pid, session, pipes, environment and exit status that it would have.
Only the start of the interpreter and the imports are shared, which take 5 s of a processor. What an
import leaves, such as Composer's handler of SIGTERM, is there from the start. Of each command of
the package at least one test starts a fresh process.

A fork needs a parent without threads. So a small server forks, and steps out of the family: the
process that serves a request forks twice, and the one between ends. The kernel gives its child to
the next ancestor that is a "child subreaper", and that is the process which asks. A command that
starts others, such as ``launch``, becomes a server's parent itself, before it has any thread.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked import begin_fork, context

STARTERS = {"launch", "run", "tests.chaos", "composer.cli.launcher", "torch.distributed.run"}
"""Words of a command line that starts further Python processes."""

PR_SET_CHILD_SUBREAPER = 36
MAX_REQUEST = 1 << 17
prctl = ctypes.CDLL(None, use_errno=True).prctl

_lock = threading.Lock()
_server: socket.socket | None = None
"""The connection to the process that forks commands; None until it has been started."""


class ForkedCommand(subprocess.Popen):
    """``subprocess.Popen`` for ``[sys.executable, ...]``; any other command is started as usual."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
    ) -> None:  # fmt: skip
        command = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else []
        if command[:1] != [sys.executable]:
            super()._execute_child(  # pyright: ignore[reportAttributeAccessIssue]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
            )
            return
        assert preexec_fn is None and not pass_fds, "a fork has neither"
        pipes = more[3:9]  # after startupinfo, creationflags, shell
        request = {
            "command": command[1:],
            "environ": dict(os.environ if env is None else env),
            "folder": os.getcwd() if cwd is None else os.fspath(cwd),
            "own_session": more[-2],
        }
        ends = zip((pipes[0], pipes[3], pipes[5]), range(3), strict=True)
        try:
            descriptors = [ours if end == -1 else end for end, ours in ends]
            self.pid = _request(json.dumps(request).encode(), descriptors)
        finally:
            self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue]
        self._child_created = True


def run(
    start: type[subprocess.Popen], command: list[str], *, timeout: float, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run`` with ``capture_output`` and ``text``, by this or by ``ForkedCommand``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(command, text=True, **pipes, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _request(message: bytes, descriptors: list[int]) -> int:
    """The pid of a new child, which the server has forked."""
    global _server
    with _lock:
        if _server is None:
            _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            context.Process(target=_serve_tests, args=(theirs,), daemon=True).start()
            theirs.close()
        assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
        try:
            socket.send_fds(_server, [message], descriptors)
            answer = _server.recv(64)
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert answer, "the server of tests/forked_commands.py has died"
    return int(answer)


# ---- the server ------------------------------------------------------------------------------


def _serve_tests(server: socket.socket) -> None:
    from tests.forked_imports import MAIN_PROCESS

    begin_fork(collects=False)
    # A server is no worker of multiprocessing, and so its forks are none either.
    multiprocessing.process._current_process = MAIN_PROCESS
    multiprocessing.process._parent_process = None
    _serve(server)


def _serve(server: socket.socket) -> None:
    """Fork for every request, until nobody is left who could ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for those who ask
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, MAX_REQUEST, 3)
        if not message:
            os._exit(0)
        (from_fork, to_server), (go, says_go) = os.pipe(), os.pipe()
        if not (between := os.fork()):
            if pid := os.fork():
                os.write(to_server, str(pid).encode())
                os._exit(0)
            server.close()
            for descriptor in (from_fork, to_server, says_go):
                os.close(descriptor)
            os.read(go, 1)  # until nobody holds the other end: before, its parent is another one
            os.close(go)
            _become(json.loads(message), descriptors)
        os.waitpid(between, 0)  # the child now is the child of who asks
        pid = os.read(from_fork, 64)
        for descriptor in (from_fork, to_server, go, says_go, *descriptors):
            os.close(descriptor)
        server.send(pid)


# ---- the command -----------------------------------------------------------------------------


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be the command, as if this process had just been started. Does not return."""
    if request["own_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _open_streams()
    command = [word for word in request["command"] if word != "-u"]
    if STARTERS.intersection(command):
        _start_server()
    if Path(command[0]).parent.name == "benchmarks":
        _start_pythons_server()
    gc.enable()
    try:
        _obey_environment()
        _run(command)
        status = 0
    except SystemExit as end:
        status = _status_of(end)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(status)


def _open_streams() -> None:
    """Open the standard streams over the new descriptors, buffered as by a fresh interpreter."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", 0 if is_unbuffered else -1, closefd=False)
        stream = io.TextIOWrapper(
            raw, "utf-8", "backslashreplace", None, number == 2, write_through=is_unbuffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _start_server() -> None:
    """Fork a server for the processes that this one will start, before it has any thread."""
    global _server
    _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        _server.close()
        with open(os.devnull, "r+b") as nothing:
            for number in range(3):  # else nobody would see the end of what the command says
                os.dup2(nothing.fileno(), number)
        _serve(theirs)
    theirs.close()
    subprocess.Popen = ForkedCommand


def _start_pythons_server() -> None:
    """Fork what multiprocessing's ``forkserver`` context would start as a fresh interpreter."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address := multiprocessing.connection.arbitrary_address("AF_UNIX"))
    listener.listen()
    alive, says_alive = os.pipe()
    if not (pid := os.fork()):
        os.close(says_alive)
        with suppress(SystemExit):  # when the process that it serves has ended
            multiprocessing.forkserver.main(listener.fileno(), alive, [])
        os._exit(0)
    listener.close()
    os.close(alive)
    server: Any = multiprocessing.forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = says_alive
    server._forkserver_pid = pid


def _obey_environment() -> None:
    """Do what Python would do at its start.

    The two ``sitecustomize`` wrap modules at their import, which here is over.
    """
    folders = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = folders
    if "TEST_PACE_S" in os.environ:
        import pace

        pace.slow_down(float(os.environ["TEST_PACE_S"]))
    if str(Path(__file__).parent / "chaos" / "at_start") in folders:
        from fault_injection import listen

        listen()


def _run(command: list[str]) -> None:
    first, *words = command
    if first == "-m":
        sys.argv, sys.path[:0] = words, [os.getcwd()]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[1:]], [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[:0] = command, [str(Path(first).parent)]
        runpy.run_path(first, run_name="__main__")


def _status_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _end(status: int) -> None:
    """What an interpreter does at its end, but for taking itself apart."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)
