"""Answer requests for the parameters where the model is evaluated (`aiops.store.evaluation`).

A version of them is made when it is requested, unless that of the current version is there. It
takes its turn before queued pushes, as readers wait for it; what it is made of is fixed then. A
capture has nothing of it: one takes its turn behind all versions that are waited for, and after one
the next is made though there is that of the current version, as a restored server makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from aiops.engine.events import Effect, OnApplied, Reply
from aiops.engine.push_closure import PushClosure
from aiops.model.arena import Arena
from aiops.model.layout import Array, Ints
from aiops.store.evaluation import Evaluation, EvaluationJob
from aiops.store.parameters import Store
from aiops.store.wanted import Wanted
from aiops.wire.messages import FetchedParams


class EvaluationReplies:
    """One engine's answers with parameters for evaluation.

    Parameters
    ----------
    store, evaluation
        The model, and its versions for evaluation.
    left_out
        Returns what is left out of each tensor's offset now, float64[tensors].
    closure
        Tells of the server's end. Then a version is made of a model that is on several servers, for
        it to be collected from them.

    Attributes
    ----------
    due
        True if readers wait for a version that has not been issued yet.
    evaluation
        As above.
    """

    def __init__(
        self,
        store: Store,
        evaluation: Evaluation,
        left_out: Callable[[], Array],
        closure: PushClosure,
    ) -> None:
        self.evaluation, self._store, self._left_out = evaluation, store, left_out
        self._closure, self._spread = closure, store.held is not store.layout
        self.due = False
        self._making = False  # a version has been issued
        self._waiting: list[tuple[int, FetchedParams, Wanted]] = []

    @property
    def due_last(self) -> bool:
        """True if a version is to be made when nothing is queued any more."""
        ends = self._spread and self._closure.ending is not None
        return ends and not (self.made or self._making)

    @property
    def made(self) -> bool:
        """True if there is the version of the current one."""
        return self.evaluation.number == self._store.version

    def answer(self, peer: int, message: FetchedParams, wanted: Wanted) -> list[Effect]:
        """Send an answer with what its reader wants, once there is that version.

        What the reader has of the parameters where gradients are computed does not count.
        """
        if self.made:
            return [self._reply(peer, message, wanted)]
        self._waiting.append((peer, message, wanted))
        self.ask()
        return []

    def ask(self) -> None:
        """Have the version of the current one be made, unless it is there."""
        self.due = not (self.made or self._making)

    def left(self, peer: int) -> None:
        """Drop the answers that wait for a connection which ended."""
        self._waiting = [entry for entry in self._waiting if entry[0] != peer]

    def abandon(self) -> list[tuple[int, int]]:
        """Drop all answers that wait; return their connections and request ids."""
        waiting, self._waiting = self._waiting, []
        return [(peer, message.id) for peer, message, _wanted in waiting]

    def now(self) -> Arena:
        """Return the values for the current version at once, while no update is outstanding."""
        return self.evaluation.now(self._left_out())

    def captured(self) -> None:
        """Make the next version though there is one: a restored server has none."""
        self.evaluation.forget()

    def issue(self) -> tuple[EvaluationJob, OnApplied]:
        """Return the job that makes the version of the current one."""
        self.due, self._making = False, True
        job = self.evaluation.begin(self._left_out())
        return job, partial(self._applied, job)

    def _applied(self, job: EvaluationJob, sums: Ints, now: float) -> list[Effect]:
        """Publish the version, and send the answers that waited for it."""
        self._making = False
        self.evaluation.publish(job)
        waiting, self._waiting = self._waiting, []
        return [self._reply(*entry) for entry in waiting]

    def _reply(self, peer: int, message: FetchedParams, wanted: Wanted) -> Reply:
        lease = self.evaluation.lease()
        parts = lease.version.parts_for(wanted)
        if not parts:
            lease.release()
            return Reply(peer, replace(message, version=self.evaluation.number))
        return Reply(peer, replace(message, version=self.evaluation.number, parts=parts), lease)
