"""Connections that have not shown that they send what they announce share few buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiops.serving import newcomers as module
from aiops.serving.newcomers import Newcomers

MIB = 1 << 20


class Link:
    """A connection that waits, with bytes that have come."""

    def __init__(self, number: int, line: Newcomers, *, there: int = 0, room: bool = True) -> None:
        self.number, self.there, self.went_on = number, there, False
        self.transport, self._line, self._room = self, line, room

    def get_extra_info(self, name: str) -> Link:
        return self

    def resume(self) -> bool:
        if not self._line.admits(self.number, 4 * MIB):
            return False
        self.went_on = True
        return self._room


@pytest.fixture
def waited() -> list[Callable[[], bool]]:
    return []


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, waited: list[Callable[[], bool]]) -> Newcomers:
    monkeypatch.setattr(module, "readable", lambda sock: sock.there)
    return Newcomers(lambda: 16 * MIB, waited.append)


def test_newcomers_have_half_of_the_memory_beside_others(line: Newcomers) -> None:
    assert [line.admits(number, 4 * MIB) for number in range(1, 6)] == [True] * 4 + [False]
    line.sent(1, 4 * MIB)
    assert line.admits(1, 4 * MIB), "it has shown that it sends"
    line.sent(2, 4 * MIB)
    assert not line.admits(6, 4 * MIB), "two that have shown nothing send"
    assert line.admits(2, 4 * MIB)
    assert not line.admits(2, 5 * MIB), "so much it has not sent yet"
    assert line.admits(6, 1000), "a small push costs nothing"


def test_a_push_may_be_larger_than_the_share(line: Newcomers) -> None:
    line.sent(1, MIB)
    assert line.admits(2, 12 * MIB)


def test_the_first_whose_bytes_are_there_goes_first(
    line: Newcomers, waited: list[Callable[[], bool]]
) -> None:
    line.sent(1, MIB)
    links: list[Any] = [Link(number, line, there=there) for number, there in ((4, 0), (5, MIB))]
    assert [line.admits(number, 4 * MIB) for number in (2, 3)] == [True] * 2
    for link in links:
        assert not line.admits(link.number, 4 * MIB)
        assert line.waits(link)
        assert not line.waits(link), "that is of the pool's line"
    line.go_on()
    assert not any(link.went_on for link in links)
    assert line.sent(2, 4 * MIB)
    line.go_on()
    assert [link.went_on for link in links] == [False, True]
    assert line.gone(3)
    line.go_on()
    assert [link.went_on for link in links] == [True, True]
    assert (line.waiting, waited) == (0, [])


def test_one_that_finds_no_room_waits_with_all_others(
    line: Newcomers, waited: list[Callable[[], bool]]
) -> None:
    line.sent(1, MIB)
    line.admits(2, 8 * MIB)
    link: Any = Link(3, line, room=False)
    assert not line.admits(3, 4 * MIB)
    line.waits(link)
    line.gone(2)
    line.go_on()
    assert waited == [link.resume]
    assert line.is_sending(3)


def test_one_that_is_gone_waits_no_more(line: Newcomers) -> None:
    line.sent(1, MIB)
    line.admits(2, 8 * MIB)
    link: Any = Link(3, line)
    line.admits(3, 4 * MIB)
    line.waits(link)
    assert not line.gone(3)
    line.gone(2)
    line.go_on()
    assert not link.went_on


def test_those_that_held_nothing_leave_room_for_none(line: Newcomers) -> None:
    """A crowd of readers that is cut off at once has the line looked at once at most."""
    line.sent(1, MIB)
    line.admits(2, 8 * MIB)
    link: Any = Link(3, line)
    line.admits(3, 4 * MIB)
    line.waits(link)
    assert not line.gone(4), "it sent no push"
    assert not line.sent(1, MIB), "it has its own share"
    assert line.gone(1), "no other has shown that it sends: the newcomers may have all"
