"""Hold acknowledgements back until the journal's rows that they depend on are committed.

A small row is written before the effects of its event are carried out, so an answer that promises
no more than that (`Acks.WRITTEN`) does not wait. Where a thread writes the row, or syncs it, only
the answer to the worker waits, for the update is carried out at once. So the guarantee is that of a
write-ahead log, and updates and the disk overlap. An answer that acknowledges nothing (a fetch's,
a pong) does not wait, and may overtake one that does: ids pair answers with requests.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

from aiops.common.frozen import value
from aiops.engine.events import Drop, Effect, Order, Reply
from aiops.errors import UsageError
from aiops.wire.data_messages import GivenTask
from aiops.wire.messages import Ack, Error, Model, TableRows
from aiops.wire.ring_messages import Round, RoundSettled
from aiops.wire.server_messages import FinishPush, HoldVersion, PushArrived, RunUpdate, UpdateDone


class Acks(IntEnum):
    """The promise of an acknowledgement (``--acks``), from least to most.

    ``APPLIED``: it is part of the model in memory. ``WRITTEN``: and of the journal's file, so it
    survives the server's death. ``DURABLE``: and the file is synced, so it survives a loss of
    power. ``REPLICATED``: and a standby has it, so it survives the loss of the machine.
    """

    APPLIED = 0
    WRITTEN = 1
    DURABLE = 2
    REPLICATED = 3

    @classmethod
    def named(cls, name: str) -> Acks:
        """Return the level of a name.

        Raises
        ------
        UsageError
            When there is none of that name.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(level.name.lower() for level in cls)
            raise UsageError(f"--acks {name}: there are {known}") from None


@value
class EncodedReply:
    """Send bytes that are an answer, encoded already."""

    peer: int
    data: bytes


class CommitGate:
    """Answers that wait for rows, in order.

    Parameters
    ----------
    wanted
        What an acknowledgement is to mean.

    Attributes
    ----------
    wanted
        That level.
    level
        What it means at present: `wanted`, or ``APPLIED`` while there is no journal.
    waiting
        The number of effects that are held.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "level")

    def __init__(self, wanted: Acks) -> None:
        self.wanted = self.level = wanted
        self._held: deque[tuple[int, Effect | EncodedReply]] = deque()  # by row, ascending
        self._peers: dict[int, int] = {}  # the number of held effects by peer

    @property
    def waiting(self) -> int:
        """The number of effects that are held."""
        return len(self._held)

    def hold(self, effects: list[Effect], row: int) -> list[Effect]:
        """Return those of an event's effects that are to be carried out now, and keep the others.

        Parameters
        ----------
        effects
            In order.
        row
            The event's row, which is not committed; those of earlier calls are not greater.
        """
        if self.level is Acks.APPLIED:
            return effects
        now: list[Effect] = []
        for effect in effects:
            peer = _acknowledged(effect)
            if peer is None and isinstance(effect, Drop) and effect.peer in self._peers:
                peer = effect.peer  # its answers come first
            if isinstance(effect, Order) and _NO_PEER in self._peers:
                peer = _NO_PEER  # orders are carried out in the order in which they were decided
            if peer is None:
                now.append(effect)
            else:
                self._keep(row, peer, effect)
        return now

    def hold_reply(self, peer: int, answer: bytes, row: int) -> None:
        """Keep an answer that is encoded already until a row is committed."""
        self._keep(row, peer, EncodedReply(peer, answer))

    def committed(self, row: int) -> list[Effect | EncodedReply]:
        """Return the effects that waited for rows up to this one, in order."""
        held, due = self._held, []
        while held and held[0][0] <= row:
            due.append(self._release())
        return due

    def forget_orders(self, shard: int) -> None:
        """Drop the orders to a follower that has come back: it is given those that it lacks again.

        They would come before what it is given first, and might be of a model that it has lost.
        """
        held, self._held = self._held, deque[tuple[int, Effect | EncodedReply]]()
        self._peers.clear()
        for row, effect in held:
            if not isinstance(effect, Order):
                self._keep(row, effect.peer, effect)  # type: ignore[union-attr]
            elif effect.shard != shard:
                self._keep(row, _NO_PEER, effect)

    def held(self) -> list[Effect | EncodedReply]:
        """Return all that waits, in order, and keep it."""
        return [effect for _row, effect in self._held]

    def open(self) -> list[Effect | EncodedReply]:
        """Hold nothing from here on, as there is no journal; return all that waited, in order."""
        self.level = Acks.APPLIED
        return [self._release() for _ in range(len(self._held))]

    def close(self) -> None:
        """Hold again what waits for the journal, which goes on."""
        self.level = self.wanted

    def _keep(self, row: int, peer: int, effect: Effect | EncodedReply) -> None:
        self._held.append((row, effect))
        self._peers[peer] = self._peers.get(peer, 0) + 1

    def _release(self) -> Effect | EncodedReply:
        _row, effect = self._held.popleft()
        peer = _NO_PEER if isinstance(effect, Order) else effect.peer  # type: ignore[union-attr]
        left = self._peers[peer] - 1
        if left:
            self._peers[peer] = left
        else:
            del self._peers[peer]
        return effect


_NO_PEER = -1  # of an order to a follower

_FINAL = (RunUpdate, FinishPush, HoldVersion)
"""Orders that a follower cannot undo: a lead that forgot them would have another history."""


def _acknowledged(effect: Effect) -> int | None:
    """Return the peer to which an effect acknowledges something; None if it does no such thing."""
    if isinstance(effect, Reply):
        message = effect.message
        if isinstance(message, Ack | Round | RoundSettled | GivenTask | PushArrived | UpdateDone):
            return effect.peer
        if isinstance(message, Model) and message.created:
            return effect.peer
        # An error's or rows' request may have been a push: to wait costs nothing but time.
        return effect.peer if isinstance(message, Error | TableRows) else None
    if isinstance(effect, Order) and isinstance(effect.message, _FINAL):
        return _NO_PEER
    return None
