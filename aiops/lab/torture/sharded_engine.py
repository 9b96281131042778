"""One server, or a lead and its followers, in one memory: messages arrive as a seed says.

Here are no bytes and no sockets: what is sent to a server waits in its queue, in order, and which
server is next is drawn. So a push is answered when nothing waits any more.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TypeAlias

from aiops.algorithms.base import Algorithm
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    Drop,
    Effect,
    Event,
    Initialised,
    Joined,
    Options,
    Order,
    Received,
    Reply,
    Reported,
)
from aiops.engine.receive import PushSink
from aiops.model.layout import Bytes, Layout, split
from aiops.model.parts import Part, Parts
from aiops.model.placement import RAW, Placement
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.shards.measuring import SAMPLE
from aiops.store.parameters import Store
from aiops.wire.messages import PROTOCOL, Hello, Message, Push
from aiops.wire.server_messages import (
    LeadHello,
    LoadShard,
    RunUpdate,
    ShardHello,
    ShardParts,
)
from aiops.wire.sinks import Sink

LEAD = 1000
"""The number of the lead's connection to a follower; clients have smaller ones."""

_NONCE = b"n" * 16

_Host: TypeAlias = Engine | Lead | Follower


class ShardedEngine:
    """An engine of one server or several, which clients push to.

    Parameters
    ----------
    algorithm, options
        Those of all servers; ``options.shards`` is their number.
    draw
        The source of the order in which messages arrive.

    Attributes
    ----------
    engine
        The one that decides.
    lead
        It, as it leads the others.
    followers
        Those, from the first.
    rounds
        The rounds of updates that followers were ordered to do.
    """

    def __init__(self, algorithm: Algorithm, options: Options, draw: random.Random) -> None:
        self._draw, self._shards = draw, options.shards
        self.engine = Engine(algorithm, options)
        self.followers = [Follower(algorithm, options) for _ in range(1, options.shards)]
        addresses = [("", 7000 + shard) for shard in range(1, options.shards)]
        self.lead: Engine | Lead = Lead(self.engine, addresses) if addresses else self.engine
        self._queues: list[deque[Event]] = [deque() for _ in range(options.shards)]
        self._answers: list[Message] = []
        self.rounds: list[str] = []
        name, settings = algorithm.name, algorithm.settings()
        hello = "lead", 1, "lead", options.run, True, _NONCE, "torture", name, settings
        for shard in range(1, options.shards):
            self._queues[shard].append(Joined(0.0, LEAD, LeadHello(0, PROTOCOL, *hello)))
        self._settle()

    # ------------------------------------------------------------ clients

    def define(self, rows: tuple[tuple[str, str, tuple[int, ...]], ...], data: Bytes) -> None:
        """Give the lead the model."""
        self._post(Initialised(0.0, rows, data))

    def join(self, peer: int) -> None:
        """Have a worker join, on the connections of this number."""
        who = f"client-{peer}", 1, f"w{peer}"
        self._post(Joined(0.0, peer, Hello(0, PROTOCOL, *who, "worker", False, _NONCE, "torture")))
        run = self.engine.options.run
        for shard in range(1, self._shards):
            hello = ShardHello(0, PROTOCOL, *who, run, False, _NONCE, "torture")
            self._queues[shard].append(Joined(0.0, peer, hello))
        self._settle()

    def push(self, peer: int, seq: int, gradient: Bytes, *, fetch: bool) -> list[Message]:
        """Push a gradient of the whole model; return the lead's answers to all pushes."""
        store, id = self.engine.defined_store, 1000 * peer + seq
        layout, level = store.layout, store.current.level or 0
        pieces: list[list[Part]] = [split(0, layout.nbytes, RAW, level)]
        announced: Parts = tuple(pieces[0])
        if self._shards > 1:
            options = self.engine.options
            placement = Placement.even(layout, self._shards, options.shard_bytes)
            pieces = [theirs for theirs, _views in placement.divide(announced)]
            announced = placement.announced(pieces)
        push = Push(id, seq, fetch, -1, announced)
        if isinstance(self.lead, Lead):
            sink, orders = self.lead.sink_for(peer, push)
            for order in orders:
                self._order(order)
            self._settle()
        else:
            sink = self.lead.admission.sink_for(push)
        if sink is None:
            raise MemoryError("the receive buffers are used up")
        _fill(sink, tuple(pieces[0]), gradient)
        self._answers.clear()
        self._queues[0].append(Received(0.0, peer, push, sink))
        for shard, theirs in enumerate(pieces[1:], 1):
            if theirs:
                self._portion(shard, peer, ShardParts(id, 0, tuple(theirs)), gradient)
        self._settle()
        return list(self._answers)

    def _portion(self, shard: int, peer: int, message: ShardParts, gradient: Bytes) -> None:
        sink = self.followers[shard - 1].sink_for(peer, message)
        if sink is None:
            raise MemoryError("the receive buffers of a follower are used up")
        _fill(sink, message.parts, gradient)
        self._queues[shard].append(Received(0.0, peer, message, sink))

    # ------------------------------------------------------------ what the servers hold

    @property
    def layout(self) -> Layout:
        """The model's."""
        return self.engine.defined_store.layout

    @property
    def stores(self) -> list[Store]:
        """The stores of all servers that hold some of the model, in its order."""
        shards = [follower.shard for follower in self.followers]
        return [self.engine.defined_store, *(each.store for each in shards if each is not None)]

    @property
    def arenas(self) -> list[Bytes]:
        """The parameters of all of them: the newest that were computed."""
        shards = [follower.shard for follower in self.followers]
        newest = [each.newest.arena.data for each in shards if each is not None]
        return [self.engine.defined_store.current.arena.data, *newest]

    # ------------------------------------------------------------ messages

    def _post(self, event: Event) -> None:
        self._queues[0].append(event)
        self._settle()

    def _settle(self) -> None:
        """Have everything arrive that was sent, and what follows from it."""
        hosts: list[_Host] = [self.lead, *self.followers]
        while waiting := [number for number, queue in enumerate(self._queues) if queue]:
            number = self._draw.choice(waiting)
            for effect in hosts[number].handle(self._queues[number].popleft()):
                self._carry_out(number, effect)

    def _carry_out(self, number: int, effect: Effect) -> None:
        match effect:
            case Apply():
                self._queues[number].append(Applied(0.0, effect.ticket, effect.run()))
            case Order():
                self._order(effect)
            case Reply():
                if effect.lease is not None:
                    effect.lease.release()
                if not number:
                    self._answers.append(effect.message)
                elif effect.peer == LEAD and type(effect.message).kind != "shard_welcome":
                    self._queues[0].append(Reported(0.0, number, effect.message))
            case Drop():
                raise AssertionError(f"a server has ended a connection: {effect.why}")

    def _order(self, order: Order) -> None:
        """Have an order wait at its follower."""
        message, sink = order.message, None
        if isinstance(message, LoadShard):
            sink = self.followers[order.shard - 1].sink_for(LEAD, message)
            assert sink is not None, "a model that begins has room"
            for part, views in enumerate(order.payloads):
                room = sink.view(part, 0)
                for view in views:
                    room[: len(view)] = view
                    room = room[len(view) :]
        if isinstance(message, RunUpdate):
            self.rounds.append(message.work.get("round", SAMPLE if SAMPLE in message.work else ""))
        self._queues[order.shard].append(Received(0.0, LEAD, message, sink))


def _fill(sink: Sink, parts: Parts, gradient: Bytes) -> None:
    """Have the parts of a push arrive."""
    for number, part in enumerate(parts):
        if not isinstance(sink, PushSink):
            return
        nbytes = part.stop - part.start
        if nbytes and part.nbytes:
            sink.view(number, 0)[:nbytes] = gradient[part.start : part.stop].data
            sink.filled(number, 0, nbytes)


__all__ = ["ShardedEngine"]
