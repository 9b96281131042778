"""The clients of a server at one moment, for the live page."""

from __future__ import annotations

from typing import NamedTuple

from aiops.dashboard.document import WorkerRow
from aiops.engine.engine import Engine


class Members(NamedTuple):
    """The clients as `aiops.dashboard.board.ServerSample` has them; without an engine none."""

    clock: float
    rows: tuple[WorkerRow, ...] = ()
    workers: int = 0
    arrivals: tuple[tuple[int, str, str], ...] = ()
    arrived: int = 0

    @classmethod
    def of(cls, engine: Engine | None, clock: float, most: int) -> Members:
        """Return those of an engine, with the rows of this many at most."""
        if engine is None:
            return cls(clock)
        members = engine.membership
        rows = tuple(WorkerRow(*row) for row in members.rows(most)) if most else ()
        count, arrivals = len(members.present()), tuple(members.arrivals)
        return cls(clock, rows, count, arrivals, members.arrived)
