"""Check what followers report to their lead; write and read faults of portions.

A lead's own part of the model, and all of its clients, outlive whatever a follower says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aiops.errors import Refused, RemoteProtocolError, refusal
from aiops.filters.arithmetic import Values
from aiops.model.layout import Ints
from aiops.model.parts import LARGEST
from aiops.store.finite_guard import LIMIT, largest_sums
from aiops.wire.fields import LONGEST
from aiops.wire.server_messages import ShardState

LOST = "lost"
"""The code of a fault: the client's connection to this shard was lost."""

PROMOTED = "promoted"
"""The key in `ShardState.holds` of a follower that is asked for as if it were a standby still."""

PLACE = "place"
"""The key in `ShardState.holds` of the number of the place that a follower has taken."""

OWN_GENERATION = "generation"
"""The key there of the generation of the follower's own state."""

_VALUES = 1000
"""Most values of a map that clients are told."""

_READ = 1e30
"""Above all values that filters look at: each is below 1e18, times the root of what it stands for,
which is less than all elements of the largest model."""

_DEPTH = 3
"""Most containers of its in each other."""

_LONGEST_TEXT = 1024
"""Most characters or bytes of a text or byte string in it."""


# ---------------------------------------------------------------- the state of a follower


def check_state(state: ShardState) -> None:
    """Check each part of what a follower says that it holds.

    Raises
    ------
    RemoteProtocolError
        When one is not what it has to be.
    """
    for name, (each, what) in _HELD.items():
        found = state.holds.get(name, ())
        if not (isinstance(found, tuple) and all(map(each, found))):
            raise RemoteProtocolError(f"shard_state.holds.{name}: a list of {what} was expected")
    for name in ("reached", PLACE, OWN_GENERATION):
        if not _is_number(state.holds.get(name, 0)):
            raise RemoteProtocolError(f"shard_state.holds.{name}: a number was expected")


def _is_number(found: object) -> bool:
    return type(found) is int and 0 <= found <= LARGEST


def _is_version(found: object) -> bool:
    return isinstance(found, tuple) and [*map(type, found)] == [int, bool] and _is_number(found[0])


def _is_start(found: object) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and all(map(_is_number, found))


_HELD: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "portions": (_is_number, "numbers"),
    "snapshots": (_is_number, "numbers"),
    "versions": (_is_version, "[number, boolean]"),
    "history": (_is_start, "[generation, row]"),
}
"""By key of `ShardState.holds`: the check of each item of a list, and the words for them."""


# ---------------------------------------------------------------- faults of portions


def write_fault(fault: Refused | None) -> dict[str, Any]:
    """Return a fault of a portion as the map that a lead is sent."""
    if fault is None:
        return {}
    return {"code": fault.code, "text": str(fault), "details": fault.details}


def read_fault(reported: Mapping[str, Any]) -> Refused | None:
    """Return the fault that a follower reported, if any."""
    if not reported:
        return None
    code, text = str(reported.get("code", "")), str(reported.get("text", "it cannot be used"))
    details = reported.get("details")
    return refusal(code, text, details if isinstance(details, dict) and is_small(details) else {})


# ---------------------------------------------------------------- sums, and what clients are told


def read_sums(data: bytes, shard: int) -> Ints:
    """Return the sums of an update, int64.

    Raises
    ------
    RemoteProtocolError
        When the bytes are none.
    """
    if len(data) % 8:
        raise RemoteProtocolError(f"shard {shard} has sums of {len(data)} bytes")
    return np.frombuffer(data, "<i8").astype(np.int64)


def check_count(sums: Ints, shard: int, *expected: int) -> None:
    """Check how many sums there are.

    Raises
    ------
    RemoteProtocolError
        When there are not as many as one of those expected.
    """
    if len(sums) not in expected:
        raise RemoteProtocolError(f"shard {shard} has sums of {len(sums)} tensors")


def check_statistic(sums: Ints, sizes: Ints, shard: int) -> None:
    """Check the sums of a statistic by tensor; ``sizes``: the elements that the follower holds.

    Those of all shards together overflow nothing, and the lead takes none for the refusal of an
    update that it has made.

    Raises
    ------
    RemoteProtocolError
        When one is above or below what as many elements can have.
    """
    most = largest_sums(sizes)
    if len(sums) and not ((-most <= sums) & (sums <= most)).all():
        raise RemoteProtocolError(f"shard {shard} has a sum that is none of a statistic")


def check_squares(sums: Ints, shard: int) -> None:
    """Check the sums of squares of groups of a follower's part of a gradient, float64.

    Raises
    ------
    RemoteProtocolError
        When one is below 0, infinite or no number.
    """
    squares = sums.view(np.float64)
    if not (np.isfinite(squares).all() and (squares >= 0).all()):
        raise RemoteProtocolError(f"shard {shard} has measured a norm that is none: {squares}")


def check_largest(largest: float, shard: int) -> None:
    """Check the largest magnitude in a follower's portion of a push.

    Raises
    ------
    RemoteProtocolError
        When it is below 0, no number, or more than the survey of a push lets pass.
    """
    if not 0 <= largest <= LIMIT:
        raise RemoteProtocolError(f"shard {shard} has a largest magnitude of {largest}")


def check_read_gradient(values: Values, shard: int) -> None:
    """Check the values that a follower has read of its portion of a push, float64.

    Raises
    ------
    RemoteProtocolError
        When one is more than a gradient can have, or no number.
    """
    if not np.abs(values).max(initial=0.0) < _READ:
        raise RemoteProtocolError(f"shard {shard} has read values that no gradient has")


def check_read_params(values: Values, shard: int) -> None:
    """Check the values that a follower has read of a version of its parameters, float64.

    Raises
    ------
    RemoteProtocolError
        When one is infinite, or no number.
    """
    if not np.isfinite(values).all():
        raise RemoteProtocolError(f"shard {shard} has read parameters that are not finite")


def is_small(value: object) -> bool:
    """Return whether a plain value is as small as one that clients are told."""
    return _count(value, _DEPTH) <= _VALUES


def _count(value: object, depth: int) -> int:
    """Return the number of values in it; more than `_VALUES` if it is too deep or long."""
    if isinstance(value, str | bytes):
        return 1 if len(value) <= _LONGEST_TEXT else _VALUES + 1
    if isinstance(value, int):
        return 1 if abs(value) <= LONGEST else _VALUES + 1
    if not isinstance(value, Mapping | tuple):
        return 1
    inside = [*value, *value.values()] if isinstance(value, Mapping) else [*value]
    if len(inside) > _VALUES or (inside and not depth):
        return _VALUES + 1
    return 1 + sum(_count(each, depth - 1) for each in inside)
