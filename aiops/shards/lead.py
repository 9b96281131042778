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
from aiops.common.generations import next_term
from aiops.common.sent_away import SentAway
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    BudgetTick,
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
    AiopsError,
    RemoteProtocolError,
    RolledBack,
    Unavailable,
    UsageError,
)
from aiops.model.layout import Layout
from aiops.model.parts import LARGEST
from aiops.model.placement import Placement
from aiops.model.row_shards import SPREAD_TABLES
from aiops.shards.budget_shares import BudgetShares
from aiops.shards.collecting import Collecting
from aiops.shards.common_moment import CommonMoment, History
from aiops.shards.counting import TrafficCount, state_of_all, tables_of_all
from aiops.shards.followers import Followers
from aiops.shards.gathering import SpreadPush
from aiops.shards.measuring import PLAN
from aiops.shards.reports import LOST, check_largest, read_fault
from aiops.shards.sharded_model import ShardedModel
from aiops.shards.snapshot_sets import SnapshotSets
from aiops.shards.updating import OnMeasured, Updating
from aiops.store.capture_job import CaptureJob
from aiops.store.gradient import Gradient
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
    sets
        The snapshots that all servers have.
    secret
        The run's, which followers are told; empty: it keeps no state.
    history
        Its generations, which followers are told; empty: it keeps no state.
    """

    def __init__(
        self, engine: Engine, addresses: Sequence[tuple[str, int]], *, kept: bool = False
    ) -> None:
        assert engine.options.shards == len(addresses) + 1
        self.engine, self.kept = engine, kept
        self._handled: Callable[[Event], list[Effect]] = engine.handle
        self._on_measured: OnMeasured = lambda ticket, squares: []
        self._followers = Followers(addresses)
        self._model: ShardedModel | None = None
        self._clients: dict[int, tuple[str, int]] = {}  # id and epoch, by connection
        self._count = TrafficCount(len(addresses))
        self.sets = SnapshotSets()
        self._budgets = BudgetShares(engine.options)
        self._sent_away = SentAway()
        self.secret, self.history = b"", History()
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
        spread = self._model is not None and self._model.spread
        return self._followers.all if spread else ()

    def _closing(self, shards: Iterable[int]) -> list[Order]:
        """Return the orders that have followers take pushes of rows, or none, as the engine does.

        Else one of them could apply its share of a push after the model is saved at the end.
        """
        return [Order(shard, ClosePushes(0, self.engine.closed)) for shard in shards]

    def send_away(self, client: str, why: str) -> list[Order]:
        """Return the orders that have followers take a client no more, for the reason ``why``.

        Its rows go straight to them, whether or not it is connected here.
        """
        self._sent_away.note(client, why)
        return [Order(shard, SendAway(0, client, why)) for shard in self._followers.all]

    @property
    def idle(self) -> bool:
        """True if no update is outstanding and none queued, or none will ever be done."""
        return self.engine.idle or bool(self._followers.lost)

    @property
    def lost(self) -> str:
        """The reason for which followers are lost, empty if none is."""
        return self._followers.why

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
        if model is None or client is None:
            return self.engine.admission.sink_for(message), []
        if self._followers.lost and isinstance(message, Push):
            return model.gathering.refuse(client, message, Unavailable(self._followers.why))
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
        for push in () if self._model is None else self._model.gathering.overdue(now, patience):
            names = ", ".join(self._followers.name(shard) for shard in sorted(push.missing))
            found.append((push.peer, f"portions of its push have not come to {names}"))
        return found

    def late(self, now: float, waits: FailureWaits) -> Mapping[int, str]:
        """Return the followers that others have waited for too long, each with the reason.

        They may answer pings and nothing else; clients are not to wait for them without an end.
        Those that are lost are none: one that comes back is given its orders again.
        """
        why = f"it has not counted its traffic for statistics in {waits.count:.0f} s"
        found = dict.fromkeys(self._count.late(now - waits.count), why)
        if self._model is not None:
            found |= self._model.updating.late(now, waits.work)
        return {shard: why for shard, why in found.items() if shard not in self._followers.lost}

    def collect(self) -> Collecting | None:
        """Begin to collect the current version from all shards; None while it cannot be read.

        Its orders are to be carried out at once.
        """
        return None if self._model is None else self._model.collect(self._followers.why)

    def sink_for_follower(self, shard: int, message: Message) -> Sink:
        """Return the sink of the payloads of a follower's message."""
        if self._model is None or not isinstance(message, ShardParts | StoredRows):
            return Discard()
        return self._model.sink_for_portion(shard, message)

    # ------------------------------------------------------------ clients

    def _on_joined(self, event: Joined) -> list[Effect]:
        hello = event.hello
        waits = self.kept and self._followers.lost
        if waits and isinstance(hello, Hello) and hello.role == "worker":
            refusal = self._followers.unavailable(hello.id, waits=True)
            return [Reply(event.peer, refusal), Drop(event.peer, refusal.text)]
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
        concerned = isinstance(message, Push | Reapply | Fetch)
        if self._model is not None and self._model.spread:
            concerned = concerned or isinstance(message, FetchRows | PushRows)
        if lost and concerned:
            if isinstance(event.sink, PushSink):
                event.sink.free()
            refusal = Reply(event.peer, self._followers.unavailable(message.id))
            return [*self._housekeeping(), refusal]
        if isinstance(message, Stats) and self._model is not None and not lost:
            return [*self._count.ask(event, self._now)]
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
            case ShardState():
                return self._on_state(shard, message)
            case Error():
                why = f"{self._followers.name(shard)} said: {message.text}"
                return self._on_lost(Lost(event.time, shard, why))
            case TrafficCounted():
                return self._report() if self._count.counted(shard, message) else []
            case UpdateDone() if model is not None:
                return self._go_on(model.updating, model.updating.done(event, message))
            case UpdateDone():
                raise RemoteProtocolError(f"shard {shard} did update {message.id} unasked")
            case PushArrived() if model is not None:
                if message.fault.get("code") == LOST:  # the client must open all connections again
                    peer = model.gathering.peer_of(message.id)
                    why = f"its connection to {self._followers.name(shard)} is gone"
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
        if self._model is not None and self._model.updating.concerns(event):
            return self._go_on(self._model.updating, self._model.updating.applied(event))
        return self._decide(event)

    def _go_on(self, updating: Updating, found: Applied | list[Effect]) -> list[Effect]:
        """Let the engine handle `Applied`, unless a shard was lost: then it is never published."""
        if not isinstance(found, Applied):
            return found
        if not self.kept and self._followers.lost:
            return []
        if updating.completed == found.ticket:
            self.updated()
        return self._decide(found)

    def _on_lost(self, event: Lost) -> list[Effect]:
        """Answer all waiting requests: without this follower the model has no further version."""
        followers, model, training = self._followers, self._model, self.engine.training
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
        return effects + self._report()

    # ------------------------------------------------------------ with a state

    def _wait_for_followers(self) -> list[Effect]:
        """End the connections of all clients, which come back when all followers are there."""
        effects: list[Effect] = [Note(f"{self._followers.why}; its state is waited for")]
        if self._model is not None:
            self._model.fail_collecting(self._followers.why)
        effects += self._report()  # statistics wait for no follower
        refusal = self._followers.unavailable(0, waits=True)
        for peer in self._clients:
            effects += [Reply(peer, refusal), Drop(peer, refusal.text)]
        return effects

    def refusal(self, shard: int, state: ShardState) -> AiopsError | None:
        """Return why a follower with this state cannot be led; None if it can.

        `RolledBack`: the lead has to begin again, at an earlier moment that both have.
        """
        moment = CommonMoment({shard: state}, self.history)
        why = self._refusal(shard, state) or self.refused(moment)
        if why:
            return UsageError(why)
        if self.kept and self._model is not None and not self._goes_on(shard, state, moment):
            return RolledBack(
                f"{self._name(shard)} is at version {state.version:,}, and its lead at"
                f" {self.engine.version:,}, or it lacks its part of a push that its lead has: it"
                " has lost its newest rows, or is of another time (of a copy). All servers of the"
                " model go back to the newest moment that they have together: start this one again",
                shard=shard,
            )
        return None

    def _goes_on(self, shard: int, state: ShardState, moment: CommonMoment) -> bool:
        """Return whether a follower is where this lead has it, with no rows of another history."""
        assert self._model is not None, "else it is anywhere"
        return not moment.ahead(LARGEST) and self._model.fits(shard, state)

    @property
    def places(self) -> dict[int, int]:
        """By shard, the number of the place that a standby has taken."""
        return self._followers.places

    def next_place(self, shard: int, generation: int) -> int:
        """Return the number of a place that a standby takes which knows of a generation.

        It begins a term above those of all servers that had the place.
        """
        followers = self._followers
        known = followers.places.get(shard, 0), followers.generations.get(shard, 0)
        return next_term(max(*known, generation), 0)

    def has_begun(self, shard: int) -> bool:
        """Return whether the server that was given a place last has been led there."""
        followers = self._followers
        return followers.generations.get(shard, 0) >= followers.places.get(shard, 0)

    def place_refusal(self, state: ShardState) -> str:
        """Return why a follower's standby that holds this cannot have its place; empty: it can.

        It can if the follower is lost, and the standby has all that any server relies on. None
        does on rows of tables: a client is told of its pushes that the standby lacks.
        """
        if not self.kept or state.shard not in self._followers.all:
            return f"this server leads no shard {state.shard} with a state"
        name = self._name(state.shard)
        if state.shard not in self._followers.lost:
            return f"{name} is there: a standby takes the place of a server that its lead has lost"
        error = self.refusal(state.shard, state)
        if isinstance(error, RolledBack):
            return (
                f"this standby has not got all that {name} had told the other servers, so"
                " acknowledged pushes would be lost: start that server again from its state, or"
                " promote the standby of the lead, which tells workers what they lose"
            )
        return "" if error is None else str(error)

    def refused(self, moment: CommonMoment) -> str:
        """Return why no moment is that of all of some followers; empty: one may be."""
        names = ", ".join(self._followers.name(shard) for shard in moment.strange)
        return names and (
            f"{names}: its last lead is none that this one knows of, so their rows may be others"
            " under the same numbers: give all servers of the model states of one time, or have a"
            " standby fetch its own again, into an empty folder"
        )

    def _refusal(self, shard: int, state: ShardState) -> str:
        run, shards, name = self.engine.options.run, len(self._followers) + 1, self._name(shard)
        if state.kept != self.kept:
            with_state, without = (self._name(0), name) if self.kept else (name, self._name(0))
            return f"{with_state} keeps a state and {without} does not: give both --state, or none"
        if not state.run:
            lacks = self._model is not None and shard not in self._model.loads
            lacks = lacks and "reached" not in state.holds  # else it has lost it
            return f"{name} has no state, and its lead has one of run {run}" if lacks else ""
        if (state.run, state.shard, state.shards) != (run, shard, shards):
            return (
                f"{name} holds shard {state.shard} of {state.shards} of run {state.run}, and is to"
                f" be shard {shard} of {shards} of run {run}: give each server the state it wrote"
            )
        if self._model is None:
            return f"{name} holds a model, and its lead has none: give both the states of one time"
        return ""

    def _name(self, shard: int) -> str:
        return self._followers.name(shard) if shard else "its lead"

    def _on_state(self, shard: int, state: ShardState) -> list[Effect]:
        """Go on with a follower that has come, or come back."""
        lost = self._followers.lost.pop(shard, None)
        self._followers.note(shard, state.holds)
        effects: list[Effect] = []
        if self.secret and not state.run:
            effects.append(Order(shard, ShareSecret(0, self.secret)))
        if self._budgets.any:
            effects.append(self._budgets.order(shard))
        effects += [Order(shard, SendAway(0, *each)) for each in self._sent_away.items()]
        self.sets.holds(shard, state.holds.get("snapshots", ()))
        if state.run and state.holds.get("history", ()) != self.history:
            effects += self._noted(shard)
        if self._model is not None:
            effects += self._with_history(self._model.resume(shard, state, self._now) or [])
        if self.engine.closed and shard in self._rows_on:
            effects += self._closing([shard])
        if lost is None or self._followers.lost:
            return effects
        effects.append(Note(f"{self._name(shard)} is back, and all of the model with it"))
        return effects + [Drop(peer, "all shards are there again") for peer in self._clients]

    def _noted(self, shard: int) -> list[Order]:
        """Return the order that tells a follower of which generation the next ones are."""
        if not self.history:
            return []
        generations, began = zip(*self.history, strict=True)
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

    def move(self, shard: int, host: str, port: int) -> None:
        """Have clients reach a follower at another address from here on."""
        self._followers.move(shard, host, port)

    def journalled_by(
        self, handled: Callable[[Event], list[Effect]], on_measured: OnMeasured
    ) -> None:
        """Have events handled by the engine's recorder, and norms noted in its journal."""
        self._handled, self._on_measured = handled, on_measured
        if self._model is not None:
            self._model.updating.on_measured = on_measured

    def restored(self, training: Training) -> None:
        """Have the model of a snapshot."""
        [effect] = [each for each in training.begun if isinstance(each, DistributeModel)]
        orders = self._distribute(effect, training)
        if self._model is not None:
            self._model.restored([each for each in orders if isinstance(each, Order)])

    def keep_gradient(self, gradient: Gradient) -> None:
        """Have a gradient of a snapshot, which may be applied again."""
        if self._model is not None:
            self._model.keep_gradient(gradient)

    def replayed(self, effects: Sequence[Effect]) -> None:
        """Note the effects of an event that the engine has handled before."""
        training = self.engine.training
        for effect in effects:
            if isinstance(effect, DistributeModel) and training is not None:
                self._distribute(effect, training)
        if self._model is not None:
            self._model.gathering.finished.clear()

    def updated(self) -> None:
        """Note that all shards have done an update, and so keep what they were given before."""
        if self._model is not None and self._model.loads:
            used, loads = self._model.holders, self._model.loads
            self._model.loads = {shard: loads[shard] for shard in loads if shard not in used}

    @property
    def holding(self) -> Sequence[int]:
        """The followers that hold a part of the model."""
        return () if self._model is None else self._model.holders[1:]

    @property
    def updating(self) -> Sequence[int]:
        """The followers that take part in updates: they hold parameters."""
        return () if self._model is None else self._model.placement.used[1:]

    def holders(self, owners: Mapping[str, Any]) -> Sequence[int]:
        """Return the followers that hold a part of the model of a capture."""
        if "model" not in owners:
            return ()
        rows, described = owners["model"]
        options = self.engine.options
        layout = Layout(rows, empty=bool(described))
        if options.spread_tables and described:
            return range(1, options.shards)
        return Placement.even(layout, options.shards, options.shard_bytes).used[1:]

    def spread_to(self, message: Message) -> Sequence[int]:
        """Return the followers that have portions of a push, whose header this is."""
        assert self._model is not None, "a model comes before its pushes"
        assert isinstance(message, Push), "only pushes have portions"
        pieces = self._model.placement.announced_pieces(message.parts)
        return [shard for shard, theirs in enumerate(pieces) if shard and theirs]

    def again(self, number: int, peer: int, message: Push, now: float) -> SpreadPush:
        """Return the sink of a push that came before; see `aiops.shards.gathering.Gathering`."""
        assert self._model is not None, "a model comes before its pushes"
        return self._model.gathering.again(number, peer, message, now)

    def resumed(self, event: Resumed, outstanding: Sequence[Effect]) -> list[Effect]:
        """Go on after a replay, with the engine's effects that are to be carried out still."""
        self._now = max(self._now, event.time)
        if self._model is not None:
            self._model.gathering.begin_numbers(event.generation)
        paced = self._budgets.paced()
        return [*paced, *self._translated(outstanding), *self._decide(event)]

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
        return self._translated(self._handled(event))

    def _translated(self, effects: Sequence[Effect]) -> list[Effect]:
        """Translate the engine's effects into orders."""
        found, training = self._housekeeping(), self.engine.training
        for effect in effects:
            match effect:
                case DistributeModel() if training is not None:
                    found += self._with_history(self._distribute(effect, training))
                case Apply() if self._model is not None and len(self._model.holders) > 1:
                    if isinstance(effect.job, CaptureJob) and effect.job.row:
                        self.sets.begin(effect.job.row)
                    found += self._model.updating.begin(effect, self.engine.version, self._now)
                case Reply():
                    found += self._reply(effect)
                case Shares():
                    found += [effect, *self._weighed(effect)]
                case _:
                    found.append(effect)
        return found

    def _weighed(self, effect: Shares) -> list[Effect]:
        """Tell the followers the changed weights of clients, too."""
        clients = ((self._clients.get(peer), weight) for peer, weight in effect.weights)
        weights = {client[0]: weight for client, weight in clients if client is not None}
        return [self._budgets.order(shard, weights) for shard in self.holding]

    def _housekeeping(self) -> list[Effect]:
        return [] if self._model is None else self._model.housekeeping()

    def _distribute(self, effect: DistributeModel, training: Training) -> list[Effect]:
        """Send each follower its part of the model."""
        engine = self.engine
        spread = engine.options.spread_tables
        given = effect, training, engine.membership, engine.admission
        self._model = model = ShardedModel(*given, spread=spread)
        pushed, fetched = engine.codecs
        plan: dict[str, Any] = {
            "push_codecs": tuple(sorted({codec.name for _pattern, codec in pushed.pairs})),
            "fetch_codec": fetched.announced if fetched else (),
        }
        if training.screen is not None:
            plan[PLAN] = training.screen.compares
        model.updating.on_measured = self._on_measured
        self.sets.servers = model.holders
        orders = model.load(effect, self._followers.table(model.placement), plan)
        if self.kept:
            model.loads = {order.shard: order for order in orders}
        if engine.closed:
            orders += self._closing(self._rows_on)
        return [*self._budgets.placed(effect.placement, rows=model.spread), *orders]

    def _reply(self, effect: Reply) -> list[Effect]:
        """Add the shard table to a reply, or order the followers to send their portions of it."""
        message, model, lease = effect.message, self._model, effect.lease
        if isinstance(message, Welcome | Model) and not self._followers.lost:
            table = self._followers.table(None if model is None else model.placement)
            message = replace(message, shards=table)
            if isinstance(message, Welcome) and self.engine.options.spread_tables:
                message = replace(message, plan={**message.plan, SPREAD_TABLES: True})
            return [replace(effect, message=message)]
        if isinstance(message, Report):
            report = {**message.report, "shards": self.report()}
            report["tables"] = tables_of_all(report["tables"], [*self._count.tables.values()])
            if self.kept:
                states = [self._count.states.get(shard, {}) for shard in self._followers.all]
                report["state"] = state_of_all(report.get("state") or {}, states)
            return [replace(effect, message=replace(message, report=report))]
        if lease is None or model is None or model.alone:
            return [effect]
        return model.send(effect, lease, self._clients.get(effect.peer))
