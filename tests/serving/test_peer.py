"""How long a peer's silence and slowness are borne."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiops.serving.config import Config
from aiops.serving.peer import Peer
from aiops.wire.messages import Ping
from tests.rows import each_row

CONFIG = Config(stall_deadline=30.0, min_rate=1024, failure_timeout=5.0)


def member(**link: Any) -> tuple[Peer, Any]:
    """A peer that has joined, and its link, on which a test plays."""
    wire = SimpleNamespace(
        midway=True, missing=1 << 20, state="open", traffic=SimpleNamespace(bytes_in=0)
    )
    played = SimpleNamespace(wire=wire, reading=True, unsent=0, sent=0, peer_name="p", **link)
    played.answering = False
    played.held = lambda now: 0.0
    handshake: Any = SimpleNamespace(admitted=SimpleNamespace(hello=SimpleNamespace(pongs=False)))
    played_as: Any = played
    peer = Peer(played_as, handshake, 0.0)
    return peer, played


def dropped_after(peer: Peer, link: Any, rate: int, crowded: bool) -> int | None:
    """Let a peer send at a rate; return the second in which it is dropped."""
    for second in range(1, 121):
        link.wire.traffic.bytes_in += rate
        if peer.fault(CONFIG, float(second), crowded) is not None:
            return second
    return None


@each_row(
    ("rate", "crowded", "expected"),
    [
        (0, False, 30),
        (1000, False, 30),
        (2000, False, None),
        (2000, True, 5),
        (60_000, True, 5),
        (100_000, True, None),
    ],
)
def test_who_sends_a_push_too_slowly(rate: int, crowded: bool, expected: int | None) -> None:
    peer, link = member()
    assert dropped_after(peer, link, rate, crowded) == expected


@pytest.mark.parametrize("crowded", [False, True])
def test_who_reads_a_long_answer_need_not_send(crowded: bool) -> None:
    peer, link = member()
    link.answering = True
    assert dropped_after(peer, link, 0, crowded) is None


def test_who_holds_no_buffer_need_not_hurry() -> None:
    peer, link = member()
    link.wire.missing = 0
    assert dropped_after(peer, link, 2000, crowded=True) is None


def test_who_is_not_read_from_is_not_to_blame() -> None:
    peer, link = member()
    link.reading = False
    assert dropped_after(peer, link, 0, crowded=True) is None


def test_a_stranger_must_introduce_itself() -> None:
    peer, _link = member()
    peer.handshake.admitted = None
    assert peer.fault(CONFIG, 9.0, crowded=False) is None
    assert "introduce" in str(peer.fault(CONFIG, 10.5, crowded=False))


@each_row("state", ["open", "shard open", "lead open", "left"])
def test_a_silent_peer_is_pinged_and_then_dropped(state: str) -> None:
    """Also a client of a follower, and a follower's lead."""
    sent: list[Any] = []
    peer, link = member(send=sent.append)
    peer.handshake.admitted.hello.pongs = True  # type: ignore[union-attr,misc]
    link.wire.state, link.wire.midway, link.wire.send = state, False, lambda message: message
    assert peer.fault(CONFIG, 4.0) is None
    assert sent == []
    assert peer.fault(CONFIG, 6.0) is None
    assert peer.fault(CONFIG, 59.0) is None
    assert sent == ([] if state == "left" else [Ping(0)])
    assert "has not answered a ping for 61 s" in str(peer.fault(CONFIG, 61.0))
