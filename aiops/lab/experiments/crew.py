"""Processes that run cases, each one at a time, with one thread each.

A process that dies (killed for its memory, say) fails the run that it was at, and another takes its
place. When the parent dies, its processes find their pipe closed, and end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from aiops.common.closing import Closing
from aiops.errors import AiopsError
from aiops.lab.experiments.case import Case, Result, Tell, Work
from aiops.net.cpu_count import BLAS

ONE_THREAD = dict.fromkeys((*BLAS, "NUMBA_NUM_THREADS"), "1")
"""NumPy and Numba read these when they are imported."""

_PATIENCE = 1.0  # seconds for a process to end by itself


class Watcher(Protocol):
    """Is told what becomes of the runs."""

    def at(self, case: Case, iterations: int) -> None:
        """A run has come so far."""

    def done(self, case: Case, result: Result) -> None:
        """A run is finished."""

    def failed(self, case: Case, why: str) -> None:
        """A run has failed."""


@dataclass
class _Member:
    process: BaseProcess
    pipe: Connection
    case: Case | None = None
    memory: int = 0


@dataclass
class Crew(Closing):
    """So many processes. Use it as ``with Crew(2) as crew``; they are gone when the block ends.

    Parameters
    ----------
    size
        How many there are at most.
    carry_out
        What each does with a piece of work; a function of a module.
    memory
        Bytes that all runs at a time may need; a run that needs more is alone.
    """

    size: int
    carry_out: Callable[[Work, Tell], Result]
    memory: int = field(default_factory=lambda: _physical_memory() * 6 // 10)

    def __post_init__(self) -> None:
        """Nobody is there yet."""
        self._members: list[_Member] = []
        self._context = multiprocessing.get_context("spawn")

    def run(
        self, cases: Sequence[Case], watcher: Watcher, needs: Callable[[Case], int] = lambda _: 0
    ) -> None:
        """Run all cases; return when each is finished or has failed.

        Parameters
        ----------
        cases
            Begun in this order, as far as memory allows.
        watcher
            Told what becomes of them.
        needs
            Says how many bytes a run needs.
        """
        waiting = list(cases)
        while waiting or any(member.case for member in self._members):
            while (place := self._next(waiting, needs)) is not None:
                self._begin(waiting.pop(place), needs)
            busy = {member.pipe: member for member in self._members if member.case}
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                self._hear(busy[pipe], watcher)

    def _next(self, waiting: Sequence[Case], needs: Callable[[Case], int]) -> int | None:
        """Return which of the cases can be begun now."""
        used = [member.memory for member in self._members if member.case]
        if len(used) >= self.size:
            return None
        for place, case in enumerate(waiting):
            if not used or sum(used) + needs(case) <= self.memory:
                return place
        return None

    def _begin(self, case: Case, needs: Callable[[Case], int]) -> None:
        member = next((m for m in self._members if not m.case), None) or self._start()
        member.case, member.memory = case, needs(case)
        with contextlib.suppress(OSError):  # it has died: its pipe will say so
            member.pipe.send(case.work)

    def _start(self) -> _Member:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self.carry_out), daemon=True, name="aiops-experiment"
        )
        with _inherited():
            process.start()
        theirs.close()
        self._members.append(_Member(process, ours))
        return self._members[-1]

    def _hear(self, member: _Member, watcher: Watcher) -> None:
        case = member.case
        assert case is not None
        try:
            kind, value = member.pipe.recv()
        except (EOFError, OSError):
            self._members.remove(member)
            member.process.join(_PATIENCE)
            watcher.failed(case, f"its process ended with status {member.process.exitcode}")
            return
        if kind == "at":
            watcher.at(case, value)
            return
        member.case = None
        (watcher.done if kind == "done" else watcher.failed)(case, value)

    def close(self) -> None:
        """End the processes, whatever they are at."""
        for member in self._members:
            member.process.terminate()
        for member in self._members:
            member.process.join(_PATIENCE)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            member.pipe.close()
        self._members.clear()


@contextlib.contextmanager
def _inherited() -> Iterator[None]:
    """What a process that is started now inherits: one thread, and no ears for Ctrl-C."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _serve(pipe: Any, carry_out: Callable[[Work, Tell], Result]) -> None:
    """Do one piece of work after the other, until there is no more."""
    with contextlib.suppress(EOFError, OSError):  # nobody is there any more
        while True:
            work = pipe.recv()
            answer: tuple[str, Any]
            try:
                answer = "done", carry_out(work, lambda done: pipe.send(("at", done)))
            except BrokenPipeError:
                return
            except AiopsError as error:
                answer = "failed", str(error)
            except Exception as error:
                answer = "failed", f"{type(error).__name__}: {error}"
            pipe.send(answer)
