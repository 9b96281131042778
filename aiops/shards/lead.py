"""Lead a sharded model: an engine with the first part of it, and orders to the followers.

::

    events → Lead.handle → Engine.handle → effects → Lead → effects, and orders to the followers

The engine's events and effects are about the whole model. Here a push is held back until every
shard has its portion; an `Apply` becomes an order to each follower, and is `Applied` when all are
done; a reply with parameters becomes the lead's portion, and orders to send the others. The engine
has no knowledge of followers, nor they of the policy (`aiops.shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiops.common.failure_waits import FailureWaits
from aiops.common.sent_away import SentAway
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    BudgetTick,
    Collected,
    Copied,
    DistributeModel,
    Drop,
    Effect,
    Event,
    Joined,
    Left,
    Lost,
    Note,
    Order,
    Paused,
    Received,
    Reply,
    Reported,
    Resumed,
    Shares,
    Stopping,
    Warm,
)
from aiops.engine.receive import PushSink
from aiops.engine.steady import Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.engine.training import Training
from aiops.errors import (
    RemoteProtocolError,
    Unavailable,
)
from aiops.model.row_shards import SPREAD_TABLES
from aiops.shards.budget_shares import BudgetShares
from aiops.shards.collecting import Collecting
from aiops.shards.counting import TrafficCount
from aiops.shards.followers import Followers
from aiops.shards.measuring import PLAN
from aiops.shards.readmission import Readmission
from aiops.shards.reports import LOST, check_largest, read_fault
from aiops.shards.sharded_model import ShardedModel
from aiops.shards.snapshot_sets import SnapshotSets
from aiops.shards.updating import OnMeasured
from aiops.store.capture_job import CaptureJob
from aiops.wire.connection import Connection
from aiops.wire.messages import (
    Error,
    Fetch,
    FetchRows,
    Hello,
    Message,
    Model,
    Push,
    PushRows,
    Reapply,
    Report,
    Stats,
    Welcome,
)
from aiops.wire.server_messages import (
    BudgetUsed,
    ClosePushes,
    KeepSets,
    LoadShard,
    NoteHistory,
    PushArrived,
    SendAway,
    ShardParts,
    ShardState,
    ShareSecret,
    SnapshotSaved,
    StoredRows,
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
    kept
        Whether it keeps a state, and each follower one of its own. Then a follower that is lost is
        waited for.

    Attributes
    ----------
    engine, kept
        As given.
    followers
        Those at the addresses.
    readmission
        Decides which of them can be led. Its history is told to followers.
    model
        The one that is spread; None: there is none yet.
    sets
        The snapshots that all servers have.
    secret
        The run's, which followers are told; empty: it keeps no state.
    """

    def __init__(
        self, engine: Engine, addresses: Sequence[tuple[str, int]], *, kept: bool = False
    ) -> None:
        assert engine.options.shards == len(addresses) + 1
        self.engine, self.kept = engine, kept
        self._handled: Callable[[Event], list[Effect]] = engine.handle
        self._on_measured: OnMeasured = lambda ticket, squares: []
        self.followers = Followers(addresses)
        self.readmission = Readmission(self.followers, engine.options.run, kept=kept)
        self.model: ShardedModel | None = None
        self._clients: dict[int, tuple[str, int]] = {}  # id and epoch, by connection
        self._count = TrafficCount(len(addresses))
        self.sets = SnapshotSets()
        self._budgets = BudgetShares(engine.options)
        self._sent_away = SentAway()
        self.secret = b""
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
            case BudgetTick():
                return self._decide(self._budgets.of_all(event))
            case Stopping() | Paused():
                effects = self._decide(event)
                return [*effects, *self._closing(self._rows_on)]
            case _:
                return self._decide(event)

    @property
    def _rows_on(self) -> Sequence[int]:
        """The followers that rows of tables lie on."""
        spread = self.model is not None and self.model.spread
        return self.followers.all if spread else ()

    def _closing(self, shards: Iterable[int]) -> list[Order]:
        """Return the orders that have followers take pushes of rows, or none, as the engine does.

        Else one of them could apply its share of a push after the model is saved at the end.
        """
        return [Order(shard, ClosePushes(0, self.engine.closure.why)) for shard in shards]

    def send_away(self, client: str, why: str) -> list[Order]:
        """Return the orders that have followers take a client no more, for the reason ``why``.

        Its rows go straight to them, whether or not it is connected here.
        """
        self._sent_away.note(client, why)
        return [Order(shard, SendAway(0, client, why)) for shard in self.followers.all]

    @property
    def idle(self) -> bool:
        """True if no update is outstanding and none queued, or none will ever be done."""
        return self.engine.idle or bool(self.followers.lost)

    @property
    def lost(self) -> str:
        """The reason for which followers are lost, empty if none is."""
        return self.followers.why

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
        model, client = self.model, self._clients.get(peer)
        if model is None or client is None:
            return self.engine.admission.sink_for(message), []
        if self.followers.lost and isinstance(message, Push):
            return model.gathering.refuse(client, message, Unavailable(self.followers.why))
        if isinstance(message, Push) and not model.alone:
            return model.gathering.sink_for(peer, client, message, self._now)
        return self.engine.admission.sink_for(message), []

    def steady(
        self, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return None: a short way would answer without the followers."""
        return None

    def steady_rows(self, peer: int, wire: Connection) -> SteadyRows | None:
        """Return the short way of a connection's messages about the rows that lie here."""
        return self.engine.steady_rows(peer, wire)

    def preparation(self) -> Warm:
        """Return the kernels to compile as soon as the server listens."""
        return self.engine.preparation()

    def overdue(self, now: float, patience: Callable[[int], float]) -> list[tuple[int, str]]:
        """Return the connections whose portions are missing too long, each with the reason."""
        found = []
        for push in () if self.model is None else self.model.gathering.overdue(now, patience):
            names = ", ".join(self.followers.name(shard) for shard in sorted(push.missing))
            found.append((push.peer, f"portions of its push have not come to {names}"))
        return found

    def late(self, now: float, waits: FailureWaits) -> Mapping[int, str]:
        """Return the followers that others have waited for too long, each with the reason.

        They may answer pings and nothing else; clients are not to wait for them without an end.
        Those that are lost are none: one that comes back is given its orders again.
        """
        why = f"it has not counted its traffic for statistics in {waits.count:.0f} s"
        found = dict.fromkeys(self._count.late(now - waits.count), why)
        if self.model is not None:
            found |= self.model.updating.late(now, waits.work)
        return {shard: why for shard, why in found.items() if shard not in self.followers.lost}

    def collect(self) -> Collecting | None:
        """Begin to collect the current version from all shards; None while it cannot be read.

        Its orders are to be carried out at once.
        """
        return None if self.model is None else self.model.collect(self.followers.why)

    def sink_for_follower(self, shard: int, message: Message) -> Sink:
        """Return the sink of the payloads of a follower's message."""
        if self.model is None or not isinstance(message, ShardParts | StoredRows):
            return Discard()
        return self.model.sink_for_portion(shard, message)

    # ------------------------------------------------------------ clients

    def _on_joined(self, event: Joined) -> list[Effect]:
        hello = event.hello
        waits = self.kept and self.followers.lost
        if waits and isinstance(hello, Hello) and hello.role == "worker":
            refusal = self.followers.unavailable(hello.id, waits=True)
            return [Reply(event.peer, refusal), Drop(event.peer, refusal.text)]
        if isinstance(event.hello, Hello):
            self._clients[event.peer] = event.hello.client, event.hello.epoch
        return self._decide(event)

    def _on_left(self, event: Left) -> list[Effect]:
        if self.model is not None:
            self.model.gathering.left(event.peer)
        self._clients.pop(event.peer, None)
        return self._decide(event)

    def _on_received(self, event: Received) -> list[Effect]:
        if self.model is None:
            return self._pass([event])
        return self._pass(self.model.gathering.received(event))

    def _pass(self, events: Sequence[Received]) -> list[Effect]:
        """Let the engine handle messages; the pushes among them have come to all shards."""
        return [effect for event in events for effect in self._pass_one(event)]

    def _pass_one(self, event: Received) -> list[Effect]:
        message, lost = event.message, self.followers.lost
        concerned = isinstance(message, Push | Reapply | Fetch)
        if self.model is not None and self.model.spread:
            concerned = concerned or isinstance(message, FetchRows | PushRows)
        if lost and concerned:
            if isinstance(event.sink, PushSink):
                event.sink.free()
            refusal = Reply(event.peer, self.followers.unavailable(message.id))
            return [*self._housekeeping(), refusal]
        if isinstance(message, Stats) and self.model is not None and not lost:
            return [*self._count.ask(event, self._now)]
        return self._decide(event)

    # ------------------------------------------------------------ followers

    def _on_report(self, event: Reported) -> list[Effect]:
        try:
            return self._handle_report(event)
        except RemoteProtocolError as error:
            return self._on_lost(Lost(event.time, event.shard, str(error)))

    def _handle_report(self, event: Reported) -> list[Effect]:
        message, shard, model = event.message, event.shard, self.model
        match message:
            case ShardState():
                return self._on_state(shard, message)
            case Error():
                why = f"{self.followers.name(shard)} said: {message.text}"
                return self._on_lost(Lost(event.time, shard, why))
            case TrafficCounted():
                if not self._count.counted(shard, message):
                    return []
                return [*self._answer_statistics(), *self._count.next(self._now)]
            case UpdateDone() if model is not None:
                return self._go_on(model, model.updating.done(event, message))
            case UpdateDone():
                raise RemoteProtocolError(f"shard {shard} did update {message.id} unasked")
            case PushArrived() if model is not None:
                if message.fault.get("code") == LOST:  # the client must open all connections again
                    peer = model.gathering.peer_of(message.id)
                    why = f"its connection to {self.followers.name(shard)} is gone"
                    return [] if peer is None else [Drop(peer, why)]
                check_largest(message.largest, shard)
                model.measuring.arrived(message.id, shard, message.seed, message.values)
                found = read_fault(message.fault), message.largest
                return self._pass(model.gathering.arrived(message.id, shard, *found))
            case BudgetUsed():
                self._budgets.reported(shard, message)
            case SnapshotSaved():
                return self.saved(shard, message.id, well=not message.why)
            case ShardParts() if model is not None:
                model.portion_came(shard, message)
            case StoredRows() if model is not None:
                model.rows_came(shard, message, event.sink)
        return []

    def _on_applied(self, event: Applied) -> list[Effect]:
        if self.model is not None and self.model.updating.concerns(event):
            return self._go_on(self.model, self.model.updating.applied(event))
        return self._decide(event)

    def _go_on(self, model: ShardedModel, found: Applied | list[Effect]) -> list[Effect]:
        """Let the engine handle `Applied`, unless a shard was lost: then it is never published."""
        if not isinstance(found, Applied):
            return found
        if not self.kept and self.followers.lost:
            return []
        if model.updating.completed == found.ticket:
            model.updated()
        return self._decide(found)

    def _on_lost(self, event: Lost) -> list[Effect]:
        """Answer all waiting requests: without this follower the model has no further version."""
        followers, model, training = self.followers, self.model, self.engine.training
        if event.shard in followers.lost:
            return []
        followers.lost[event.shard] = event.why
        if model is not None:
            model.updating.lost(event.shard)
        self.sets.lost(event.shard)
        self._budgets.lost(event.shard)
        if self.kept:
            return self._wait_for_followers()
        effects: list[Effect] = [
            Note(f"{followers.why}; this server and the others keep what they have")
        ]
        if training is not None:
            waiting = training.replies.abandon()
            if model is not None and model.spread:
                waiting += training.table_requests.give_up()
                if training.rows_shortcut is not None:
                    training.rows_shortcut.closed = True  # requests for rows are refused
            effects += [Reply(peer, followers.unavailable(id)) for peer, id in waiting]
        if model is not None:
            effects += self._pass(model.gathering.give_up())
            model.fail_collecting(followers.why)
        return effects + self._answer_statistics()

    # ------------------------------------------------------------ with a state

    def _wait_for_followers(self) -> list[Effect]:
        """End the connections of all clients, which come back when all followers are there."""
        effects: list[Effect] = [Note(f"{self.followers.why}; its state is waited for")]
        if self.model is not None:
            self.model.fail_collecting(self.followers.why)
        effects += self._answer_statistics()  # statistics wait for no follower
        refusal = self.followers.unavailable(0, waits=True)
        for peer in self._clients:
            effects += [Reply(peer, refusal), Drop(peer, refusal.text)]
        return effects

    def _on_state(self, shard: int, state: ShardState) -> list[Effect]:
        """Go on with a follower that has come, or come back."""
        lost = self.followers.lost.pop(shard, None)
        self.followers.note(shard, state.holds)
        effects: list[Effect] = []
        if self.secret and not state.run:
            effects.append(Order(shard, ShareSecret(0, self.secret)))
        if self._budgets.any:
            effects.append(self._budgets.order(shard))
        effects += [Order(shard, SendAway(0, *each)) for each in self._sent_away.items()]
        self.sets.holds(shard, state.holds.get("snapshots", ()))
        if state.run and state.holds.get("history", ()) != self.readmission.history:
            effects += self._noted(shard)
        if self.model is not None:
            effects += self._with_history(self.model.resume(shard, state, self._now) or [])
        if self.engine.closure.why and shard in self._rows_on:
            effects += self._closing([shard])
        if lost is None or self.followers.lost:
            return effects
        effects.append(Note(f"{self.followers.name(shard)} is back, and all of the model with it"))
        return effects + [Drop(peer, "all shards are there again") for peer in self._clients]

    def _noted(self, shard: int) -> list[Order]:
        """Return the order that tells a follower of which generation the next ones are."""
        if not self.readmission.history:
            return []
        generations, began = zip(*self.readmission.history, strict=True)
        return [Order(shard, NoteHistory(0, generations, began, began[-1]))]

    def _with_history(self, effects: Sequence[Effect]) -> list[Effect]:
        """Tell each follower that begins with its part of the model of its lead's history, too."""
        found = list[Effect]()
        for effect in effects:
            found.append(effect)
            if isinstance(effect, Order) and isinstance(effect.message, LoadShard):
                found += self._noted(effect.shard)
        return found

    def saved(self, shard: int, cut: int, *, well: bool) -> list[Effect]:
        """Note that a server (0: this one) has synced its snapshot, or has none; return orders."""
        self.sets.saved(shard, cut, well=well)
        return self.remove_snapshots()

    def remove_snapshots(self) -> list[Effect]:
        """Return the orders to remove what no set needs, the lead's own (0) among them."""
        kept = self.sets.kept()
        return [Order(shard, KeepSets(0, kept)) for shard in self.sets.servers if kept]

    def journalled_by(
        self, handled: Callable[[Event], list[Effect]], on_measured: OnMeasured
    ) -> None:
        """Have events handled by the engine's recorder, and norms noted in its journal."""
        self._handled, self._on_measured = handled, on_measured
        if self.model is not None:
            self.model.updating.on_measured = on_measured

    def restored(self, training: Training) -> None:
        """Have the model of a snapshot."""
        [effect] = [each for each in training.begun if isinstance(each, DistributeModel)]
        orders = self._distribute(effect, training)
        if self.model is not None:
            self.model.restored([each for each in orders if isinstance(each, Order)])

    def replayed(self, effects: Sequence[Effect]) -> None:
        """Note the effects of an event that the engine has handled before."""
        training = self.engine.training
        for effect in effects:
            if isinstance(effect, DistributeModel) and training is not None:
                self._distribute(effect, training)
        if self.model is not None:
            self.model.gathering.finished.clear()

    def resumed(self, event: Resumed, outstanding: Sequence[Effect]) -> list[Effect]:
        """Go on after a replay, with the engine's effects that are to be carried out still."""
        self._now = max(self._now, event.time)
        if self.model is not None:
            self.model.gathering.begin_numbers(event.generation)
        paced = self._budgets.paced()
        return [*paced, *self._translated(outstanding), *self._decide(event)]

    def _answer_statistics(self) -> list[Effect]:
        """Answer the requests for statistics, with the traffic that followers have counted."""
        self.engine.membership.counted_by_shards(self._count.clients)
        asked = [event for event in self._count.end() if event.peer in self._clients]
        return [effect for event in asked for effect in self._decide(event)]

    def count_traffic(self) -> list[Effect]:
        """Begin to count the followers' traffic, which `of_all` reports, unless one is lost.

        A follower that never answers is not `late`: metrics have its last count.
        """
        if self.model is None or self.followers.lost:
            return []
        return [*self._count.begin()]

    def of_all(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's statistics with its followers' last counts, and the shards' lines."""
        return self._count.of_all(report, kept=self.kept) | {"shards": self.report()}

    def report(self) -> list[dict[str, Any]]:
        """Return each shard's line of the statistics."""
        model, version = self.model, self.engine.version
        if model is None:
            return self.followers.report(version, None, ())
        return self.followers.report(version, model.placement, model.updating.versions)

    # ------------------------------------------------------------ the engine's effects

    def _decide(self, event: Event) -> list[Effect]:
        """Let the engine handle an event, and translate its effects into orders."""
        if event.time < self._now:  # it waited for others
            event = replace(event, time=self._now)
        return self._translated(self._handled(event))

    def _translated(self, effects: Sequence[Effect]) -> list[Effect]:
        """Translate the engine's effects into orders."""
        found, training = self._housekeeping(), self.engine.training
        for effect in effects:
            match effect:
                case DistributeModel() if training is not None:
                    found += self._with_history(self._distribute(effect, training))
                case Apply() if self.model is not None and len(self.model.holders) > 1:
                    if isinstance(effect.job, CaptureJob) and effect.job.row:
                        self.sets.begin(effect.job.row)
                    found += self.model.updating.begin(effect, self.engine.version, self._now)
                case Reply():
                    found += self._reply(effect)
                case Copied() if self.model is not None:
                    collecting = self.model.collect_from(effect.lease, self.followers.why)
                    found += [*collecting.orders, Collected(collecting)]
                case Shares():
                    found += [effect, *self._weighed(effect)]
                case _:
                    found.append(effect)
        return found

    def _weighed(self, effect: Shares) -> list[Effect]:
        """Tell the followers the changed weights of clients, too."""
        clients = ((self._clients.get(peer), weight) for peer, weight in effect.weights)
        weights = {client[0]: weight for client, weight in clients if client is not None}
        holders = () if self.model is None else self.model.holders[1:]
        return [self._budgets.order(shard, weights) for shard in holders]

    def _housekeeping(self) -> list[Effect]:
        return [] if self.model is None else self.model.housekeeping()

    def _distribute(self, effect: DistributeModel, training: Training) -> list[Effect]:
        """Send each follower its part of the model."""
        engine = self.engine
        spread = engine.options.spread_tables
        given = effect, training, engine.membership, engine.admission
        self.model = self.readmission.model = model = ShardedModel(*given, spread=spread)
        pushed, fetched = engine.codecs
        plan: dict[str, Any] = {
            "push_codecs": tuple(sorted({codec.name for _pattern, codec in pushed.pairs})),
            "fetch_codec": fetched.announced if fetched else (),
        }
        if training.screen is not None:
            plan[PLAN] = training.screen.compares
        model.updating.on_measured = self._on_measured
        self.sets.servers = model.holders
        orders = model.load(effect, self.followers.table(model.placement), plan)
        if self.kept:
            model.loads = {order.shard: order for order in orders}
        if engine.closure.why:
            orders += self._closing(self._rows_on)
        return [*self._budgets.placed(effect.placement, rows=model.spread), *orders]

    def _reply(self, effect: Reply) -> list[Effect]:
        """Add the shard table to a reply, or order the followers to send their portions of it."""
        message, model, lease = effect.message, self.model, effect.lease
        if isinstance(message, Welcome | Model) and not self.followers.lost:
            table = self.followers.table(None if model is None else model.placement)
            message = replace(message, shards=table)
            if isinstance(message, Welcome) and self.engine.options.spread_tables:
                message = replace(message, plan={**message.plan, SPREAD_TABLES: True})
            return [replace(effect, message=message)]
        if isinstance(message, Report):
            return [replace(effect, message=replace(message, report=self.of_all(message.report)))]
        if lease is None or model is None or model.alone:
            return [effect]
        return model.send(effect, lease, self._clients.get(effect.peer))
