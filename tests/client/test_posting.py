"""A client's mailbox beside posting: what answers lend, and when it is given back."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiops.client.params import Leased, Params
from aiops.client.posting import Posting
from aiops.errors import RemoteProtocolError
from aiops.model.layout import Layout
from aiops.model.mailbox import Mailbox, size_of
from aiops.wire.shared_payloads import SharedPayloads

LAYOUT = Layout.of({"a": np.zeros(300, np.float32), "b": np.zeros((2, 5), np.float32)})
NBYTES = LAYOUT.nbytes


class Half:
    """A mailbox, two segments of a server, and what the server is told."""

    def __init__(self) -> None:
        self.segments: dict[int, Any] = {}
        self.shared = SharedPayloads(lambda nbytes: self.segments[0])
        for number in (1, 2):
            self.show(number, number)
        self.mailbox = Mailbox(np.zeros(size_of(NBYTES), np.uint8), -1)
        self.said: list[int] = []
        self.released: list[int] = []
        self.open = True
        self.compiled: Any = SimpleNamespace(
            posted=0, lent=0, segment=0, offset=0, give_back=self.give_back
        )
        self.shared.give_back = self.released.append
        self.posting = Posting(self.compiled, self.mailbox, LAYOUT, self.shared)

    def show(self, number: int, value: int) -> None:
        """Have the server show a segment, with this value in each byte."""
        self.segments[number] = self.segments[0] = np.full(2 * NBYTES, value, np.uint8)
        self.shared.map(SimpleNamespace(segment=number, nbytes=2 * NBYTES))  # type: ignore[arg-type]

    def give_back(self, number: int) -> bool:
        self.said.append(number)
        return self.open

    def lend(self, params: Params, segment: int = 1, offset: int = 0) -> None:
        """Have the next push answered with a place; ids are a hundred more than numbers."""
        self.compiled.posted += 1
        self.compiled.lent, self.compiled.segment, self.compiled.offset = 1, segment, offset
        self.posting.bring(params, 100 + self.compiled.posted)


def test_parameters_are_copied_and_given_back_at_once() -> None:
    half, params = Half(), Params(LAYOUT)
    for number in (1, 2, 3):
        half.lend(params, 2, 7)
        half.segments[2][:] += 1
        assert (params.arena.data == 1 + number).all()
    assert half.said == [1, 2, 3]
    assert not half.released


def test_views_are_given_back_with_the_next() -> None:
    half, params = Half(), Leased(LAYOUT)
    half.lend(params)
    assert half.said == []
    assert np.shares_memory(params["a"], half.segments[1])
    assert not params["a"].flags.writeable
    half.lend(params, 2)
    assert half.said == [1]
    assert np.shares_memory(params["a"], half.segments[2])
    params.own()
    assert half.said == [1, 2]
    assert (params.arena.data == 2).all()


def test_what_is_older_holds_up_what_is_newer() -> None:
    """A word says that all answers up to one are given back."""
    half, older, newer = Half(), Leased(LAYOUT), Leased(LAYOUT)
    half.lend(older)
    for _ in range(3):
        half.lend(newer, 2)
    half.lend(Params(LAYOUT))
    assert half.said == []
    older.release()
    assert half.said == [3], "the newer one still reads the fourth"
    newer.release()
    assert half.said == [3, 5]


def test_a_mailbox_that_was_left_has_answers_released_by_the_connection() -> None:
    half, older, newer = Half(), Leased(LAYOUT), Leased(LAYOUT)
    half.lend(older)
    half.lend(newer)
    half.lend(newer)
    half.open = False
    older.release()
    assert half.released == [101, 102]
    newer.release()
    assert half.released == [101, 102, 103]


def test_arenas_are_made_once_for_each_place() -> None:
    half, params = Half(), Leased(LAYOUT)
    half.lend(params)
    first = params.arena
    half.lend(params, 2)
    half.lend(params)
    assert params.arena is first
    half.lend(params, 1, 4)
    assert params.arena is not first
    half.show(1, 9)
    half.lend(params, 1, 4)
    assert (params.arena.data == 9).all()


def test_a_segment_that_is_shown_again_is_another_one() -> None:
    half, params = Half(), Leased(LAYOUT)
    half.lend(params)
    half.show(1, 9)
    assert (params.arena.data == 1).all(), "it is read on"
    half.lend(params)
    assert (params.arena.data == 9).all()


def test_what_a_program_keeps_holds_no_other_memory() -> None:
    """Though it keeps its parameters, all else that it was shown is unmapped with the end."""
    half, params = Half(), Leased(LAYOUT)
    half.lend(params)
    half.lend(params, 2)
    mapped = [weakref.ref(half.segments[number]) for number in (1, 2)]
    half.segments.clear()
    half.shared.lost()
    del half.posting  # as with the form of a connection's exchanges
    assert [each() is None for each in mapped] == [True, False]
    assert (params.arena.data == 2).all()


@pytest.mark.parametrize(("segment", "offset"), [(3, 0), (0, 0), (1, NBYTES + 1), (1, 1 << 63)])
@pytest.mark.parametrize("kind", [Params, Leased])
def test_another_place_is_an_error(segment: int, offset: int, kind: type[Params]) -> None:
    half, params = Half(), kind(LAYOUT)
    half.lend(params)
    before = params.arena.data.tobytes()
    with pytest.raises(RemoteProtocolError, match="segment"):
        half.lend(params, segment, offset)
    assert params.arena.data.tobytes() == before


def test_views_of_parameters_that_were_not_lent_are_a_copy() -> None:
    half, params = Half(), Leased(LAYOUT)
    half.lend(params)
    half.mailbox.answered(NBYTES)[:] = 7
    half.compiled.posted, half.compiled.lent = 2, 0
    half.posting.bring(params, 102)
    half.mailbox.answered(NBYTES)[:] = 8
    assert (params.arena.data == 7).all()
    assert half.said == [1]


def test_a_gradient_lies_where_it_is_posted_from() -> None:
    half = Half()
    assert half.posting.room is None, "the server has not opened it"
    half.mailbox.data[512] = 1
    assert half.posting.room is not None
    half.posting.room.views["b"][:] = 1
    offset = LAYOUT.tensors[[t.name for t in LAYOUT.tensors].index("b")].offset
    assert (half.mailbox.data[3 * 4096 + offset :][:40].view(np.float32) == 1).all()
