"""What a client, or a stranger, may send to shards without harm to anybody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aiops.client.outbox import Outbox
from aiops.client.params import Params
from aiops.client.request_kinds import Request
from aiops.errors import BadPush, RemoteProtocolError, Unavailable
from aiops.model.parts import Part
from aiops.model.tables import Table
from aiops.wire import messages, server_messages
from aiops.wire.messages import Push
from aiops.wire.server_messages import ShardParts
from tests.driven import Driven
from tests.shards.world import Actor, World

MODEL = {"w": np.zeros((30, 2), np.float32), "b": np.zeros(4, np.float32)}


@pytest.fixture
def world() -> World:
    return World(0, 2)


def joined(world: World, name: str) -> tuple[Actor, Params]:
    """A client that has fetched the model."""
    actor = Actor(world, name, lambda actor: None)
    actor.done = True
    world.actors.append(actor)
    actor.connect()
    world.settle()
    done(world, actor, actor.requests.define(MODEL))
    assert actor.session.info.layout is not None
    params = Params(actor.session.info.layout)
    done(world, actor, actor.requests.fetch(params))
    return actor, params


def done(world: World, actor: Actor, request: Any) -> Any:
    actor.flush()
    world.settle()
    return request.value()


def ones(params: Params, value: float = 1) -> dict[str, Any]:
    return {name: np.full(a.shape, value, a.dtype) for name, a in params.items()}


def unharmed(world: World, version: int) -> None:
    """Others train on as if nothing had been; every buffer has come back."""
    actor, params = joined(world, "somebody else")
    assert params.version == version
    assert all((a == -version).all() for a in params.values())
    receipt = done(world, actor, actor.requests.push(ones(params), params, params))
    assert receipt.version == version + 1
    assert all((a == -version - 1).all() for a in params.values())
    for host in world.hosts:
        assert host.coordinator.pools[0].out == 0
    assert world.lead.ended is None
    assert world.followers[0].ended is None


@pytest.mark.parametrize("place", [0, 40, 59])
@pytest.mark.parametrize("value", [np.nan, 1e20])
def test_a_bad_value_in_one_portion_refuses_all_of_it(
    world: World, place: int, value: float
) -> None:
    actor, params = joined(world, "worker")
    grads = ones(params)
    grads["w"].reshape(-1)[place] = value
    where = [place // 2, place % 2]
    with pytest.raises(BadPush, match=rf"'w' holds .* at \[{where[0]}, {where[1]}\]"):
        done(world, actor, actor.requests.push(grads, params, params))
    done(world, actor, actor.requests.push(ones(params), params, params))
    unharmed(world, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: (Part(parts[0].start, parts[0].stop - 4, "raw", parts[0].nbytes - 4, 0),),
        lambda parts: (Part(parts[0].start - 4, parts[0].stop, "raw", parts[0].nbytes + 4, 0),),
        lambda parts: (replace_version(parts[0], 7),),
        lambda parts: (Part(parts[0].start, parts[0].stop, "raw", parts[0].nbytes + 4, 0),),
        lambda parts: (Part(parts[0].start, parts[0].stop, "magic", 4, 0),),
        lambda parts: (Part(parts[0].start, parts[0].stop, "int8", 4, 0),),
        lambda parts: (Part(parts[0].start, parts[0].stop, "raw", 0, 0),),
        lambda parts: (*parts, *parts),
        lambda parts: (Part(0, 1 << 40, "raw", 16, 0),),
        lambda parts: tuple(
            Part(a, b, "raw", b - a, 0) for a, b in ((parts[0].start, 191), (191, parts[0].stop))
        ),
    ],
)
def test_a_portion_that_is_not_what_was_announced(world: World, change: Any) -> None:
    actor, params = joined(world, "worker")
    [branch] = actor.session.shards.channels
    say = branch.ask

    def lie(portion: ShardParts, payloads: Any, outbox: Any) -> None:
        parts = change(portion.parts)
        views = [[memoryview(bytes(part.nbytes))] for part in parts]
        say(replace(portion, parts=parts), views, outbox)

    branch.ask = lie  # type: ignore[method-assign]
    with pytest.raises(BadPush):
        done(world, actor, actor.requests.push(ones(params), params, params))
    branch.ask = say  # type: ignore[method-assign]
    done(world, actor, actor.requests.push(ones(params), params, params))
    unharmed(world, 1)


def replace_version(part: Part, version: int) -> Part:
    return Part(*part[:4], version)


@pytest.mark.parametrize(
    "parts",
    [
        (Part(0, 256, "shard", 0, 0),),
        (Part(0, 256, "raw", 256, 0),),
        (Part(0, 128, "shard", 0, 0), Part(128, 256, "shard", 0, 0)),
        (Part(0, 128, "raw", 128, 0),),
        (Part(0, 128, "raw", 128, 0), Part(128, 256, "shard", 8, 0)),
        (Part(0, 128, "raw", 128, 0), Part(128, 256, "shard", 0, 1)),
        (Part(0, 128, "raw", 128, 5), Part(128, 256, "shard", 0, 5)),
        (Part(0, 128, "raw", 128, 0), Part(128, 512, "shard", 0, 0)),
        (Part(128, 256, "shard", 0, 0), Part(0, 128, "raw", 128, 0)),
        (Part(0, 6, "raw", 6, 0), Part(6, 128, "raw", 122, 0), Part(128, 256, "shard", 0, 0)),
        (Part(0, 128, "raw", 128, 0), Part(128, 191, "shard", 0, 0), Part(191, 256, "shard", 0, 0)),
        (Part(128, 256, "shard", 0, 0), Part(128, 256, "shard", 0, 0)),
    ],
)
def test_a_push_that_is_announced_wrongly(world: World, parts: Any) -> None:
    actor, _params = joined(world, "worker")
    assert actor.session.info.placement is not None
    assert actor.session.info.placement.edges == [0, 128, 256]
    request = said(actor, Push(1000, 1, False, -1, parts))
    portion = ShardParts(1000, 0, (Part(128, 256, "raw", 128, 0),))
    actor.session.shards.channels[0].ask(portion, [[memoryview(bytes(128))]], Outbox())
    actor.flush()
    world.settle()
    with pytest.raises(BadPush):
        request.value()
    actor.hang_up()
    world.settle()
    unharmed(world, 0)


def said(actor: Actor, message: Any) -> Request:
    """Have a client say something to the lead as it is."""
    request = Request("an answer", lambda id: message, lambda answer: answer)
    actor.session.pending.by_id[message.id] = request
    views = [[memoryview(bytes(part.nbytes))] for part in message.parts]
    actor.session.out.extend(actor.session.wire.send(message, views))
    return request


def test_portions_that_nobody_expects_wait_and_are_forgotten(world: World) -> None:
    actor, _params = joined(world, "worker")
    [branch] = actor.session.shards.channels
    for id in (77, 78, 79):
        portion = ShardParts(id, 0, (Part(128, 256, "raw", 128, 0),))
        branch.ask(portion, [[memoryview(bytes(128))]], Outbox())
    actor.flush()
    world.settle()
    actor.hang_up()
    world.settle()
    unharmed(world, 0)


def test_a_push_whose_portion_never_comes_is_overdue(world: World) -> None:
    actor, params = joined(world, "worker")
    actor.session.shards.channels[0].ask = lambda *portion: None  # type: ignore[method-assign]
    actor.requests.push(ones(params), params, params)
    actor.flush()
    world.settle()
    lead = world.lead_brain
    assert lead.overdue(world.now + 50, lambda nbytes: 60.0) == []
    [(peer, why)] = lead.overdue(world.now + 61, lambda nbytes: 60.0)
    assert "have not come to shard 1 of 2" in why
    world.lead.lines[peer].cut()
    actor.hang_up()
    world.settle()
    unharmed(world, 0)


def test_messages_behind_an_unfinished_push_are_freed_with_their_connection() -> None:
    world = World(0, 2)
    actor = Actor(world, "worker", lambda actor: None)
    actor.done = True
    world.actors.append(actor)
    actor.connect()
    world.settle()
    done(world, actor, actor.requests.define(MODEL, {"words": Table(10, 2)}))
    params = Params(actor.session.info.layout)  # type: ignore[arg-type]
    done(world, actor, actor.requests.fetch(params))
    actor.session.shards.channels[0].ask = lambda *portion: None  # type: ignore[method-assign]
    actor.requests.push(ones(params), params, params)
    actor.requests.push_rows("words", [1, 2], np.ones((2, 2), np.float32))
    actor.flush()
    world.settle()
    assert any(pool.out for pool in world.lead.coordinator.pools)
    actor.hang_up()
    world.settle()
    assert [pool.out for pool in world.lead.coordinator.pools] == [0, 0]


def test_a_push_that_is_arriving_when_a_follower_is_lost_is_freed() -> None:
    """The model is the lead's alone, and yet the push is refused."""
    world = World(0, 2, shard_bytes=1 << 20)
    actor, params = joined(world, "worker")
    request = actor.requests.push(ones(params), params, params)
    actor.flush()
    line = actor.lines[0][1]
    while len(line.up.bytes) > 1:
        world.lead.arrive(line, len(line.up.bytes) - 1)
    assert world.lead.coordinator.pools[0].out
    world.lead.orders[0].lost()
    world.settle()
    assert isinstance(request.refusal, Unavailable)
    assert "shard 1 is gone" in str(request.refusal)
    assert world.lead.coordinator.pools[0].out == 0


def shards_push(id: int, seq: int) -> Push:
    """A push of zeros, of which a portion lies on the follower."""
    parts = Part(0, 128, "raw", 128, 0), Part(128, 256, "shard", 0, 0)
    return Push(id, seq, False, -1, parts)


def drop(world: World) -> None:
    """Have all happen that follows, with the connections that servers drop."""
    world.settle()
    while world.doomed:
        world.step_doomed()
        world.settle()


def test_a_client_that_gives_two_pushes_one_id_is_dropped(world: World) -> None:
    """It had all followers refuse the order of their lead, which then had no model."""
    actor, _params = joined(world, "worker")
    for seq in (1, 2):
        said(actor, shards_push(1000, seq))
    actor.flush()
    drop(world)
    assert not world.lead_brain.followers.lost
    assert not actor.lines
    unharmed(world, 0)


def test_a_client_whose_refused_portions_never_come_is_dropped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the followers refuse an order, too, and there was no end of what they kept."""
    monkeypatch.setattr("aiops.shards.receive._MOST", 5)
    actor, _params = joined(world, "worker")
    for seq in range(1, 8):
        refused = replace(shards_push(1000 + seq, seq), parts=(Part(0, 256, "shard", 0, 0),))
        said(actor, refused)
    actor.flush()
    drop(world)
    assert not world.lead_brain.followers.lost
    assert not actor.lines
    unharmed(world, 0)


def test_of_a_client_that_is_not_there_no_portion_is_kept(world: World) -> None:
    """Each client that connects to the lead alone left thousands of them on the followers."""
    actor, _params = joined(world, "worker")
    actor.lines[1][1].cut()
    refused = replace(shards_push(1000, 1), parts=(Part(0, 256, "shard", 0, 0),))
    said(actor, refused)
    for buffer in actor.session.out:
        actor.lines[0][1].up.bytes += buffer
    world.settle()
    buffers = world.followers[0].coordinator._buffers
    assert (buffers._by_key, buffers._discards) == ({}, {})


def test_nobody_else_gives_orders(world: World) -> None:
    actor, _params = joined(world, "worker")
    [(_session, _line), (_branch, line)] = actor.lines
    order = Driven("client", lambda message: None)
    order.state = "lead open"
    for buffer in order.send(server_messages.FinishPush(1, False)):
        line.up.bytes += buffer
    with pytest.raises(RemoteProtocolError, match="may not send 'finish_push' when 'shard open'"):
        world.settle()
    line.up.bytes.clear()
    actor.hang_up()
    world.settle()
    unharmed(world, 0)


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (("lead", "run"), "has its lead already"),
        (("follow", "another run"), "and its client of another run"),
        (("hello", ""), "connect to its lead"),
    ],
)
def test_who_does_not_belong_there(world: World, greeting: tuple[str, str], why: str) -> None:
    kind, run = greeting
    line = world.followers[0].accept(None)
    rule = world.engine.algorithm
    who = 0, messages.PROTOCOL, "stranger", 1, "stranger", run, False, bytes(16), ""
    hello: Any = {
        "lead": lambda: server_messages.LeadHello(*who, rule.name, rule.settings(), 0),
        "follow": lambda: server_messages.ShardHello(*who),
        "hello": lambda: messages.Hello(
            0, messages.PROTOCOL, "x", 1, "x", "worker", False, bytes(16), ""
        ),
    }[kind]()
    wire = Driven("client", lambda message: None)
    line.up.say(wire.send(hello))
    world.settle()
    came = bytes(line.down.bytes)
    wire.next_buffer()[: len(came)] = came
    [(answer, _sink)] = wire.take(len(came))
    assert isinstance(answer, messages.Error)
    assert answer.fatal
    assert why in answer.text
    line.cut()
    unharmed(world, 0)


def test_a_server_without_shards_follows_nobody() -> None:
    world = World(0, 1)
    line = world.lead.accept(None)
    wire = Driven("client", lambda message: None)
    who = 0, messages.PROTOCOL, "x", 1, "x", "run", False, bytes(16), ""
    line.up.say(wire.send(server_messages.ShardHello(*who)))
    world.settle()
    came = bytes(line.down.bytes)
    wire.next_buffer()[: len(came)] = came
    [(answer, _sink)] = wire.take(len(came))
    assert isinstance(answer, messages.Error)
    assert "is no follower" in answer.text
