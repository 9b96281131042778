"""The types of the fields of messages, and the values that each accepts from a peer.

A type is a name with which the fields of `aiops.wire.messages` are annotated. The check of the same
name in `CHECKS` accepts or refuses a received value; `aiops.wire.decoding` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from aiops.model.layout import MAX_TENSORS
from aiops.model.parts import LARGEST, MAX_TEXT
from aiops.model.tables import MAX_TABLES

UInt: TypeAlias = int  # 0 ≤ x ≤ LARGEST
Have: TypeAlias = int  # -1 ("nothing") or a UInt
Batches: TypeAlias = int  # 1 ≤ x ≤ MAX_COUNT
Real: TypeAlias = float  # finite
OptReal: TypeAlias = float | None
Text: TypeAlias = str  # at most 4,096 characters
Reason: TypeAlias = str  # at most MAX_REASON characters
Nonce: TypeAlias = bytes  # 16 to 64 bytes
Bytes32: TypeAlias = bytes  # 32 bytes, or none
Blob: TypeAlias = bytes
Plain: TypeAlias = Mapping[str, Any]  # nested plain values, at most 6 deep
Offered: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape
Rows: TypeAlias = tuple[tuple[str, str, tuple[int, ...], int], ...]  # ... and offset in the arena
Sparse: TypeAlias = tuple[tuple[Any, ...], ...]
# name, rows, width, dtype, initialiser, scale, seed; and most rows and age, if rows are evicted
ShardTable: TypeAlias = tuple[
    tuple[str, int, int], ...
]  # host (empty: the lead's), port, first byte
Gate: TypeAlias = tuple[float, ...]  # c_push, c_fetch; or none
Factors: TypeAlias = tuple[float, ...]  # each from 0 to MOST_FACTOR; none: they are 1
Versions: TypeAlias = tuple[int, ...]  # of the model, and of each table; or none
Members: TypeAlias = tuple[tuple[str, int, bool], ...]  # host, port, whether its model counts
Positive: TypeAlias = int  # 1 ≤ x ≤ LARGEST
Numbers: TypeAlias = tuple[int, ...]  # of tasks, at most MAX_LISTED
Logged: TypeAlias = tuple[tuple[str, float], ...]  # name, a finite number; at most MAX_LOGGED
Examples: TypeAlias = tuple[tuple[int, int, int], ...]  # task, start, stop; at most MAX_LISTED

MAX_COUNT = 1 << 20
"""Most mini-batches that one push may stand for; a gate keeps back a million at most."""

MOST_FACTOR = 100.0
"""Most that a worker may have a learning rate multiplied by."""

MAX_REASON = 256
"""Most characters of the reason for which a push is not used."""

LONGEST = (1 << 63) - 1
"""Largest size of an axis, and largest seed; the layout checks their products."""

MAX_AXES = 32
"""Most axes a tensor may have."""

MAX_LOGGED = 16
"""Most numbers that a client may log at a time."""

MAX_LOGGED_NAME = 64
"""Most bytes of the name of such a number."""

MAX_LISTED = 1024
"""Most tasks, or ranges of examples, that one message may list."""


def _uint(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _have(value: object) -> bool:
    return type(value) is int and -1 <= value <= LARGEST


def _batches(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_COUNT


def _long(value: object) -> bool:
    return type(value) is int and 0 <= value <= LONGEST


def _real(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def _opt_real(value: object) -> bool:
    return value is None or _real(value)


def _text(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _reason(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_REASON


def _bool(value: object) -> bool:
    return type(value) is bool


def _nonce(value: object) -> bool:
    return type(value) is bytes and 16 <= len(value) <= 64


def _bytes32(value: object) -> bool:
    return type(value) is bytes and len(value) in (0, 32)


def _blob(value: object) -> bool:
    return type(value) is bytes


def _plain(value: object) -> bool:
    return type(value) is dict and _plain_value(value, 6)


def _plain_value(value: object, depth: int) -> bool:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return True
    if depth == 0:
        return False
    if type(value) is tuple:
        return all(_plain_value(item, depth - 1) for item in value)
    if type(value) is dict:
        return all(type(k) is str and _plain_value(v, depth - 1) for k, v in value.items())
    return False


def _offered(value: object) -> bool:
    """Check rows of (name, dtype, shape); the layout checks their values."""
    return type(value) is tuple and all(
        type(row) is tuple and len(row) == 3 and _described(row) for row in value
    )


def _rows(value: object) -> bool:
    """Check rows of (name, dtype, shape, offset)."""
    return type(value) is tuple and all(
        type(row) is tuple and len(row) == 4 and _described(row) and _uint(row[3]) for row in value
    )


def _sparse(value: object) -> bool:
    """Check rows of (name, rows, width, dtype, initialiser, scale, seed[, rows, age])."""
    return type(value) is tuple and all(
        type(row) is tuple and len(row) in (7, 9) and _sparse_row(*row) for row in value
    )


def _sparse_row(
    name: object, rows: object, width: object, dtype: object, init: object, *rest: object
) -> bool:
    return (
        (_text(name) and _text(dtype) and _text(init))
        and (_long(rows) and _long(width))
        and (_real(rest[0]) and all(map(_long, rest[1:])))
    )


def _described(row: tuple[Any, ...]) -> bool:
    name, dtype, shape = row[:3]
    if not (_text(name) and _text(dtype) and type(shape) is tuple and len(shape) <= MAX_AXES):
        return False
    return all(_long(size) for size in shape)


def _places(value: object, third: Callable[[object], bool]) -> bool:
    """Check rows of (host, port, something)."""
    return type(value) is tuple and all(
        type(row) is tuple
        and len(row) == 3
        and _text(row[0])
        and _uint(row[1])
        and 0 < row[1] < 1 << 16
        and third(row[2])
        for row in value
    )


def _members(value: object) -> bool:
    """Check rows of (host, port, whether its model counts)."""
    return _places(value, _bool)


def _versions(value: object) -> bool:
    """Check the versions of a model and of its tables, or none."""
    return type(value) is tuple and len(value) <= 1 + MAX_TABLES and all(map(_uint, value))


def _positive(value: object) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


def _numbers(value: object) -> bool:
    return type(value) is tuple and len(value) <= MAX_LISTED and all(map(_uint, value))


def _examples(value: object) -> bool:
    """Check ranges of (task, start, stop), none of them empty."""
    return (
        type(value) is tuple
        and len(value) <= MAX_LISTED
        and all(
            type(row) is tuple and len(row) == 3 and all(map(_uint, row)) and row[1] < row[2]
            for row in value
        )
    )


def _logged(value: object) -> bool:
    """Check pairs of (name, finite number), each name once."""
    return (
        type(value) is tuple
        and len(value) <= MAX_LOGGED
        and all(type(row) is tuple and len(row) == 2 for row in value)
        and all(type(row[0]) is str and len(row[0].encode()) <= MAX_LOGGED_NAME for row in value)
        and all(_real(row[1]) for row in value)
        and len({row[0] for row in value}) == len(value)
    )


def _wants(value: object) -> bool:
    """Check runs of (first tensor, past the last, version held), in order."""
    if type(value) is not tuple:
        return False
    if not value:
        return True
    reached = 0
    for run in value:
        if type(run) is not tuple or len(run) != 3 or not all(map(_have, run)):
            return False
        if not reached <= run[0] < run[1]:
            return False
        reached = run[1]
    return True


def _ranges(value: object) -> bool:
    """Check runs of (start, stop, version), in order."""
    return _wants(value) and all(run[2] >= 0 for run in value)  # type: ignore[attr-defined]


def _shard_table(value: object) -> bool:
    """Check rows of (host, port, first byte)."""
    return _places(value, _uint)


def _gate(value: object) -> bool:
    """Check the two constants of a gate, or none."""
    return value == () or (
        type(value) is tuple and len(value) == 2 and all(_real(c) and c >= 0 for c in value)
    )


def _factors(value: object) -> bool:
    """Check factors of learning rates: none, one for all tensors, or one for each."""
    return (
        type(value) is tuple
        and len(value) <= MAX_TENSORS
        and all(type(each) is float and 0 <= each <= MOST_FACTOR for each in value)
    )


_ACCEPTED: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "UInt": ("an integer from 0 to 2⁵³−1", _uint),
    "Have": ("an integer from −1 to 2⁵³−1", _have),
    "Batches": (f"an integer from 1 to {MAX_COUNT:,}", _batches),
    "Real": ("a finite float", _real),
    "OptReal": ("a finite float or nil", _opt_real),
    "Text": (f"a string of at most {MAX_TEXT:,} characters", _text),
    "Reason": (f"a string of at most {MAX_REASON} characters", _reason),
    "bool": ("a boolean", _bool),
    "Nonce": ("16 to 64 bytes", _nonce),
    "Bytes32": ("32 bytes, or none", _bytes32),
    "Blob": ("bytes", _blob),
    "Plain": ("a map of plain values", _plain),
    "Offered": ("a list of [name, dtype, shape]", _offered),
    "Rows": ("a list of [name, dtype, shape, offset]", _rows),
    "Sparse": ("a list of [name, rows, width, dtype, initialiser, scale, seed(, 2 more)]", _sparse),
    "Wants": ("a list of [first tensor, past the last, version held]", _wants),
    "Ranges": ("a list of [start, stop, version]", _ranges),
    "ShardTable": ("a list of [host, port, first byte]", _shard_table),
    "Gate": ("a list of two constants ≥ 0, or none", _gate),
    "Factors": (f"a list of at most {MAX_TENSORS:,} floats from 0 to {MOST_FACTOR:g}", _factors),
    "Versions": (f"a list of at most {1 + MAX_TABLES:,} versions", _versions),
    "Members": ("a list of [host, port, boolean]", _members),
    "Positive": ("an integer from 1 to 2⁵³−1", _positive),
    "Numbers": (f"a list of at most {MAX_LISTED:,} integers from 0 to 2⁵³−1", _numbers),
    "Logged": (f"a list of at most {MAX_LOGGED} [name, finite float], each name once", _logged),
    "Examples": (f"a list of at most {MAX_LISTED:,} [task, start, stop]", _examples),
}

CHECKS: Mapping[str, Callable[[object], bool]] = {
    name: check for name, (_what, check) in _ACCEPTED.items()
}
"""By type of field: the check of a value. Parts have none: the decoder checks them."""

TYPES: Mapping[str, str] = {
    **{name: what for name, (what, _check) in _ACCEPTED.items()},
    "Parts": "a list of parts",
}
"""The values that each type of field accepts, in words."""
