"""What is lent in place, and what is copied first."""

from collections.abc import Sequence

import numpy as np
import pytest

from aiops.client.outbox import Outbox
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.shared_memory import Segment
from aiops.wire.messages import Share

LAYOUT = Layout([("a", "float32", (3, 5)), ("b", "float32", (7,)), ("c", "float32", (2,))])


def shown(segment: Segment) -> tuple[int, Share | None]:
    return 1, None


def lent(outbox: Outbox, views: Sequence[memoryview]) -> tuple[int, bool]:
    """Return the offset at which a payload is lent, and whether that is in a room."""
    found = outbox.lend([list(views)], shown)
    assert len(found.places) == 1
    place = found.places[0]
    assert place is not None
    return place[1], bool(found.rooms)


def bytes_of(arena: Arena, *names: str) -> list[memoryview]:
    return [arena.views[name].reshape(-1).view(np.uint8).data for name in names]


@pytest.fixture
def outbox() -> Outbox:
    made = Outbox()
    made.lends_above = 0
    return made


@pytest.mark.parametrize(
    ("names", "offset"), [("abc", 0), ("bc", 60), ("a", 0), ("ab", 0), ("c", 88)]
)
def test_neighbours_in_a_room_are_lent_as_they_lie(outbox: Outbox, names: str, offset: int) -> None:
    assert lent(outbox, bytes_of(outbox.room(LAYOUT), *names)) == (offset, True)


def test_others_are_copied(outbox: Outbox) -> None:
    room, elsewhere = outbox.room(LAYOUT), Arena(LAYOUT)
    for views in (
        bytes_of(room, "a", "c"),  # there is a gap
        bytes_of(room, "b", "a"),
        [*bytes_of(room, "a"), *bytes_of(elsewhere, "b")],
        bytes_of(elsewhere, "a", "b"),
    ):
        found = outbox.lend([views], shown)
        assert not found.rooms
        assert found.copied is not None
        wanted = b"".join(bytes(view) for view in views)
        assert bytes(found.copied.data[: len(wanted)]) == wanted


def test_what_goes_beyond_a_room_is_copied(outbox: Outbox) -> None:
    """Memory behind a room is no part of it, though it be its neighbour."""
    segment = Segment(LAYOUT.nbytes + 64)
    outbox._rooms.add(inner := Segment(1))
    inner.data = segment.data[: LAYOUT.nbytes]
    assert lent(outbox, [segment.data[: LAYOUT.nbytes].data]) == (0, True)
    assert lent(outbox, [segment.data.data])[1] is False
    assert lent(outbox, [segment.data[:8].data, segment.data[8:].data])[1] is False
