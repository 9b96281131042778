"""A client that an administrator sends away: no server of a model on shards takes it any more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.client import Client
from aiops.engine.events import Drop, Order, Received
from aiops.errors import Kicked
from aiops.model.tables import Table
from aiops.wire.messages import PROTOCOL, Error
from aiops.wire.server_messages import SendAway, ShardHello, ShardWelcome
from tests.serving.test_administration import PLAIN, aiops
from tests.shards.test_lead_proof import RUN, follower, joined
from tests.shards.world import World
from tests.support import ServerThread

WHY = "this client was sent away by token 'admin'"


def client(name: str, epoch: int) -> ShardHello:
    return ShardHello(0, PROTOCOL, name, epoch, "worker", RUN, True, bytes(16), "test", 3)


def test_a_follower_drops_it_and_takes_it_no_more() -> None:
    found = follower()
    for peer, name in enumerate(("held-up", "other"), 2):
        [welcome] = joined(found, peer, client(name, 1))
        assert isinstance(welcome, ShardWelcome)
    assert found.handle(Received(0.0, 1, SendAway(0, "held-up", WHY), None)) == [Drop(2, WHY)]
    refused, drop = joined(found, 4, client("held-up", 2))
    assert isinstance(refused, Error)
    assert (refused.code, refused.text, refused.fatal) == ("kicked", WHY, True)
    assert isinstance(drop, Drop)
    *_, welcome = joined(found, 5, client("other", 2))
    assert isinstance(welcome, ShardWelcome)


def test_a_follower_that_comes_back_is_told_again() -> None:
    world = World(0, 3)
    world.settle()
    lead: Any = world.lead.coordinator
    first = lead.send_away("held-up", WHY)
    assert first == [Order(shard, SendAway(0, "held-up", WHY)) for shard in (1, 2)]
    [follower, _] = world.followers
    again = lead._on_state(1, follower.coordinator.state())
    assert first[0] in again


def test_it_pushes_no_rows_to_any_server() -> None:
    """Over real sockets: rows go straight to the servers that they lie on."""
    ids, ones = np.arange(100), np.ones((100, 4), np.float32)
    with (
        ServerThread(**PLAIN, shards=3, spread_tables=True) as server,
        Client(server.url, role="worker", name="slow") as slow,
        Client(server.url, role="worker", name="quick") as quick,
    ):
        slow.define({}, {"t": Table(100, 4, init="zeros")})
        for each in (slow, quick):
            each.push_rows("t", ids, ones)
        aiops("kick", server.url, "slow")
        for _ in range(2):
            with pytest.raises(Kicked):
                slow.push_rows("t", ids, ones)
        quick.push_rows("t", ids, ones)
        assert (quick.fetch_rows("t", ids) == -3).all()
