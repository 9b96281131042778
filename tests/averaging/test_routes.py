"""The choice between a direct connection and the relay."""

from __future__ import annotations

from aiops.averaging import routes
from aiops.averaging.routes import AGAIN, HEAD_START, Routes

ONE, TWO = ("10.0.0.1", 4000), ("10.0.0.2", 4000)


def test_a_direct_connection_has_a_head_start_until_the_relay_was_needed() -> None:
    ways = Routes()
    assert ways.head_start(ONE) == HEAD_START
    ways.note(ONE, relayed=True)
    assert ways.head_start(ONE) == 0.0
    assert ways.head_start(TWO) == HEAD_START
    ways.note(ONE, relayed=False)
    assert ways.head_start(ONE) == HEAD_START


def test_it_has_one_again_from_time_to_time() -> None:
    ways = Routes()
    starts = []
    for _ in range(2 * AGAIN + 1):
        starts.append(ways.head_start(ONE))
        ways.note(ONE, relayed=True)
    assert [n for n, start in enumerate(starts) if start] == [0, AGAIN, 2 * AGAIN]


def test_it_remembers_a_bounded_number_of_members() -> None:
    ways = Routes()
    for port in range(routes._REMEMBERED + 1):
        ways.note(("10.0.0.1", port), relayed=True)
    assert ways.head_start(("10.0.0.1", 0)) == HEAD_START
    assert ways.head_start(("10.0.0.1", 1)) == 0.0
