"""The examples of one data set, and the tasks in which they are handed out: positions only.

`aiops.engine.data_sets` decides who is given which of them, and when they count.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

Pieces = list[list[int]]
"""Ranges [start, stop) that neither overlap nor touch, rising."""


def add(pieces: Pieces, start: int, stop: int) -> None:
    """Add a range that none of the pieces overlaps."""
    at = bisect_left(pieces, [start])
    if at < len(pieces) and pieces[at][0] == stop:
        stop = pieces.pop(at)[1]
    if at and pieces[at - 1][1] == start:
        pieces[at - 1][1] = stop
    else:
        pieces.insert(at, [start, stop])


def covers(pieces: Pieces, start: int, stop: int) -> bool:
    """Return whether a range lies within one of the pieces."""
    at = bisect_left(pieces, [start + 1]) - 1
    return at >= 0 and pieces[at][1] >= stop


def remove(pieces: Pieces, start: int, stop: int) -> bool:
    """Remove a range; return whether it lay within one of the pieces, else nothing is changed."""
    if not covers(pieces, start, stop):
        return False
    at = bisect_left(pieces, [start + 1]) - 1
    first, last = pieces[at]
    pieces[at : at + 1] = [piece for piece in ([first, start], [stop, last]) if piece[0] < piece[1]]
    return True


def length(pieces: Pieces) -> int:
    """Return the number of positions in some pieces."""
    return sum(stop - start for start, stop in pieces)


@dataclass(slots=True)
class DataSet:
    """The examples of a data set: what is free and what was seen, by open epoch.

    Attributes
    ----------
    name, examples, block, seed
        As of `TakeTask`.
    epoch
        The lowest epoch that is not complete.
    given
        By open epoch: the first position that was never handed out.
    free
        By open epoch: what was handed out and has come back.
    seen
        By open epoch: the number of examples that count.
    tasks
        Tasks that were completed.
    returned
        Examples that came back, to be handed out again.
    """

    name: str
    examples: int
    block: int
    seed: int
    epoch: int
    given: dict[int, int] = field(default_factory=dict)
    free: dict[int, Pieces] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    tasks: int = 0
    returned: int = 0

    def __post_init__(self) -> None:
        """Open the first epoch."""
        if not self.given:
            self._open(self.epoch)

    def _open(self, epoch: int) -> None:
        self.given[epoch], self.free[epoch], self.seen[epoch] = 0, [], 0

    def pick(self, size: int, epochs: int) -> tuple[int, int, int] | None:
        """Take a range (epoch, start, stop) of at most ``size``, of an epoch below ``epochs``."""
        following, exhausted = self.epoch + 1, self.given[self.epoch] == self.examples
        exhausted = exhausted and not self.free[self.epoch]
        if exhausted and following < epochs and following not in self.given:
            self._open(following)
        for epoch in sorted(self.given):
            if epoch >= epochs:
                break
            if self.free[epoch]:
                start, stop = self.free[epoch][0]
                stop = min(stop, start + size)
                remove(self.free[epoch], start, stop)
                return epoch, start, stop
            start = self.given[epoch]
            if start < self.examples:
                self.given[epoch] = stop = min(start + size, self.examples)
                return epoch, start, stop
        return None

    def give_back(self, epoch: int, start: int, stop: int) -> None:
        """Take back a range that was handed out, and not seen."""
        add(self.free[epoch], start, stop)
        self.returned += stop - start

    def count(self, epoch: int, examples: int) -> None:
        """Count examples as seen; close the epochs that are complete."""
        self.seen[epoch] += examples
        while self.seen[self.epoch] == self.examples:
            for each in (self.given, self.free, self.seen):
                del each[self.epoch]
            self.epoch += 1
            if self.epoch not in self.given:
                self._open(self.epoch)

    def state(self) -> list[Any]:
        """Return it as plain values, which make it again."""
        pieces = {epoch: [list(piece) for piece in free] for epoch, free in self.free.items()}
        known = self.name, self.examples, self.block, self.seed, self.epoch
        return [*known, dict(self.given), pieces, dict(self.seen), self.tasks, self.returned]


@dataclass(slots=True, eq=False)
class DataTask:
    """A range of one epoch that a worker has.

    Attributes
    ----------
    number, data, epoch
        The number that its worker knows it by, and what its positions are of.
    holder, taker
        Numbers of the members who push for it, and who asked for it.
    since
        The time of its last progress.
    todo
        What is not covered.
    covered
        The number of examples that wait for the answer to a push.
    closed
        Whether what returns goes to other workers.
    """

    number: int
    data: DataSet
    epoch: int
    holder: int
    taker: int
    since: float
    todo: Pieces
    covered: int = 0
    closed: bool = False

    def state(self) -> list[Any]:
        """Return it as plain values, with the name of its data set."""
        known = self.number, self.data.name, self.epoch, self.holder, self.taker, self.since
        return [*known, [list(piece) for piece in self.todo], self.covered, self.closed]
