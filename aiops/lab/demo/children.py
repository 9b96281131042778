"""Child processes: started, listened to, waited for with a deadline, and ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from aiops.common.closing import AsyncClosing
from aiops.errors import AiopsError
from aiops.net.cpu_count import BLAS

T = TypeVar("T")

ONE_CORE = dict.fromkeys(BLAS, "1")
"""The environment of a worker that shares a machine with others: BLAS with one thread."""

_TAIL = 12  # lines of a child's standard error that are kept for the report
_MERCY = 0.4  # seconds between asking a child to end and ending it
_LAST = 5.0  # seconds for the system to clear away what was ended


class DemoFailed(AiopsError):
    """The demo could not go on; ``details["stderr"]`` has the last lines of who failed."""


class Interrupted(AiopsError):
    """Somebody asked the demo to stop; ``details["signal"]`` is the signal's number."""


class Child:
    """One process, on a leash: it does not outlive this one (see `aiops.net.child_guard`)."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.ended = asyncio.Event()

    def say_the_word(self) -> None:
        """Tell it to go."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still there."""
        if self.process.returncode is None:
            # Not process.send_signal: it looks whether the child has ended, and when it has, takes
            # the exit status away from asyncio, which waits for it on another thread.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def listen(self, on_line: Callable[[str], None]) -> int:
        """Take in what it says until it ends; return its exit status."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        await asyncio.gather(
            _read_lines(self.process.stdout, on_line),
            _read_lines(self.process.stderr, self.tail.append),
        )
        status = await self.process.wait()
        self.ended.set()
        return status


class Family(AsyncClosing):
    """All children of a demo. ``async with Family() as family`` ends them on the way out.

    Every wait goes through `within`: it has a deadline, and it ends early when a child dies or
    `interrupt` is called.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners: list[asyncio.Task[None]] = []
        self._ending = False

    async def start(
        self,
        name: str,
        arguments: Sequence[str],
        on_line: Callable[[str], None],
        *,
        environment: Mapping[str, str] | None = None,
        lasting: bool = False,
    ) -> Child:
        """Start ``python -m arguments``; the module is on a leash, by itself or through ours.

        Parameters
        ----------
        name
            What it is called in messages to people.
        arguments
            The module and its own arguments.
        on_line
            Is given every line of its standard output.
        environment
            Variables it gets beside ours.
        lasting
            Whether it is meant to last until it is ended: then any exit of its own is trouble.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**_own_environment(), **(environment or {})},
                start_new_session=True,  # a Ctrl-C at the terminal is for the parent to handle
            )
        except OSError as error:
            raise DemoFailed(f"{name} cannot be started: {error.strerror or error}") from None
        child = Child(name, process)
        self.children.append(child)
        self._listeners.append(asyncio.create_task(self._listen(child, on_line, lasting)))
        return child

    async def within(self, seconds: float, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns.

        Raises
        ------
        DemoFailed
            When it takes longer than so many seconds, or a child fails meanwhile.
        Interrupted
            When somebody called `interrupt`.
        """
        task = asyncio.ensure_future(coroutine)
        either: set[asyncio.Future[Any]] = {task, self._trouble}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._trouble.done():
                self._trouble.result()
            if not task.done():
                raise DemoFailed(f"{what} took more than {seconds:g} s")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def interrupt(self, number: int) -> None:
        """End whatever `within` is waiting for."""
        self._fail(Interrupted(f"stopped by signal {number}", signal=number))

    async def close(self) -> None:
        """End every child: ask, then insist. Does not fail."""
        self._ending = True
        for number, seconds in ((signal.SIGTERM, _MERCY), (signal.SIGKILL, _LAST)):
            for child in reversed(self.children):  # the server, which is the first, last
                child.send(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    for child in self.children:
                        await child.ended.wait()
                break
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)

    async def _listen(self, child: Child, on_line: Callable[[str], None], lasting: bool) -> None:
        status = await child.listen(on_line)
        if self._ending or (status == 0 and not lasting):
            return
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        self._fail(DemoFailed(f"{child.name} {how}", stderr=list(child.tail)))

    def _fail(self, error: AiopsError) -> None:
        if not self._trouble.done():
            self._trouble.set_exception(error)
            self._trouble.exception()  # it may be that nobody waits any more


async def _read_lines(reader: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    rest = b""
    while chunk := await reader.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            take(line.decode(errors="replace"))
    if rest:
        take(rest.decode(errors="replace"))


def _own_environment() -> dict[str, str]:
    """Return our variables, without those that would make the server another one than announced."""
    kept = ("AIOPS_DATA", "AIOPS_KERNELS", "AIOPS_TOKEN")
    return {k: v for k, v in os.environ.items() if not k.startswith("AIOPS_") or k in kept}
