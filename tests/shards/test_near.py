"""Clients on the machine of all servers of a model, or of some: those share memory with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client import AsyncWorker, Client, Worker
from aiops.common import urls
from aiops.errors import BadPush
from aiops.serving.server import Server
from tests.adapter import Adapter
from tests.support import ServerThread, assert_same

COUNT = 3 << 15
MODEL = {"w": np.zeros((COUNT // 8, 8), np.float32), "b": np.zeros(64, np.float32)}
ONES = {name: np.ones_like(array) for name, array in MODEL.items()}
SIZE = 4 * (COUNT + 64)
FLAGS: dict[str, Any] = {"policy": "asgd", "set": {"lr": 1}, "kernels": "numpy"}

Make = Callable[..., Any]


@pytest.fixture(params=["blocking", "asyncio"])
def worker(request: pytest.FixtureRequest) -> Make:
    if request.param == "blocking":
        return Worker
    return lambda *args, **named: Adapter(asyncio.new_event_loop, *args, of=AsyncWorker, **named)


@contextlib.contextmanager
def apart(*no_shm: bool) -> Iterator[tuple[ServerThread, list[ServerThread]]]:
    """Serve a model on a lead and followers, each with shared memory or without."""
    with contextlib.ExitStack() as stack:
        lead, *others = no_shm
        followers = [
            stack.enter_context(ServerThread(follower=True, shards=1, no_shm=each, **FLAGS))
            for each in others
        ]
        where = [urls.write(*urls.parse(each.url)).removeprefix("aiops://") for each in followers]
        given = {"followers": where, "shards": 1 + len(others), "no_shm": lead}
        yield stack.enter_context(ServerThread(**given, **FLAGS)), followers


def shared(server: ServerThread) -> list[bool]:
    """Return of each connection of a client whether memory is shared with it."""

    def of_peers(running: Server) -> list[bool]:
        peers = running.connections.peers.values()
        hellos = [(peer.handshake.hello, peer.link.wire.shared) for peer in peers]
        return [memory is not None for hello, memory in hellos if hello and hello.role != "lead"]

    return list(server.call(of_peers))


def train(one: Any, steps: int = 5) -> None:
    for step in range(1, steps + 1):
        one.step(ONES)
        assert_same(one.params, {name: np.full_like(a, -step) for name, a in MODEL.items()})


@pytest.mark.parametrize("no_shm", [(False, False, False), (True, False, True), (False, True)])
def test_memory_is_shared_with_those_that_have_it(worker: Make, no_shm: tuple[bool, ...]) -> None:
    """A worker on the host of one server shares memory with that one, and uses TCP for others."""
    with apart(*no_shm) as (lead, followers), worker(lead.url, MODEL) as one:
        assert [shared(each) for each in (lead, *followers)] == [[not each] for each in no_shm]
        train(one)


def test_payloads_do_not_cross_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted are the bytes of a payload, lent or not; the sockets move a few of them."""
    moved: list[int] = []
    from aiops.client.sync import shard_socket

    original = shard_socket.send_some

    def counted(sock: Any, buffers: Any, flags: int = 0) -> None:
        before = sum(map(len, buffers))
        original(sock, buffers, flags)
        moved.append(before - sum(map(len, buffers)))

    monkeypatch.setattr(shard_socket, "send_some", counted)
    with apart(False, False) as (lead, _followers), Client(lead.url, role="worker") as client:
        params = client.define(MODEL)
        moved.clear()
        for _ in range(3):
            client.exchange(params, ONES)
        sent = client.stats()["workers"][0]["bytes_pushed"]
        assert_same(params, {name: a - 3 for name, a in MODEL.items()})
    assert sent >= 3 * SIZE
    assert 0 < sum(moved) < SIZE / 10


def test_what_is_lent_comes_back(worker: Make) -> None:
    """No version of a shard stays alive for a client that has read it."""
    with apart(False, False) as (lead, followers), worker(lead.url, MODEL) as one:
        train(one, 12)  # more than the answers that may be lent at a time
        for server in (lead, *followers):
            lent = server.call(lambda s: [len(p._lent) for p in s.connections.peers.values()])
            assert max(lent) <= 1


def test_a_bad_value_is_refused_on_all_shards(worker: Make) -> None:
    with apart(False, False) as (lead, _followers), worker(lead.url, MODEL) as one:
        train(one, 2)
        bad = {name: array.copy() for name, array in ONES.items()}
        bad["w"][-1, -1] = np.nan
        with pytest.raises(BadPush, match="holds nan"):
            one.step(bad)
        one.step(ONES)
        assert_same(one.params, {name: a - 3 for name, a in MODEL.items()})


def test_a_gradient_may_be_changed_once_it_was_answered() -> None:
    """A portion that waits for another push is the follower's own copy."""
    settings = {**FLAGS, "policy": "softsync", "set": {"lr": 1}, "workers": 2, "shards": 2}
    with (
        ServerThread(**settings) as server,
        aiops.Client(server.url, role="worker") as client,
    ):
        params = client.define(MODEL)
        room = client.room()
        for step in range(1, 4):
            for value in (1, 3):  # the first is answered before it is part of an update
                for array in room.values():
                    array[...] = value
                client.push(params, room)
            for array in room.values():
                array[...] = 7
            client.fetch(params)
            assert_same(params, {name: a - 2 * step for name, a in MODEL.items()})


def test_a_budget_uses_tcp() -> None:
    settings = {"shards": 2, "bandwidth_budget": "1GB/s", **FLAGS}
    with ServerThread(**settings) as server, Client(server.url, role="worker") as client:
        params = client.define(MODEL)
        client.exchange(params, ONES)
        assert shared(server) == [False]
        channels = client._session.shards.channels
        assert [channel.wire.shared for channel in channels] == [None]
        assert not client._session.shards.near
