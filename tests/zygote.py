"""Processes for tests, forked from one that has imported aiops: ``python -m tests.zygote``.

Python's start and the imports are most of the work of a short test of a server process. A process
that is forked is as real as any other: it has its own descriptors, environment, signals and exit
status, and is a child of the test's process. Only its start is not repeated, so a test whose point
is the start (what is imported, and when; the interpreter's options) uses `subprocess.Popen`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiops.lab.processes import ONE_THREAD

ROOT = Path(__file__).parent.parent

_IMPORTS = (
    *("aiops.cli.main", "aiops.cli.serve", "aiops.serving.main", "aiops.serving.state.kept_state"),
    *("aiops.serving.standby.server", "aiops.client.asyncio.worker"),
    *("aiops.client.sync.worker", "aiops.lab.processes", "aiops.net.child_guard", "uvloop"),
)
_LENGTH = struct.Struct("!I")
_PR_SET_CHILD_SUBREAPER = 36
IMPORTED = "AIOPS_TEST_IMPORTED"
"""The variable with modules, separated by commas, that a process finds imported."""
_ABOVE = 512  # descriptors from here on are not a program's


class _Order(NamedTuple):
    """What a process is to run, and with what."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    targets: list[int]  # the numbers that the descriptors get
    session: bool
    group: int  # -1: that of its parent


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`; it forks a process of ``python -m`` or ``python -c`` where it can.

    It cannot if the environment differs from this process's in more than variables of aiops or
    of a launcher, or numbers of threads. `IMPORTED` in the environment names modules that are to be
    imported before it forks, of which PyTorch alone is two seconds in every process.
    """

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _close, pass_fds, folder, environment, _info, _flags, shell, *pipes = rest
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _restore, *owner = pipes
        *_users, umask, session, group = owner
        words = None if isinstance(args, str | bytes | os.PathLike) else list(map(str, args))
        own = os.environ if environment is None else environment
        zygote = None
        if words is not None and not (shell or preexec_fn or executable) and umask < 0:
            zygote = _zygote(words, own)
        if zygote is None or words is None:
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        given = {0: p2cread, 1: c2pwrite, 2: errwrite}
        files = {to: to if fd == -1 else fd for to, fd in given.items()}
        files |= {fd: fd for fd in pass_fds}
        order = _Order(
            words[1:], dict(own), str(folder or os.getcwd()), list(files), session, group
        )
        self.pid = zygote.start(order, list(files.values()))
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


def run(*words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run Python with these words; return what came of it, as `subprocess.run` does."""
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with ForkedPopen([sys.executable, *words], text=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


class ForkingModule(types.ModuleType):
    """The module `subprocess` with `ForkedPopen`, for a module under test to use in its place."""

    def __init__(self) -> None:
        super().__init__("subprocess")
        self.__dict__.update({**vars(subprocess), "Popen": ForkedPopen})


class _Zygote:
    """The process that forks, seen from the tests' process."""

    def __init__(self, environment: Mapping[str, str], imported: str) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(theirs.fileno()), imported],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        atexit.register(self.close)

    def start(self, order: _Order, files: Sequence[int]) -> int:
        """Have a process started; return its number."""
        data = pickle.dumps(order)
        with _forking:
            # The process that forks it ends at once, and this process becomes its parent.
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._sock, [_LENGTH.pack(len(data))], files)
                self._sock.sendall(data)
                (pid,) = _LENGTH.unpack(_exactly(self._sock, _LENGTH.size))
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(pid)

    def close(self) -> None:
        """End it; the processes that it forked go on."""
        self._sock.close()
        self._popen.wait()


_zygotes: dict[tuple[bool, str], _Zygote] = {}
_making = threading.Lock()
_forking = threading.Lock()


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process reads before it runs a program."""
    ours = ("AIOPS_", "GLOO_", "OMPI_COMM_", "PMIX_", "PYTEST_", "PYTHONPATH", "TMPDIR")
    return {key: value for key, value in environment.items() if not key.startswith(ours)}


def _zygote(words: Sequence[str], environment: Mapping[str, str]) -> _Zygote | None:
    """Return what forks such a process; None: it must be started."""
    options = [word for word in words[1:] if word.startswith("-")][:1]
    if (
        sys.platform != "linux"
        or words[0] != sys.executable
        or options not in (["-m"], ["-c"], ["-W"])
    ):
        return None
    wanted, mine = _own(environment), _own(os.environ)
    single = wanted != mine
    if single and wanted != mine | dict(ONE_THREAD):
        return None
    if not set(environment.get("PYTHONPATH", "").split(os.pathsep)) <= {"", *sys.path}:
        return None
    key = single, environment.get(IMPORTED, "")
    with _making:
        if key not in _zygotes:
            _zygotes[key] = _Zygote(wanted, key[1])
    return _zygotes[key]


# ---------------------------------------------------------------- in the process that forks


def _exactly(sock: socket.socket, count: int) -> bytes:
    """Receive that many bytes; raise `EOFError` if the other side has ended."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _receive(sock: socket.socket) -> tuple[_Order, list[int]]:
    size = array.array("i").itemsize
    head, ancillary, _flags, _address = sock.recvmsg(_LENGTH.size, socket.CMSG_SPACE(64 * size))
    files = array.array("i")
    for _level, _kind, data in ancillary:
        files.frombytes(data)
    head += _exactly(sock, _LENGTH.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return pickle.loads(_exactly(sock, _LENGTH.unpack(head)[0])), list(files)


def _serve(sock: socket.socket) -> Callable[[], Any]:
    """Fork processes; return in each of them, with what it is to do."""
    while True:
        try:
            order, files = _receive(sock)
        except (EOFError, OSError):
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            sock.close()
            return _prepared(order, files, writing)
        os.close(writing)
        os.waitpid(between, 0)
        said = os.read(reading, _LENGTH.size)
        for fd in (reading, *files):
            os.close(fd)
        sock.sendall(said)


def _prepared(order: _Order, files: Sequence[int], writing: int) -> Callable[[], Any]:
    """Make this process the one that is wanted; return its program."""
    if order.session:
        os.setsid()
    elif order.group >= 0:
        os.setpgid(0, order.group)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(writing, _LENGTH.pack(os.getpid()))  # from now on it may be sent signals
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in files]
    os.closerange(3, _ABOVE)
    for fd, to in zip(moved, order.targets, strict=True):
        os.dup2(fd, to)
    os.closerange(_ABOVE, max(moved) + 1)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    tempfile.tempdir = None
    folders = order.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]
    gc.enable()
    words = list(order.words)
    while words[0] == "-W":
        warnings._processoptions([words[1]])  # type: ignore[attr-defined]
        del words[:2]
    option, what, *arguments = words
    if option == "-c":
        return lambda: _run_text(what, arguments)
    sys.argv = [what, *arguments]
    sys.path[0] = order.folder
    for name in (what, *arguments[:1]):  # it is run, perhaps by a `ChildGuard`, not imported
        if name in sys.modules and not hasattr(sys.modules[name], "__path__"):
            del sys.modules[name]
    return lambda: runpy.run_module(what, run_name="__main__", alter_sys=True)


def _run_text(text: str, arguments: list[str]) -> None:
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(text, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the tests
    for name in (*_IMPORTS, *filter(None, sys.argv[2].split(","))):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.disable()
    gc.freeze()
    # Here the interpreter ends as any other does: exit status, tracebacks, functions at the end.
    _serve(socket.socket(fileno=int(sys.argv[1])))()
