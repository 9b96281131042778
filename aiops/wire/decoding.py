"""Decode and check the header of a received message.

Any bytes become a message whose fields all have their types, or a `RemoteProtocolError` that names
the path of the fault. Until then no memory is allocated that is large relative to the header.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from math import inf
from typing import Any

import msgpack

from aiops.errors import RemoteProtocolError
from aiops.model.parts import LARGEST, Part
from aiops.wire.encoding import KINDS
from aiops.wire.fields import CHECKS, MAX_COUNT, TYPES
from aiops.wire.messages import Message

MAX_PAYLOAD = (1 << 32) - 1
"""Bytes of a payload, at most: its prefix has 32 bits for them."""

_UNSEEN = 1024  # bytes: a longer header is walked through before it is decoded


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Make the message that a header's bytes describe.

    Raises
    ------
    RemoteProtocolError
        Naming the path at which the header is not legal.
    """
    try:
        if len(data) > _UNSEEN:
            _walk(data)
        header = msgpack.unpackb(data, use_list=False, ext_hook=_no_ext, strict_map_key=True)
    except RemoteProtocolError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as err:
        why = str(err) or type(err).__name__
        raise RemoteProtocolError(f"header: not one MessagePack map: {why}") from None
    if type(header) is not dict:
        raise RemoteProtocolError(f"header: a map was expected, not {type(header).__name__}")
    kind: Any = header.get("kind")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RemoteProtocolError(f"header.kind: no message of kind {_short(kind)}")
    known, message = _FIELDS[cls], _new(cls)
    for name, what, check, bounds in known:
        try:
            value = header[name]
        except KeyError:
            raise RemoteProtocolError(f"{kind}.{name}: missing") from None
        if check is None:
            if type(value) is not tuple:
                raise RemoteProtocolError(f"{kind}.parts: a list was expected, not {_short(value)}")
            parts = []
            for item in value:
                if type(item) is tuple and len(item) == 5:
                    start, stop, codec, nbytes, version = item
                    if (
                        type(start) is type(stop) is type(nbytes) is type(version) is int
                        and type(codec) is str
                        and len(codec) <= 32
                        and 0 <= start < stop <= LARGEST
                        and 0 <= nbytes <= MAX_PAYLOAD
                        and 0 <= version <= LARGEST
                    ):
                        parts.append(_part(item))
                        continue
                raise RemoteProtocolError(f"{kind}.parts[{len(parts)}]{_wrong_with(item)}")
            value = tuple(parts)
        elif type(value) is int and bounds is not None:  # most fields: their check in line
            if not bounds[0] <= value <= bounds[1]:
                raise _unexpected(kind, name, what, value)
        elif value is True or value is False:
            if what is not _BOOL:
                raise _unexpected(kind, name, what, value)
        elif value is None:
            if what is not _OPT_REAL:
                raise _unexpected(kind, name, what, value)
        elif type(value) is float:
            if what not in _REALS or not -inf < value < inf:
                raise _unexpected(kind, name, what, value)
        elif (
            (type(value) is bytes and what is _BLOB)
            or (value == () and what in _MAY_BE_EMPTY)
            or (value == "" and what is _REASON)
        ):
            pass
        elif not check(value):
            raise _unexpected(kind, name, what, value)
        setattr(message, name, value)
    if len(header) != 1 + len(known):
        names = {"kind", *(field[0] for field in known)}
        strange = next(key for key in header if key not in names)
        raise RemoteProtocolError(f"{kind}.{_short(strange)}: no such field")
    return message


def _unexpected(kind: str, name: str, what: str, value: object) -> RemoteProtocolError:
    text = f"{kind}.{name}: {what} was expected, not {_short(value)}"
    return RemoteProtocolError(text)


def _walk(data: bytes | bytearray | memoryview) -> None:
    """Check that every list is as long as it announces, without allocating any.

    msgpack allocates a list when it reads its length. A megabyte of lists within lists that each
    announce a million items would take gigabytes before the first missing item is noticed.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


_new: Callable[[type[Message]], Message] = object.__new__
"""Make a message without its `__init__`, which is a call more: the decoder checks every field."""

_part = partial(tuple.__new__, Part)  # what Part(*item) does, in a third of the time


def _wrong_with(item: object) -> str:
    """Return the field of a bad part that is wrong, and the reason."""
    if type(item) is not tuple or len(item) != 5:
        return ": five values were expected"
    field: dict[str, Any] = dict(zip(Part._fields, item, strict=True))
    for name, most in (
        ("start", LARGEST),
        ("stop", LARGEST),
        ("nbytes", MAX_PAYLOAD),
        ("version", LARGEST),
    ):
        got = field[name]
        if type(got) is not int or not 0 <= got <= most:
            return f".{name}: an integer from 0 to {most} was expected, not {_short(got)}"
    if type(field["codec"]) is not str or len(field["codec"]) > 32:
        return ".codec: a codec's name was expected"
    return f": start {field['start']} ≥ stop {field['stop']}"


def _no_ext(code: int, data: bytes) -> object:
    raise RemoteProtocolError(f"header: extension type {code} is not part of the wire")


def _short(value: object) -> str:
    text = reprlib.repr(value)  # not repr: the peer's value may be deep or long
    return text if len(text) <= 60 else text[:57] + "..."


_BOOL, _BLOB, _OPT_REAL, _REASON = (TYPES[name] for name in ("bool", "Blob", "OptReal", "Reason"))
_REALS = TYPES["Real"], _OPT_REAL
_MAY_BE_EMPTY = tuple(TYPES[name] for name in ("Wants", "Gate", "Factors"))
_BOUNDS = {
    "UInt": (0, LARGEST),
    "Have": (-1, LARGEST),
    "Batches": (1, MAX_COUNT),
    "Positive": (1, LARGEST),
}
"""The least and the most that an integer may be, by its type."""

_FIELDS = {
    cls: tuple(
        (f.name, TYPES[str(f.type)], CHECKS.get(str(f.type)), _BOUNDS.get(str(f.type)))
        for f in fields(cls)
    )
    for cls in KINDS.values()
}
