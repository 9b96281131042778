"""The document of the live page, and its changes: one serialisation of each for all viewers.

A viewer is sent the whole document once, and then the difference of each tick to the one before:
the sections that are not as they were, the rows of workers that are not, a point of each series,
and the new events. Whatever the number of workers, a difference has at most `CHANGED` of their
rows: those that have waited longest go first, and the rest follow with the next ticks.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aiops.dashboard.document import Report, WorkerRow, sections, text
from aiops.dashboard.happenings import Arrival, Happening, happened
from aiops.dashboard.series import RunSeries, rounded
from aiops.metrics.scalars import rate, staleness_between

MOST_WORKERS = 1024
"""Workers that have a row."""

CHANGED = 256
"""Rows that a difference has at most, those of workers that have come aside."""

EVENTS = 200
"""Events that are kept."""

LOGGED = 8
"""Names of logged numbers that are shown: those that most clients log."""

_OWN = ("workers", "loop", "updating", "resident", "updates", "staleness", "received", "sent")


class ServerSample(NamedTuple):
    """A server as it was at one moment.

    Attributes
    ----------
    time
        In seconds since 1970, as a clock has it that is never set: one that falls stands still.
    clock
        The server's, in seconds; `WorkerRow.answered` is in the same.
    report
        Its report, with ``ready``.
    rows
        Its clients; None: they were not asked for, as there are no viewers.
    workers
        How many workers it has.
    arrivals
        Those that came and went lately, and the number of all that ever did.
    arrived
        How many ever came or went.
    shares
        Of a processor that its threads have used since the sample before, by name.
    """

    time: float
    clock: float
    report: Report
    rows: Sequence[WorkerRow] | None = None
    workers: int = 0
    arrivals: Sequence[Arrival] = ()
    arrived: int = 0
    shares: Mapping[str, float] = {}


class Board:
    """The document of one server.

    Parameters
    ----------
    about
        What does not change: settings of the server, by name.

    Attributes
    ----------
    tick
        The number of samples so far.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.tick = 0
        self._about = dict(about)
        self._sections: dict[str, Any] = {"state": {"ready": "it is starting"}}
        self._series = RunSeries(_OWN)
        self._events: deque[list[Any]] = deque(maxlen=EVENTS)
        self._rows: dict[int, list[Any]] = {}  # as viewers have them
        self._due: dict[int, None] = {}  # rows that have changed, the longest ago first
        self._names: list[str] = []
        self._last: ServerSample | None = None

    def take(self, sample: ServerSample) -> bytes:
        """Take the next sample; return the difference that it makes, as a server-sent event."""
        last, report = self._last, sample.report
        if last is not None and sample.time < last.time:
            sample = sample._replace(time=last.time)
        self.tick += 1
        found: dict[str, Any] = {"tick": self.tick, "clock": round(sample.clock, 1)}
        now = sections(report, sample.shares)
        now["names"] = self._noted_names([*(report.get("logged") or ())][:LOGGED])
        now["counts"] = {"workers": sample.workers, **report.get("worker_counts", {})}
        found |= {name: made for name, made in now.items() if self._sections.get(name) != made}
        self._sections = now
        if sample.rows is not None:
            found["rows"], found["gone"] = self._changed(sample.rows)
        else:  # no viewer has them
            self._rows, self._due = {}, {}
        values, names = self._values(last, sample), [*self._series.names]
        found["point"] = {"t": round(sample.time, 1), **self._series.add(sample.time, values)}
        if forgotten := [name for name in names if name not in self._series.names]:
            found["forgotten"] = forgotten
        events = [[round(sample.time, 1), *each] for each in self._happened(last, sample)]
        self._events.extend(events)
        if events:
            found["events"] = events[-EVENTS:]
        self._last = sample._replace(rows=None)
        return event("tick", found)

    def whole(self) -> bytes:
        """Return the whole document as a server-sent event, as viewers have it after the tick."""
        last = self._last
        return event(
            "whole",
            {
                "tick": self.tick,
                "clock": round(last.clock, 1) if last else 0.0,
                "about": self._about,
                **self._sections,
                "rows": [*self._rows.values()],
                "series": self._series.columns(),
                "events": [*self._events],
            },
        )

    # ------------------------------------------------------------ inside

    def _noted_names(self, logged: Sequence[str]) -> list[str]:
        """Return the names of logged numbers; one that is no longer among them goes.

        When they change, viewers forget the numbers in all rows, which are sent again in turn.
        """
        kept = [name for name in self._names if name in logged]
        names = [*kept, *(name for name in logged if name not in kept)]
        if names != self._names:
            for row in self._rows.values():
                row[-1] = []
        self._names = names
        return names

    def _changed(self, given: Sequence[WorkerRow]) -> tuple[list[list[Any]], list[int]]:
        """Return the rows to send, and the numbers of those that are gone."""
        rows = {row.number: self._row(row) for row in given[:MOST_WORKERS]}
        gone = [number for number in self._rows if number not in rows]
        for number in gone:
            del self._rows[number]
        for number in [n for n in self._due if n not in rows]:
            del self._due[number]
        new = [number for number in rows if number not in self._rows]
        for number, row in rows.items():
            if number in self._rows and self._rows[number] != row:
                self._due.setdefault(number)
        sent = [*new, *[*self._due][: max(0, CHANGED - len(new))]]
        for number in sent:
            self._rows[number] = rows[number]
            self._due.pop(number, None)
        return [rows[number] for number in sent], gone

    def _row(self, row: WorkerRow) -> list[Any]:
        seconds = (row.compute, row.idle)
        return [
            *(row.number, text(row.name), row.state, row.pushes, row.refused, row.ignored),
            *(row.staleness, row.bytes_in, row.bytes_out, round(row.answered, 3)),
            *(None if each is None else round(each, 1) for each in seconds),
            [_finite(row.logged.get(name)) for name in self._names],
        ]

    def _values(self, last: ServerSample | None, now: ServerSample) -> dict[str, float | None]:
        """Return the values of the series: rates since the sample before, and means."""
        report = now.report
        found: dict[str, float | None] = {
            "workers": now.workers,
            # The first are of the moment of the start.
            "loop": now.shares.get("event loop") if last else None,
            "updating": now.shares.get("updates") if last else None,
            "resident": (report.get("memory") or {}).get("resident"),
        }
        passed = now.time - last.time if last else 0.0
        if last is not None and passed > 0:
            before = last.report
            found["updates"] = rate(before, report, passed, "version")
            found["staleness"] = staleness_between(before, report)
            for name, way in (("received", "pushed"), ("sent", "fetched")):
                found[name] = rate(before, report, passed, "ledger", way, "bytes")
        for name in self._names:
            mean, least, most = report["logged"][name]
            found[f"log {name}"] = mean
            found[f"min {name}"], found[f"max {name}"] = least, most
        return found

    def _happened(self, last: ServerSample | None, now: ServerSample) -> list[Happening]:
        seen = last.arrived if last and not _began_anew(last, now) else 0
        new = [each for each in now.arrivals if each[0] > seen]
        more = max(0, now.arrived - seen - len(new))
        before = last.report if last else None
        return [*happened(before, now.report, new, more)]


def _began_anew(last: ServerSample, now: ServerSample) -> bool:
    """Return whether another engine counts arrivals, from 0 on, as after a rollback.

    A standby that is promoted, with a generation of its own, goes on counting.
    """
    before, state = (sample.report.get("state") or {} for sample in (last, now))
    another = before.get("generation") != state.get("generation") and "standby_of" not in before
    return another or now.arrived < last.arrived


def _finite(value: float | None) -> float | None:
    shown = None if value is None else rounded(value)
    return None if shown is None or not math.isfinite(shown) else shown


def event(kind: str, document: Mapping[str, Any]) -> bytes:
    """Return a server-sent event.

    >>> event("tick", {"a": 1})
    b'event: tick\\ndata: {"a":1}\\n\\n'
    """
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"event: {kind}\ndata: {data}\n\n".encode(errors="replace")
