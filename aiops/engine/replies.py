"""Answer requests: acknowledgements, parameters, refusals.

This module reads the store and appends `Reply` effects; it never changes the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aiops.bandwidth.gate_controller import GateController
from aiops.engine import validation
from aiops.engine.delta_replies import DeltaReplies
from aiops.engine.events import Effect, Received, Reply
from aiops.engine.gradient_cache import CachedGradient
from aiops.engine.membership import Member, Said
from aiops.engine.receive import PushSink
from aiops.errors import BadPush, NotReady, Refused, StaleGradient
from aiops.model.parts import Parts
from aiops.store.parameters import Store
from aiops.store.wanted import Wanted
from aiops.wire.fields import Sparse
from aiops.wire.messages import Ack, Error, Fetch, Model, Params, Push, PushRows, Reapply


@dataclass(slots=True)
class PendingPush:
    """A push on its way through the engine; ``peer`` is None once its connection ended."""

    peer: int | None
    message: Push | Reapply
    sink: PushSink | CachedGradient
    member: Member
    staleness: int = 0
    mean_staleness: float = 0.0
    made: bool = False  # its step is in a published version, though its answer is held


class Replies:
    """One engine's answers.

    Parameters
    ----------
    effects
        The engine's list of effects, appended to.

    Attributes
    ----------
    pending
        The pushes that are to be answered later, by client and sequence number.
    readers
        Requests that wait for an update in place: connection, request id, the call that answers.
    """

    def __init__(self, effects: list[Effect]) -> None:
        self.effects = effects
        self.store: Store | None = None
        self.budget: GateController | None = None
        self.delta_replies: DeltaReplies | None = None  # answers coded fetches, if they are enabled
        self.tables: Sparse = ()
        self.now = 0.0
        self.refused: Counter[str] = Counter()
        self.pending: dict[tuple[str, int], PendingPush] = {}
        self.readers: list[tuple[int, int, Callable[[], None]]] = []

    @property
    def version(self) -> int:
        """The model version, 0 without a model."""
        return self.store.version if self.store else 0

    # ------------------------------------------------------------ reading

    def fetch(self, peer: int, message: Fetch, member: Member | None) -> None:
        """Send the tensors that the client wants and does not have, as soon as they can be read."""
        store = self._defined()
        wanted = self._wanted(message)
        said = store.vbar(), store.vbars(), self._gate(store)
        if message.coded and self.delta_replies is not None:
            params = Params(message.id, store.version, (), *said)
            self.delta_replies.answer(peer, params, wanted, member)
            return
        if not store.readable:
            again = partial(self.fetch, peer, message, member)
            self.readers.append((peer, message.id, again))
            return
        self._note_sent(store, member)
        parts = store.current.parts_for(wanted)
        params = Params(message.id, store.version, parts, *said)
        self.effects.append(Reply(peer, params, store.lease() if parts else None))

    def describe(self, peer: int, id: int, created: bool = False) -> None:
        """Send the model's description."""
        store = self._defined()
        model = Model(id, created, store.version, store.layout.rows, self.tables)
        self.effects.append(Reply(peer, model))

    def readable_again(self) -> None:
        """Answer the requests that waited for an update in place."""
        readers, self.readers = self.readers, []
        for _peer, _id, answer in readers:
            answer()

    def left(self, peer: int) -> None:
        """Drop a connection's fetches; the answers to its pushes are kept, but not sent."""
        self.readers = [reader for reader in self.readers if reader[0] != peer]
        if self.delta_replies is not None:
            self.delta_replies.left(peer)
        for pending in self.pending.values():
            if pending.peer == peer:
                pending.peer = None

    # ------------------------------------------------------------ pushes

    def waiting(self) -> list[tuple[int, int]]:
        """Drop the requests that wait for parameters; return their connections and ids."""
        readers, self.readers = self.readers, []
        coded = self.delta_replies.abandon() if self.delta_replies is not None else []
        return [(peer, id) for peer, id, _answer in readers] + coded

    def unanswered(self) -> list[PendingPush]:
        """Return the pushes that are to be answered later."""
        return list(self.pending.values())

    def acknowledge(self, pending: PendingPush, used: bool = True) -> None:
        """Answer a push whose gradient has been used (or is ignored)."""
        store, member, message = self.store, pending.member, pending.message
        assert store is not None, "no client can push before the model is defined"
        if used:
            member.pushes += 1
        else:
            member.ignored += 1
        member.staleness = pending.staleness
        parts: Parts = ()
        coded = message.fetch and message.coded and self.delta_replies is not None
        if pending.peer is not None and message.fetch and not coded:
            if store.rule.reads:
                self._note_sent(store, member)
            if message.wants:
                parts = store.current.parts_for(self._wanted(message))
            else:
                parts = store.current.parts_since(message.have)
        version = store.current.number
        news = (used, pending.staleness, pending.mean_staleness, *store.statistic())
        gate = () if self.budget is None else self._gate(store)
        ack = Ack(message.id, version, version, *news, parts, gate)
        member.answered = self.now
        member.remember(message.seq, (version, *news))
        self.pending.pop((member.client, message.seq), None)
        if pending.peer is not None and coded:
            assert self.delta_replies is not None
            self.delta_replies.answer(pending.peer, ack, self._wanted(message), member)
        elif pending.peer is not None:  # no update is outstanding, so the parameters can be read
            self.effects.append(Reply(pending.peer, ack, store.lease() if parts else None))

    def refuse(self, pending: PendingPush, fault: Refused) -> None:
        """Refuse a push that was queued; one to be computed again brings the parameters with it."""
        message, lease, store = pending.message, None, self._defined()
        error = self._count(pending.member, message.id, fault)
        member = pending.member
        member.answered = self.now
        member.remember(message.seq, error)
        self.pending.pop((member.client, message.seq), None)
        pending.sink.free()
        if pending.peer is None:
            return
        wants = message.fetch and not (message.coded and self.delta_replies)  # coded: it must fetch
        parts = store.current.parts_for(self._wanted(message)) if wants else ()
        if isinstance(fault, StaleGradient) and parts and store.readable:
            self._note_sent(store, pending.member)
            lease = store.lease()
            error = _error(message.id, fault, self.version, parts)
        self.effects.append(Reply(pending.peer, error, lease))

    def refuse_at_once(self, event: Received, member: Member, fault: Refused) -> None:
        """Refuse a push before it is queued."""
        message = event.message
        assert isinstance(message, Push | Reapply | PushRows)
        error = self._count(member, message.id, fault)
        member.remember(message.seq, error)
        self.effects.append(Reply(event.peer, error))

    def deny(self, event: Received, fault: Refused) -> None:
        """Refuse a request that is no push."""
        self.effects.append(Reply(event.peer, _error(event.message.id, fault, self.version)))

    def repeated(self, event: Received, member: Member) -> bool:
        """Answer a push that came before, on a connection since lost, without applying it.

        Returns True if it had come before. If it is still pending, its answer goes to the new
        connection.
        """
        message = event.message
        assert isinstance(message, Push | Reapply)
        pending = self.pending.get((member.client, message.seq))
        if pending is None and message.seq > member.last_seq:
            return False
        fault = validation.beyond(self.store, message) if self.store is not None else None
        if fault is not None:  # the repetition may ask for other tensors than the first
            self.deny(event, fault)
            return True
        if pending is not None:
            pending.peer, pending.message = event.peer, message
            return True
        answer = member.answers.get(message.seq)
        if isinstance(answer, tuple):
            self._acknowledge_again(event.peer, message, answer, member)
        elif isinstance(answer, Error):
            said = answer.code, answer.text, answer.details, False, self.version
            again = Error(message.id, *said)
            self.effects.append(Reply(event.peer, again))
        else:
            self.deny(
                event,
                BadPush(
                    f"push {message.seq} is older than what the server remembers of this client"
                    f" (its last was {member.last_seq}); it was not applied again"
                ),
            )
        return True

    # ------------------------------------------------------------ inside

    def _defined(self) -> Store:
        if self.store is None:
            raise NotReady("no worker has defined the model yet: a worker must do it")
        return self.store

    def _gate(self, store: Store) -> tuple[float, ...]:
        """Return the constants of the gates, where a budget chooses them."""
        return self.budget.constants(store.vbar()) if self.budget is not None else ()

    def _wanted(self, message: Fetch | Push | Reapply) -> Wanted:
        """Return the tensors that a request wants, checked against the model."""
        store = self._defined()
        wanted = Wanted(message.have, message.wants)
        return wanted.known(store.version, len(store.layout.tensors))

    def _note_sent(self, store: Store, member: Member | None) -> None:
        """Keep the version that a worker computes at, if the rule compares gradients with it.

        Called whenever a worker is sent the current version, or an answer that it holds it.
        """
        if store.rule.reads and member is not None and member.worker:
            member.forget_sent()
            member.sent = store.lease()

    def _acknowledge_again(
        self, peer: int, message: Push | Reapply, told: Said, member: Member
    ) -> None:
        """Send an acknowledgement again, with the present parameters if the request wants them."""
        store = self._defined()
        version, said = told[0], told[1:]
        parts: Parts = ()
        if message.fetch and message.coded and self.delta_replies is not None:
            answer = Ack(message.id, version, store.version, *said, (), self._gate(store))
            self.delta_replies.answer(peer, answer, self._wanted(message), member)
            return
        if message.fetch:
            if not store.readable:
                again = partial(self._acknowledge_again, peer, message, told, member)
                self.readers.append((peer, message.id, again))
                return
            self._note_sent(store, member)
            parts = store.current.parts_for(self._wanted(message))
        answer = Ack(message.id, version, store.version, *said, parts, self._gate(store))
        self.effects.append(Reply(peer, answer, store.lease() if parts else None))

    def _count(self, member: Member, id: int, fault: Refused) -> Error:
        member.refused += 1
        self.refused[fault.code] += 1
        return _error(id, fault, self.version)


def _error(id: int, fault: Refused, version: int, parts: Parts = ()) -> Error:
    return Error(id, fault.code, str(fault), fault.details, False, version, parts)
