"""Lend receive buffers under a bound; connections that find none wait in line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from aiops.model.arena import aligned
from aiops.model.layout import Bytes


class BufferPool:
    """Receive buffers with a bound on their total bytes.

    Parameters
    ----------
    bound
        Total bytes that may be out at once.
    make
        Returns a new buffer of a number of bytes.
    """

    def __init__(self, bound: int, make: Callable[[int], Bytes] = aligned) -> None:
        self.bound, self._make = bound, make
        self.out = 0
        self.peak = 0
        self.waiting_for_shards = 0  # those that wait in `ShardBuffers`
        self.wake: Callable[[], object] | None = None  # schedules `settle`, from any thread
        self.given: Callable[[], None] | None = None  # called when there may be more room
        self._returned: deque[Bytes] = deque()
        self._line: deque[Callable[[], bool]] = deque()
        self._spare: list[Bytes] = []
        self._retrying = self._given = False

    @property
    def waiting(self) -> int:
        """The number of those that wait for a buffer."""
        return len(self._line) + self.waiting_for_shards

    def take(self, nbytes: int) -> Bytes | None:
        """Return a buffer of that size, or None when the bound does not allow it now.

        If no buffer is out, one may exceed the bound: else its push would wait for ever.
        """
        if self._returned:
            self.settle()
        if self._line and not self._retrying:  # else small pushes would starve a large one
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
        """Bytes of spare buffers kept for reuse; with those out never more than the bound."""
        return sum(len(spare) for spare in self._spare)

    def reserve(self, nbytes: int) -> bool:
        """Count bytes that will be taken soon, if the bound allows it; return whether it does.

        Call `unreserve` before they are taken.
        """
        if self._returned:
            self.settle()
        if self.out and self.out + nbytes > self.bound:
            return False
        self.out += nbytes
        self.peak = max(self.peak, self.out)
        return True

    def unreserve(self, nbytes: int) -> None:
        """Undo a `reserve`."""
        self.out -= nbytes

    def wait(self, again: Callable[[], bool]) -> None:
        """Add ``again`` to the line: called when there may be room, it returns whether it had."""
        self._line.append(again)
        if self._returned and self.wake is not None:  # one came back before there was a line
            self.wake()

    def give(self, buffer: Bytes) -> None:
        """Put a buffer back, and serve the line."""
        self.out -= len(buffer)
        if self.out + (self.kept if self._spare else 0) + len(buffer) <= self.bound:
            self._spare.append(buffer)
        if self._line or self.given is not None:
            self.retry()

    def hand_over(self, buffer: Bytes) -> None:
        """Give a buffer away: it will not come back, and the new owner accounts for it."""
        self.out -= len(buffer)
        self.retry()

    def give_threadsafe(self, buffer: Bytes) -> None:
        """Return a buffer from any thread; the next `settle` puts it back."""
        self._returned.append(buffer)
        wake = self.wake
        if self._line and wake is not None:
            wake()

    def settle(self) -> None:
        """Put back the buffers that other threads returned."""
        while self._returned:
            self.give(self._returned.popleft())

    def retry(self) -> None:
        """Serve the line, first come first served."""
        self._given = True
        if self._retrying:  # `give` was called by the loop below, which sees `_given`
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


_UNBOUNDED = 1 << 62  # bytes


def unbounded(pools: Iterable[BufferPool]) -> dict[BufferPool, int]:
    """Let pools have as many buffers as they take; return the bounds of those that had any."""
    found = {pool: pool.bound for pool in pools if pool.bound != _UNBOUNDED}
    for pool in found:
        pool.bound = _UNBOUNDED
    return found
