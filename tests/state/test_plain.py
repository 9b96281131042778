"""Plain values keep their types; whatever else is refused, in writing and in reading."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import DamagedState, UsageError
from aiops.model.layout import dtype_named
from aiops.state import plain
from aiops.state.plain import ARRAY, DTYPES, INTEGER, SET, TUPLE, field, nbytes_of, pack, unpack
from tests.rows import each_row

# Deferred, so that hypothesis need not print all of what they are made of.
scalars: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary()
    )
)
hashable: st.SearchStrategy[Any] = st.deferred(
    lambda: scalars | st.tuples(scalars, scalars) | st.frozensets(scalars | st.tuples(scalars))
)
values: st.SearchStrategy[Any] = st.deferred(
    lambda: st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(hashable, inner)
            | st.sets(hashable)
            | st.frozensets(hashable)
        ),
        max_leaves=12,
    )
)


def typed(value: Any) -> Any:
    """A value with all of its types: 1, 1.0 and True are three values."""
    kind = type(value)
    if kind is dict:
        return kind, [(typed(key), typed(item)) for key, item in value.items()]
    if kind in (set, frozenset):
        return kind, frozenset(typed(item) for item in value)
    if kind in (list, tuple):
        return kind, tuple(typed(item) for item in value)
    return kind, str(value) if kind is float else value


@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    data = pack(value)
    assert typed(unpack(data, "it")) == typed(value)
    assert pack(unpack(data, "it")) == data, "dicts keep their order, and sets have one"


@given(values, st.data())
def test_damaged_values_are_refused_or_are_values(value: Any, data: st.DataObject) -> None:
    packed = bytearray(pack(value))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(DamagedState):
        unpack(bytes(packed), "it")


@given(st.binary(max_size=64))
def test_any_bytes(data: bytes) -> None:
    with contextlib.suppress(UsageError):
        pack(unpack(data, "it"))


@each_row("name", sorted(DTYPES))
@each_row("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_arrays(name: str, shape: tuple[int, ...]) -> None:
    dtype = dtype_named(name) if name == "bfloat16" else np.dtype(name)
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    found = unpack(pack({"a": array}), "it")["a"]
    assert (found.dtype, found.shape, found.flags.writeable) == (dtype, shape, True)
    assert found.tobytes() == array.tobytes()


def test_an_array_with_gaps_and_one_of_another_byte_order() -> None:
    array = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(unpack(pack(array), "it"), array)
    swapped = np.array([1.5, 2.5], ">f8")
    assert pack(swapped) == pack(np.array([1.5, 2.5]))


def test_every_bit_of_a_float_is_kept() -> None:
    for bits in (0x7FF8000000000001, 0xFFF0000000000000, 0x8000000000000000, 1):
        value = np.uint64(bits).view(np.float64).item()
        found = unpack(pack(value), "it")
        assert np.float64(found).view(np.uint64) == bits


class Colour(IntEnum):
    RED = 1


class Thing:
    pass


@each_row(
    ("value", "why"),
    [
        ({"a": [1, Thing()]}, r"\['a'\]\[1\] is a Thing, which is not plain"),
        ({"a": np.float64(1)}, r"\['a'\] is a float64, which is not plain"),
        ({"a": Colour.RED}, r"\['a'\] is a Colour, which is not plain"),
        ({"a": OrderedDict()}, r"\['a'\] is a OrderedDict, which is not plain"),
        ({Thing(): 1}, "it's key .* is a Thing"),
        ((np.array([None]),), r"\[0\] is an array of object"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_what_is_not_plain_is_named(value: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        pack(value)


def test_depth() -> None:
    deep: Any = 1
    for _ in range(plain.MAX_NESTED):
        deep = (deep,)
    assert unpack(pack(deep), "it") == deep
    with pytest.raises(UsageError, match="more than 16 tuples"):
        pack((deep,))
    data = pack(deep)
    for _ in range(2):
        data = msgpack.packb(msgpack.ExtType(TUPLE, b"\x91" + data))
    with pytest.raises(DamagedState, match="more than 16 extension types deep"):
        unpack(data, "it")
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="cannot be written"):
        pack(endless)


def extension(code: int, inside: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb(inside))))


@each_row(
    ("data", "why"),
    [
        (b"", "incomplete|not enough|unpack"),
        (b"\x01\x02", "extra data"),
        (b"\xc1", "it is damaged"),
        (b"\x81\x90\x01", "unhashable"),
        (msgpack.packb(msgpack.ExtType(INTEGER, b"1_0")), "digits and nothing else"),
        (msgpack.packb(msgpack.ExtType(INTEGER, b"x")), "invalid literal"),
        (msgpack.packb(msgpack.ExtType(INTEGER, b"9" * 5000)), "limit"),
        (extension(9, []), "extension type 9 is unknown"),
        (extension(TUPLE, 1), "extension type 1 holds no list"),
        (extension(SET, [[]]), "unhashable"),
        (extension(ARRAY, ["float64", [1 << 40], b""]), "has 0 bytes"),
        (extension(ARRAY, ["object", [1], bytes(8)]), "no array has the dtype 'object'"),
        (extension(ARRAY, ["float64", [-1], b""]), "sizes from 0"),
        (extension(ARRAY, ["float64", [True], bytes(8)]), "sizes from 0"),
        (extension(ARRAY, ["float64", [0, 1 << 62, 1 << 62], b""]), "no memory holds"),
        (extension(ARRAY, ["float64", [1] * 33, bytes(8)]), "at most 32 sizes"),
        (extension(ARRAY, ["float64", 1, bytes(8)]), "at most 32 sizes"),
        (extension(ARRAY, [1, [1], bytes(8)]), r"\[dtype, shape, bytes\]"),
        (extension(ARRAY, [[1]]), "not enough values"),
    ],
)
def test_damage_is_a_sentence(data: bytes, why: str) -> None:
    with pytest.raises(DamagedState, match=f"(?i){why}"):
        unpack(data, "it")


def test_announced_lengths_allocate_nothing() -> None:
    """Lists within lists, each of which announces more items than there are bytes left."""
    hostile = (b"\xdd" + (1_000_000).to_bytes(4, "big")) * 200_000
    tracemalloc.start()
    try:
        for data in (hostile, hostile[:-1], b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
            with pytest.raises(DamagedState):
                unpack(data, "it")
        _now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * len(hostile)


def test_fields() -> None:
    found = {"row": 3, "whole": True}
    assert field(found, "row", int, "snapshot-3") == 3
    for key in ("whole", "missing"):
        with pytest.raises(DamagedState, match=f"snapshot-3 is damaged: its '{key}' should be int"):
            field(found, key, int, "snapshot-3")


def test_bytes_of_a_shape() -> None:
    assert nbytes_of(np.dtype(np.float32), [2, 3]) == 24
    assert nbytes_of(np.dtype(np.float32), []) == 4
    assert nbytes_of(np.dtype(np.float32), [0, 7]) == 0
