"""The messages of a push to two shards and its answer: client, lead and follower."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from aiops.algorithms.dcasgd import DCASGD
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    Effect,
    Event,
    Joined,
    Options,
    Order,
    Received,
    Reply,
    Reported,
)
from aiops.model.parts import Part, Parts
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.wire import messages
from aiops.wire.messages import Message
from aiops.wire.server_messages import LeadHello, ShardHello, ShardParts, ShardWelcome
from aiops.wire.sinks import Sink
from aiops.wire.state_machine import Side

Step = tuple[Side, Message, tuple[bytes, ...]]

_CLIENT, _LEAD = 1, 2  # connections: the client's to either server, and the lead's to its follower


class Sharded:
    """A record of the messages between two servers and a client, joined through memory.

    Attributes
    ----------
    to_lead, to_follower
        The messages between the client and either server.
    orders
        The messages between the lead, which is the client there, and its follower.
    """

    def __init__(self) -> None:
        options = Options(backend="numpy", shards=2, shard_bytes=1, run="8c2f")
        self._lead = Lead(Engine(DCASGD(lr=0.5), options), [("", 7172)])
        self._follower = Follower(DCASGD(lr=0.5), options)
        self.to_lead: list[Step] = []
        self.to_follower: list[Step] = []
        self.orders: list[Step] = []

    def send_to_lead(self, message: Message, *payloads: bytes) -> None:
        """Have the client send a message to the lead."""
        self.to_lead.append(("client", message, payloads))
        if isinstance(message, messages.Hello):
            self._lead_handles(Joined(0.0, _CLIENT, message))
            return
        sink, orders = self._lead.sink_for(_CLIENT, message)
        filled = _filled(sink, message, payloads)
        self._carry_out(orders)
        self._lead_handles(Received(0.0, _CLIENT, message, filled))

    def send_to_follower(self, message: Message, *payloads: bytes) -> None:
        """Have the client send a message to the follower."""
        self.to_follower.append(("client", message, payloads))
        if isinstance(message, ShardHello):
            self._follower_handles(Joined(0.0, _CLIENT, message))
            return
        sink = _filled(self._follower.sink_for(_CLIENT, message), message, payloads)
        self._follower_handles(Received(0.0, _CLIENT, message, sink))

    def order(self, message: Message, payloads: tuple[bytes, ...] = ()) -> None:
        """Have the lead send a message to the follower."""
        self.orders.append(("client", message, payloads))
        if isinstance(message, LeadHello):
            self._follower_handles(Joined(0.0, _LEAD, message))
            return
        sink = _filled(self._follower.sink_for(_LEAD, message), message, payloads)
        self._follower_handles(Received(0.0, _LEAD, message, sink))

    def _lead_handles(self, event: Event) -> None:
        self._carry_out(self._lead.handle(event))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Order):
                self.order(effect.message, tuple(b"".join(views) for views in effect.payloads))
            elif isinstance(effect, Apply):
                self._lead_handles(Applied(0.0, effect.ticket, effect.run()))
            elif isinstance(effect, Reply):
                self.to_lead.append(("server", effect.message, _payloads(effect)))

    def _follower_handles(self, event: Event) -> None:
        for effect in self._follower.handle(event):
            if isinstance(effect, Apply):
                self._follower_handles(Applied(0.0, effect.ticket, effect.run()))
            elif isinstance(effect, Reply) and effect.peer == _CLIENT:
                self.to_follower.append(("server", effect.message, _payloads(effect)))
            elif isinstance(effect, Reply):
                self.orders.append(("server", effect.message, _payloads(effect)))
                if not isinstance(effect.message, ShardWelcome):
                    self._lead_handles(Reported(0.0, 1, effect.message))


def _filled(sink: Sink | None, message: Message, payloads: tuple[bytes, ...]) -> Sink | None:
    parts: Parts = getattr(message, "parts", ())
    if not parts or sink is None:
        return None
    for number, (part, payload) in enumerate(zip(parts, payloads, strict=True)):
        if part.nbytes:
            sink.view(number, 0)[: len(payload)] = payload
            sink.filled(number, 0, len(payload))
    return sink


def _payloads(effect: Reply) -> tuple[bytes, ...]:
    if effect.lease is None:
        return ()
    found = tuple(b"".join(views) for views in effect.lease.borrowed_views(effect.message.parts))  # type: ignore[attr-defined]
    effect.lease.release()
    return found


def exchange(hello: messages.Hello, nonce: bytes) -> Sharded:
    """Return the messages that define a model of four float32 on two servers, and push to it."""
    m, sharded = messages, Sharded()
    rule = DCASGD(lr=0.5)
    named = "8c2f", 1, "shard 1 of 2", "8c2f", True, nonce, "example/1"
    sharded.order(LeadHello(0, m.PROTOCOL, *named, rule.name, rule.settings()))
    sharded.send_to_lead(hello)
    sharded.send_to_follower(
        ShardHello(0, m.PROTOCOL, hello.client, 1, hello.name, "8c2f", False, nonce, named[-1])
    )
    rows = (("w", "float32", (4,)),)
    offer = m.Define(1, rows, (Part(0, 16, "raw", 16, 0),))
    sharded.send_to_lead(offer, struct.pack("<4f", 1, 2, 3, 4))
    parts = Part(0, 8, "raw", 8, 0), Part(8, 16, "shard", 0, 0)
    sharded.send_to_lead(m.Push(2, 1, True, 0, parts), struct.pack("<2f", 2, 2), b"")
    portion = ShardParts(2, 0, (Part(8, 16, "raw", 8, 0),))
    sharded.send_to_follower(portion, struct.pack("<2f", -2, 4))
    return sharded
