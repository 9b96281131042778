"""A client's knowledge of its server's run: which of its versions and pushes are left.

A server that keeps its state goes on with its run when it is started again, as the run's next
generation. If it has lost the last updates, it counts their versions again, with other values.
"""

from __future__ import annotations

from bisect import bisect_left

from aiops.common.generations import generation_text
from aiops.errors import RemoteProtocolError, Superseded
from aiops.wire.messages import Welcome

_LONGEST_NAME = 256  # characters of a run's: a hello has to stay short
_BOUNDS = 64
"""The most restarts that are remembered one by one; what came before them counts as lost."""

_RUNS = 1 << 16
"""The most runs of sequence numbers that are kept; the oldest are forgotten first."""


class KnownRun:
    """A server's run, as far as a client has been told of it.

    Attributes
    ----------
    name
        The run's name; empty until the first welcome.
    generation
        The highest of it by which this client was welcomed; 0 if the server keeps no state.
    proof
        The proof of that generation, which an earlier server of the run asks for before it ends.
    acks
        What an acknowledgement promises, as the last welcome said.
    last_change
        The epoch of this client's first connection to the present generation: all that came by an
        earlier connection may be lost.
    last_loss
        The epoch of the first connection after acknowledged pushes were lost; 0: none were.
    """

    last_change: int
    last_loss: int
    acks: str
    name: str
    generation: int
    proof: bytes

    def __init__(self) -> None:
        self.name, self.generation, self.proof, self.acks = "", 0, b"", ""
        self.last_change = self._began = 1
        self.last_loss = 0
        self._bounds: list[tuple[int, tuple[int, ...]]] = []  # by epoch, what is left of earlier

    def continued_by(self, welcome: Welcome) -> bool:
        """Return whether a welcome is by a later generation of the run that is known."""
        return bool(self.name) and welcome.run == self.name and welcome.generation > self.generation

    def welcomed(self, welcome: Welcome, epoch: int, server: str) -> None:
        """Learn what the welcome of a connection says of the run.

        Raises
        ------
        Superseded
            When a later generation of the run has welcomed this client before.
        RemoteProtocolError
            When the run's name is longer than any.
        """
        if len(welcome.run) > _LONGEST_NAME:
            text = f"{server} names its run by {len(welcome.run):,} characters"
            raise RemoteProtocolError(text)
        if welcome.run == self.name and welcome.generation < self.generation:
            raise Superseded(
                f"{server} is at generation {generation_text(welcome.generation)} of its run, and"
                f" another server has generation {generation_text(self.generation)}: connect to"
                " that one",
                generation=self.generation,
            )
        if self.name and welcome.run != self.name:
            self.last_change = self._began = epoch
            self.last_loss = 0
            self._bounds.clear()
        elif self.continued_by(welcome):
            self.last_change = epoch
            self._bounds.append((epoch, welcome.intact))
            if len(self._bounds) > _BOUNDS:
                self._began = self._bounds.pop(0)[0]
        self.name, self.acks = welcome.run, welcome.acks
        self.generation, self.proof = welcome.generation, welcome.generation_proof

    def of_another(self, epoch: int) -> bool:
        """Return whether what came by an earlier connection is of another run."""
        return epoch < self._began

    def lost(self, epoch: int, version: int, table: int | None = None) -> bool:
        """Return whether a version is not any more what it was.

        Parameters
        ----------
        epoch
            The epoch of the connection by which it came.
        version
            The version of the model, or that of a table. -1: it is not known, as of parameters into
            which an answer was arriving; then it may be any of those that are lost.
        table
            The table's number.
        """
        index = 0 if table is None else 1 + table
        return epoch < self._began or any(
            epoch < restarted and (version < 0 or len(intact) <= index or intact[index] < version)
            for restarted, intact in self._bounds
        )


class AcknowledgedPushes:
    """The sequence numbers of the pushes that a server has acknowledged as used.

    Attributes
    ----------
    runs
        Runs of successive numbers, [first, last] each, in order.
    """

    def __init__(self) -> None:
        self.runs: list[list[int]] = []

    @property
    def last(self) -> int:
        """The highest, 0 if there is none."""
        return self.runs[-1][1] if self.runs else 0

    def add(self, first: int, last: int) -> None:
        """Add the numbers from ``first`` to ``last``."""
        runs = self.runs
        at = bisect_left(runs, [first])
        if at and runs[at - 1][1] + 1 >= first:
            at -= 1
            runs[at][1] = max(runs[at][1], last)
        else:
            runs.insert(at, [first, last])
        while at + 1 < len(runs) and runs[at + 1][0] <= runs[at][1] + 1:
            runs[at][1] = max(runs[at][1], runs.pop(at + 1)[1])
        if len(runs) > _RUNS:
            del runs[0]

    def roll_back(self, last: int) -> int:
        """Forget the numbers above ``last``; return how many there were."""
        lost, runs = 0, self.runs
        while runs and runs[-1][1] > last:
            run = runs[-1]
            lost += run[1] - max(run[0] - 1, last)
            if run[0] > last:
                runs.pop()
            else:
                run[1] = last
        return lost

    def remove(self, first: int, last: int) -> int:
        """Forget the numbers from ``first`` to ``last``; return how many there were."""
        kept, removed = list[list[int]](), 0
        for low, high in self.runs:
            if low < first:
                kept.append([low, min(high, first - 1)])
            if high > last:
                kept.append([max(low, last + 1), high])
            removed += max(0, min(high, last) - max(low, first) + 1)
        self.runs[:] = kept
        return removed

    def clear(self) -> None:
        """Forget all: the run is another one."""
        self.runs.clear()
