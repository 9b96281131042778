"""Hold answers back until the policy lets their workers go, and excuse workers that are overdue.

A policy may answer a worker only once certain others have pushed. Until then its push is held here.
A worker that the others have waited for longer than ``--worker-deadline`` is excused: the policy is
told that it is no longer waited for. A `WakeAt` requests the `Tick` at which that may be due.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.algorithms.base import Decision, Policy
from aiops.engine.events import Effect, Note, WakeAt
from aiops.engine.gradient_cache import CachedGradient
from aiops.engine.membership import Member, Membership
from aiops.engine.push_closure import PushClosure
from aiops.engine.replies import PendingPush, Replies
from aiops.errors import Unavailable
from aiops.store.parameters import Store


class HeldPushes:
    """The pushes of one engine whose gradients are used, and whose answers are held back.

    Parameters
    ----------
    policy
        It lets workers go.
    store
        Pushes are acknowledged when its current version can be read.
    membership
        The workers that are waited for.
    replies
        Acknowledges or refuses the pushes.
    closure
        Tells of the server's end.

    Attributes
    ----------
    pushes
        In the order in which they were used.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "pushes")

    def __init__(
        self,
        policy: Policy,
        store: Store,
        membership: Membership,
        replies: Replies,
        closure: PushClosure,
    ) -> None:
        self._policy, self._store = policy, store
        self._membership, self._replies, self._closure = membership, replies, closure
        self.pushes: list[PendingPush] = []
        self._since = 0.0  # when the first of them was held
        # Thousands of workers make each `waited_for` slow, and most policies have no use for it:
        # it is computed only for policies that override `workers_changed`.
        self._listens = type(policy).workers_changed is not Policy.workers_changed
        self._waited_for: frozenset[int] = frozenset()  # at the last `may_have_changed`

    @property
    def stopping(self) -> bool:
        """True once the server goes down for good: from then on no answer is held."""
        ending = self._closure.ending
        return ending is not None and not ending.kept

    def may_have_changed(self) -> bool:
        """Return False if the policy has been told which workers are waited for now."""
        if not self._listens:
            return True
        before, self._waited_for = self._waited_for, self._membership.waited_for()
        return self._waited_for != before

    def decide(self) -> Decision | None:
        """Tell the policy which workers are waited for; return its decision, if it makes one."""
        return self._policy.workers_changed(self._waited_for) if self._listens else None

    def answer_or_hold(self, push: PendingPush, published: bool, now: float) -> list[Effect]:
        """Acknowledge a push whose gradient has been used, or hold its answer back."""
        push.made = published
        stopped = self.stopping and published
        if stopped or self._policy.may_go(push.member.number, published):
            return self._replies.acknowledge(push, now)
        if self.stopping:
            return self._replies.refuse(push, _not_made(), now)
        if not self.pushes:
            self._since = now
        self.pushes.append(push)
        return self.wake()

    def release(self, now: float, *, published: bool) -> list[Effect]:
        """Acknowledge the pushes whose workers the policy lets go, if parameters can be read."""
        if not self.pushes or not self._store.readable:
            return []
        pushes, self.pushes = self.pushes, []
        effects: list[Effect] = []
        for push in pushes:
            if self._policy.may_go(push.member.number, published) or self.stopping:
                effects += self._replies.acknowledge(push, now)
            else:
                self.pushes.append(push)
        return effects

    def excuse_overdue(self, now: float) -> list[Effect]:
        """Stop waiting for workers that are overdue."""
        membership, notes = self._membership, list[Effect]()
        for member in membership.overdue(now, self._since, self._pushed()):
            member.excused = True
            text = (
                f"worker {member.name!r} has not pushed for {membership.deadline:g} s:"
                " the others no longer wait for it (--worker-deadline)"
            )
            notes.append(Note(text))
        if membership.awaited and now >= self._since + membership.deadline:
            text = (
                f"{membership.awaited} of {membership.expected} workers have not come within"
                f" {membership.deadline:g} s: going on without them"
            )
            notes.append(Note(text))
            membership.late = True
        return notes

    def wait_anew(self, now: float) -> list[Effect]:
        """Begin the deadline of every worker again: pushes were paused."""
        self._since = max(self._since, now)
        return self.wake()

    def wake(self) -> list[Effect]:
        """Return the request for the `Tick` at which the next worker is overdue, if any will be."""
        if not self.pushes:
            return []
        due = self._membership.next_deadline(self._since, self._pushed())
        return [] if due is None else [WakeAt(due)]

    def stop(self, now: float) -> list[Effect]:
        """Answer all: refused, unless their step is in a published version."""
        pushes, self.pushes = self.pushes, []
        effects: list[Effect] = []
        for push in pushes:
            if push.made:
                self.pushes.append(push)
            else:
                effects += self._replies.refuse(push, _not_made(), now)
        return effects + self.release(now, published=False)

    def state(self) -> dict[str, Any]:
        """Return the pushes as plain values, for `restore`. A successor does not stop."""
        return {
            "pushes": [push.state() for push in self.pushes],
            "since": self._since,
            "waited_for": sorted(self._waited_for),
        }

    def restore(self, state: Mapping[str, Any], members: Mapping[int, Member]) -> None:
        """Continue from what `state` returned; ``members``: by number."""
        used = CachedGradient(None)  # the gradients of held pushes are in the sum or the version
        self.pushes = [self._replies.restore(row, used, members) for row in state["pushes"]]
        self._since, self._waited_for = state["since"], frozenset(state["waited_for"])

    def _pushed(self) -> frozenset[int]:
        """Return the numbers of the workers that have pushed, and wait for the others."""
        return frozenset(push.member.number for push in self.pushes)


def _not_made() -> Unavailable:
    return Unavailable("the server is shutting down; the step was not made")
