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
from functools import partial
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
from aiops.engine.steady import Steady
from aiops.errors import Refused, RemoteProtocolError, Unavailable
from aiops.model.arena import aligned
from aiops.model.layout import split
from aiops.model.placement import RAW, Placement, empty_cover, ranges_of
from aiops.shards.collecting import Collecting
from aiops.shards.counting import PushCounts
from aiops.shards.gathering import Coming, Gathered, Gathering, Nothing, Passed
from aiops.shards.orders import LOST, read_fault, send_increments, send_params
from aiops.shards.updating import Updating
from aiops.store.delta_replica import ReplicaJob
from aiops.store.gradient import Gradient
from aiops.store.parameters import UpdateJob
from aiops.store.snapshots import Version
from aiops.wire.connection import Connection, SinkFor
from aiops.wire.fields import ShardTable
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
from aiops.wire.server_messages import (
    CountTraffic,
    ExpectPush,
    FinishPush,
    HoldVersion,
    LoadShard,
    PushArrived,
    ShardParts,
    TrafficCounted,
    UpdateDone,
)
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
        self.engine, self.addresses = engine, tuple(addresses)
        self.placement: Placement | None = None
        self._alone = False  # all of the model is held here
        self._gathering = Gathering()
        self._clients: dict[int, tuple[str, int]] = {}  # id and epoch, by connection
        self._numbers = 0  # pushes so far
        self._updating: Updating | None = None  # once there is a placement
        # Versions that followers keep for rules that read them; True: those of the delta replica.
        self._held: set[tuple[int, bool]] = set()
        self._broken: dict[int, str] = {}  # followers that are lost: the reason of each
        self._nothing = Gradient(aligned(0), empty_cover())
        self._counting: PushCounts | None = None
        self._counts = 0
        self._collecting: dict[int, Collecting] = {}
        self._collected = 0
        self._now = 0.0  # the time of the last event
        # Orders that follow from calls of sinks and of `sink_for`, which return no effects.
        self._orders: list[Effect] = []

    # ------------------------------------------------------------ the shell's calls

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out."""
        self._now = max(self._now, event.time)
        before = self.flush()
        match event:
            case Received():
                effects = self._on_received(event)
            case Applied():
                effects = self._on_applied(event)
            case Reported():
                effects = self._on_report(event)
            case Lost():
                effects = self._on_lost(event)
            case Joined():
                effects = self._on_joined(event)
            case Left():
                effects = self._on_left(event)
            case _:
                effects = self._decide(event)
        return before + effects + self.flush()

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

    def sinks_of(self, peer: int) -> SinkFor:
        """Return the function that gives a connection's messages sinks: `sink_for`."""
        return partial(self.sink_for, peer)

    def sink_for(self, peer: int, message: Message) -> Sink | None:
        """Return the sink of a message's payloads, or None if there is no room now: call `wait`.

        A push is announced to the followers here, so that they have room for its portions.
        """
        placement = self.placement
        if not isinstance(message, Push) or placement is None or peer not in self._clients:
            return self.engine.admission.sink_for(message)
        if self._alone and not self._broken:
            return self.engine.admission.sink_for(message)
        try:
            if self._broken:
                raise Unavailable(self._why())
            pieces = placement.announced_pieces(message.parts)
            cover = placement.cover(pieces)
        except Refused as fault:
            return self._refused(peer, message, fault)
        sink: Any = Nothing()
        if pieces[0]:
            sink = self.engine.admission.sink_for(replace(message, parts=tuple(pieces[0])))
            if sink is None:
                return None
        if isinstance(sink, Discard):
            return self._refused(peer, message, sink.fault)
        # Announced only with room on the lead: so all shards grant room in one order, and two
        # pushes cannot wait for each other.
        self._numbers += 1
        missing = {shard for shard in range(1, len(placement)) if pieces[shard]}
        nbytes = sum(part.nbytes for shard in missing for part in pieces[shard])
        coming = Coming(self._numbers, peer, sink, cover, missing, self._now, nbytes, pieces)
        self._gathering.begin(coming)
        for shard in sorted(missing):
            ranges = ranges_of(pieces[shard])
            order = ExpectPush(coming.number, *self._clients[peer], message.id, ranges)
            self._orders.append(Order(shard, order))
        return coming.sink

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return None: a short way would answer without the followers."""
        return None

    def flush(self) -> list[Effect]:
        """Return the orders that calls of `sink_for` have given."""
        orders, self._orders = self._orders, []
        return orders

    def preparation(self) -> Warm:
        """Return the kernels to compile as soon as the server listens."""
        return self.engine.preparation()

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections whose portions are missing too long, each with the reason."""
        return [
            (
                coming.peer,
                "portions of its push have not come to"
                f" {', '.join(self._name(shard) for shard in sorted(coming.missing))}",
            )
            for coming in self._gathering.overdue(now, patience)
        ]

    # ------------------------------------------------------------ clients

    def _on_joined(self, event: Joined) -> list[Effect]:
        if isinstance(event.hello, Hello):
            self._clients[event.peer] = event.hello.client, event.hello.epoch
        return self._decide(event)

    def _on_left(self, event: Left) -> list[Effect]:
        for coming in self._gathering.left(event.peer):
            if isinstance(coming.sink, Nothing | Discard):
                coming.sink.abandoned()
            else:
                coming.sink.free()
            self._forget(coming.number, False)
        self._clients.pop(event.peer, None)
        return self._decide(event)

    def _on_received(self, event: Received) -> list[Effect]:
        if self._alone and not self._broken and not isinstance(event.message, Stats):
            return self._decide(event)
        return self._pass(self._gathering.received(event))

    def _pass(self, passed: Sequence[Passed]) -> list[Effect]:
        """Let the engine handle messages; the pushes among them have come to all shards."""
        return [effect for event, coming in passed for effect in self._pass_one(event, coming)]

    def _pass_one(self, event: Received, coming: Coming | None) -> list[Effect]:
        if coming is not None and coming.cover is not None:
            forget = partial(self._forget, coming.number)
            event = replace(event, sink=Gathered(coming, self._nothing, forget))
        if self._broken and isinstance(event.message, Push | Reapply | Fetch):
            if isinstance(event.sink, Gathered):
                event.sink.free()
            return [*self.flush(), Reply(event.peer, self._unavailable(event.message.id))]
        if isinstance(event.message, Stats) and not self._broken and self.placement is not None:
            return self._count(event)
        if isinstance(event.message, Push) and coming is not None and coming.pieces:
            whole = tuple(part for theirs in coming.pieces for part in theirs)
            event = replace(event, message=replace(event.message, parts=whole))
        return self._decide(event)

    def _count(self, event: Received) -> list[Effect]:
        """Order the followers to count their traffic, before the engine reports."""
        orders: list[Effect] = []
        if self._counting is None:
            self._counts += 1
            self._counting = PushCounts(self._counts, len(self.addresses))
            message = CountTraffic(self._counts)
            orders = [Order(shard, message) for shard in range(1, len(self.addresses) + 1)]
        self._counting.asked.append(event)
        return orders

    def _on_counted(self, shard: int, message: TrafficCounted) -> list[Effect]:
        counting = self._counting
        if counting is None or not counting.counted(message.id, shard, message.clients):
            return []
        return self._report(counting)

    def _report(self, counting: PushCounts) -> list[Effect]:
        self._counting = None
        for member in self.engine.membership:
            member.shard_traffic = counting.clients.get(member.client, member.shard_traffic)
        asked = [event for event in counting.asked if event.peer in self._clients]
        return [effect for event in asked for effect in self._decide(event)]

    def _refused(self, peer: int, message: Push, fault: Exception | None) -> Discard:
        """Discard the portions of a push that is refused, on all shards."""
        self._numbers += 1
        sink = Discard(fault)
        self._gathering.begin(Coming(self._numbers, peer, sink, None, set(), self._now, 0, ()))
        if any(not part.nbytes for part in message.parts):
            self._orders += self._all(
                ExpectPush(self._numbers, *self._clients[peer], message.id, ())
            )
        return sink

    def _forget(self, number: int, keep: bool) -> None:
        self._orders += self._all(FinishPush(number, keep))

    # ------------------------------------------------------------ followers

    def _on_report(self, event: Reported) -> list[Effect]:
        try:
            return self._handle_report(event)
        except RemoteProtocolError as error:
            return self._on_lost(Lost(event.time, event.shard, str(error)))

    def _handle_report(self, event: Reported) -> list[Effect]:
        message = event.message
        if isinstance(message, PushArrived):
            if message.fault.get("code") == LOST:  # the client must open all connections again
                peer = self._gathering.peer_of(message.id)
                why = f"its connection to {self._name(event.shard)} is gone"
                return [] if peer is None else [Drop(peer, why)]
            fault = read_fault(message.fault)
            return self._pass(self._gathering.arrived(message.id, event.shard, fault))
        if isinstance(message, UpdateDone):
            if self._updating is None:
                raise RemoteProtocolError(f"shard {event.shard} did update {message.id} unasked")
            return self._go_on(self._updating.done(event, message))
        if isinstance(message, TrafficCounted):
            return self._on_counted(event.shard, message)
        if isinstance(message, ShardParts):
            collecting = self._collecting.get(message.id)
            if collecting is not None and collecting.came(event.shard):
                del self._collecting[message.id]
        elif isinstance(message, Error):
            why = f"{self._name(event.shard)} said: {message.text}"
            return self._on_lost(Lost(event.time, event.shard, why))
        return []

    def _on_applied(self, event: Applied) -> list[Effect]:
        if self._updating is not None and self._updating.concerns(event):
            return self._go_on(self._updating.applied(event))
        return self._decide(event)

    def _go_on(self, found: Applied | list[Effect]) -> list[Effect]:
        """Let the engine handle `Applied`, unless a shard was lost: then it is never published."""
        if not isinstance(found, Applied):
            return found
        return [] if self._broken else self._decide(found)

    def _on_lost(self, event: Lost) -> list[Effect]:
        """Answer all waiting requests: without this follower the model has no further version."""
        if event.shard in self._broken:
            return []
        self._broken[event.shard] = event.why
        effects: list[Effect] = [
            Note(f"{self._why()}; this server and the others keep what they have")
        ]
        if self.engine.training is not None:
            waiting = self.engine.training.replies.abandon()
            effects += [Reply(peer, self._unavailable(id)) for peer, id in waiting]
        effects += self._pass(self._gathering.despair())
        if self._counting is not None:
            effects += self._report(self._counting)
        for collecting in self._collecting.values():
            collecting.fail(self._why())
        self._collecting.clear()
        return effects

    def _of_replica(self, version: Version) -> bool:
        training = self.engine.training
        return training is not None and training.of_replica(version)

    def _unavailable(self, id: int) -> Error:
        text = f"{self._why()}; start the servers again, from the last --save"
        return Error(id, Unavailable.code, text, {"shards": sorted(self._broken)}, False)

    def _why(self) -> str:
        return "; ".join(why for _shard, why in sorted(self._broken.items()))

    def _name(self, shard: int) -> str:
        host, port = self.addresses[shard - 1]
        where = f"{host}:{port}" if host else f"port {port}"
        return f"shard {shard} of {len(self.addresses) + 1} ({where})"

    # ------------------------------------------------------------ the whole model

    def collect(self) -> Collecting | None:
        """Begin to collect the current version from all shards; None while it cannot be read."""
        store, placement = self.engine.store, self.placement
        if store is None or placement is None or not store.readable:
            return None
        self._collected += 1
        collecting = Collecting(placement, store.lease(), self._why() if self._broken else "")
        if not collecting.done:
            self._collecting[self._collected] = collecting
            for shard in collecting.missing:
                parts = placement.divide(store.current.parts)[shard][0]
                order = send_params(self._collected, "", 0, store.version, parts)
                self._orders.append(Order(shard, order))
        return collecting

    def sink_for_follower(self, shard: int, message: Message) -> Sink:
        """Return the sink of the payloads of a follower's message."""
        collecting = self._collecting.get(message.id)
        if collecting is None or not isinstance(message, ShardParts):
            return Discard()
        return collecting.sink(shard, message.parts)

    # ------------------------------------------------------------ the engine's effects

    def _decide(self, event: Event) -> list[Effect]:
        """Let the engine handle an event, and translate its effects into orders."""
        if event.time < self._now:  # it waited for others
            event = replace(event, time=self._now)
        effects = self.engine.handle(event)
        found = self.flush() + self._hold()
        for effect in effects:
            match effect:
                case DistributeModel():
                    found += self._distribute(effect)
                case Apply() if self._updating is not None and not self._alone:
                    found += self._begin_update(self._updating, effect)
                case Reply():
                    found += self._send(effect)
                case _:
                    found.append(effect)
        return found

    def _hold(self) -> list[Effect]:
        """Order followers to keep the versions that the rule will compare gradients with."""
        training = self.engine.training
        if training is None or not training.store.rule.reads or self.placement is None:
            return []
        held, orders = training.held_versions(self.engine.membership), list[Effect]()
        for version, replica in sorted(held - self._held):
            orders += self._all(HoldVersion(0, version, True, replica))
        for version, replica in sorted(self._held - held):
            orders += self._all(HoldVersion(0, version, False, replica))
        self._held = held
        return orders

    def _distribute(self, effect: DistributeModel) -> list[Effect]:
        """Send each follower its part of the model."""
        self.placement = placement = effect.placement
        self._alone = placement.used == [0]
        self._updating = Updating(placement, self._of_replica)
        codecs = {codec.name for _pattern, codec in self.engine.codecs[0].pairs}
        fetched = self.engine.codecs[1].announced if self.engine.codecs[1] else ()
        orders: list[Effect] = []
        for shard in range(1, len(placement)):
            low, high = placement.edges[shard : shard + 2]
            parts = () if low == high else tuple(split(low, high, RAW, 0))
            message = LoadShard(
                0,
                {"push_codecs": tuple(sorted(codecs)), "fetch_codec": fetched},
                placement.layout.rows,
                self._shard_table(),
                shard,
                parts,
            )
            views = tuple((effect.data[part.start : part.stop].data,) for part in parts)
            orders.append(Order(shard, message, views))
        return orders

    def _begin_update(self, updating: Updating, effect: Apply) -> list[Effect]:
        """Order all shards to do their part of an update; work on rows is the lead's alone."""
        spread = isinstance(effect.job, UpdateJob | ReplicaJob)
        return [*(updating.begin(effect) if spread else ()), effect]

    def _send(self, effect: Reply) -> list[Effect]:
        """Add the shard table to a reply, or order the followers to send their portions of it."""
        message, placement, orders = effect.message, self.placement, list[Effect]()
        if isinstance(message, Welcome | Model) and not self._broken:
            effect = replace(effect, message=replace(message, shards=self._shard_table()))
        elif isinstance(message, Report):
            report = {**message.report, "shards": self.report()}
            effect = replace(effect, message=replace(message, report=report))
        elif effect.lease is not None and placement is not None and not self._alone:
            client = self._clients.get(effect.peer)
            pieces = [theirs for theirs, _views in placement.divide(message.parts)]  # type: ignore[attr-defined]
            replica = self._of_replica(effect.lease.version)
            ask = send_increments if replica else send_params
            if client is not None:
                for shard, theirs in enumerate(pieces[1:], 1):
                    if theirs:
                        at = *client, effect.lease.version.number
                        orders.append(Order(shard, ask(message.id, *at, theirs)))
            parts = placement.announced(pieces, increments=replica)
            effect = replace(effect, message=replace(message, parts=parts))  # type: ignore[call-arg]
        return [*orders, effect]

    def report(self) -> list[dict[str, Any]]:
        """Return each shard's line of the statistics; ``behind`` is its lag, in versions."""
        version, edges = self.engine.version, []
        versions = self._updating.versions if self._updating else [0] * len(self.addresses)
        if self.placement is not None:
            edges = self.placement.edges
        lines = []
        for shard in range(len(self.addresses) + 1):
            mine = versions[shard - 1] if shard in self._used else version
            host, port = ("", 0) if shard == 0 else self.addresses[shard - 1]
            lines.append(
                {
                    "shard": shard,
                    "host": host,
                    "port": port,
                    "bytes": edges[shard + 1] - edges[shard] if edges else 0,
                    "version": mine,
                    "behind": max(0, max([version, *versions]) - mine),
                    "gone": self._broken.get(shard, ""),
                }
            )
        return lines

    # ------------------------------------------------------------ inside

    def _shard_table(self) -> ShardTable:
        starts = self.placement.starts[1:] if self.placement else [0] * len(self.addresses)
        return tuple((*where, start) for where, start in zip(self.addresses, starts, strict=True))

    def _all(self, message: Message) -> list[Effect]:
        """Return an order for all followers that hold a part of the model."""
        return [Order(shard, message) for shard in self._used]

    @property
    def _used(self) -> Sequence[int]:
        return self.placement.used[1:] if self.placement is not None else ()
