"""Looking for an answer for a moment before sleeping for it.

A processor that has gone idle takes as long to wake as a small exchange takes altogether: with
4 KiB and one worker, looking on both sides makes 10,000 exchanges a second out of 4,500. But who
looks, keeps a processor from others. So a look never lasts longer than `Spin.MOST`, and gives way
between any two glances: whoever else wants the processor has it. When that happens, or when the
look was in vain, the next ones are left out, the more the longer it goes on.
"""

from __future__ import annotations

import os
from asyncio import get_running_loop
from collections.abc import Callable
from time import perf_counter

_CROWDED = 5e-6
"""Giving way takes a microsecond when nobody wants the processor, and much longer otherwise."""

_LONGEST_REST = 256

_GIVE_WAY: Callable[[], None] | None = getattr(os, "sched_yield", None)


class Spin:
    """When to look again, when to go to sleep, and when not to begin at all.

    ::

        look = spin.begin()
        while look and not there():
            look = spin.again()
        if there():
            spin.found()

    Parameters
    ----------
    clock, give_way
        For tests; `time.perf_counter` and `os.sched_yield` (where there is none, nobody looks).
    """

    MOST = 500e-6
    """Seconds that one look may last."""

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
        """Begin a wait; return whether to look at all."""
        if self._resting:
            self._resting -= 1
            return False
        if self._give_way is None:
            return False
        self._until = self._clock() + self.MOST
        return True

    def again(self) -> bool:
        """Give way to others after a glance in vain; return whether to glance again."""
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
        """What was looked for has come while looking: it is worth it."""
        self._rest = 1

    def look(self, there: Callable[[int], object]) -> None:
        """Do all of that at one go: look until it is there, or is to be slept for.

        Parameters
        ----------
        there
            Says whether it is; it is told how many milliseconds to wait for it (0).
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
    """Has an event loop look for a next message a while before it sleeps for one.

    Parameters
    ----------
    spin
        What says how long.
    """

    __slots__ = ("_heard", "_looking", "_spin")

    def __init__(self, spin: Spin) -> None:
        self._spin = spin
        self._looking = self._heard = False  # and whether a message came meanwhile

    def heard(self) -> None:
        """Hear that messages have come, on the event loop: look for the next."""
        self._heard = self._looking
        if not self._looking and self._spin.begin():
            self._looking = True
            get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Come round once more, unless it is time to sleep."""
        if self._heard:
            self._heard = False
            self._spin.found()
            self._spin.begin()
        if self._spin.again():
            get_running_loop().call_soon(self._look)
        else:
            self._looking = False
