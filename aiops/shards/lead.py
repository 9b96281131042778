"""Lead a sharded model: an engine with the first part of it, and orders to the followers.

::

    events → Lead.handle → Engine.handle → effects → Lead → effects, and orders to the followers

The engine's events and effects are about the whole model. Here a push is held back until every
shard has its portion; an `Apply` becomes an order to each follower, and is `Applied` when all are
done; a reply with parameters becomes the lead's portion, and orders to send the others. The engine
has no knowledge of followers, nor they of the policy (`aiops.shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aiops.engine.buffer_pool import BufferPool
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    DistributeModel,
    Drop,
    Effect,
    Event,
    Joined,
    Left,
    Lost,
    Note,
    Order,
    Received,
    Reply,
    Reported,
    Warm,
)
from aiops.engine.receive import PushSink
from aiops.engine.steady import Steady
from aiops.engine.training import Training
from aiops.errors import RemoteProtocolError, Unavailable
from aiops.shards.collecting import Collecting
from aiops.shards.counting import TrafficCount
from aiops.shards.followers import Followers
from aiops.shards.orders import LOST, read_fault
from aiops.shards.sharded_model import ShardedModel
from aiops.wire.connection import Connection
from aiops.wire.messages import (
    Error,
    Fetch,
    Hello,
    Message,
    Model,
    Push,
    Reapply,
    Report,
    Stats,
    Welcome,
)
from aiops.wire.server_messages import PushArrived, ShardParts, TrafficCounted, UpdateDone
from aiops.wire.sinks import Discard, Sink


class Lead:
    """The lead of one sharded model.

    Parameters
    ----------
    engine
        The engine that decides; its options give the number of shards.
    addresses
        The address of each follower for clients: host (empty: this server's own) and port.
    """

    def __init__(self, engine: Engine, addresses: Sequence[tuple[str, int]]) -> None:
        assert engine.options.shards == len(addresses) + 1
        self.engine = engine
        self._followers = Followers(addresses)
        self._model: ShardedModel | None = None
        self._clients: dict[int, tuple[str, int]] = {}  # id and epoch, by connection
        self._count = TrafficCount(len(addresses))
        self._now = 0.0  # the time of the last event

    # ------------------------------------------------------------ the shell's calls

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out."""
        self._now = max(self._now, event.time)
        match event:
            case Received():
                return self._on_received(event)
            case Applied():
                return self._on_applied(event)
            case Reported():
                return self._on_report(event)
            case Lost():
                return self._on_lost(event)
            case Joined():
                return self._on_joined(event)
            case Left():
                return self._on_left(event)
            case _:
                return self._decide(event)

    @property
    def idle(self) -> bool:
        """True if no update is outstanding and none queued."""
        return self.engine.idle

    @property
    def pools(self) -> Sequence[BufferPool]:
        """The pools that payloads get their buffers from."""
        return self.engine.pools

    def wait(self, again: Callable[[], bool]) -> None:
        """Have ``again`` called when there may be room; it returns whether there was."""
        self.engine.wait(again)

    def sink_for(self, peer: int, message: Message) -> tuple[Sink | None, list[Order]]:
        """Return the sink of a message's payloads, or None if there is no room now: call `wait`.

        A push is announced here, so that the followers have room for its portions: carry the orders
        out at once.
        """
        model, client = self._model, self._clients.get(peer)
        if isinstance(message, Push) and model is not None and client is not None:
            if self._followers.lost:
                return model.gathering.refuse(client, message, Unavailable(self._followers.why))
            if not model.alone:
                return model.gathering.sink_for(peer, client, message, self._now)
        return self.engine.admission.sink_for(message), []

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return None: a short way would answer without the followers."""
        return None

    def preparation(self) -> Warm:
        """Return the kernels to compile as soon as the server listens."""
        return self.engine.preparation()

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections whose portions are missing too long, each with the reason."""
        found = []
        for push in () if self._model is None else self._model.gathering.overdue(now, patience):
            names = ", ".join(self._followers.name(shard) for shard in sorted(push.missing))
            found.append((push.peer, f"portions of its push have not come to {names}"))
        return found

    def collect(self) -> Collecting | None:
        """Begin to collect the current version from all shards; None while it cannot be read.

        Its orders are to be carried out at once.
        """
        return None if self._model is None else self._model.collect(self._followers.why)

    def sink_for_follower(self, shard: int, message: Message) -> Sink:
        """Return the sink of the payloads of a follower's message."""
        if self._model is None or not isinstance(message, ShardParts):
            return Discard()
        return self._model.sink_for_portion(shard, message)

    # ------------------------------------------------------------ clients

    def _on_joined(self, event: Joined) -> list[Effect]:
        if isinstance(event.hello, Hello):
            self._clients[event.peer] = event.hello.client, event.hello.epoch
        return self._decide(event)

    def _on_left(self, event: Left) -> list[Effect]:
        if self._model is not None:
            self._model.gathering.left(event.peer)
        self._clients.pop(event.peer, None)
        return self._decide(event)

    def _on_received(self, event: Received) -> list[Effect]:
        if self._model is None:
            return self._pass([event])
        return self._pass(self._model.gathering.received(event))

    def _pass(self, events: Sequence[Received]) -> list[Effect]:
        """Let the engine handle messages; the pushes among them have come to all shards."""
        return [effect for event in events for effect in self._pass_one(event)]

    def _pass_one(self, event: Received) -> list[Effect]:
        message, lost = event.message, self._followers.lost
        if lost and isinstance(message, Push | Reapply | Fetch):
            if isinstance(event.sink, PushSink):
                event.sink.free()
            refusal = Reply(event.peer, self._followers.unavailable(message.id))
            return [*self._housekeeping(), refusal]
        if isinstance(message, Stats) and self._model is not None and not lost:
            return [*self._count.ask(event)]
        return self._decide(event)

    # ------------------------------------------------------------ followers

    def _on_report(self, event: Reported) -> list[Effect]:
        try:
            return self._handle_report(event)
        except RemoteProtocolError as error:
            return self._on_lost(Lost(event.time, event.shard, str(error)))

    def _handle_report(self, event: Reported) -> list[Effect]:
        message, shard, model = event.message, event.shard, self._model
        match message:
            case Error():
                why = f"{self._followers.name(shard)} said: {message.text}"
                return self._on_lost(Lost(event.time, shard, why))
            case TrafficCounted():
                return self._report() if self._count.counted(shard, message) else []
            case UpdateDone() if model is not None:
                return self._go_on(model.updating.done(event, message))
            case UpdateDone():
                raise RemoteProtocolError(f"shard {shard} did update {message.id} unasked")
            case PushArrived() if model is not None:
                if message.fault.get("code") == LOST:  # the client must open all connections again
                    peer = model.gathering.peer_of(message.id)
                    why = f"its connection to {self._followers.name(shard)} is gone"
                    return [] if peer is None else [Drop(peer, why)]
                fault = read_fault(message.fault)
                return self._pass(model.gathering.arrived(message.id, shard, fault))
            case ShardParts() if model is not None:
                model.portion_came(shard, message)
        return []

    def _on_applied(self, event: Applied) -> list[Effect]:
        if self._model is not None and self._model.updating.concerns(event):
            return self._go_on(self._model.updating.applied(event))
        return self._decide(event)

    def _go_on(self, found: Applied | list[Effect]) -> list[Effect]:
        """Let the engine handle `Applied`, unless a shard was lost: then it is never published."""
        if not isinstance(found, Applied):
            return found
        return [] if self._followers.lost else self._decide(found)

    def _on_lost(self, event: Lost) -> list[Effect]:
        """Answer all waiting requests: without this follower the model has no further version."""
        followers, model, training = self._followers, self._model, self.engine.training
        if event.shard in followers.lost:
            return []
        followers.lost[event.shard] = event.why
        effects: list[Effect] = [
            Note(f"{followers.why}; this server and the others keep what they have")
        ]
        if training is not None:
            waiting = training.replies.abandon()
            effects += [Reply(peer, followers.unavailable(id)) for peer, id in waiting]
        if model is not None:
            effects += self._pass(model.gathering.give_up())
            model.fail_collecting(followers.why)
        return effects + self._report()

    def _report(self) -> list[Effect]:
        """Answer the requests for statistics, with the traffic that followers have counted."""
        for member in self.engine.membership:
            member.shard_traffic = self._count.clients.get(member.client, member.shard_traffic)
        asked = [event for event in self._count.end() if event.peer in self._clients]
        return [effect for event in asked for effect in self._decide(event)]

    def report(self) -> list[dict[str, Any]]:
        """Return each shard's line of the statistics."""
        model, version = self._model, self.engine.version
        if model is None:
            return self._followers.report(version, None, ())
        return self._followers.report(version, model.placement, model.updating.versions)

    # ------------------------------------------------------------ the engine's effects

    def _decide(self, event: Event) -> list[Effect]:
        """Let the engine handle an event, and translate its effects into orders."""
        if event.time < self._now:  # it waited for others
            event = replace(event, time=self._now)
        effects = self.engine.handle(event)
        found, training = self._housekeeping(), self.engine.training
        for effect in effects:
            match effect:
                case DistributeModel() if training is not None:
                    found += self._distribute(effect, training)
                case Apply() if self._model is not None and not self._model.alone:
                    found += self._model.updating.begin(effect)
                case Reply():
                    found += self._reply(effect)
                case _:
                    found.append(effect)
        return found

    def _housekeeping(self) -> list[Effect]:
        return [] if self._model is None else self._model.housekeeping()

    def _distribute(self, effect: DistributeModel, training: Training) -> list[Effect]:
        """Send each follower its part of the model."""
        engine = self.engine
        self._model = model = ShardedModel(effect, training, engine.membership, engine.admission)
        pushed, fetched = engine.codecs
        plan = {
            "push_codecs": tuple(sorted({codec.name for _pattern, codec in pushed.pairs})),
            "fetch_codec": fetched.announced if fetched else (),
        }
        return model.load(effect, self._followers.table(model.placement), plan)

    def _reply(self, effect: Reply) -> list[Effect]:
        """Add the shard table to a reply, or order the followers to send their portions of it."""
        message, model, lease = effect.message, self._model, effect.lease
        if isinstance(message, Welcome | Model) and not self._followers.lost:
            table = self._followers.table(None if model is None else model.placement)
            return [replace(effect, message=replace(message, shards=table))]
        if isinstance(message, Report):
            report = {**message.report, "shards": self.report()}
            return [replace(effect, message=replace(message, report=report))]
        if lease is None or model is None or model.alone:
            return [effect]
        return model.send(effect, lease, self._clients.get(effect.peer))
