"""The numbers that clients log, over all clients: means, least and largest, for people."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Protocol

from aiops.wire.fields import MAX_LOGGED

LATELY = 30.0
"""Seconds for which a number counts, though the client that has logged it has left since. A loop
logs its last ones as it ends: a page and trackers that look now and then have them, too."""

GONE = 256
"""Clients that have left whose numbers are kept, at most."""

LOOKED_AT = 1 << 12
"""Numbers that are looked at for one summary, at most: those that were logged last. It takes some
milliseconds, in which nothing else happens; thousands of clients may log 16 each."""


class Logging(Protocol):
    """A client that has logged numbers, as `aiops.engine.membership.Member`."""

    number: int
    name: str
    peer: int | None
    logged: dict[str, float]
    logged_at: float


class LoggedNumbers:
    """The clients that have logged numbers: those that are here, and those that left lately."""

    def __init__(self) -> None:
        self._members: OrderedDict[int, Logging] = OrderedDict()  # by number, the last one last
        self._latest: dict[str, int] = {}  # the client that has come last, by a name of theirs

    def note(self, member: Logging) -> None:
        """Note that a client has logged numbers: it is the last that has."""
        self._members[member.number] = member
        self._members.move_to_end(member.number)
        self._latest.setdefault(member.name, member.number)

    def joined(self, member: Logging) -> None:
        """Note a new client: one of its name, which was started again, counts while it is here."""
        if member.name in self._latest:
            self._latest[member.name] = member.number

    def forget(self, present: int) -> None:
        """Forget clients that have left, if there are too many beside those that are here."""
        if len(self._members) > 2 * (present + GONE):
            gone = [m for m in self._members.values() if m.peer is None]
            for member in gone[:-GONE]:
                del self._members[member.number]
            names = {member.name for member in self._members.values()}
            self._latest = {name: of for name, of in self._latest.items() if name in names}

    def clear(self) -> None:
        """Forget all."""
        self._members.clear()
        self._latest.clear()

    def summary(self, now: float) -> dict[str, list[float]]:
        """Return the mean, least and largest of each number that clients have logged last.

        Of more than `MAX_LOGGED` names those that most clients log, and then those of the clients
        that came first. ``now``: in seconds, as `logged_at` is.
        """
        found = dict[str, list[float]]()
        first = dict[str, int]()
        for number, logged in self._last(now):
            for name, value in logged.items():
                found.setdefault(name, []).append(value)
                first[name] = min(number, first.get(name, number))
        names = sorted(found, key=lambda name: (-len(found[name]), first[name]))[:MAX_LOGGED]
        return {name: _summary(found[name]) for name in names}

    def _last(self, now: float) -> Iterator[tuple[int, Mapping[str, float]]]:
        """Yield numbers of clients, and what each has logged, those that logged last first."""
        looked_at = 0
        for member in reversed(self._members.values()):
            if looked_at >= LOOKED_AT:
                return
            latest = self._latest.get(member.name, 0) <= member.number
            if member.peer is not None or (latest and now <= member.logged_at + LATELY):
                looked_at += len(member.logged)
                yield member.number, member.logged


def _summary(values: list[float]) -> list[float]:
    return [sum(values) / len(values), min(values), max(values)]  # `MOST_LOGGED` bounds each
