"""Deal the blocks of a data set to workers that come and go; no Ray here.

Each block of an epoch goes to one worker. A worker has finished a block when it asks for the next;
a block that its worker did not finish goes to another. An epoch ends for a worker when all blocks
have been dealt: it need not wait for the others, and may begin the next epoch while they finish
theirs. So an example is seen once an epoch, except that those of an unfinished block are seen again
as far as the lost worker had come.
"""

from __future__ import annotations

from collections import deque

from aiops.common.frozen import value
from aiops.errors import UsageError


@value
class DealtBlock:
    """A block for a worker: its number in its epoch."""

    epoch: int
    number: int


@value
class EpochOver:
    """All blocks of an epoch have been dealt."""

    epoch: int


class Dealing:
    """The decisions about the blocks of one data set.

    The blocks of an epoch are known one after the other, since Ray Data makes them as they are
    wanted: `ask` returns the number of a block that may not be there, and then `exhausted` says so.
    """

    epoch: int

    def __init__(self) -> None:
        self.epoch = 0
        self._next = 0  # number of the next block that has not been dealt in this epoch
        self._over = False
        self._returned = deque[DealtBlock]()
        self._held: dict[int, DealtBlock] = {}
        self._starts: dict[int, int] = {}  # by rank, how often its worker has been begun

    def begin(self, rank: int, start: int) -> int:
        """Note that a worker begins; return the epoch that it is to begin with.

        ``start``: how often this rank's has been begun before. What the one before held goes back.

        Raises
        ------
        UsageError
            When a later worker of this rank has begun already.
        """
        if start < self._starts.get(rank, 0):
            raise UsageError(f"worker {rank} has been replaced: its loop is to end")
        if start > self._starts.get(rank, -1):
            self.lost(rank)
        self._starts[rank] = start
        return self.epoch

    @property
    def unfinished(self) -> frozenset[DealtBlock]:
        """The blocks that have been dealt, and may have to be dealt again."""
        return frozenset((*self._held.values(), *self._returned))

    def lost(self, rank: int) -> None:
        """Take back what a worker held."""
        block = self._held.pop(rank, None)
        if block is not None:
            self._returned.append(block)

    def ask(self, rank: int, start: int, epoch: int) -> DealtBlock | EpochOver:
        """Return a worker's next block of an epoch; it has finished the one before.

        Raises
        ------
        UsageError
            When it has been replaced, or names an epoch to come.
        """
        self.begin(rank, start)
        if not 0 <= epoch <= self.epoch + self._over:
            raise UsageError(f"epoch {epoch} has not begun: the present one is {self.epoch}")
        self._held.pop(rank, None)
        if self._returned:
            self._held[rank] = block = self._returned.popleft()
            return block
        if epoch > self.epoch:
            self.epoch, self._next, self._over = epoch, 0, False
        if epoch < self.epoch or self._over:
            return EpochOver(epoch)
        self._held[rank] = block = DealtBlock(epoch, self._next)
        self._next += 1
        return block

    def exhausted(self, block: DealtBlock) -> EpochOver:
        """Note that there is no such block: its epoch has been dealt."""
        self._held = {rank: held for rank, held in self._held.items() if held != block}
        self._over = True
        return EpochOver(block.epoch)
