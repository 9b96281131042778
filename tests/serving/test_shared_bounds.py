"""Bounds on what all connections hold together."""

from __future__ import annotations

from typing import Any

from aiops.serving.shared_bounds import SharedBound


class Link:
    """A connection that holds some bytes."""

    def __init__(self, held: int) -> None:
        self.held, self.why = held, ""

    def dismiss(self, why: str) -> None:
        self.why = why


def test_the_one_that_holds_most_makes_room_the_oldest_first() -> None:
    links: list[Any] = [Link(2), Link(5), Link(5), Link(1)]
    bound = SharedBound(10, lambda link: link.held, "too much", lambda: links)  # type: ignore[attr-defined]
    bound.grew(10)
    assert not any(link.why for link in links)
    bound.grew(3)
    assert [link.why for link in links] == ["", "too much", "", ""]
    links.pop(1)
    bound.grew(2)
    assert not any(link.why for link in links), "8 are held, and not 15"
    bound.grew(3)
    assert not any(link.why for link in links)


def test_several_make_room_if_need_be() -> None:
    links: list[Any] = [Link(9), Link(8), Link(1)]
    SharedBound(5, lambda link: link.held, "!", lambda: links).grew(18)  # type: ignore[attr-defined]
    assert [link.why for link in links] == ["!", "!", ""]
