"""Messages handed over: what is said and counted is what bytes would have been."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.client.params import Leased
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.errors import BadPush, LocalProtocolError, RemoteProtocolError
from aiops.model.layout import Layout
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.memory_wire import MemoryLine, MemoryWire, MessageInTransit
from aiops.sim.turns.simulated_client import SimulatedClient
from aiops.wire.messages import Fetch, Pong, Stats
from tests.sim.turns.cases import random_pieces
from tests.sim.turns.lines import in_pieces

START: dict[str, Any] = {
    "w": np.linspace(-2, 2, 1200).reshape(40, 30).astype(np.float32),
    "b": np.zeros(30, np.float32),
    "half": np.ones(7, np.float16),
}


def served(
    policy: str = "asgd", handed: bool = True, **options: Any
) -> tuple[Engine, list[SimulatedClient]]:
    """Return an engine, and two clients of it."""
    engine = Engine(find(policy).make({}), Options(backend="numpy", workers=2, **options))
    server = MemoryServer(engine, line=MemoryLine if handed else in_pieces(random_pieces(1)))
    return engine, [SimulatedClient(server, f"client-{i}", START) for i in range(2)]


def gradient(params: Any) -> dict[str, Any]:
    """Pull everything towards 1."""
    return {name: (array - 1).astype(array.dtype) for name, array in params.items()}


@pytest.mark.parametrize(
    ("policy", "gate"),
    [
        *((policy, "") for policy in ("fasgd", "easgd", "hardsync", "dcasgd", "no-delay")),
        ("fasgd", "periodic:k_push=2,k_fetch=3"),
    ],
)
def test_every_count_is_that_of_bytes(policy: str, gate: str) -> None:
    reports = []
    for handed in (True, False):
        engine, workers = served(policy, handed, gate=gate)
        for turn in range(20):
            worker = workers[turn % 2]
            if not worker.waits:
                worker.step(gradient)
        for worker, row in zip(workers, engine.report()["workers"], strict=True):
            assert (row["bytes_fetched"], row["bytes_pushed"]) == worker.session.traffic
        report = engine.report()
        talks = [worker.session.ledger.report() for worker in workers]
        reports.append((report["ledger"], report["workers"], report["version"], talks))
    assert reports[0] == reports[1]


def ends() -> tuple[MemoryWire, MemoryWire]:
    """Return the two ends of a connection."""
    up, down = deque[MessageInTransit](), deque[MessageInTransit]()
    client = MemoryWire("client", down, up)
    return client, MemoryWire("server", up, down)


class TestMemoryWire:
    def test_follows_the_table(self) -> None:
        client, server = ends()
        with pytest.raises(LocalProtocolError, match="a client may not send 'fetch' when 'start'"):
            client.send(Fetch(1, -1))
        client.state = "open"
        client.send(Stats(1))
        with pytest.raises(RemoteProtocolError, match="a client may not send 'stats' when 'start'"):
            server.received(server.inbox[0].nbytes)

    def test_counts_as_a_stream_does(self) -> None:
        client, _server = ends()
        client.state = "open"
        assert client.send(Pong(300)) == []
        assert client.outbox[0].nbytes == client.traffic.bytes_out
        assert client.traffic.kinds_out["pong"].overhead == client.traffic.bytes_out

    def test_a_gradient_that_is_not_finite_is_refused(self) -> None:
        _engine, workers = served()
        bad = gradient(workers[0].params)
        bad["w"][3, 4] = np.inf
        with pytest.raises(BadPush, match=r"'w' holds inf at \[3, 4\]"):
            workers[0].give(bad)
        assert workers[0].step(gradient) is not None, "it goes on"


class TestLeased:
    def test_reads_where_the_server_keeps_it(self) -> None:
        engine, (one, other) = served()
        assert isinstance(one.params, Leased)
        assert one.params.borrowed
        assert engine.store is not None
        assert one.params.arena is engine.store.current.arena
        before = one.params["w"].copy()
        other.step(gradient)
        assert one.params.arena is not engine.store.current.arena
        np.testing.assert_array_equal(one.params["w"], before)
        assert engine.store.alive == 2
        one.step(gradient)
        assert one.params.arena is engine.store.current.arena
        assert list(one.params) == list(other.params)

    def test_what_it_let_go_lives_no_longer(self) -> None:
        engine, (one, other) = served()
        for _ in range(6):
            other.step(gradient)
        assert engine.store is not None
        assert engine.store.alive == 2
        assert isinstance(one.params, Leased)
        one.params.release()
        assert engine.store.alive == 1

    def test_becomes_its_own(self) -> None:
        engine, (one, other) = served()
        assert isinstance(one.params, Leased)
        before = one.params["w"].copy()
        mine = one.params.own()
        assert not one.params.borrowed
        assert mine is one.params.own()
        other.step(gradient)
        np.testing.assert_array_equal(one.params["w"], before)
        assert engine.store is not None
        assert engine.store.alive == 1
        mine.views["w"][...] = 0

    def test_coded_fetches_are_its_own(self) -> None:
        engine, (one, _other) = served(fetch_codec=("int8",))
        one.step(gradient)
        assert isinstance(one.params, Leased)
        assert not one.params.borrowed
        assert engine.store is not None
        assert one.params.arena is not engine.store.current.arena

    def test_is_a_copy_where_steps_are_the_worker_s(self) -> None:
        engine, (one, _other) = served("easgd")
        assert not isinstance(one.params, Leased)
        assert engine.store is not None
        assert engine.store.alive == 1
        assert engine.membership.ledger()["fetched"]["with_payload"] == 2

    def test_empty(self) -> None:
        leased = Leased(Layout([("w", "float32", (3,))]))
        leased.release()
        assert not leased.borrowed
        assert leased.own() is leased.arena


def test_what_was_pushed_is_let_go_without_a_collector() -> None:
    """Nothing refers to itself: gradients are gone as soon as the next has been pushed."""
    _engine, (worker, _other) = served()
    gc.disable()
    try:
        pushed = gradient(worker.params)
        alive = weakref.ref(pushed["w"])
        worker.give(pushed)
        worker.give(gradient(worker.params))
        del pushed
        assert alive() is None
    finally:
        gc.enable()
