"""Poll for a message for a moment before sleeping until it comes.

An idle processor takes as long to wake as a whole small exchange: with 4 KiB and one worker,
polling on both sides makes 10,000 exchanges a second out of 4,500. But polling keeps a processor
from other threads. So it never lasts longer than `Spin.MOST`, and yields the processor after each
poll. If another thread takes it then, or the poll was in vain, the next waits begin without
polling: 1, then 2, 4 and so on up to 256 of them.
"""

from __future__ import annotations

import os
from asyncio import get_running_loop
from collections.abc import Callable
from time import perf_counter

_CROWDED = 5e-6
"""Seconds: `sched_yield` takes about 1e-6 if the processor is free, and much longer if not."""

_CROWDED_AT_FIRST = 20e-6
"""The same of the first yield of a wait. After waits that slept it takes 6e-6 to 10e-6 on a free
processor, whose caches hold nothing of it; taken for a crowd, that would be the last poll for the
next 256 waits, and so on for the life of the connection."""

_LONGEST_REST = 256

_GIVE_WAY: Callable[[], None] | None = getattr(os, "sched_yield", None)


class Spin:
    """The decision to poll again, to sleep, or not to poll at all.

    ::

        spin.look(there)  # a whole wait, in a thread that may block

        look = spin.begin()  # the same wait, one poll at a time
        while look and not there():
            look = spin.look()
        if there():
            spin.found()

    Parameters
    ----------
    clock, give_way
        For tests; `time.perf_counter` and `os.sched_yield` (without it there is no polling).

    Attributes
    ----------
    resting
        The number of waits that do not poll, from the next one on.
    budget
        Nanoseconds that a wait in compiled code may poll; 0 without ``give_way``.
    """

    MOST = 500e-6
    """Seconds that one wait may poll."""

    CROWDED = int(1e9 * _CROWDED_AT_FIRST), int(1e9 * _CROWDED)
    """Nanoseconds: the first yield of a wait, and another one, on a processor that is not free."""

    __slots__ = ("_clock", "_crowded", "_give_way", "_rest", "_until", "budget", "resting")

    def __init__(
        self,
        clock: Callable[[], float] = perf_counter,
        give_way: Callable[[], None] | None = _GIVE_WAY,
    ) -> None:
        self._clock, self._give_way = clock, give_way
        self._until, self._crowded = 0.0, _CROWDED_AT_FIRST
        self.resting, self._rest = 0, 1  # waits to leave out now, and after the next failure
        self.budget: int = int(1e9 * self.MOST) if give_way is not None else 0

    def begin(self) -> bool:
        """Begin a wait; return whether to poll at all."""
        if self.resting:
            self.resting -= 1
            return False
        if self._give_way is None:
            return False
        self._until, self._crowded = self._clock() + self.MOST, _CROWDED_AT_FIRST
        return True

    def found(self) -> None:
        """Note that a message came while polling: poll in the next wait too."""
        self._rest = 1

    def missed(self) -> None:
        """Note that a wait polled in vain: leave out more and more of the next ones."""
        self.resting = self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)

    def look(self, there: Callable[[int], object] | None = None) -> bool:
        """Poll until the message is there or it is time to sleep, in one call.

        Parameters
        ----------
        there
            Returns whether it is; called with the milliseconds that it may wait (0). None: the
            caller polls, in a wait that it began; yield the processor once, after a poll in vain.

        Returns
        -------
        bool
            False: it is time to sleep.
        """
        give_way, clock = self._give_way, self._clock
        if there is not None and self.resting:  # `begin` in line: a call less per exchange
            self.resting -= 1
            return False
        if give_way is None:
            return False
        now = clock()
        if there is not None:
            self._until, self._crowded = now + self.MOST, _CROWDED_AT_FIRST
        until, crowded = self._until, self._crowded
        while there is None or not there(0):
            before = now
            give_way()
            now = clock()
            if now >= until or now - before >= crowded:
                self.missed()
                return False
            crowded = _CROWDED
            if there is None:
                self._crowded = crowded
                return True
        self._rest = 1
        return True


class BusyPoll:
    """Has an event loop poll for a next message before it sleeps until one comes.

    A peer that is served keeps a processor busy, or its network does. So the loop polls only while
    there are fewer peers than processors: else each poll takes time that a peer could use, and
    finds fewer messages than a loop that sleeps until it is woken.

    Parameters
    ----------
    spin
        Decides how long.
    processors
        The number of processors.

    Attributes
    ----------
    idle
        True if the loop may begin to poll: call `begin` when messages have come.
    received
        A message has come since the last poll; set it when one comes.
    """

    __slots__ = ("_crowded", "_polling", "_processors", "_spin", "idle", "received")

    def __init__(self, spin: Spin, processors: int) -> None:
        self._spin, self._processors = spin, processors
        self._polling = self._crowded = self.received = False
        self.idle = True

    def serve(self, peers: int) -> None:
        """Take note of the number of peers."""
        self._crowded = peers >= self._processors
        self.idle = not (self._crowded or self._polling)

    def begin(self) -> None:
        """Begin to poll for the next message, called on the event loop when messages have come."""
        self.received = False
        if self._spin.begin():
            self._polling, self.idle = True, False
            get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Have the loop run once more, unless it is time to sleep."""
        if self.received:
            self.received = False
            self._spin.found()
            self._spin.begin()
        if not self._crowded and self._spin.look():
            get_running_loop().call_soon(self._look)
        else:
            self._polling, self.idle = False, not self._crowded
