"""Everything of a lead that exists once its model is placed on shards.

The lead makes a `ShardedModel` when its engine asks for the model to be distributed. The methods
return the orders that they entail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from aiops.engine.admission import Admission
from aiops.engine.events import DistributeModel, Effect, Options, Order, Reply
from aiops.engine.membership import Membership
from aiops.engine.training import Training
from aiops.model.layout import Array, Ints, Layout, split
from aiops.model.placement import RAW, Placement
from aiops.model.row_shards import GIVEN_ROWS, SPREAD_TABLES, shards_of
from aiops.shards.collecting import Collecting
from aiops.shards.gathering import Gathering
from aiops.shards.measuring import Measuring
from aiops.shards.orders import send_increments, send_params
from aiops.shards.stored_rows import CollectedRows
from aiops.shards.updating import Updating
from aiops.store.gradient import Gradient
from aiops.store.snapshots import Lease
from aiops.wire.fields import ShardTable
from aiops.wire.messages import Message, Push
from aiops.wire.server_messages import (
    FinishPush,
    HoldVersion,
    LoadShard,
    ShardParts,
    ShardState,
    StoredRows,
)
from aiops.wire.sinks import Discard, Sink


class ShardedModel:
    """One model on several shards, as its lead sees it.

    Parameters
    ----------
    effect
        Its placement and values.
    training, membership, admission
        Those of the engine.
    spread
        Whether the rows of tables are to lie on all shards.

    Attributes
    ----------
    placement
        The bytes of each shard.
    alone
        True if the lead holds all of them: then pushes and fetches are its engine's alone.
    spread
        True if rows of tables lie on all shards.
    holders
        The shards that hold some of the model, the lead first: parameters, or rows of tables.
    gathering
        The pushes whose portions are arriving.
    measuring
        What followers have read for the filters.
    updating
        The outstanding update.
    loads
        By shard, the order that it begins with, if the lead keeps a state and no update was done
        on all shards yet: one that has kept nothing is given it again.
    """

    def __init__(
        self,
        effect: DistributeModel,
        training: Training,
        membership: Membership,
        admission: Admission,
        *,
        spread: bool = False,
    ) -> None:
        self.spread = spread and bool(training.tables)
        self._training, self._membership = training, membership
        self.placement = placement = effect.placement
        self.alone = placement.used == [0]
        self.gathering = Gathering(placement, admission)
        self.holders: Sequence[int] = range(len(placement)) if self.spread else placement.used
        self.measuring = Measuring(placement, self.gathering, training.screen)
        given = training.of_replica, self.holders, self.gathering.largest, self.measuring
        self.updating = Updating(placement, *given)
        # Versions that followers keep for rules that read them; True: those of the delta replica.
        self._held: set[tuple[int, bool]] = set()
        self.loads: dict[int, Order] = {}
        self._collecting: dict[int, Collecting] = {}
        self._collected = 0

    @property
    def version(self) -> int:
        """The newest version."""
        return self._training.store.version

    def spread_to(self, message: Message) -> Sequence[int]:
        """Return the followers that have portions of a push, whose header this is."""
        assert isinstance(message, Push), "only pushes have portions"
        pieces = self.placement.announced_pieces(message.parts)
        return [shard for shard, theirs in enumerate(pieces) if shard and theirs]

    def updated(self) -> None:
        """Note that all shards have done an update, and so keep what they were given before."""
        if self.loads:
            self.loads = {n: load for n, load in self.loads.items() if n not in self.holders}

    def _all(self, message: Message) -> list[Effect]:
        """Return an order for all followers that hold a part of the model."""
        return [Order(shard, message) for shard in self.placement.used[1:]]

    def load(
        self, effect: DistributeModel, table: ShardTable, plan: Mapping[str, Any]
    ) -> list[Order]:
        """Send each follower its part of the model, the shard table, and the codecs in use."""
        placement, orders = self.placement, list[Order]()
        if self.spread:
            plan = {**plan, SPREAD_TABLES: self._training.tables.described}
        for shard in range(1, len(placement)):
            low, high = placement.edges[shard : shard + 2]
            parts = () if low == high else tuple(split(low, high, RAW, 0))
            views = [(effect.data[part.start : part.stop].data,) for part in parts]
            theirs = [_of_shard(given, shard, len(placement)) for given in effect.rows]
            counts = {GIVEN_ROWS: tuple(len(ids) for ids, _rows in theirs)} if theirs else {}
            for data in (array.reshape(-1).view(np.uint8) for given in theirs for array in given):
                pieces = tuple(split(0, len(data), RAW, 0)) if len(data) else ()
                parts += pieces
                views += [(data[piece.start : piece.stop].data,) for piece in pieces]
            given = {**plan, **counts}, placement.layout.rows, table, shard, parts
            orders.append(Order(shard, LoadShard(0, *given), tuple(views)))
        return orders

    def fits(self, shard: int, state: ShardState) -> bool:
        """Return whether a follower's state can be made that of the lead; as of `resume`."""
        if not state.run and shard not in self.loads:
            return False
        if shard not in self.holders:
            return True
        lacks = self.gathering.lacks(shard, state.holds.get("portions", ()))
        return not lacks and self.updating.fits(shard, state, self.version)

    def resume(self, shard: int, state: ShardState, now: float) -> list[Effect] | None:
        """Make a follower's state that of the lead; None: it cannot be, as it is of another time.

        Then it is at another version, or lacks its portion of a push that the lead's engine has.

        A follower has carried out the orders up to one of them. Its lead may have decided more
        since, of which one update at most.
        """
        if not self.fits(shard, state):
            return None
        effects = list[Effect]()
        if not state.run:
            effects.append(self.loads[shard])
        if shard not in self.holders:
            return effects
        again = self.updating.resume(shard, state, self.version, now)
        known, freed = self.gathering.known, {m.id for m in self.gathering.finished}
        for number in state.holds.get("portions", ()):
            if number not in known and number not in freed:
                effects.append(Order(shard, FinishPush(number, False)))
            elif known.get(number):
                effects.append(Order(shard, FinishPush(number, True)))
        held = {(number, replica) for number, replica in state.holds.get("versions", ())}
        wanted = self._wanted()
        for version, replica in sorted(wanted - held):
            effects.append(Order(shard, HoldVersion(0, version, True, replica)))
        effects += again or []  # it may be computed in place
        for version, replica in sorted(held - wanted):
            effects.append(Order(shard, HoldVersion(0, version, False, replica)))
        return effects

    def _wanted(self) -> set[tuple[int, bool]]:
        """Return the versions that followers are to keep."""
        if not self._training.store.rule.reads:
            return set()
        return self._training.held_versions(self._membership)

    def restored(self, loads: Sequence[Order]) -> None:
        """Continue from a snapshot: all followers with a part of the model have it."""
        self.loads = {each.shard: each for each in loads if each.shard not in self.holders}

    def keep_gradient(self, gradient: Gradient) -> None:
        """Have the portions of a gradient of a snapshot, which may be applied again."""
        if gradient.number:
            self.gathering.keeps(gradient)

    def housekeeping(self) -> list[Effect]:
        """Free the portions of finished pushes; keep the versions that the rule will read."""
        gathering, training, orders = self.gathering, self._training, list[Effect]()
        finished, gathering.finished[:] = list(gathering.finished), []
        for message in finished:
            self.measuring.finished(message.id)
            orders += self._all(message)
        if training.store.rule.reads:
            held = self._wanted()
            for version, replica in sorted(held - self._held):
                orders += self._all(HoldVersion(0, version, True, replica))
            for version, replica in sorted(self._held - held):
                orders += self._all(HoldVersion(0, version, False, replica))
            self._held = held
        return orders

    def send(self, effect: Reply, lease: Lease, client: tuple[str, int] | None) -> list[Effect]:
        """Return a reply cut to the lead's portion, and the orders to send the others."""
        message, version = effect.message, lease.version
        pieces = [theirs for theirs, _views in self.placement.divide(message.parts)]  # type: ignore[attr-defined]
        replica = self._training.of_replica(version)
        order, effects = send_increments if replica else send_params, list[Effect]()
        if self._training.of_evaluation(version):
            order = partial(send_params, evaluation=True)
        for shard, theirs in enumerate(pieces[1:], 1):
            if theirs and client is not None:
                effects.append(Order(shard, order(message.id, *client, version.number, theirs)))
        parts = self.placement.announced(pieces, increments=replica)
        return [*effects, replace(effect, message=replace(message, parts=parts))]  # type: ignore[call-arg]

    # ------------------------------------------------------------ the whole model

    def collect(self, failure: str) -> Collecting | None:
        """Begin to collect the current version from all shards; None while it cannot be read.

        If there is that version for evaluation, as at the end, it is this.
        """
        store, replies = self._training.store, self._training.evaluation
        if not store.readable:
            return None
        evaluation = replies is not None and replies.made
        return self.collect_from(
            replies.evaluation.lease() if replies and evaluation else store.lease(), failure
        )

    def collect_from(self, lease: Lease, failure: str) -> Collecting:
        """Begin to collect the version of this lease from all shards."""
        self._collected += 1
        rows = CollectedRows(self._training.tables, self.holders[1:]) if self.spread else None
        given = self._collected, self.placement, lease, failure, rows
        collecting = Collecting(*given, evaluation=self._training.of_evaluation(lease.version))
        if not collecting.done:
            self._collecting[self._collected] = collecting
        return collecting

    def sink_for_portion(self, shard: int, message: ShardParts | StoredRows) -> Sink:
        """Return the sink of a follower's portion of the whole model, or of its rows."""
        collecting = self._collecting.get(message.id)
        if collecting is None:
            return Discard()
        if isinstance(message, ShardParts):
            return collecting.sink(shard, message.parts)
        return Discard() if collecting.rows is None else collecting.rows.sink(message)

    def portion_came(self, shard: int, message: ShardParts) -> None:
        """Note that a follower's portion of the whole model has come."""
        collecting = self._collecting.get(message.id)
        if collecting is not None and collecting.came(shard, message.parts):
            del self._collecting[message.id]

    def rows_came(self, shard: int, message: StoredRows, sink: Sink | None) -> None:
        """Take rows that a follower has sent."""
        collecting = self._collecting.get(message.id)
        if collecting is not None and collecting.rows_came(shard, message, sink):
            del self._collecting[message.id]

    def fail_collecting(self, why: str) -> None:
        """End all collections: a follower is lost."""
        for collecting in self._collecting.values():
            collecting.fail(why)
        self._collecting.clear()


def holders_in(owners: Mapping[str, Any], options: Options) -> Sequence[int]:
    """Return the followers that hold a part of the model of a capture."""
    if "model" not in owners:
        return ()
    rows, described = owners["model"]
    if options.spread_tables and described:
        return range(1, options.shards)
    layout = Layout(rows, empty=bool(described))
    return Placement.even(layout, options.shards, options.shard_bytes).used[1:]


def _of_shard(given: tuple[Ints, Array], shard: int, shards: int) -> tuple[Ints, Array]:
    """Return those of a table's rows, ids and values, that lie on a shard."""
    ids, rows = given
    mine = shards_of(ids, shards) == shard
    return ids[mine], rows[mine]
