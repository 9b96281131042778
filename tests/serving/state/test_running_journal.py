"""A journal that may have no file, and may go on in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiops.engine.events import JournalEnded
from aiops.serving.state.running_journal import RunningJournal


class Writer:
    """A journal in memory, with room for two rows."""

    def __init__(self) -> None:
        self.rows, self.nbytes, self.synced = list[Any](), 0, 0

    def append(self, row: Any) -> JournalEnded | None:
        if len(self.rows) == 2:
            return JournalEnded(1.0, "there is no room")
        self.rows.append(row)
        self.nbytes += 10
        return None

    def sync(self, now: float, done: Callable[[int], object]) -> None:
        self.synced = len(self.rows)
        done(self.synced)


def journal(writer: Any) -> RunningJournal:
    return RunningJournal(writer, lambda: 1.0)


def test_without_a_file_there_is_nothing_to_sync() -> None:
    found, synced = journal(None), list[int]()
    found.sync(synced.append)
    assert (found.nbytes, found.synced, synced) == (0, 0, [])
    with pytest.raises(AssertionError, match="there is no journal"):
        found.append("row")  # type: ignore[arg-type]


def test_what_follows_it_is_told_of_each_row_and_of_the_one_without_room() -> None:
    found, told, synced = journal(Writer()), list[int](), list[int]()
    found.appended = lambda: told.append(found.nbytes)
    rows: list[Any] = ["one", "two", "three"]
    ended = [found.append(row) for row in rows]
    assert ended[:2] == [None, None]
    assert isinstance(ended[2], JournalEnded)
    assert told == [10, 20, 20]
    found.sync(synced.append)
    assert synced == [found.synced] == [2]


def test_it_goes_on_in_another_file() -> None:
    found = journal(Writer())
    found.append("row")  # type: ignore[arg-type]
    found.writer = None
    assert found.nbytes == 0
    found.writer = other = Writer()  # type: ignore[assignment]
    found.append("next")  # type: ignore[arg-type]
    assert other.rows == ["next"]
