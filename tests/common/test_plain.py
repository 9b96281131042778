"""Plain values: everything comes back as it was, through MessagePack, and nothing else is taken."""

from __future__ import annotations

import enum
from collections import Counter
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.common.plain import from_plain, to_plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.recursive(SCALARS | st.binary(), lambda each: st.lists(each, max_size=3).map(tuple))
VALUES = st.recursive(
    KEYS,
    lambda each: (
        st.lists(each, max_size=4)
        | st.lists(each, max_size=4).map(tuple)
        | st.dictionaries(KEYS, each, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """A value with the types of its parts: 1, 1.0 and True are equal otherwise."""
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), Counter(repr(typed(item)) for item in value)
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return type(value), value


@given(VALUES)
def test_a_value_comes_back_through_messagepack(value: Any) -> None:
    packed = msgpack.packb(to_plain(value))
    again = from_plain(msgpack.unpackb(packed, strict_map_key=True))
    assert typed(again) == typed(value)


def test_a_container_is_copied() -> None:
    value = {1: [2, {3}]}
    kept = to_plain(value)
    value[1].append(4)
    assert from_plain(kept) == {1: [2, {3}]}


def test_equal_sets_are_written_alike() -> None:
    assert to_plain({1 << 20, 8, 16}) == to_plain({16, 8, 1 << 20})
    assert to_plain({8, "8", None}) == to_plain({None, "8", 8})


class Word(enum.IntEnum):
    """An int that is more than one."""

    ONE = 1


@pytest.mark.parametrize(
    "value", [object(), Counter(), np.int64(1), Word.ONE, [np.zeros(1)], {1: object()}, len]
)
def test_other_classes_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^(object|Counter|int64|Word|ndarray|builtin.*)$"):
        to_plain(value)


@pytest.mark.parametrize("value", [[1], {}, {"a": 1, "b": 2}, {"object": []}, {"int": "x"}])
def test_what_was_never_written_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"plain|invalid literal"):
        from_plain(value)
