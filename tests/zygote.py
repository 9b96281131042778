"""Processes for tests, forked from one that has imported aiops: ``python -m tests.zygote``.

Python's start and the imports are most of the work of a short test of a server process. A process
that is forked is as real as any other: it has its own descriptors, environment, signals and exit
status, and is a child of the test's process; the system shows it with its own command line and
environment. Only its start is not repeated, nor are its modules taken down at its end, so a test
whose point is the start (what is imported, and when; the interpreter's options) uses
`subprocess.Popen`.

What a forked process starts is started, unless `NESTED` asks for forks. Then the process, before it
begins, forks one more: a zygote of its own, which forks its children as a test's zygote forks those
of the test.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
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
    *("aiops.launch.job", "aiops.launch.reaper", "aiops.serving.embedded", "encodings.idna"),
    *("aiops.algorithms.fasgd", "aiops.algorithms.server_optimizer", "aiops.lab.workloads"),
    *("aiops.cli.demo", "aiops.cli.join", "aiops.cli.run", "aiops.cli.run_screen", "rich.live"),
    *("aiops.lab.demo.display", "aiops.lab.demo.run", "aiops.lab.demo.worker"),
)
_COMMAND = ("policies", "asgd")  # a short one: what the command line imports and makes as it runs
_LENGTH = struct.Struct("!I")
_PR_SET_CHILD_SUBREAPER = 36
IMPORTED = "AIOPS_TEST_IMPORTED"
"""The variable with modules, separated by commas, that a process finds imported."""
NESTED = "AIOPS_TEST_NESTED"
"""The variable that, if it is set, has a process fork what it starts by `subprocess` or asyncio."""
_ABOVE = 512  # descriptors from here on are not a program's
_KEPT = 768  # the descriptor by which a process asks its own zygote
_ROOM = 1 << 14  # bytes for a command line, and for an environment, that the system shows
_OF_LOOPS = ("subprocess_exec", "_make_subprocess_transport", "_child_watcher_callback")
_THREADS = frozenset(ONE_THREAD)
_NOT_AT_THE_START = (
    *("AIOPS_", "GLOO_", "OMPI_COMM_", "PMIX_", "PYTEST_", "PYTHONPATH", "PYTHONUNBUFFERED"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TMPDIR", "TP_"),
)


class _Order(NamedTuple):
    """What a process is to run, and with what."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    targets: list[int]  # the numbers that the descriptors get
    session: bool
    group: int  # -1: that of its parent
    first: Callable[[], Any] | None  # what it calls before its program


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`; it forks a process that runs Python where it can.

    It cannot if the environment differs from this process's in more than variables of aiops or
    of a launcher, or numbers of threads (which a `NESTED` fork has in its environment, but NumPy
    does not read them again). `IMPORTED` in the environment names modules that are to be imported
    before it forks, of which PyTorch alone is two seconds in every process.
    """

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _close, pass_fds, folder, environment, _info, _flags, shell, *pipes = rest
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _restore, *owner = pipes
        *_users, umask, session, group = owner
        words = None if isinstance(args, str | bytes | os.PathLike) else list(map(str, args))
        own = os.environ if environment is None else environment
        zygote = None
        if words is not None and not (shell or executable) and umask < 0 and _named(preexec_fn):
            zygote = _zygote(words, own)
        if zygote is None or words is None:
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        given = {0: p2cread, 1: c2pwrite, 2: errwrite}
        files = {to: to if fd == -1 else fd for to, fd in given.items()}
        files |= {fd: fd for fd in pass_fds}
        order = _Order(
            *(words, dict(own), os.path.abspath(folder or os.getcwd()), list(files)),
            *(session, group, preexec_fn),
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
        self.run = types.FunctionType(subprocess.run.__code__, self.__dict__)  # by that `Popen`
        self.run.__kwdefaults__ = subprocess.run.__kwdefaults__


class _Zygote:
    """The process that forks, seen from one whose children it forks."""

    def __init__(self, sock: socket.socket, popen: subprocess.Popen[Any] | None = None) -> None:
        self._sock, self._popen = sock, popen
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
        if self._popen is not None:
            self._popen.wait()


_zygotes: dict[tuple[bool, str], _Zygote] = {}
_nested: _Zygote | None = None
"""That of a process which was itself forked, and forks what it starts."""
_making = threading.Lock()
_forking = threading.Lock()


def _begun(environment: Mapping[str, str], imported: str) -> _Zygote:
    """Start a zygote of the tests' process, with an environment and modules to import."""
    sock, theirs = socket.socketpair()
    module = ["-m", "tests.zygote", str(theirs.fileno()), imported]
    with theirs:
        popen = subprocess.Popen(
            [sys.executable, *module, "." * _ROOM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**environment, "AIOPS_TEST_ROOM": "." * _ROOM},
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
    return _Zygote(sock, popen)


def _named(first: Callable[[], Any] | None) -> bool:
    """Return whether another process finds a function by its module and name, or there is none."""
    if first is None:
        return True
    module = sys.modules.get(getattr(first, "__module__", ""))
    return first.__module__ != "__main__" and getattr(module, first.__qualname__, None) is first


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process reads before it runs a program."""
    return {k: v for k, v in environment.items() if not k.startswith(_NOT_AT_THE_START)}


def _zygote(words: Sequence[str], environment: Mapping[str, str]) -> _Zygote | None:
    """Return what forks such a process; None: it must be started."""
    option = next((word for word in words[1:] if word.startswith("-")), "")
    script = len(words) > 1 and words[1].endswith(".py")
    if sys.platform != "linux" or words[0] != sys.executable:
        return None
    if not script and option not in ("-m", "-c", "-W"):
        return None
    wanted, mine = _own(environment), _own(os.environ)
    if _nested is not None:
        same = {k: v for k, v in wanted.items() if k not in _THREADS}
        return _nested if same == {k: v for k, v in mine.items() if k not in _THREADS} else None
    single = wanted != mine
    if single and wanted != mine | dict(ONE_THREAD):
        return None
    if not set(environment.get("PYTHONPATH", "").split(os.pathsep)) <= {"", *sys.path}:
        return None
    key = single, environment.get(IMPORTED, "")
    with _making:
        if key not in _zygotes:
            _zygotes[key] = _begun(wanted, key[1])
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
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:  # it has the right parent once that one has ended
                os.sched_yield()
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
    if order.environment.get(NESTED):
        ours, theirs = socket.socketpair()
        if not os.fork():
            ours.close()
            return _prepared_zygote(theirs)
        theirs.close()
    if order.session:
        os.setsid()
    elif order.group >= 0:
        os.setpgid(0, order.group)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.first is not None:
        order.first()
    _show(order.words, order.environment)
    os.write(writing, _LENGTH.pack(os.getpid()))  # from now on it may be sent signals
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in files]
    if order.environment.get(NESTED):
        _fork_from(socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, _KEPT)))
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
    if order.environment.get("PYTHONUNBUFFERED"):
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(fd, "w"), errors=how, write_through=True)  # type: ignore[arg-type]
            for fd, how in ((1, "strict"), (2, "backslashreplace"))
        )
    words = order.words[1:]
    while words[0] == "-W":
        warnings._processoptions([words[1]])  # type: ignore[attr-defined]
        del words[:2]
    if words[0].endswith(".py"):
        return lambda: _run_script(words)
    option, what, *arguments = words
    if option == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        return lambda: _run_text(what, "<string>")
    sys.argv = [what, *arguments]
    sys.path[0] = order.folder
    for name in (what, *arguments[:1]):  # it is run, perhaps by a `ChildGuard`, not imported
        if name in sys.modules and not hasattr(sys.modules[name], "__path__"):
            del sys.modules[name]
    return lambda: runpy.run_module(what, run_name="__main__", alter_sys=True)


def _prepared_zygote(sock: socket.socket) -> Callable[[], Any]:
    """Be the zygote of the process that forked this one; return in what it forks, as `_serve`."""
    os.setsid()
    kept = socket.socket(fileno=fcntl.fcntl(sock.detach(), fcntl.F_DUPFD_CLOEXEC, _KEPT))
    os.closerange(3, _KEPT)
    return _serve(kept)


def _fork_from(sock: socket.socket) -> None:
    """Have this process's children forked by the zygote at the other end of a socket."""
    global _nested
    _nested = _Zygote(sock)
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    # A loop of uvloop starts processes without `subprocess`: here it does as asyncio's own do,
    # which from 3.14 on have what watches their children.
    with contextlib.suppress(ImportError):
        from uvloop import Loop

        for name in _OF_LOOPS if sys.version_info < (3, 14) else ():
            if found := getattr(asyncio.SelectorEventLoop, name, None):
                setattr(Loop, name, found)
                Loop._debug = False
        # What watches children from 3.12 on calls these.
        Loop._add_reader, Loop._remove_reader = Loop.add_reader, Loop.remove_reader


def _show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have the system show a command line and an environment for this process.

    The system reads them where it wrote those of the process that was started (proc(5), "stat").
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    its_words, end_of_words, its_variables, end_of_variables = map(int, fields[45:49])
    variables = [f"{key}={value}" for key, value in environment.items()]
    for texts, begin, end in (
        (words, its_words, end_of_words),
        (variables, its_variables, end_of_variables),
    ):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)
        assert len(data) <= end - begin, f"{len(data)} bytes, and room for {end - begin}"
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, data, len(data))


def _run_script(words: list[str]) -> None:
    path = Path(words[0]).absolute()
    sys.argv, sys.path[0] = words, str(path.parent)
    _run_text(path.read_bytes(), words[0], __file__=str(path))


def _run_text(text: str | bytes, name: str, **names: str) -> None:
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__.update(names)
    exec(compile(text, name, "exec"), main.__dict__)


def _run(program: Callable[[], Any]) -> None:
    """Run a program, and end as the interpreter does, except that its modules are not taken down.

    That would write to every page that is shared with the zygote, and take 40 ms, ten times as long
    as all else of a short process. Garbage is collected: a task that was left pending says so.
    """
    status = 0
    try:
        program()
    except SystemExit as ended:  # whatever else it raises, the interpreter reports
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(status)  # the interpreter finds the same, and reports it
    os._exit(status & 0xFF)


def main() -> None:
    """Import what there is to import, fork, and in each fork run its program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the tests
    for name in (*_IMPORTS, *filter(None, sys.argv[2].split(","))):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        command = sys.modules["aiops.cli.main"].command(_COMMAND[0])
        command(list(_COMMAND[1:]), standalone_mode=False)
    gc.collect()
    gc.disable()
    gc.freeze()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    from tests import zygote  # this module, for those that it forks too

    zygote.main()
