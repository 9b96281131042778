"""Why a server takes no pushes: an administrator has paused them, or it is ending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiops.engine.events import Stopping


class PushClosure:
    """The pauses and the end of one server: then it takes no pushes.

    Attributes
    ----------
    paused
        The reason for which an administrator has paused them; empty: none has.
    ending
        The event with which the server's end began; None: it goes on.
    why
        The reason for which no pushes are taken, as a sentence; empty: they are.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "why")

    def __init__(self) -> None:
        self.paused = self.why = ""
        self.ending: Stopping | None = None

    def pause(self, why: str) -> None:
        """Pause pushes for a reason, or (empty) take them again."""
        self.paused = why
        self._say()

    def end(self, event: Stopping | None) -> None:
        """Note that the server ends; None: it goes on after all."""
        self.ending = event
        self._say()

    def _say(self) -> None:
        self.why = self.paused and f"the server takes no pushes at present: {self.paused}"
        if self.ending is not None:
            self.why = "the server is shutting down and takes no more pushes"

    def state(self) -> list[Any]:
        """Return it as plain values, for `restore`."""
        ending = self.ending
        return [None if ending is None else [ending.time, ending.kept], self.paused]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned."""
        ending, self.paused = state
        self.end(None if ending is None else Stopping(*ending))
