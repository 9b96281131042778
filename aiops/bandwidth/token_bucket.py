"""Limit bytes per second, and share them fairly among the connections that wait.

Pure: time is an argument (seconds of any monotonic clock), and nothing here waits. Bytes are
*taken* before they cross, so that the grants of several connections never exceed the budget in sum;
then they either *cross*, or are *put back*. The driver does only this::

    budget.ask(flow, OUT, nbytes)                     # a connection has bytes to move
    for flow, way, nbytes in budget.grants(now):      # those that it may move now
        ...
    budget.crossed(flow, nbytes, now)                 # they crossed
    budget.next(now)                                  # the time of the next grants

The queue is deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) with a weight per flow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Way: TypeAlias = Literal[0, 1]
IN: Way = 0
OUT: Way = 1

USABLE = 0.96
"""The share of a budget earned per second; the rest absorbs bursts and new connections."""

_DEPTH = 0.125
"""Seconds of a budget that may be saved up and cross at once."""

_SLOTS = 128  # per second, in the ledger
_KEPT = _SLOTS + 2  # slots summed: any second, and 1/128 s for clocks read a little apart
_MIN_GRANT = 256  # a 256th of a second's budget: less is not worth a system call
_QUANTUM = (1, 256 * 1024)  # bytes per turn, at least and at most
_TURNS = 64  # turns per second, between those bounds
_SPARE = 64  # a 64th of a second's budget is kept for new connections
_IDLE = 1.0  # seconds for which the bucket of a client that left is kept


class TokenBucket:
    """A limit of ``rate`` bytes in any second, earned evenly.

    A token bucket makes the traffic smooth (it fills at 0.96 of the rate, and holds 1/8 s of it, so
    that a late wake-up loses nothing). A ledger of the last second, kept in slots of 1/128 s,
    decides in the end: whatever the pattern, no second has more than ``rate`` bytes.

    Parameters
    ----------
    rate
        Bytes per second, at least 1.
    now
        The time, in seconds.
    """

    taken: int
    peak: int
    rate: int

    __slots__ = (
        *("_at", "_depth", "_slot", "_slots", "_tokens", "_until", "_window", "_withheld"),
        *("peak", "rate", "taken"),
    )

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._depth = max(1.0, _DEPTH * rate)
        self._tokens = self._depth
        self._at = now
        self._slot = int(now * _SLOTS)
        self._slots = [0] * _KEPT  # bytes that crossed, by slot modulo their number
        self._window = 0  # their sum
        self._withheld, self._until = 0, now  # bytes that must not cross before that time
        self.taken = 0  # bytes taken that have not crossed
        self.peak = 0  # most bytes that crossed in a window so far

    def room(self, now: float) -> int:
        """Return the number of bytes that may be taken now."""
        self._advance(now)
        left = self.rate - self.rate // _SPARE - self._window - self.taken - self._held_back(now)
        return max(0, min(int(self._tokens), left))

    def spare(self, now: float) -> bool:
        """Return whether one byte may be taken although there may be no `room`."""
        self._advance(now)
        return self._window + self.taken + self._held_back(now) < self.rate

    def change(self, rate: int, now: float) -> None:
        """Limit it to another rate from here on.

        What a higher rate adds may cross after a second, or a little more. So buckets whose rates
        have one sum keep that sum in any second, if what one gains is taken from another before.
        """
        self._advance(now)
        if rate > self.rate:
            self._withheld = self._held_back(now) + rate - self.rate
            self._until = now + _KEPT / _SLOTS
        else:
            self._withheld = max(0, self._withheld - (self.rate - rate))
        self.rate, self._depth = rate, max(1.0, _DEPTH * rate)
        self._tokens = min(self._tokens, self._depth)

    def owe(self) -> None:
        """Begin with a debt of all that may be saved up: another bucket may have spent as much.

        Then no second has more than ``rate`` bytes of the two, though their counts are not known to
        each other, if this one begins when the other ends.
        """
        self._tokens = -self._depth

    def _held_back(self, now: float) -> int:
        return self._withheld if now < self._until else 0

    def take(self, nbytes: int) -> None:
        """Take bytes, at most as many as `room` returned."""
        self._tokens -= nbytes
        self.taken += nbytes

    def put_back(self, nbytes: int) -> None:
        """Put back bytes that will not cross."""
        self.taken -= nbytes
        self._tokens = min(self._depth, self._tokens + nbytes)

    def crossed(self, nbytes: int, now: float) -> None:
        """Count taken bytes that have crossed."""
        self._advance(now)
        self.taken -= nbytes
        self._slots[self._slot % _KEPT] += nbytes
        self._window += nbytes
        self.peak = max(self.peak, self._window)

    def used(self, now: float) -> int:
        """Return the number of bytes that crossed in the last second."""
        self._advance(now)
        return self._window

    def absorb(self, other: TokenBucket, now: float) -> None:
        """Add the counts of another bucket of the same rate: both are one client's."""
        self._advance(now)
        other._advance(now)
        for slot in range(self._slot - _KEPT + 1, self._slot + 1):
            self._slots[slot % _KEPT] += other._slots[slot % _KEPT]
        self._window += other._window
        self.taken += other.taken
        self._tokens -= other._depth - other._tokens  # the tokens that the other has spent

    def when(self, nbytes: int, now: float) -> float:
        """Return the time at which ``nbytes`` can be taken, if none are taken before."""
        self._advance(now)
        due = now + max(0.0, min(nbytes, self._depth) - self._tokens) / (USABLE * self.rate)
        total = self._window + self.taken + nbytes + self.rate // _SPARE
        excess = total - self.rate
        slot = self._slot - _KEPT
        while excess > 0 and slot < self._slot:
            slot += 1
            excess -= self._slots[slot % _KEPT]
        if slot > self._slot - _KEPT:
            due = max(due, (slot + _KEPT) / _SLOTS)
        if total + self._held_back(now) > self.rate:
            due = max(due, min(self._until, now + _KEPT / _SLOTS))
        return due

    def _advance(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self._depth, self._tokens + (now - self._at) * USABLE * self.rate)
            self._at = now
        slot = int(now * _SLOTS)
        for new in range(max(self._slot + 1, slot - _KEPT + 1), slot + 1):
            self._window -= self._slots[new % _KEPT]
            self._slots[new % _KEPT] = 0
        self._slot = max(self._slot, slot)


@dataclass(slots=True)
class _Flow:
    """One connection under a budget."""

    weight: float = 1.0
    own: TokenBucket | None = None
    key: str | None = None  # the client whose bucket that is
    wants: list[int] = field(default_factory=lambda: [0, 0])  # by way
    way: Way = IN  # the direction served next
    deficit: float = 0.0  # bytes that it may still take in this turn
    free: bool = False  # it is not limited, and not counted
    credited: bool = False  # its turn has begun
    queued: bool = False
    taken: int = 0


class Budget:
    """The bytes that each connection of a server may move, under shared limits.

    Parameters
    ----------
    total
        Bytes per second of all of them together, both ways; None: no ceiling.
    each
        Bytes per second of one client, both ways, over however many connections; None: none.
    now
        The time, in seconds.
    """

    spent: int
    wanted: int

    def __init__(self, total: int | None, each: int | None, now: float) -> None:
        self.total: TokenBucket | None = TokenBucket(total, now) if total is not None else None
        self._each = each
        self._set_turns()
        self._owing = now  # until then, clients come whose last bytes are not counted here
        self._flows: dict[int, _Flow] = {}
        self._owners: dict[str, TokenBucket] = {}
        self._gone: deque[tuple[float, str]] = deque()  # the times at which clients are forgotten
        self._line: deque[int] = deque()
        self.spent = 0  # bytes that have crossed so far
        self.wanted = 0  # bytes that are waited for

    def _set_turns(self) -> None:
        rates = (None if self.total is None else self.total.rate), self._each
        rate = min(r for r in rates if r is not None)
        least, most = _QUANTUM
        self.quantum: int = max(least, min(most, rate // _TURNS))
        self._min_grant = max(1, min(self.quantum, rate // _MIN_GRANT))

    def change(self, total: int | None, each: int | None, now: float) -> None:
        """Limit bytes to other rates from here on; a limit stays one, and none stays none."""
        if self.total is not None and total is not None:
            self.total.change(total, now)
        if self._each is not None and each is not None:
            self._each = each
            own = [flow.own for flow in self._flows.values() if flow.own is not None]
            for bucket in {id(each): each for each in (*own, *self._owners.values())}.values():
                bucket.change(each, now)
        self._set_turns()

    def owe(self, now: float) -> None:
        """Keep to the limits together with an earlier server, which may have ended just now.

        The limits of all, and of each client that comes within a second, begin with a debt.
        """
        if self.total is not None:
            self.total.owe()
        self._owing = now + _KEPT / _SLOTS

    # ------------------------------------------------------------ connections

    def open(self, flow: int, now: float) -> None:
        """Add a connection."""
        own = TokenBucket(self._each, now) if self._each is not None else None
        self._flows[flow] = _Flow(own=own)

    def join(self, flow: int, client: str, now: float) -> None:
        """Set the client of a connection: all connections of a client share one limit."""
        entry = self._flows[flow]
        if entry.own is None:
            return
        own = self._owners.get(client)
        if own is None:
            self._owners[client] = entry.own
            if now < self._owing:
                entry.own.owe()
        else:
            own.absorb(entry.own, now)
            entry.own = own
        entry.key = client

    def exempt(self, flow: int) -> None:
        """Neither limit nor count what a connection moves from here on: it is no client's."""
        entry = self._flows[flow]
        taken = entry.taken
        self._put_back(entry, taken)
        entry.free, entry.own, entry.taken = True, None, taken
        if entry.queued:
            self._line.remove(flow)
            self._line.appendleft(flow)

    def close(self, flow: int, now: float) -> None:
        """Forget a connection; the bytes that it had taken are put back."""
        entry = self._flows.pop(flow, None)
        if entry is None:
            return
        self._put_back(entry, entry.taken)
        self.wanted -= sum(entry.wants)
        if entry.queued:
            self._line.remove(flow)
        if entry.key is not None:
            self._gone.append((now + _IDLE, entry.key))
        self._forget(now)

    def weigh(self, flow: int, weight: float) -> None:
        """Set a connection's share, relative to others, when demand exceeds the budget."""
        entry = self._flows.get(flow)
        if entry is not None:
            entry.weight = weight

    # ------------------------------------------------------------ asking

    def ask(self, flow: int, way: Way, nbytes: int) -> None:
        """Queue for ``nbytes``, in place of the last request of this connection and direction."""
        entry = self._flows[flow]
        self.wanted += nbytes - entry.wants[way]
        entry.wants[way] = nbytes
        if nbytes and not entry.queued:
            entry.queued = True
            if entry.free:  # it waits for none
                self._line.appendleft(flow)
            else:
                self._line.append(flow)
        elif entry.queued and not any(entry.wants):
            self._line.remove(flow)
            self._unqueue(entry)

    def asked(self, flow: int, way: Way) -> int:
        """Return the number of bytes that a connection waits for."""
        return self._flows[flow].wants[way]

    def at_once(self, flow: int, nbytes: int, now: float) -> int:
        """Take up to ``nbytes`` without queueing: 0 while any connection waits."""
        entry = self._flows[flow]
        if entry.free:
            self._take(entry, nbytes)
            return nbytes
        if self._line:
            return 0
        count = min(nbytes, self.quantum, self._room(entry, now))
        self._take(entry, count)
        return count

    def borrow(self, flow: int, now: float) -> bool:
        """Take one byte, for an event loop that reads in any case; return whether there is one."""
        entry = self._flows[flow]
        buckets = () if entry.free else (self.total, entry.own)
        if not all(b.spare(now) for b in buckets if b is not None):
            return False
        self._take(entry, 1)
        return True

    def grants(self, now: float) -> list[tuple[int, Way, int]]:
        """Take and return all grants possible now: connection, direction, bytes."""
        found: list[tuple[int, Way, int]] = []
        line, passed = self._line, 0
        while line and passed < len(line):
            flow = line[0]
            entry = self._flows[flow]
            if entry.free:
                found += self._all_wanted(flow, entry)
                continue
            if not entry.credited:
                entry.credited = True
                entry.deficit += self.quantum * entry.weight
            way = entry.way if entry.wants[entry.way] else _other(entry.way)
            count = min(entry.wants[way], max(1, int(entry.deficit)))
            least = min(count, self._min_grant)
            if self.total is not None and self.total.room(now) < least:
                break
            if entry.own is not None and entry.own.room(now) < least:
                line.rotate(-1)  # its own limit holds it up, and must not hold up the others
                passed += 1
                continue
            count, passed = min(count, self._room(entry, now)), 0
            self._take(entry, count)
            entry.wants[way] -= count
            self.wanted -= count
            entry.way = _other(way)
            entry.deficit -= count
            found.append((flow, way, count))
            if not any(entry.wants):
                line.popleft()
                self._unqueue(entry)
            elif entry.deficit < 1:
                entry.credited = False
                line.rotate(-1)
        return found

    def _all_wanted(self, flow: int, entry: _Flow) -> list[tuple[int, Way, int]]:
        """Grant a connection without limits, the first in the line, what it waits for."""
        ways: tuple[Way, Way] = (IN, OUT)
        found = [(flow, way, entry.wants[way]) for way in ways if entry.wants[way]]
        self._take(entry, sum(entry.wants))
        self.wanted -= sum(entry.wants)
        entry.wants[:] = [0, 0]
        self._line.popleft()
        self._unqueue(entry)
        return found

    def next(self, now: float) -> float | None:
        """Return the time of the next grants; None while no connection waits."""
        if not self._line:
            return None
        due = now
        if self.total is not None:
            due = self.total.when(self._least(self._flows[self._line[0]]), now)
        waiting = [self._flows[flow] for flow in self._line]
        own = [e.own.when(self._least(e), now) for e in waiting if e.own is not None]
        return max(due, min(own)) if own else due

    # ------------------------------------------------------------ taken bytes

    def crossed(self, flow: int, nbytes: int, now: float) -> None:
        """Count taken bytes that a connection has moved."""
        entry = self._flows[flow]
        entry.taken -= nbytes
        if entry.free:
            return
        self.spent += nbytes
        if self.total is not None:
            self.total.crossed(nbytes, now)
        if entry.own is not None:
            entry.own.crossed(nbytes, now)

    def put_back(self, flow: int, nbytes: int) -> None:
        """Put back bytes that a connection had taken and does not need now."""
        self._put_back(self._flows[flow], nbytes)

    # ------------------------------------------------------------ inside

    def _room(self, entry: _Flow, now: float) -> int:
        rooms = [b.room(now) for b in (self.total, entry.own) if b is not None]
        return min(rooms)

    def _take(self, entry: _Flow, nbytes: int) -> None:
        entry.taken += nbytes
        for bucket in () if entry.free else (self.total, entry.own):
            if bucket is not None:
                bucket.take(nbytes)

    def _put_back(self, entry: _Flow, nbytes: int) -> None:
        entry.taken -= nbytes
        for bucket in () if entry.free else (self.total, entry.own):
            if bucket is not None:
                bucket.put_back(nbytes)

    def _least(self, entry: _Flow) -> int:
        return min(max(entry.wants), self._min_grant)

    def _unqueue(self, entry: _Flow) -> None:
        entry.queued = entry.credited = False
        entry.deficit = 0.0

    def _forget(self, now: float) -> None:
        """Forget the buckets of clients that left over a second ago."""
        while self._gone and self._gone[0][0] <= now:
            _when, key = self._gone.popleft()
            owner = self._owners.get(key)
            if owner is None or any(entry.own is owner for entry in self._flows.values()):
                continue
            if owner.used(now):
                self._gone.append((now + _IDLE, key))
                break
            del self._owners[key]


def _other(way: Way) -> Way:
    return OUT if way == IN else IN
