"""Answer requests about the parameters: acknowledgements, parameters, refusals.

This module reads the store, and never changes the parameters. Each method returns the effects of
what it decided, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiops.bandwidth.gate_controller import GateController
from aiops.engine import validation
from aiops.engine.delta_replies import DeltaReplies
from aiops.engine.evaluation_replies import EvaluationReplies
from aiops.engine.events import Effect, Received, Reply
from aiops.engine.gradient_cache import CachedGradient
from aiops.engine.membership import Acknowledged, Member, Membership
from aiops.engine.receive import PushSink
from aiops.errors import BadPush, Refused, StaleGradient
from aiops.model.parts import Parts
from aiops.store.parameters import Store
from aiops.store.wanted import Wanted
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.fields import MAX_REASON, Sparse
from aiops.wire.messages import Ack, Error, Fetch, FetchedParams, Model, Push, PushRows, Reapply


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
    row: int = 0  # of the journal, where its gradient is

    def state(self) -> list[Any]:
        """Return the push as plain values, for `Replies.restore`; the gradient is not in them.

        They begin with the row, the member's number and the sequence number.
        """
        numbers = self.staleness, self.mean_staleness, self.made
        message, member = self.message, self.member.number
        return [self.row, member, message.seq, self.peer, encode(message), *numbers]


class Replies:
    """One engine's answers.

    Parameters
    ----------
    store
        The parameters.
    tables
        The model's tables, as they are announced.
    membership
        Counts refusals.
    budget
        Chooses the constants of the gates, if there is a bandwidth budget.
    delta_replies
        Answers coded fetches, if they are enabled.
    evaluation
        Answers fetches for evaluation, if the model is evaluated elsewhere than it is trained.

    Attributes
    ----------
    pending
        The pushes that are to be answered later, by client and sequence number.
    readers
        Requests that wait for an update in place: connection, request id, the call that answers.
    """

    def __init__(
        self,
        store: Store,
        tables: Sparse,
        membership: Membership,
        budget: GateController | None,
        delta_replies: DeltaReplies | None,
        evaluation: EvaluationReplies | None = None,
    ) -> None:
        self._store, self._tables, self._membership = store, tables, membership
        self._budget, self._delta_replies = budget, delta_replies
        self._evaluation = evaluation
        self.pending: dict[tuple[str, int], PendingPush] = {}
        self.readers: list[tuple[int, int, Callable[[], list[Effect]]]] = []

    # ------------------------------------------------------------ reading

    def fetch(self, peer: int, message: Fetch, member: Member | None) -> list[Effect]:
        """Send the tensors that the client wants and does not have, as soon as they can be read."""
        store, wanted = self._store, self._wanted(message)
        wanted = wanted.whole if message.evaluation else wanted
        statistics = store.vbar(), store.vbars(), self._gate()
        if message.evaluation and self._evaluation is not None:
            params = FetchedParams(message.id, store.version, (), *statistics)
            return self._evaluation.answer(peer, params, wanted)
        if message.coded and self._delta_replies is not None:
            params = FetchedParams(message.id, store.version, (), *statistics)
            return self._delta_replies.answer(peer, params, wanted, member)
        if not store.readable:
            self.readers.append((peer, message.id, partial(self.fetch, peer, message, member)))
            return []
        self._note_sent(member)
        parts = store.current.parts_for(wanted)
        params = FetchedParams(message.id, store.version, parts, *statistics)
        return [Reply(peer, params, store.lease() if parts else None)]

    def describe(self, peer: int, id: int, created: bool = False) -> Reply:
        """Send the model's description."""
        store = self._store
        return Reply(peer, Model(id, created, store.version, store.layout.rows, self._tables))

    def answer_readers(self) -> list[Effect]:
        """Answer the requests that waited for an update in place."""
        readers, self.readers = self.readers, []
        return [effect for _peer, _id, answer in readers for effect in answer()]

    def left(self, peer: int) -> None:
        """Drop a connection's fetches; the answers to its pushes are kept, but not sent."""
        self.readers = [reader for reader in self.readers if reader[0] != peer]
        if self._delta_replies is not None:
            self._delta_replies.left(peer)
        if self._evaluation is not None:
            self._evaluation.left(peer)
        for pending in self.pending.values():
            if pending.peer == peer:
                pending.peer = None

    # ------------------------------------------------------------ pushes

    def abandon(self) -> list[tuple[int, int]]:
        """Answer nothing more; return the connections and ids of the requests that wait."""
        waiting: list[tuple[int, int]] = []
        for pending in self.pending.values():
            if pending.peer is not None:
                waiting.append((pending.peer, pending.message.id))
                pending.peer = None
        readers, self.readers = self.readers, []
        waiting += [(peer, id) for peer, id, _answer in readers]
        for each in (self._delta_replies, self._evaluation):
            waiting += [] if each is None else each.abandon()
        return waiting

    def acknowledge(self, push: PendingPush, now: float, unused: str = "") -> list[Effect]:
        """Answer a push whose gradient has been used, unless it is ``unused`` for this reason."""
        store, member, message, peer = self._store, push.member, push.message, push.peer
        used, why = not unused, unused[:MAX_REASON]
        if used:
            member.pushes += 1
        else:
            member.ignored += 1
        member.staleness = push.staleness
        delta_replies = self._delta_replies if message.fetch and message.coded else None
        parts: Parts = ()
        if peer is not None and message.fetch and delta_replies is None:
            if store.rule.reads:
                self._note_sent(member)
            if message.wants:
                parts = store.current.parts_for(self._wanted(message))
            else:
                parts = store.current.parts_since(message.have)
        version = store.current.number
        vbar, vbars = store.statistic()
        result = used, push.staleness, push.mean_staleness, vbar, vbars
        gate = () if self._budget is None else self._gate()
        ack = Ack(message.id, version, version, *result, parts, gate, why)
        member.answered = now
        member.remember(message.seq, (version, *result, why))
        self.pending.pop((member.client, message.seq), None)
        if peer is None:
            return []
        if delta_replies is not None:
            return delta_replies.answer(peer, ack, self._wanted(message), member)
        # No update is outstanding, so the parameters can be read.
        return [Reply(peer, ack, store.lease() if parts else None)]

    def refuse(self, push: PendingPush, fault: Refused, now: float) -> list[Effect]:
        """Refuse a push that was queued; one to be computed again brings the parameters with it."""
        message, member, store, lease = push.message, push.member, self._store, None
        self._membership.count_refusal(member, fault)
        error = error_of(message.id, fault, store.version)
        member.answered = now
        member.remember(message.seq, error)
        self.pending.pop((member.client, message.seq), None)
        push.sink.free()
        if push.peer is None:
            return []
        coded = message.coded and self._delta_replies is not None  # then it must fetch
        wants = message.fetch and not coded
        parts = store.current.parts_for(self._wanted(message)) if wants else ()
        if isinstance(fault, StaleGradient) and parts and store.readable:
            self._note_sent(member)
            lease = store.lease()
            error = error_of(message.id, fault, store.version, parts)
        return [Reply(push.peer, error, lease)]

    def refuse_new(self, event: Received, member: Member, fault: Refused) -> list[Effect]:
        """Refuse a push before it is queued."""
        message = event.message
        assert isinstance(message, Push | Reapply | PushRows)
        error = error_of(message.id, fault, self._store.version)
        self._membership.refuse(member, message.seq, fault, error)
        return [Reply(event.peer, error)]

    def repeat(self, event: Received, member: Member) -> list[Effect]:
        """Answer a push that came before, on a connection since lost, without applying it.

        If it is still pending, its answer goes to the new connection.
        """
        message, peer, version = event.message, event.peer, self._store.version
        assert isinstance(message, Push | Reapply)
        fault = validation.beyond(self._store, message)
        if fault is not None:  # the repetition may ask for other tensors than the first
            return [Reply(peer, error_of(message.id, fault, version))]
        pending = self.pending.get((member.client, message.seq))
        if pending is not None:
            pending.peer, pending.message = peer, message
            return []
        answer = member.answers.get(message.seq)
        if isinstance(answer, tuple):
            return self._acknowledge_again(peer, message, answer, member)
        if isinstance(answer, Error):
            again = Error(message.id, answer.code, answer.text, answer.details, False, version)
            return [Reply(peer, again)]
        return [Reply(peer, error_of(message.id, too_old(message.seq, member), version))]

    def restore(
        self, state: Sequence[Any], sink: PushSink | CachedGradient, members: Mapping[int, Member]
    ) -> PendingPush:
        """Return a push, unanswered, that continues from what `PendingPush.state` returned.

        Parameters
        ----------
        state
            As plain values.
        sink
            Its gradient.
        members
            By number.
        """
        row, number, _seq, peer, header, staleness, mean, made = state
        message, member = decode(header), members[number]
        assert isinstance(message, Push | Reapply)
        push = PendingPush(peer, message, sink, member, staleness, mean, made, row)
        self.pending[member.client, message.seq] = push
        return push

    # ------------------------------------------------------------ inside

    def _gate(self) -> tuple[float, ...]:
        """Return the constants of the gates, where a budget chooses them."""
        return self._budget.constants(self._store.vbar()) if self._budget is not None else ()

    def _wanted(self, message: Fetch | Push | Reapply) -> Wanted:
        """Return the tensors that a request wants, checked against the model."""
        wanted = Wanted(message.have, message.wants)
        return wanted.known(self._store.version, len(self._store.layout.tensors))

    def _note_sent(self, member: Member | None) -> None:
        """Keep the version that a worker computes at, if the rule compares gradients with it.

        Called whenever a worker is sent the current version, or an answer that it holds it.
        """
        if self._store.rule.reads and member is not None and member.worker:
            member.forget_sent()
            member.sent = self._store.lease()

    def _acknowledge_again(
        self, peer: int, message: Push | Reapply, before: Acknowledged, member: Member
    ) -> list[Effect]:
        """Send an acknowledgement again, with the present parameters if the request wants them."""
        store, version, result, why = self._store, before[0], before[1:-1], before[-1]
        parts: Parts = ()
        if message.fetch and message.coded and self._delta_replies is not None:
            ack = Ack(message.id, version, store.version, *result, (), self._gate(), why)
            return self._delta_replies.answer(peer, ack, self._wanted(message), member)
        if message.fetch:
            if not store.readable:
                again = partial(self._acknowledge_again, peer, message, before, member)
                self.readers.append((peer, message.id, again))
                return []
            self._note_sent(member)
            parts = store.current.parts_for(self._wanted(message))
        ack = Ack(message.id, version, store.version, *result, parts, self._gate(), why)
        return [Reply(peer, ack, store.lease() if parts else None)]


def too_old(seq: int, member: Member) -> BadPush:
    """Return the refusal of a repeated push whose answer is no longer remembered."""
    return BadPush(
        f"push {seq} is older than what the server remembers of this client"
        f" (its last was {member.last_seq}); it was not applied again"
    )


def error_of(id: int, fault: Refused, version: int = 0, parts: Parts = ()) -> Error:
    """Return the answer that refuses a request."""
    return Error(id, fault.code, str(fault), fault.details, False, version, parts)
