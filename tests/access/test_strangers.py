"""The pool of connections that have not introduced themselves."""

from __future__ import annotations

from aiops.access.strangers import StrangerPool


def test_the_oldest_of_the_address_with_the_most_makes_room() -> None:
    strangers = StrangerPool(3)
    assert [strangers.came(number, host) for number, host in ((1, "a"), (2, "b"), (3, "b"))] == [
        None
    ] * 3
    assert strangers.came(4, "c") == 2
    assert strangers.came(5, "c") == 4
    assert len(strangers) == 3


def test_those_that_are_gone_take_no_place() -> None:
    strangers = StrangerPool(2)
    for number in range(100):
        assert strangers.came(number, "a") is None
        strangers.gone(number)
        strangers.gone(number)
    assert len(strangers) == 0
