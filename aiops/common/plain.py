"""Values as MessagePack carries them, with the types of their containers.

A state that is kept in a file is made of None, booleans, integers, floats, text, bytes, lists, and
maps with text as keys. `to_plain` writes other containers, and integers of more than 64 bits, as a
map of one entry that names the type; `from_plain` makes the same value of that again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCALARS = (type(None), bool, float, str, bytes)
_SEQUENCES: Mapping[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_TYPES: Mapping[str, type] = {name: kind for kind, name in _SEQUENCES.items()}


def to_plain(value: Any) -> Any:
    """Return a value as MessagePack carries it; containers are copied.

    >>> to_plain({1: (2, 3)})
    {'dict': [[1, {'tuple': [2, 3]}]]}

    Raises
    ------
    TypeError
        When it is, or contains, an instance of any other class, which the text names. A derived
        class is another one: it may hold more than its base.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else {"int": str(value)}
    if kind is dict:
        return {"dict": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if kind in (set, frozenset):
        return {_SEQUENCES[kind]: [to_plain(item) for item in _ordered(value)]}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [to_plain(item) for item in value]}
    raise TypeError(kind.__qualname__)


def from_plain(value: Any) -> Any:
    """Return the value of which `to_plain` made this.

    Raises
    ------
    ValueError
        When it is nothing that `to_plain` returns.
    """
    if type(value) is int or type(value) in _SCALARS:
        return value
    if type(value) is not dict or len(value) != 1:
        raise ValueError(f"a plain value was expected, not {type(value).__name__}")
    [(name, content)] = value.items()
    if name == "int":
        return int(content)
    if name == "dict":
        return {from_plain(key): from_plain(item) for key, item in content}
    if name not in _TYPES:
        raise ValueError(f"there is no plain type {name!r}")
    return _TYPES[name](from_plain(item) for item in content)


def _ordered(items: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the items of a set in an order that does not depend on its history."""
    try:
        return sorted(items)
    except TypeError:  # of several types
        return sorted(items, key=repr)
