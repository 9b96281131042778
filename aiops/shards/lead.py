"""Lead a sharded model: an engine with the first part of it, and orders to the followers.

::

    events → Lead.handle → Engine.handle → effects → Lead → effects, and orders to the followers

The engine's events and effects are about the whole model. Here a push is held back until every
shard has its portion; an `Apply` becomes an order to each follower, and is `Applied` when all are
done; a reply with parameters becomes the lead's portion, and orders to send the others. The engine
has no knowledge of followers, nor they of the policy (`aiops.shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    Told,
    Warm,
)
from aiops.engine.steady import Steady
from aiops.errors import Refused, RemoteProtocolError, Unavailable, refusal
from aiops.model.arena import aligned
from aiops.model.layout import split
from aiops.model.placement import RAW, Placement, empty_cover, ranges_of
from aiops.shards.collecting import Collecting
from aiops.shards.counting import PushCounts
from aiops.shards.follower import LOST
from aiops.shards.gathering import Coming, Gathered, Gathering, Nothing
from aiops.shards.orders import send_increments, send_params
from aiops.shards.updating import Updating
from aiops.store.delta_replica import ReplicaJob
from aiops.store.gradient import Gradient
from aiops.store.parameters import UpdateJob
from aiops.store.snapshots import Version
from aiops.wire.connection import Connection
from aiops.wire.fields import ShardTable
from aiops.wire.messages import (
    CountTraffic,
    Error,
    ExpectPush,
    Fetch,
    FinishPush,
    Hello,
    HoldVersion,
    LoadShard,
    Message,
    Model,
    Push,
    PushArrived,
    Reapply,
    Report,
    ShardParts,
    Stats,
    TrafficCounted,
    UpdateDone,
    Welcome,
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
        self._gathering = Gathering(self._ready)
        self._clients: dict[int, tuple[str, int]] = {}  # id and epoch, by connection
        self._numbers = 0  # pushes so far
        self._updating = Updating(
            len(addresses), self._order, lambda effect: self._out.append(effect), self._of_replica
        )
        # Versions that followers keep for rules that read them; True: those of the delta replica.
        self._held: set[tuple[int, bool]] = set()
        self._broken: dict[int, str] = {}  # followers that are lost: the reason of each
        self._nothing = Gradient(aligned(0), empty_cover())
        self._counting: PushCounts | None = None
        self._counts = 0
        self._collecting: dict[int, Collecting] = {}
        self._collected = 0
        self._out: list[Effect] = []

    # ------------------------------------------------------------ the shell's calls

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
        else:
            self._decide(event)
        out, self._out = self._out, []
        return out

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

    def sink_for(self, peer: int, message: Message) -> Sink | None:
        """Return the sink of a message's payloads, or None if there is no room now: call `wait`.

        A push is announced to the followers here, so that they have room for its portions.
        """
        placement = self.placement
        if not isinstance(message, Push) or placement is None or peer not in self._clients:
            return self.engine.sink_for(peer, message)
        if self._alone and not self._broken:
            return self.engine.sink_for(peer, message)
        try:
            if self._broken:
                raise Unavailable(self._why())
            pieces = placement.announced_pieces(message.parts)
            cover = placement.cover(pieces)
        except Refused as fault:
            return self._refused(peer, message, fault)
        sink: Any = Nothing()
        if pieces[0]:
            sink = self.engine.sink_for(peer, replace(message, parts=tuple(pieces[0])))
            if sink is None:
                return None
        if isinstance(sink, Discard):
            return self._refused(peer, message, sink.fault)
        # Announced only with room on the lead: so all shards grant room in one order, and two
        # pushes cannot wait for each other.
        self._numbers += 1
        missing = {shard for shard in range(1, len(placement)) if pieces[shard]}
        nbytes = sum(part.nbytes for shard in missing for part in pieces[shard])
        coming = Coming(self._numbers, peer, sink, cover, missing, self.engine.now, nbytes, pieces)
        self._gathering.begin(coming)
        for shard in sorted(missing):
            ranges = ranges_of(pieces[shard])
            self._order(shard, ExpectPush(coming.number, *self._clients[peer], message.id, ranges))
        return coming.sink

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return None: a short way would answer without the followers."""
        return None

    def flush(self) -> list[Effect]:
        """Return the orders that calls of `sink_for` have given."""
        out, self._out = self._out, []
        return out

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

    def _on_joined(self, event: Joined) -> None:
        if isinstance(event.hello, Hello):
            self._clients[event.peer] = event.hello.client, event.hello.epoch
        self._decide(event)

    def _on_left(self, event: Left) -> None:
        for coming in self._gathering.left(event.peer):
            if isinstance(coming.sink, Nothing | Discard):
                coming.sink.abandoned()
            else:
                coming.sink.free()
            self._forget(coming.number, False)
        self._clients.pop(event.peer, None)
        self._decide(event)

    def _on_received(self, event: Received) -> None:
        if self._alone and not self._broken and not isinstance(event.message, Stats):
            self._decide(event)
        else:
            self._gathering.received(event)

    def _ready(self, event: Received, coming: Coming | None) -> None:
        """Let the engine handle a message; if it is a push, it has come to all shards."""
        event = replace(event, time=max(event.time, self.engine.now))
        if coming is not None and coming.cover is not None:
            forget = partial(self._forget, coming.number)
            event = replace(event, sink=Gathered(coming, self._nothing, forget))
        if self._broken and isinstance(event.message, Push | Reapply | Fetch):
            if isinstance(event.sink, Gathered):
                event.sink.free()
            self._out.append(Reply(event.peer, self._unavailable(event.message.id)))
            return
        if isinstance(event.message, Stats) and not self._broken and self.placement is not None:
            self._count(event)
            return
        if isinstance(event.message, Push) and coming is not None and coming.pieces:
            whole = tuple(part for theirs in coming.pieces for part in theirs)
            event = replace(event, message=replace(event.message, parts=whole))
        self._decide(event)

    def _count(self, event: Received) -> None:
        """Order the followers to count their traffic, before the engine reports."""
        if self._counting is None:
            self._counts += 1
            self._counting = PushCounts(self._counts, len(self.addresses))
            for shard in range(1, len(self.addresses) + 1):
                self._order(shard, CountTraffic(self._counts))
        self._counting.asked.append(event)

    def _on_counted(self, shard: int, message: TrafficCounted) -> None:
        counting = self._counting
        if counting is not None and counting.counted(message.id, shard, message.clients):
            self._report(counting)

    def _report(self, counting: PushCounts) -> None:
        self._counting = None
        for member in self.engine.membership:
            member.apart = counting.clients.get(member.client, member.apart)
        for event in counting.asked:
            if event.peer in self._clients:
                self._decide(replace(event, time=self.engine.now))

    def _refused(self, peer: int, message: Push, fault: Exception | None) -> Discard:
        """Discard the portions of a push that is refused, on all shards."""
        self._numbers += 1
        sink = Discard(fault)
        self._gathering.begin(
            Coming(self._numbers, peer, sink, None, set(), self.engine.now, 0, ())
        )
        if any(not part.nbytes for part in message.parts):
            self._all(ExpectPush(self._numbers, *self._clients[peer], message.id, ()))
        return sink

    def _forget(self, number: int, keep: bool) -> None:
        self._all(FinishPush(number, keep))

    # ------------------------------------------------------------ followers

    def _on_told(self, event: Told) -> None:
        self.engine.now = max(self.engine.now, event.time)
        try:
            self._hear(event)
        except RemoteProtocolError as error:
            self._on_lost(Lost(event.time, event.shard, str(error)))

    def _hear(self, event: Told) -> None:
        message = event.message
        if isinstance(message, PushArrived):
            if message.fault.get("code") == LOST:  # the client must open all connections anew
                peer = self._gathering.peer_of(message.id)
                if peer is not None:
                    why = f"its connection to {self._name(event.shard)} is gone"
                    self._out.append(Drop(peer, why))
                return
            self._gathering.arrived(message.id, event.shard, _fault(message.fault))
        elif isinstance(message, UpdateDone):
            self._done(self._updating.done(event, message))
        elif isinstance(message, TrafficCounted):
            self._on_counted(event.shard, message)
        elif isinstance(message, ShardParts):
            collecting = self._collecting.get(message.id)
            if collecting is not None and collecting.came(event.shard):
                del self._collecting[message.id]
        elif isinstance(message, Error):
            why = f"{self._name(event.shard)} said: {message.text}"
            self._on_lost(Lost(event.time, event.shard, why))

    def _on_applied(self, event: Applied) -> None:
        if self._updating.concerns(event):
            self._done(self._updating.applied(event))
        else:
            self._decide(event)

    def _done(self, applied: Applied | None) -> None:
        """Let the engine handle `Applied`, unless a shard was lost: then it is never published."""
        if applied is not None and not self._broken:
            self._decide(applied)

    def _on_lost(self, event: Lost) -> None:
        """Answer all waiting requests: without this follower the model has no further version."""
        if event.shard in self._broken:
            return
        self._broken[event.shard] = event.why
        self._out.append(Note(f"{self._why()}; this server and the others keep what they have"))
        self.engine.now = max(self.engine.now, event.time)
        if self.engine.training is not None:
            for peer, id in self.engine.training.replies.abandon():
                self._out.append(Reply(peer, self._unavailable(id)))
        self._gathering.despair()
        if self._counting is not None:
            self._report(self._counting)
        for collecting in self._collecting.values():
            collecting.fail(self._why())
        self._collecting.clear()

    def _of_replica(self, version: Version) -> bool:
        training = self.engine.training
        return training is not None and training.of_replica(version)

    def _unavailable(self, id: int) -> Error:
        text = f"{self._why()}; start the servers anew, from the last --save"
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
                self._order(shard, send_params(self._collected, "", 0, store.version, parts))
        return collecting

    def sink_for_follower(self, shard: int, message: Message) -> Sink:
        """Return the sink of the payloads of a follower's message."""
        collecting = self._collecting.get(message.id)
        if collecting is None or not isinstance(message, ShardParts):
            return Discard()
        return collecting.sink(shard, message.parts)

    # ------------------------------------------------------------ the engine's effects

    def _decide(self, event: Event) -> None:
        """Let the engine handle an event, and translate its effects into orders."""
        begun = len(self._out)
        effects = self.engine.handle(event)
        self._hold()
        for effect in effects:
            translate = _EFFECTS.get(type(effect))
            if translate is None:
                self._out.append(effect)
            else:
                translate(self, effect)
        if any(
            type(effect) is DistributeModel for effect in effects
        ):  # `LoadShard` precedes all other orders
            mine = self._out[begun:]
            mine.sort(key=lambda e: not (type(e) is Order and type(e.message) is LoadShard))
            self._out[begun:] = mine

    def _hold(self) -> None:
        """Order followers to keep the versions that the rule will compare gradients with."""
        training = self.engine.training
        if training is None or not training.store.rule.reads or self.placement is None:
            return
        held = training.held_versions(self.engine.membership)
        for version, shadow in sorted(held - self._held):
            self._all(HoldVersion(0, version, True, shadow))
        for version, shadow in sorted(self._held - held):
            self._all(HoldVersion(0, version, False, shadow))
        self._held = held

    def _on_hand(self, effect: DistributeModel) -> None:
        self.placement = placement = effect.placement
        self._alone = placement.used == [0]
        self._updating.defined(placement)
        codecs = {codec.name for _pattern, codec in self.engine.codecs[0].pairs}
        fetched = self.engine.codecs[1].announced if self.engine.codecs[1] else ()
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
            self._out.append(Order(shard, message, views))

    def _on_apply(self, effect: Apply) -> None:
        if isinstance(effect.job, UpdateJob | ReplicaJob) and not self._alone:
            self._updating.begin(effect)
        self._out.append(effect)

    def _on_reply(self, effect: Reply) -> None:
        message, placement = effect.message, self.placement
        if isinstance(message, Welcome | Model) and not self._broken:
            effect = replace(effect, message=replace(message, shards=self._shard_table()))
        elif isinstance(message, Report):
            report = {**message.report, "shards": self.report()}
            effect = replace(effect, message=replace(message, report=report))
        elif effect.lease is not None and placement is not None and not self._alone:
            client = self._clients.get(effect.peer)
            pieces = [theirs for theirs, _views in placement.divide(message.parts)]  # type: ignore[attr-defined]
            shadow = self._of_replica(effect.lease.version)
            ask = send_increments if shadow else send_params
            if client is not None:
                for shard, theirs in enumerate(pieces[1:], 1):
                    if theirs:
                        at = *client, effect.lease.version.number
                        self._order(shard, ask(message.id, *at, theirs))
            parts = placement.announced(pieces, increments=shadow)
            effect = replace(effect, message=replace(message, parts=parts))  # type: ignore[call-arg]
        self._out.append(effect)

    def report(self) -> list[dict[str, Any]]:
        """Return each shard's line of the statistics; ``behind`` is its lag, in versions."""
        version, edges = self.engine.version, []
        if self.placement is not None:
            edges = self.placement.edges
        lines = []
        for shard in range(len(self.addresses) + 1):
            mine = self._updating.versions[shard - 1] if shard in self._used else version
            host, port = ("", 0) if shard == 0 else self.addresses[shard - 1]
            lines.append(
                {
                    "shard": shard,
                    "host": host,
                    "port": port,
                    "bytes": edges[shard + 1] - edges[shard] if edges else 0,
                    "version": mine,
                    "behind": max(0, max([version, *self._updating.versions]) - mine),
                    "gone": self._broken.get(shard, ""),
                }
            )
        return lines

    # ------------------------------------------------------------ inside

    def _shard_table(self) -> ShardTable:
        starts = self.placement.starts[1:] if self.placement else [0] * len(self.addresses)
        return tuple((*where, start) for where, start in zip(self.addresses, starts, strict=True))

    def _order(self, shard: int, message: Message) -> None:
        self._out.append(Order(shard, message))

    def _all(self, message: Message) -> None:
        """Send an order to all followers that hold a part of the model."""
        for shard in self._used:
            self._order(shard, message)

    @property
    def _used(self) -> Sequence[int]:
        return self.placement.used[1:] if self.placement is not None else ()


def _fault(told: Mapping[str, Any]) -> Refused | None:
    """Return the fault that a follower reported, if any."""
    if not told:
        return None
    details = told.get("details")
    return refusal(
        str(told.get("code", "")),
        str(told.get("text", "it cannot be used")),
        details if isinstance(details, dict) else {},
    )


_HANDLERS: dict[type, Callable[[Lead, Any], None]] = {
    Joined: Lead._on_joined,
    Left: Lead._on_left,
    Received: Lead._on_received,
    Applied: Lead._on_applied,
    Told: Lead._on_told,
    Lost: Lead._on_lost,
}

_EFFECTS: dict[type, Callable[[Lead, Any], None]] = {
    DistributeModel: Lead._on_hand,
    Apply: Lead._on_apply,
    Reply: Lead._on_reply,
}
