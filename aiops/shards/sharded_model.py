"""Everything of a lead that exists once its model is placed on shards.

The lead makes a `ShardedModel` when its engine asks for the model to be distributed. The methods
return the orders that they entail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiops.engine.admission import Admission
from aiops.engine.events import DistributeModel, Effect, Order, Reply
from aiops.engine.membership import Membership
from aiops.engine.training import Training
from aiops.model.layout import split
from aiops.model.placement import RAW
from aiops.shards.collecting import Collecting
from aiops.shards.gathering import Gathering
from aiops.shards.orders import send_increments, send_params
from aiops.shards.updating import Updating
from aiops.store.snapshots import Lease
from aiops.wire.fields import ShardTable
from aiops.wire.messages import Message
from aiops.wire.server_messages import HoldVersion, LoadShard, ShardParts
from aiops.wire.sinks import Discard, Sink


class ShardedModel:
    """One model on several shards, as its lead sees it.

    Parameters
    ----------
    effect
        Its placement and values.
    training, membership, admission
        Those of the engine.

    Attributes
    ----------
    placement
        The bytes of each shard.
    alone
        True if the lead holds all of them: then pushes and fetches are its engine's alone.
    gathering
        The pushes whose portions are arriving.
    updating
        The outstanding update.
    """

    def __init__(
        self,
        effect: DistributeModel,
        training: Training,
        membership: Membership,
        admission: Admission,
    ) -> None:
        self._training, self._membership = training, membership
        self.placement = placement = effect.placement
        self.alone = placement.used == [0]
        self.gathering = Gathering(placement, admission)
        self.updating = Updating(placement, training.of_replica)
        # Versions that followers keep for rules that read them; True: those of the delta replica.
        self._held: set[tuple[int, bool]] = set()
        self._collecting: dict[int, Collecting] = {}
        self._collected = 0

    def _all(self, message: Message) -> list[Effect]:
        """Return an order for all followers that hold a part of the model."""
        return [Order(shard, message) for shard in self.placement.used[1:]]

    def load(
        self, effect: DistributeModel, table: ShardTable, plan: Mapping[str, Any]
    ) -> list[Effect]:
        """Send each follower its part of the model, the shard table, and the codecs in use."""
        placement, orders = self.placement, list[Effect]()
        for shard in range(1, len(placement)):
            low, high = placement.edges[shard : shard + 2]
            parts = () if low == high else tuple(split(low, high, RAW, 0))
            message = LoadShard(0, plan, placement.layout.rows, table, shard, parts)
            views = tuple((effect.data[part.start : part.stop].data,) for part in parts)
            orders.append(Order(shard, message, views))
        return orders

    def housekeeping(self) -> list[Effect]:
        """Free the portions of finished pushes; keep the versions that the rule will read."""
        gathering, training, orders = self.gathering, self._training, list[Effect]()
        finished, gathering.finished[:] = list(gathering.finished), []
        for message in finished:
            orders += self._all(message)
        if training.store.rule.reads:
            held = training.held_versions(self._membership)
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
        for shard, theirs in enumerate(pieces[1:], 1):
            if theirs and client is not None:
                effects.append(Order(shard, order(message.id, *client, version.number, theirs)))
        parts = self.placement.announced(pieces, increments=replica)
        return [*effects, replace(effect, message=replace(message, parts=parts))]  # type: ignore[call-arg]

    # ------------------------------------------------------------ the whole model

    def collect(self, failure: str) -> Collecting | None:
        """Begin to collect the current version from all shards; None while it cannot be read."""
        store = self._training.store
        if not store.readable:
            return None
        self._collected += 1
        collecting = Collecting(self._collected, self.placement, store.lease(), failure)
        if not collecting.done:
            self._collecting[self._collected] = collecting
        return collecting

    def sink_for_portion(self, shard: int, message: ShardParts) -> Sink:
        """Return the sink of a follower's portion of the whole model."""
        collecting = self._collecting.get(message.id)
        return Discard() if collecting is None else collecting.sink(shard, message.parts)

    def portion_came(self, shard: int, message: ShardParts) -> None:
        """Note that a follower's portion of the whole model has come."""
        collecting = self._collecting.get(message.id)
        if collecting is not None and collecting.came(shard):
            del self._collecting[message.id]

    def fail_collecting(self, why: str) -> None:
        """End all collections: a follower is lost."""
        for collecting in self._collecting.values():
            collecting.fail(why)
        self._collecting.clear()
