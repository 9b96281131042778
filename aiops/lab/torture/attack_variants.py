"""All that hostile peers can be tried against, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiops.lab.torture.attacked import SETTINGS, Attacked, AttackedServer, AttackPlan
from aiops.lab.torture.attacked_shards import AttackedFollower, AttackedShards
from aiops.lab.torture.attacked_standby import AttackedStandby

OTHERS: Mapping[str, Callable[[AttackPlan], Attacked]] = {
    "shards": AttackedShards,
    "follower": AttackedFollower,
    "standby": AttackedStandby,
}
"""By variant: what is attacked, if it is not one server."""

VARIANTS = (*SETTINGS, *OTHERS)


def attacked(plan: AttackPlan) -> Attacked:
    """Return what a plan attacks."""
    return OTHERS.get(plan.variant, AttackedServer)(plan)
