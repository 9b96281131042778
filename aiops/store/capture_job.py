"""Copy what updates overwrite in place, in the place of an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiops.model.layout import Ints
from aiops.store.updater import NONE


@dataclass(slots=True, eq=False)
class CaptureJob:
    """The copying of a capture, which takes its turn among the updates.

    Its turn is what decides about later events. So a replay gives it one too, but `begin` is not
    called there, and `run` does nothing.

    Attributes
    ----------
    number
        The snapshot's.
    row
        The row of the journal after which the state is captured; 0: it is not captured.
    cost
        Bytes read and written.
    error
        The reason for which there are no copies, if memory was short.
    """

    number: int
    row: int = 0
    cost: int = 0
    error: MemoryError | None = None
    _copy: Callable[[], object] | None = None

    def begin(self, copy: Callable[[], object], nbytes: int) -> None:
        """Have `run` call ``copy``, which reads this number of bytes, and writes as many."""
        self._copy, self.cost = copy, 2 * nbytes

    def run(self) -> Ints:
        """Make the copies (on any thread, while no update runs); return no sums."""
        if self._copy is not None:
            try:
                self._copy()
            except MemoryError as error:
                self.error = error
        return NONE
