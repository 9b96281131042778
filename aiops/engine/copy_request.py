"""Hand out one version of the model, to be copied while updates go on."""

from __future__ import annotations

from aiops.engine.evaluation_replies import EvaluationReplies
from aiops.engine.events import Copied, Effect
from aiops.store.parameters import Store


class CopyRequest:
    """A copy of the model that is due, as it is where the model is evaluated.

    It is handed out between two jobs, before anything that is queued. So a capture finds none that
    is due.

    Parameters
    ----------
    store, evaluation
        The model, and its versions for evaluation; None: it is evaluated where it is trained.

    Attributes
    ----------
    due
        Whether a copy is due.
    """

    def __init__(self, store: Store, evaluation: EvaluationReplies | None) -> None:
        self._store, self._evaluation, self.due = store, evaluation, False

    def ask(self) -> None:
        """Have a copy be due."""
        self.due = True
        if self._evaluation is not None:
            self._evaluation.ask()

    def abandon(self) -> None:
        """Have none be due: the server that asked has ended."""
        self.due = False

    def take(self) -> list[Effect]:
        """Return the copy, which is due, if its version is there, while no job is outstanding."""
        if self._evaluation is not None and not self._evaluation.made:
            return []
        self.due = False
        owner = self._store if self._evaluation is None else self._evaluation.evaluation
        return [Copied(owner.lease())]
