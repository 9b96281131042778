"""The examples whose effect is in a worker's own model, and in no round of averaging yet.

An example is *stepped* at the end of the step that was computed on it, *copied* when the model is
copied for a round, and forgotten once that round is settled; else it is stepped again. `step` and
`copy` are called under the lock that guards the model, so the copy and the list agree. `tasks` may
be read meanwhile by another thread: what moves is in both places before it leaves one.
"""

from __future__ import annotations

from aiops.wire.fields import MAX_LISTED, Examples


class Unsettled:
    """The unsettled examples of one worker: ranges (task, start, stop).

    Another run of the server knows none of them: they are forgotten when one is noticed.
    """

    def __init__(self) -> None:
        self._stepped: list[tuple[int, int, int]] = []
        self._copied: Examples = ()
        self._run = ""

    def __bool__(self) -> bool:
        return bool(self._stepped or self._copied)

    @property
    def tasks(self) -> set[int]:
        """The numbers of their tasks."""
        return {task for task, _start, _stop in (*self._copied, *self._stepped)}

    def step(self, examples: Examples, run: str) -> None:
        """Note what the model has been trained on."""
        self._check(run)
        for task, start, stop in examples:
            last = self._stepped[-1] if self._stepped else None
            if last is not None and (last[0], last[2]) == (task, start):
                self._stepped[-1] = task, last[1], stop
            else:
                self._stepped.append((task, start, stop))

    def copy(self, run: str) -> Examples:
        """Note that the model is copied; return the examples in the copy, as many as fit."""
        self._check(run)
        self.restore()
        self._copied = tuple(self._stepped[:MAX_LISTED])
        del self._stepped[:MAX_LISTED]
        return self._copied

    def settle(self) -> None:
        """Forget what was copied: it counts, or its effect is in this model no more."""
        self._copied = ()

    def restore(self) -> None:
        """Note that the copy came to nothing."""
        self._stepped[:0] = self._copied
        self._copied = ()

    def _check(self, run: str) -> None:
        if run != self._run:
            self._run, self._copied = run, ()
            self._stepped.clear()
