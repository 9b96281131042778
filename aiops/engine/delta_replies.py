"""Answer coded fetches from the delta replica, once it is near enough to the model.

Updates of the replica (`aiops.store.delta_replica`) take their turn before queued pushes, because
readers wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from aiops.engine.events import Effect, OnApplied, Reply
from aiops.engine.membership import Member
from aiops.model.layout import Ints
from aiops.store.delta_replica import DeltaReplica, ReplicaJob
from aiops.store.parameters import Store
from aiops.store.wanted import Wanted
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import Ack, FetchedParams


class DeltaReplies:
    """One engine's coded answers.

    Parameters
    ----------
    store, replica
        The model, and the delta replica that follows it.

    Attributes
    ----------
    due
        True if readers wait for an update of the replica that has not been issued yet.
    due_last
        False: nothing is to be done at the end.
    waiting
        The answers that wait: connection, message, what its reader wants, and the reader.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "waiting")

    def __init__(self, store: Store, replica: DeltaReplica) -> None:
        self.replica, self._store = replica, store
        self.due = self.due_last = False
        self._updating = False  # an update has been issued
        self.waiting: list[tuple[int, Ack | FetchedParams, Wanted, Member | None]] = []

    def answer(
        self, peer: int, message: Ack | FetchedParams, wanted: Wanted, member: Member | None
    ) -> list[Effect]:
        """Send an answer with what its reader wants of the replica; ``member`` is the reader.

        It waits if the replica is behind: an update is then `due`.
        """
        replica, version = self.replica, self._store.version
        replica.asked(version, wanted)
        if wanted.newest > replica.current.number:  # its version is not one of the replica's
            wanted = wanted.known(replica.current.number, len(self._store.layout.tensors))
        if not (self.due or self._updating) and not replica.due(version):
            return [self._reply(peer, message, wanted, member)]
        self.waiting.append((peer, message, wanted, member))
        self.due = not self._updating
        return []

    def follow(self, have: int) -> Ints | None:
        """Note a fetch that `answer_at_once` answers, and bring the replica up to date if need be.

        Nothing waits or is outstanding.

        Parameters
        ----------
        have
            The model version that the reader holds of all tensors.

        Returns
        -------
        array or None
            What `ReplicaJob.run` returned; None: the replica is near enough to the model.
        """
        replica, model = self.replica, self._store.current
        replica.asked_by(model.number, have)
        return replica.step(model) if replica.due(model.number) else None

    def answer_at_once(self, message: Ack, have: int) -> tuple[Ack, list[list[memoryview]]]:
        """Return an answer with what its reader wants of the replica, and its payloads.

        They are views, and to be copied before the replica is used again. ``have``: as of `follow`,
        which was called.
        """
        replica = self.replica
        number = replica.current.number
        wanted = Wanted(have).known(number, len(self._store.layout.tensors))
        parts, lease = replica.answer(wanted)
        payloads = list[list[memoryview]]()
        if lease is not None:
            payloads = lease.borrowed_views(parts)
            lease.release()
        return replace(message, current=number, parts=parts), payloads

    def left(self, peer: int) -> None:
        """Drop the answers that wait for a connection which ended."""
        self.waiting = [entry for entry in self.waiting if entry[0] != peer]

    def abandon(self) -> list[tuple[int, int]]:
        """Drop all answers that wait; return their connections and request ids."""
        waiting, self.waiting = self.waiting, []
        return [(peer, message.id) for peer, message, _wanted, _member in waiting]

    def captured(self) -> None:
        """Do nothing: all of the replica is captured."""

    def state(self) -> dict[str, Any]:
        """Return the answers that wait as plain values, for `restore`; no update is issued."""
        waiting = [
            [peer, encode(message), wanted.have, wanted.wants, member and member.number]
            for peer, message, wanted, member in self.waiting
        ]
        return {"due": self.due, "waiting": waiting}

    def restore(self, state: Mapping[str, Any], members: Mapping[int, Member]) -> None:
        """Continue from what `state` returned; ``members``: by number."""
        self.due, self.waiting = state["due"], []
        for peer, message, have, wants, number in state["waiting"]:
            answer = decode(message)
            assert isinstance(answer, Ack | FetchedParams)
            wanted = Wanted(have, wants)
            member = None if number is None else members[number]
            self.waiting.append((peer, answer, wanted, member))

    def issue(self) -> tuple[ReplicaJob, OnApplied]:
        """Return the job that brings the replica up to the current version."""
        self.due, self._updating = False, True
        job = self.replica.follow(self._store.current)
        return job, partial(self._applied, job)

    def _applied(self, job: ReplicaJob, sums: Ints, now: float) -> list[Effect]:
        """Publish the replica's new version, and send the answers that waited for it."""
        self._updating = False
        self.replica.followed(job, sums)
        self.replica.settle()
        waiting, self.waiting = self.waiting, []
        return [self._reply(*entry) for entry in waiting]

    def _reply(
        self, peer: int, message: Ack | FetchedParams, wanted: Wanted, member: Member | None
    ) -> Reply:
        parts, lease = self.replica.answer(wanted)
        if self._store.rule.reads and member is not None and member.worker:
            member.forget_sent()
            member.sent = self.replica.lease()  # the rule compares with what it computes at
        number = self.replica.current.number
        if isinstance(message, Ack):
            return Reply(peer, replace(message, current=number, parts=parts), lease)
        return Reply(peer, replace(message, version=number, parts=parts), lease)
