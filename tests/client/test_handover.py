"""Bytes that were received, or are to be sent, elsewhere: none is lost and none comes twice."""

from __future__ import annotations

import pytest

from aiops.client.handover import process, without
from tests.rows import each_row


class Taking:
    """A receiver that has room for some bytes at a time."""

    def __init__(self, room: int) -> None:
        self.found, self._room = b"", memoryview(bytearray(room))

    def next_buffer(self) -> memoryview:
        return self._room

    def received(self, nbytes: int) -> None:
        self.found += bytes(self._room[:nbytes])


@each_row("room", [1, 3, 4, 100])
def test_a_receiver_gets_all_bytes_in_order(room: int) -> None:
    receiver = Taking(room)
    assert process(receiver, [memoryview(b"abcd"), memoryview(b""), memoryview(b"efg")])
    assert receiver.found == b"abcdefg"


@pytest.mark.parametrize("views", [[], [memoryview(b"")]])
def test_it_is_known_whether_there_were_any(views: list[memoryview]) -> None:
    receiver = Taking(4)
    assert not process(receiver, views)
    assert receiver.found == b""


@each_row("sent", range(9))
def test_what_was_sent_is_left_out(sent: int) -> None:
    left = without([b"abc", b"", memoryview(b"de"), bytearray(b"fgh")], sent)
    assert b"".join(left) == b"abcdefgh"[sent:]
    assert all(map(len, left)), "nothing is sent of an empty buffer"
