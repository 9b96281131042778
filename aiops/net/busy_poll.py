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

_LONGEST_REST = 256

_GIVE_WAY: Callable[[], None] | None = getattr(os, "sched_yield", None)


class Spin:
    """The decision to poll again, to sleep, or not to poll at all.

    ::

        look = spin.begin()
        while look and not there():
            look = spin.again()
        if there():
            spin.found()

    Parameters
    ----------
    clock, give_way
        For tests; `time.perf_counter` and `os.sched_yield` (without it there is no polling).
    """

    MOST = 500e-6
    """Seconds that one wait may poll."""

    __slots__ = ("_clock", "_give_way", "_rest", "_resting", "_until")

    def __init__(
        self,
        clock: Callable[[], float] = perf_counter,
        give_way: Callable[[], None] | None = _GIVE_WAY,
    ) -> None:
        self._clock, self._give_way = clock, give_way
        self._until = 0.0
        self._resting, self._rest = 0, 1  # waits to leave out now, and after the next failure

    def begin(self) -> bool:
        """Begin a wait; return whether to poll at all."""
        if self._resting:
            self._resting -= 1
            return False
        if self._give_way is None:
            return False
        self._until = self._clock() + self.MOST
        return True

    def again(self) -> bool:
        """Yield the processor after a poll in vain; return whether to poll again."""
        assert self._give_way is not None
        before = self._clock()
        self._give_way()
        now = self._clock()
        if now < self._until and now - before < _CROWDED:
            return True
        self._resting = self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)
        return False

    def found(self) -> None:
        """Note that a message came while polling: poll in the next wait too."""
        self._rest = 1

    def look(self, there: Callable[[int], object]) -> None:
        """Poll until the message is there or it is time to sleep, in one call.

        Parameters
        ----------
        there
            Returns whether it is; called with the milliseconds that it may wait (0).
        """
        if self._resting:
            self._resting -= 1
            return
        give_way, clock = self._give_way, self._clock
        if give_way is None:
            return
        now = clock()
        until = now + self.MOST
        while not there(0):
            before = now
            give_way()
            now = clock()
            if now >= until or now - before >= _CROWDED:
                self._resting = self._rest
                self._rest = min(2 * self._rest, _LONGEST_REST)
                return
        self._rest = 1


class BusyPoll:
    """Has an event loop poll for a next message before it sleeps until one comes.

    Parameters
    ----------
    spin
        Decides how long.
    """

    __slots__ = ("_heard", "_looking", "_spin")

    def __init__(self, spin: Spin) -> None:
        self._spin = spin
        self._looking = self._heard = False  # a poll is scheduled; a message came meanwhile

    def heard(self) -> None:
        """Begin to poll for the next message, called on the event loop when messages have come."""
        self._heard = self._looking
        if not self._looking and self._spin.begin():
            self._looking = True
            get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Have the loop run once more, unless it is time to sleep."""
        if self._heard:
            self._heard = False
            self._spin.found()
            self._spin.begin()
        if self._spin.again():
            get_running_loop().call_soon(self._look)
        else:
            self._looking = False
