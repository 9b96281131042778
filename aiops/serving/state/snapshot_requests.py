"""Requests for a snapshot of a server's state: each is answered when one is on the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

OnSnapshot: TypeAlias = Callable[[int, str], None]
"""Takes the version of the snapshot, or the reason for which there is none (else empty)."""

MOST_REQUESTS = 64
"""Requests that may wait at a time."""


class SnapshotRequests:
    """The requests of one server that wait."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, OnSnapshot]] = []  # with the newest row when it came

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, row: int, answer: OnSnapshot) -> None:
        """Answer when a snapshot is written that has all events up to a row."""
        if len(self._waiting) == MOST_REQUESTS:
            answer(0, f"{MOST_REQUESTS} requests for one wait already: ask again later")
        else:
            self._waiting.append((row, answer))

    def written(self, row: int, version: int) -> None:
        """Answer those that a snapshot of this row covers; ``version``: the model's then."""
        covered = [answer for asked, answer in self._waiting if asked <= row]
        self._waiting = [each for each in self._waiting if each[0] > row]
        for answer in covered:
            answer(version, "")

    def failed(self, why: str) -> None:
        """Answer all: none was written, and ``why``."""
        waiting, self._waiting = self._waiting, []
        for _row, answer in waiting:
            answer(0, why)
