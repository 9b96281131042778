"""All that hostile peers can be tried against, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiops.lab.torture.attacked import (
    SETTINGS,
    Attacked,
    AttackedServer,
    AttackedWithChecksums,
    AttackPlan,
)
from aiops.lab.torture.attacked_averaging import AttackedAveraging, AttackedRendezvous
from aiops.lab.torture.attacked_roles import AttackedByRoles
from aiops.lab.torture.attacked_shards import AttackedFollower, AttackedShards
from aiops.lab.torture.attacked_standby import AttackedStandby
from aiops.lab.torture.attacked_steady import AttackedSteady

OTHERS: Mapping[str, Callable[[AttackPlan], Attacked]] = {
    "shards": AttackedShards,
    "filtered-shards": AttackedShards,
    "follower": AttackedFollower,
    "standby": AttackedStandby,
    "roles": AttackedByRoles,
    "checksums": AttackedWithChecksums,
    "steady": AttackedSteady,
    "rendezvous": AttackedRendezvous,
    "averaging": AttackedAveraging,
}
"""By variant: what is attacked, if it is not one server."""

VARIANTS = (*SETTINGS, *OTHERS)

OF_FRAMES = tuple(variant for variant in VARIANTS if variant != "averaging")
"""Those whose servers can be handed bytes without a network."""


def attacked(plan: AttackPlan) -> Attacked:
    """Return what a plan attacks."""
    return OTHERS.get(plan.variant, AttackedServer)(plan)
