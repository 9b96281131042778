"""The journal of a server that runs: rows are appended, synced, and followed by its standbys."""

from __future__ import annotations

from collections.abc import Callable

from aiops.durable.recorder import AppendRow
from aiops.engine.events import JournalEnded
from aiops.serving.state.journal_writer import JournalWriter


class RunningJournal:
    """The journal of one server, through the files that it is written to one after the other.

    Attributes
    ----------
    writer
        Writes the present one; None: there is no journal, or none yet.
    appended
        Called when a row has been appended, unless it is None.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "appended", "writer")

    def __init__(self, writer: JournalWriter | None, now: Callable[[], float]) -> None:
        self.writer, self._now = writer, now
        self.appended: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that this start has journalled."""
        return 0 if self.writer is None else self.writer.nbytes

    @property
    def synced(self) -> int:
        """The newest row that is known to be synced."""
        return 0 if self.writer is None else self.writer.synced

    def sync(self, done: Callable[[int], object]) -> None:
        """Have what is journalled synced; `JournalWriter.sync` says when ``done`` is called."""
        if self.writer is not None:
            self.writer.sync(self._now(), done)

    def append(self, effect: AppendRow) -> JournalEnded | None:
        """Append a row; return the event that ends the journal if there is no room for it."""
        assert self.writer is not None, "there is no journal"
        ended = self.writer.append(effect)
        if self.appended is not None:
            self.appended()
        return ended
