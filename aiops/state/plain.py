"""Plain values as MessagePack and back, with their types, and arrays among them.

None, booleans, integers of 64 bits, floats, text, bytes, lists, and maps whose keys are plain are
MessagePack's own. Tuples, sets, arrays and larger integers are extension types (`TUPLE` and those
after it), so that a policy finds its attributes as they were. Nothing else can be written: no class
is named in a file, and reading executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgpack
import numpy as np

from aiops.errors import DamagedState, UsageError
from aiops.model.layout import Array, dtype_named

Plain: TypeAlias = Any
"""A value that `pack` can write."""

T = TypeVar("T")

TUPLE, SET, FROZENSET, ARRAY, INTEGER = 1, 2, 3, 4, 5
"""Codes of the extension types.

The data of the first three are the MessagePack of a list; a set's items are in the order of their
encoded bytes. An array's data are the MessagePack of [dtype, shape, elements in C order, little
endian]. An integer's data are its decimal digits.
"""

MAX_NESTED = 16
"""Extension types within each other, at most."""

_UNSEEN = 1024  # bytes: longer values are walked through before they are decoded

_NATIVE = ("bool", "float16", "float32", "float64", "bfloat16")
DTYPES = frozenset((*_NATIVE, *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64))))
"""The dtypes that an array of a state may have."""

_DAMAGE = (ValueError, TypeError, KeyError, msgpack.UnpackException, RecursionError, OverflowError)


def pack(value: Plain) -> bytes:
    """Return a plain value as MessagePack.

    Raises
    ------
    UsageError
        When a part of it is not plain; the text says where and what it is.
    """
    try:
        return _pack(value, MAX_NESTED)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"the state cannot be written: {_fault(value) or error}") from None


def unpack(data: bytes | memoryview, name: str) -> Plain:
    """Return the plain value that these bytes hold.

    Parameters
    ----------
    data
        MessagePack, whole.
    name
        The file's or the row's name, for errors.

    Raises
    ------
    DamagedState
        When they are not one plain value.
    """
    try:
        return _unpack(data, MAX_NESTED)
    except _DAMAGE as error:
        raise DamagedState(f"{name} is damaged: {str(error) or type(error).__name__}") from None


def field(found: Mapping[str, Plain], key: str, kind: type[T], name: str) -> T:
    """Return the value of a key of a map that was read.

    Raises
    ------
    DamagedState
        When it is missing, or not exactly of that type (a boolean is no integer).
    """
    value = found.get(key)
    if type(value) is not kind:
        raise DamagedState(
            f"{name} is damaged: its {key!r} should be {kind.__name__}, not {type(value).__name__}"
        )
    return value


def dtype_of(text: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name.

    Raises
    ------
    ValueError
        When an array of a state cannot have it.
    UsageError
        When it needs a package that is not installed.
    """
    if text not in DTYPES:
        raise ValueError(f"no array has the dtype {text!r:.40}")
    return dtype_named(text) if text == "bfloat16" else np.dtype(text)


def nbytes_of(dtype: np.dtype[Any], shape: Plain) -> int:
    """Return the bytes of an array of this dtype and shape, a list of sizes.

    Raises
    ------
    ValueError
        When the shape is none.
    """
    if type(shape) is not list or len(shape) > 32:
        raise ValueError("a shape is a list of at most 32 sizes")
    if any(type(size) is not int or not 0 <= size < 1 << 63 for size in shape):
        raise ValueError("a shape has sizes from 0 to 2⁶³ − 1")
    # An empty array's other sizes count too: NumPy computes their strides.
    if dtype.itemsize * math.prod(size or 1 for size in shape) >= 1 << 63:
        raise ValueError(f"no memory holds an array of shape {shape!s:.60}")
    return dtype.itemsize * math.prod(shape)


def _pack(value: Plain, depth: int) -> bytes:
    def extension(item: Any) -> msgpack.ExtType:
        if not depth:
            raise ValueError(f"it is more than {MAX_NESTED} tuples, sets or arrays deep")
        kind = type(item)
        if kind is int:
            return msgpack.ExtType(INTEGER, str(item).encode())
        if kind is tuple:
            return msgpack.ExtType(TUPLE, _pack(list(item), depth - 1))
        if kind is set or kind is frozenset:
            items = sorted(_pack(each, depth - 1) for each in item)
            head = msgpack.Packer().pack_array_header(len(items))
            return msgpack.ExtType(SET if kind is set else FROZENSET, head + b"".join(items))
        if kind is np.ndarray and (name := item.dtype.name) in DTYPES:
            little = item.dtype if name == "bfloat16" else item.dtype.newbyteorder("<")
            data = np.ascontiguousarray(item, little).tobytes()
            described = [name, list(item.shape), data]
            return msgpack.ExtType(ARRAY, _pack(described, depth - 1))
        raise TypeError(f"a {kind.__qualname__} is not plain")

    return bytes(msgpack.packb(value, default=extension, strict_types=True))


def _unpack(data: bytes | memoryview, depth: int) -> Plain:
    def extension(code: int, inside: bytes) -> Any:
        if not depth:
            raise ValueError(f"values are more than {MAX_NESTED} extension types deep")
        if code == INTEGER:
            return _integer(inside)
        items = _unpack(inside, depth - 1)
        if type(items) is not list:
            raise ValueError(f"extension type {code} holds no list")
        if code == TUPLE:
            return tuple(items)
        if code == SET:
            return set(items)
        if code == FROZENSET:
            return frozenset(items)
        if code == ARRAY:
            return _array(items)
        raise ValueError(f"extension type {code} is unknown")

    # msgpack allocates a list when it reads its length, so walk through it first: lists within
    # lists that each announce a million items would take gigabytes before one is missed.
    if len(data) > _UNSEEN:
        walker = msgpack.Unpacker(max_buffer_size=len(data))
        walker.feed(data)
        walker.skip()
    return msgpack.unpackb(data, ext_hook=extension, strict_map_key=False)


def _integer(digits: bytes) -> int:
    found = int(digits)
    if str(found).encode() != digits:
        raise ValueError("an integer has digits and nothing else")
    return found


def _array(items: list[Any]) -> Array:
    """Return the array of an extension's data: a copy, writable."""
    name, shape, data = items
    if type(name) is not str or type(data) is not bytes:
        raise ValueError("an array is [dtype, shape, bytes]")
    dtype = dtype_of(name)
    if nbytes_of(dtype, shape) != len(data):
        raise ValueError(f"an array of shape {shape!s:.60} has {len(data)} bytes")
    little = dtype if name == "bfloat16" else dtype.newbyteorder("<")
    return np.frombuffer(data, little).astype(dtype).reshape(shape)


def _fault(value: Any, path: str = "", depth: int = 0) -> str:
    """Return the place and type of the first part that is not plain, or an empty text."""
    kind = type(value)
    at = path or "it"
    if kind in (bool, int, float, str, bytes, type(None)):
        return ""
    if depth > 64:
        return f"{at:.80}... is too deep"
    if kind is dict:
        parts = [(f"{path}[{key!r:.40}]", item) for key, item in value.items()]
        parts += [(f"{at}'s key {key!r:.40}", key) for key in value]
    elif kind in (list, tuple, set, frozenset):
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif kind is np.ndarray:
        return "" if value.dtype.name in DTYPES else f"{at} is an array of {value.dtype.name}"
    else:
        return f"{at} is a {kind.__qualname__}, which is not plain"
    return next(filter(None, (_fault(item, where, depth + 1) for where, item in parts)), "")
