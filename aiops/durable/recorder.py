"""An engine whose events are journalled, and whose acknowledgements wait for the journal."""

from __future__ import annotations

from dataclasses import replace

from aiops.common.frozen import value
from aiops.durable.commit_gate import Acks, CommitGate, EncodedReply
from aiops.durable.rows import JournalRow, check_of, passes, row_of
from aiops.engine.engine import Engine
from aiops.engine.events import Committed, Effect, Event, JournalEnded, Note, Received
from aiops.model.layout import Ints
from aiops.state.row_kinds import STEADY_ROW

_REPEAT = 60.0
"""Seconds after which it is said again that there is no journal."""


@value
class AppendRow:
    """Append a row to the journal, before the effects that follow are carried out."""

    number: int
    row: JournalRow


class Recorder:
    """An engine with a journal.

    Parameters
    ----------
    engine
        Handles the events.
    gate
        Holds the acknowledgements.
    first
        The number of the next row.

    Attributes
    ----------
    recording
        Whether events are journalled at present.
    ended
        The reason for which they are not; empty while they are.
    """

    def __init__(self, engine: Engine, gate: CommitGate, first: int) -> None:
        self.engine, self._gate, self.next = engine, gate, first
        self.recording, self.ended = True, ""

    @property
    def holds(self) -> bool:
        """True while acknowledgements wait for the journal."""
        return self._gate.waiting > 0

    @property
    def acks(self) -> Acks:
        """The promise of an acknowledgement, at present."""
        return self._gate.level

    def handle(self, event: Event) -> list[Effect | AppendRow | EncodedReply]:
        """Handle an event; return its effects, in order, the writing of its row first."""
        if isinstance(event, Committed):
            return [*self._gate.committed(event.row)]
        if isinstance(event, JournalEnded):
            return self._journal_ended(event)
        if not self.recording or passes(event):
            return [*self.engine.handle(event)]
        leased = self.engine.freeze()
        number, self.next = self.next, self.next + 1
        append = AppendRow(number, row_of(event, leased))
        if isinstance(event, Received):
            event = replace(event, row=number)
        effects = self.engine.handle(event, leased)
        return [append, *self._gate.hold(effects, number)]

    def exchanged(self, peer: int, numbers: tuple[int, ...], ticket: int, sums: Ints) -> bytes:
        """Return the row of a steady exchange, which takes the next number.

        Parameters
        ----------
        peer, numbers
            As of `aiops.engine.steady.Shortcut.update`.
        ticket, sums
            Of the update.
        """
        self.next += 1
        return STEADY_ROW.pack(peer, *numbers, check_of(ticket, sums))

    def hold(self, peer: int, answer: bytes) -> bool:
        """Keep the answer to the last steady exchange, if it has to wait; return whether it has."""
        if self._gate.level < Acks.DURABLE:
            return False
        self._gate.hold_reply(peer, answer, self.next - 1)
        return True

    def _journal_ended(self, event: JournalEnded) -> list[Effect | AppendRow | EncodedReply]:
        """Go on without a journal; return what waited for it, after a line that says so."""
        self.recording, self.ended = False, event.why
        wanted = self._gate.wanted.name.lower()
        text = f"{event.why}; acknowledgements mean 'applied' from here on, not {wanted!r}"
        return [Note(text), *self._gate.open()]
