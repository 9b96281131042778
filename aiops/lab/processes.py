"""Child processes of the demo, the experiments and the benchmarks: started, read, and ended.

Every child is a Python module that `aiops.net.child_guard` runs: it ends when its standard input
does, which the system closes however its parent ends. Every child leads a session of its own: a
Ctrl-C at the terminal reaches the parent alone, and what the child started can be ended with it.

======================  ===========================================================================
`Supervisor`            asyncio: children that print lines; every wait has a deadline, and fails
                        early when a child fails
`ChildProcess`          blocking: one child, its first line or all its lines
`PipedProcess`          blocking: one child that runs a function with one end of a pipe for objects
======================  ===========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import IO, Any, TypeVar

from aiops.common.closing import AsyncClosing, Closing
from aiops.common.formatting import ending
from aiops.errors import AiopsError
from aiops.net.cpu_count import BLAS
from aiops.net.process_tree import Lines, kill_session, send

T = TypeVar("T")

ONE_THREAD: Mapping[str, str] = dict.fromkeys((*BLAS, "NUMBA_NUM_THREADS"), "1")
"""The environment of a process that shares a machine with others: NumPy and Numba read it."""

_KEPT = ("AIOPS_DATA", "AIOPS_KERNELS", "AIOPS_TOKEN")
_TAIL = 12  # lines of a child's standard error that are kept for the error
_GRACE = 0.4  # seconds between SIGTERM and SIGKILL
_LAST = 5.0  # seconds that the system may take to remove a killed process
_CHUNK = 1 << 16


class ProcessFailed(AiopsError):
    """A child process failed or took too long; ``details["stderr"]`` has its last lines."""


class Interrupted(AiopsError):
    """SIGINT or SIGTERM ended the run; ``details["signal"]`` is the signal's number."""


def command(module: str, *arguments: str, guarded: bool = True) -> list[str]:
    """Return the command line of ``python -m module arguments`` as a child.

    ``guarded``: `aiops.net.child_guard` runs it; a module that makes its own `ChildGuard`, since it
    waits for the parent's line, must be started without.
    """
    guard = ("aiops.net.child_guard",) if guarded else ()
    return [sys.executable, "-m", *guard, module, *arguments]


def clean_environment() -> dict[str, str]:
    """Return this process's variables without ``AIOPS_*`` settings of servers and clients."""
    return {k: v for k, v in os.environ.items() if not k.startswith("AIOPS_") or k in _KEPT}


# ------------------------------------------------------------------ blocking


class ChildProcess(Closing):
    """One child, for blocking code. ``with ChildProcess(...)`` ends it on the way out.

    Parameters
    ----------
    name
        The child's, for errors.
    words
        Its command line, by `command`.
    environment
        Its variables; default: this process's.
    log
        A file for its standard error, also for its standard output unless ``lines``; default:
        this process's standard error.
    lines
        Whether its standard output is read, by `first_line` and `lines`; ``"both"``: its standard
        error with it.
    grace
        Seconds that `close` gives it to end by itself after SIGTERM.
    pass_fds
        Files that it inherits.

    Attributes
    ----------
    popen
        The process.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Any = None,
        lines: bool | str = False,
        grace: float = _GRACE,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._grace = grace
        self._split, self._ready = Lines(), deque[str]()
        # A handler that raises in here leaves no child behind: the pipe closes with the object.
        self.popen = subprocess.Popen(
            words,
            bufsize=0,  # or `close` would write what a child that has ended did not take, and fail
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if lines else log,
            stderr=subprocess.STDOUT if lines == "both" else log,
            env=None if environment is None else dict(environment),
            pass_fds=pass_fds,
            start_new_session=True,
        )

    def first_line(self, seconds: float) -> str:
        """Return its next line of output, stripped.

        Raises
        ------
        ProcessFailed
            When it ends before, or prints none within this many seconds.
        """
        line = next(self.lines(seconds), None)
        if line is None:
            status = self.popen.wait()
            raise ProcessFailed(f"{self.name} {ending(status)} before it printed a line: see above")
        return line.strip()

    def lines(self, seconds: float | None = None) -> Iterator[str]:
        """Yield its lines of output until it closes it; each within this many seconds."""
        assert self.popen.stdout is not None
        output = self.popen.stdout.fileno()
        until = None if seconds is None else time.monotonic() + seconds
        ended = False
        while self._ready or not ended:
            if self._ready:
                yield self._ready.popleft()
                until = None if seconds is None else time.monotonic() + seconds
                continue
            left = None if until is None else max(0.0, until - time.monotonic())
            if not wait([output], left):
                raise ProcessFailed(f"{self.name} printed no line within {seconds:g} s")
            chunk = os.read(output, _CHUNK)
            ended = not chunk
            self._ready += self._split.feed(chunk)

    def end(self, grace: float) -> int:
        """Send SIGTERM, wait ``grace`` seconds, kill what is left; return the exit status."""
        if self.popen.poll() is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace)
        if self.popen.poll() is None:
            self.signal(signal.SIGKILL)
        return self.popen.wait()

    def write_line(self, text: str) -> None:
        """Write a line to its standard input: `aiops.net.child_guard.ChildGuard` waits for one."""
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self.popen.stdin.write(text.encode() + b"\n")
            self.popen.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended; SIGKILL goes to its whole session."""
        if self.popen.returncode is None:
            if number == signal.SIGKILL:
                kill_session(self.popen.pid)
            else:
                send(self.popen.pid, number)

    def kill(self) -> None:
        """Kill it, and all processes of its session."""
        kill_session(self.popen.pid)

    def close(self) -> None:
        """End it, and close its pipes."""
        with self.popen:
            self.end(self._grace)


class PipedProcess(ChildProcess):
    """One child that runs a function, for blocking code.

    Parameters
    ----------
    name
        The child's, for errors.
    target
        A function of a module; the child calls it with its end of the pipe, then ends.
    environment
        Variables that it has beside this process's and `ONE_THREAD`.

    Attributes
    ----------
    pipe
        This process's end; the child's end closes with the child.
    """

    def __init__(
        self,
        name: str,
        target: Callable[[Connection], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            super().__init__(
                name,
                command("aiops.lab.piped_child", str(theirs.fileno())),
                environment={**os.environ, **ONE_THREAD, **(environment or {})},
                log=self._log,
                pass_fds=[theirs.fileno()],
            )
        self.send(sys.path)
        self.send(target)

    def send(self, value: Any) -> None:
        """Send an object; that the child has ended shows when its answer is received."""
        with contextlib.suppress(OSError):
            self.pipe.send(value)

    def receive(self) -> Any:
        """Return the next object that it sends.

        Raises
        ------
        ProcessFailed
            When it ends instead.
        """
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            raise ProcessFailed(self.complaint()) from None

    def complaint(self) -> str:
        """Return how it ended, with the last line that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(1)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        last = f"; its last line: {lines[-1].strip()}" if lines else ""
        return f"{self.name} {ending(self.popen.poll())}{last}"

    def close(self) -> None:
        """End it, and close pipe and log."""
        super().close()
        self.pipe.close()
        self._log.close()


# ------------------------------------------------------------------ asyncio


class SupervisedProcess(ChildProcess):
    """One child of a `Supervisor`, which reads its output.

    Attributes
    ----------
    tail
        The last lines of its standard error.
    ended
        Set when it has ended and its output has been read.
    """

    def __init__(self, name: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(name, words, environment=environment, log=subprocess.PIPE, lines=True)
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.ended = asyncio.Event()

    async def read(self, on_line: Callable[[str], None]) -> int:
        """Read its output until it ends; return its exit status."""
        pipes = (self.popen.stdout, on_line), (self.popen.stderr, self.tail.append)
        await asyncio.gather(*(_read_lines(pipe, take) for pipe, take in pipes if pipe))
        status = await asyncio.to_thread(self.popen.wait)
        self.ended.set()
        return status


class Supervisor(AsyncClosing):
    """The child processes of one run. ``async with Supervisor() as supervisor`` ends them all.

    Attributes
    ----------
    children
        In the order in which they were started; the last is ended first.
    """

    def __init__(self) -> None:
        self.children: list[SupervisedProcess] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers: list[asyncio.Task[None]] = []
        self._ending = False

    def start(
        self,
        name: str,
        words: Sequence[str],
        on_line: Callable[[str], None],
        *,
        environment: Mapping[str, str] | None = None,
        lasting: bool = False,
    ) -> SupervisedProcess:
        """Start a child.

        Parameters
        ----------
        name
            The child's, for errors.
        words
            Its command line, by `command`.
        on_line
            Is called with every line of its standard output.
        environment
            Variables that it has beside this process's (`clean_environment`).
        lasting
            Whether every exit before `close` is a failure; default: exit status 0 is none.

        Raises
        ------
        ProcessFailed
            When it cannot be started.
        """
        try:
            child = SupervisedProcess(name, words, {**clean_environment(), **(environment or {})})
        except OSError as error:
            raise ProcessFailed(f"{name} cannot be started: {error.strerror or error}") from None
        self.children.append(child)
        self._readers.append(asyncio.create_task(self._read(child, on_line, lasting)))
        return child

    async def within(self, seconds: float, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine.

        Raises
        ------
        ProcessFailed
            When it takes longer than this many seconds, or a child fails meanwhile.
        Interrupted
            When `interrupt` is called meanwhile, or was before.
        """
        task = asyncio.ensure_future(coroutine)
        either: set[asyncio.Future[Any]] = {task, self._failure}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            if not task.done():
                raise ProcessFailed(f"{what} took more than {seconds:g} s")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def interrupt(self, number: int) -> None:
        """Have the current `within`, and all later ones, raise `Interrupted`."""
        self._fail(Interrupted(f"stopped by signal {number}", signal=number))

    async def close(self) -> None:
        """End every child: SIGTERM, then SIGKILL. Does not fail."""
        self._ending = True
        for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _LAST)):
            for child in reversed(self.children):  # the server, which is the first, last
                child.signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    for child in self.children:
                        await child.ended.wait()
                break
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for child in self.children:
            child.close()

    async def _read(
        self, child: SupervisedProcess, on_line: Callable[[str], None], lasting: bool
    ) -> None:
        status = await child.read(on_line)
        if self._ending or (status == 0 and not lasting):
            return
        self._fail(ProcessFailed(f"{child.name} {ending(status)}", stderr=list(child.tail)))

    def _fail(self, error: AiopsError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # read here: it may be that no `within` follows


async def _read_lines(pipe: IO[bytes], take: Callable[[str], None]) -> None:
    """Read lines from a pipe until it ends."""
    loop, lines = asyncio.get_running_loop(), Lines()
    ended = loop.create_future()

    def read() -> None:
        chunk = os.read(pipe.fileno(), _CHUNK)
        if not chunk:
            loop.remove_reader(pipe)
            ended.set_result(None)
        for line in lines.feed(chunk):
            take(line)

    loop.add_reader(pipe, read)
    try:
        await ended
    finally:
        loop.remove_reader(pipe)
