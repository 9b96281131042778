"""Hostile sessions in virtual time: what is sent, and that a server which breaks is found out."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from random import Random

import msgpack
import pytest

from aiops.engine.engine import Engine
from aiops.errors import RemoteProtocolError
from aiops.lab.torture.hostile_messages import HostileMessages, Target
from aiops.lab.torture.hostile_session import draw_session
from aiops.lab.torture.session_trial import SessionTrial, draw_sessions
from aiops.serving.acceptor import Acceptor
from aiops.serving.peer import Peer
from aiops.wire.decoding import decode
from aiops.wire.encoding import KINDS
from aiops.wire.fields import CHECKS, TYPES
from tests.seeds import seeds

TARGET = Target(
    (("w", "float32", (4,)),), ((0, 16),), 16, (("t", 9, 2, "float32", "zeros", 0.0, 1),)
)


@pytest.mark.parametrize("seed", seeds(6))
def test_a_server_serves_on(seed: int) -> None:
    result = SessionTrial(draw_sessions(seed)).run()
    assert result.wrong == []
    assert result.frames > 50


@pytest.mark.parametrize("seed", [0, 3])
def test_workers_average_on(seed: int) -> None:
    """With each other, and through a relay alone."""
    result = SessionTrial(draw_sessions(seed, ("averaging",))).run()
    assert result.wrong == []
    assert result.answers["challenge"] > 0


def test_a_worker_that_takes_a_stranger_for_its_neighbour_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiops.client.ring_listener.belongs", lambda hello, this, left: True)
    wrong = [SessionTrial(draw_sessions(seed, ("averaging",))).run().wrong for seed in (2, 4, 6)]
    assert any(wrong)


def test_messages_are_mostly_right() -> None:
    """Else they would not come further than the decoder."""
    whole = 0
    for seed in range(40):
        messages = HostileMessages(Random(seed), TARGET)
        for drawn in [messages.greeting(), *(messages.request() for _ in range(9))]:
            header, payloads = drawn
            assert header["kind"] in KINDS
            assert [part[3] for part in header.get("parts", ())] == [len(p) for p in payloads]
            with contextlib.suppress(RemoteProtocolError):
                whole += decode(msgpack.packb(header)).kind == header["kind"]
    assert whole > 340


@pytest.mark.parametrize("kind", TYPES)
def test_a_value_of_each_type_is_drawn(kind: str) -> None:
    messages = HostileMessages(Random(1), TARGET)
    drawn = [messages.value(kind) for _ in range(20)]
    if kind != "Parts":  # the decoder checks these itself
        values = msgpack.unpackb(msgpack.packb(drawn), use_list=False)
        assert any(CHECKS[kind](value) for value in values)


def test_sessions_get_far_enough() -> None:
    """Pushes are taken and refused, parameters and rows are sent, tasks are given."""
    answers = Counter[str]()
    for seed in (4, 5, 7):
        plan = replace(draw_sessions(seed, ("asgd", "fasgd")), tables=True, token=False)
        answers += SessionTrial(plan).run().answers
    far = ("ack", "params", "rows", "model", "task", "report", "error bad-push", "error refused")
    assert [kind for kind in far if not answers[kind]] == []


def test_a_seed_decides_all() -> None:
    one, other = (draw_session(Random(5), TARGET, 30) for _ in range(2))
    assert one == other
    assert draw_session(Random(6), TARGET, 30) != one


class TestFound:
    """Defects of a server that are put in by hand."""

    def wrong(self) -> str:
        return "\n".join(SessionTrial(draw_sessions(3, ("asgd",))).run().wrong)

    def test_none(self) -> None:
        assert self.wrong() == ""

    def test_an_exception(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Engine, "report", lambda self, *shown: 1 // 0)
        assert "ZeroDivisionError" in self.wrong()

    def test_a_buffer_that_is_not_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiops.engine.receive.PushSink.free", lambda self: None)
        assert "receive buffers are not back" in self.wrong()

    def test_a_worker_that_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Peer, "lost", lambda self: None)
        monkeypatch.setattr(Acceptor, "link_lost", lambda self, link, error: None)
        assert "workers that are gone count as present" in self.wrong()
