"""Processes that carry out the runs of an experiment, each process one run at a time, one thread.

A process that dies (the system kills it for its memory, for example) fails the run that it was at,
and another takes its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Protocol

from aiops.common.closing import Closing
from aiops.errors import AiopsError
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun, Result, RunWork
from aiops.lab.processes import PipedProcess, ProcessFailed
from aiops.lab.run_record import physical_memory


class PoolWatcher(Protocol):
    """Receives the progress and the results of the runs."""

    def at(self, case: PlannedRun, iterations: int) -> None:
        """A run has done this many iterations."""

    def done(self, case: PlannedRun, result: Result) -> None:
        """A run is finished."""

    def failed(self, case: PlannedRun, why: str) -> None:
        """A run has failed."""


@dataclass
class _PoolProcess:
    process: PipedProcess
    case: PlannedRun | None = None
    memory: int = 0


@dataclass
class RunPool(Closing):
    """Processes that carry out runs. ``with RunPool(2, carry_out) as pool`` ends them.

    Parameters
    ----------
    size
        How many processes there are at most.
    carry_out
        Carries out one piece of work in a process; a function of a module.
    memory
        Bytes that all runs at a time may need; a run that needs more is alone.
    """

    size: int
    carry_out: Callable[[RunWork, OnProgress], Result]
    memory: int = field(default_factory=lambda: physical_memory() * 6 // 10)

    def __post_init__(self) -> None:
        """Start with no process; they are started when there is a run for them."""
        self._members: list[_PoolProcess] = []

    def run(
        self,
        cases: Sequence[PlannedRun],
        watcher: PoolWatcher,
        needs: Callable[[PlannedRun], int] = lambda _: 0,
    ) -> None:
        """Run all cases; return when each is finished or has failed.

        Parameters
        ----------
        cases
            Begun in this order, as far as memory allows.
        watcher
            Is told what becomes of them.
        needs
            Returns how many bytes a run needs.
        """
        waiting = list(cases)
        while waiting or any(member.case for member in self._members):
            while (place := self._next(waiting, needs)) is not None:
                self._begin(waiting.pop(place), needs)
            busy = {
                member.process.pipe: (member, member.case)
                for member in self._members
                if member.case is not None
            }
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                self._receive(*busy[pipe], watcher)

    def _next(
        self, waiting: Sequence[PlannedRun], needs: Callable[[PlannedRun], int]
    ) -> int | None:
        """Return which of the cases can begin now."""
        used = [member.memory for member in self._members if member.case]
        if len(used) >= self.size:
            return None
        for place, case in enumerate(waiting):
            if not used or sum(used) + needs(case) <= self.memory:
                return place
        return None

    def _begin(self, case: PlannedRun, needs: Callable[[PlannedRun], int]) -> None:
        member = next((m for m in self._members if not m.case), None)
        if member is None:
            process = PipedProcess("its process", partial(_serve, self.carry_out))
            member = _PoolProcess(process)
            self._members.append(member)
        member.case, member.memory = case, needs(case)
        member.process.send(case.work)

    def _receive(self, member: _PoolProcess, case: PlannedRun, watcher: PoolWatcher) -> None:
        try:
            kind, value = member.process.receive()
        except ProcessFailed as error:
            self._members.remove(member)
            member.process.close()
            watcher.failed(case, str(error))
            return
        if kind == "at":
            watcher.at(case, value)
            return
        member.case = None
        (watcher.done if kind == "done" else watcher.failed)(case, value)

    def close(self) -> None:
        """End the processes, busy or not."""
        for member in self._members:
            member.process.kill()
        while self._members:
            self._members.pop().process.close()


def _serve(carry_out: Callable[[RunWork, OnProgress], Result], pipe: Connection) -> None:
    """Carry out one piece of work after the other, until the pipe ends."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            work = pipe.recv()
            answer: tuple[str, object]
            try:
                answer = "done", carry_out(work, lambda done: pipe.send(("at", done)))
            except BrokenPipeError:
                return
            except AiopsError as error:
                answer = "failed", str(error)
            except Exception as error:
                answer = "failed", f"{type(error).__name__}: {error}"
            pipe.send(answer)
