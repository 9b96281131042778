"""Buffers under a bound, and the line of those who wait for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aiops.model.arena import aligned
from aiops.model.layout import Bytes


class BufferPool:
    """Receive buffers with a bound on their total; who finds it empty waits in line.

    Parameters
    ----------
    bound
        Total bytes that may be out at once.
    make
        Makes one, of so many bytes.
    """

    def __init__(self, bound: int, make: Callable[[int], Bytes] = aligned) -> None:
        self.bound, self._make = bound, make
        self.out = 0
        self.peak = 0
        self.lacking = 0  # how many wait for one in a line that is kept elsewhere
        self.wake: Callable[[], object] | None = None  # has `settle` called soon, from any thread
        self.given: Callable[[], None] | None = None  # called when there may be more room
        self._returned: deque[Bytes] = deque()
        self._line: deque[Callable[[], bool]] = deque()
        self._spare: list[Bytes] = []
        self._retrying = self._given = False

    @property
    def waiting(self) -> int:
        """How many wait for a buffer."""
        return len(self._line) + self.lacking

    def take(self, nbytes: int) -> Bytes | None:
        """Return a buffer of that size, or None when the bound does not allow it now.

        The bound gives way to one buffer larger than all of it: a lone push must get through.
        """
        if self._returned:
            self.settle()
        if self._line and not self._retrying:  # nobody overtakes those in line
            return None
        if self.out and self.out + nbytes > self.bound:
            return None
        self.out += nbytes
        self.peak = max(self.peak, self.out)
        for index, spare in enumerate(self._spare):
            if len(spare) == nbytes:
                return self._spare.pop(index)
        while self._spare and self.out + self.kept > self.bound:
            self._spare.pop(0)
        return self._make(nbytes)

    @property
    def kept(self) -> int:
        """Bytes kept for pushes to come; with those that are out never more than the bound."""
        return sum(len(spare) for spare in self._spare)

    def reserve(self, nbytes: int) -> bool:
        """Count bytes that will be taken before long, if the bound allows it; say whether it did.

        `unreserve` them before they are taken.
        """
        if self._returned:
            self.settle()
        if self.out and self.out + nbytes > self.bound:
            return False
        self.out += nbytes
        self.peak = max(self.peak, self.out)
        return True

    def unreserve(self, nbytes: int) -> None:
        """Count them no longer."""
        self.out -= nbytes

    def wait(self, again: Callable[[], bool]) -> None:
        """Stand in line: ``again`` is called when there may be room, and says whether there was."""
        self._line.append(again)

    def give(self, buffer: Bytes) -> None:
        """Put a buffer back, and let those in line try."""
        self.out -= len(buffer)
        if self.out + (self.kept if self._spare else 0) + len(buffer) <= self.bound:
            self._spare.append(buffer)
        if self._line or self.given is not None:
            self.retry()

    def hand_over(self, buffer: Bytes) -> None:
        """Let a buffer become another's, who counts it himself."""
        self.out -= len(buffer)
        self.retry()

    def let_go(self, buffer: Bytes) -> None:
        """Say, from any thread, that a buffer is not used any more; `settle` takes it back."""
        self._returned.append(buffer)
        wake = self.wake
        if self._line and wake is not None:
            wake()

    def settle(self) -> None:
        """Take back what was let go."""
        while self._returned:
            self.give(self._returned.popleft())

    def retry(self) -> None:
        """Let those in line try, first come first served."""
        self._given = True
        if self._retrying:  # a buffer came back while the line is being served
            return
        self._retrying = True
        try:
            while self._line and self._given:
                self._given = False
                while self._line and self._line[0]():
                    self._line.popleft()
        finally:
            self._retrying = False
        if self.given is not None:
            self.given()
