"""Answer coded fetches from the delta replica, once it is near enough to the model.

Updates of the replica (`aiops.store.delta_replica`) take their turn before queued pushes, because
readers wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aiops.engine.events import Effect, Reply
from aiops.engine.membership import Member
from aiops.model.layout import Ints
from aiops.store.delta_replica import DeltaReplica, ReplicaJob
from aiops.store.parameters import Store
from aiops.store.wanted import Wanted
from aiops.wire.messages import Ack, Params


class DeltaReplies:
    """One engine's coded answers.

    Parameters
    ----------
    store, shadow
        The model, and the delta replica that follows it.
    effects
        The engine's list of effects, appended to.
    queue
        Puts an update of the replica at the head of the update queue.
    """

    def __init__(
        self,
        store: Store,
        shadow: DeltaReplica,
        effects: list[Effect],
        queue: Callable[[DeltaReplies], None],
    ) -> None:
        self.shadow, self._store = shadow, store
        self._effects, self._queue = effects, queue
        self._queued = False
        self._job: ReplicaJob | None = None
        self._waiting: list[tuple[int, Ack | Params, Wanted, Member | None]] = []

    def answer(
        self, peer: int, message: Ack | Params, wanted: Wanted, member: Member | None
    ) -> None:
        """Send an answer with what its reader wants of the replica; ``member`` is the reader.

        It waits if the replica is due for an update.
        """
        self.shadow.asked(self._store.version, wanted)
        if wanted.newest > self.shadow.current.number:  # its version is not one of the replica's
            wanted = wanted.known(self.shadow.current.number, len(self._store.layout.tensors))
        if not self._queued and not self.shadow.due(self._store.version):
            self._send(peer, message, wanted, member)
            return
        self._waiting.append((peer, message, wanted, member))
        if not self._queued:
            self._queued = True
            self._queue(self)

    def left(self, peer: int) -> None:
        """Drop the answers that wait for a connection which ended."""
        self._waiting = [entry for entry in self._waiting if entry[0] != peer]

    def abandon(self) -> list[tuple[int, int]]:
        """Drop all answers that wait; return their connections and request ids."""
        waiting, self._waiting = self._waiting, []
        return [(peer, message.id) for peer, message, _wanted, _member in waiting]

    def issue(self) -> ReplicaJob:
        """Return the job that brings the replica up to the current version."""
        self._job = self.shadow.follow(self._store.current)
        return self._job

    def applied(self, sums: Ints) -> None:
        """Publish the replica's new version, and send the answers that waited for it."""
        assert self._job is not None
        job, self._job, self._queued = self._job, None, False
        self.shadow.followed(job, sums)
        self.shadow.settle()
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self._send(*entry)

    def _send(
        self, peer: int, message: Ack | Params, wanted: Wanted, member: Member | None
    ) -> None:
        parts, lease = self.shadow.answer(wanted)
        if self._store.rule.reads and member is not None and member.worker:
            member.forget_sent()
            member.sent = self.shadow.lease()  # the rule compares with what it computes at
        number = self.shadow.current.number
        if isinstance(message, Ack):
            answer: Ack | Params = replace(message, current=number, parts=parts)
        else:
            answer = replace(message, version=number, parts=parts)
        self._effects.append(Reply(peer, answer, lease))
