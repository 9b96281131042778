"""Templates of headers: messages that are equal to an earlier one but for a few numbers.

A header is MessagePack, and a peer that sends the same message again and again sends the same bytes
but for the values of some integers and floats, as long as these keep their width. Where those lie
is learnt by walking one such header; from then on the message is packed, or taken apart, by one
call of `struct`, and compared to the first by one comparison. A header that differs in any other
byte does not match, and is decoded as any header is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from aiops.model.parts import LARGEST

MOST: Final = LARGEST
"""The largest integer that the wire allows."""

Path = tuple[str | int, ...]
"""Where a value stands in a header: the keys of maps and the indices of lists that lead to it."""

_PREFIX = struct.Struct(">BI")
_HEADER, _PAYLOAD = 0xCE, 0xC6

# by first byte: format of the value, its length, and what an encoder that wastes no byte puts there
_INTEGERS: Mapping[int, tuple[str, int, int, int]] = {
    0xCC: ("B", 1, 1 << 7, (1 << 8) - 1),
    0xCD: ("H", 2, 1 << 8, (1 << 16) - 1),
    0xCE: ("I", 4, 1 << 16, (1 << 32) - 1),
    0xCF: ("Q", 8, 1 << 32, MOST),
}
_FLOATS = {0xCA: ("f", 4), 0xCB: ("d", 8)}
_BINARIES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LISTS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}
_OTHERS = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


class Field(NamedTuple):
    """A value of a header: its bytes are [start, stop), as `struct` names it by ``form``.

    ``least`` and ``most`` bound the integers that its writer puts into these bytes. ``form`` is
    empty if the value is of a kind that does not vary.
    """

    start: int
    stop: int
    form: str
    least: int = 0
    most: int = 0


class Template:
    """The bytes of a message up to its only payload, but for some of its fields.

    Parameters
    ----------
    header
        A header, complete.
    nbytes
        The length of the payload that follows it.
    varying
        The fields that may vary (two at least), in the order in which they are packed and taken
        apart.
    optional
        Those that may be absent or nil as well; they then do not vary.

    Attributes
    ----------
    size
        Length in bytes of the header with its prefix, and of the payload's prefix.
    bounds
        The least and the most integer of each varying field: outside of these the writer would use
        another width. Of floats and binaries (0, 0).
    lacking
        Which of the optional fields are.

    Raises
    ------
    ValueError
        When a field is not there, or is of a form that cannot vary.
    """

    __slots__ = ("_constants", "_order", "_pick", "_struct", "bounds", "lacking", "size")

    def __init__(
        self,
        header: bytes,
        nbytes: int,
        varying: Sequence[Path],
        optional: Sequence[Path] = (),
    ) -> None:
        found = dict(_value(header, 0, ()))
        fields: list[Field] = []
        self.lacking: list[Path] = []
        for path in varying:
            field = found.get(path)
            if field is not None and field.form:
                fields.append(field)
            elif path in optional:
                self.lacking.append(path)
            else:
                raise ValueError(f"no number that may vary at {path}")
        self.bounds = [(field.least, field.most) for field in fields]
        whole = _PREFIX.pack(_HEADER, len(header)) + header + _PREFIX.pack(_PAYLOAD, nbytes)
        constants, form, reached = [], ">", 0
        order = sorted(range(len(fields)), key=lambda number: fields[number].start)
        for number in order:
            field = fields[number]
            start, stop = field.start + _PREFIX.size, field.stop + _PREFIX.size
            constants.append(whole[reached:start])
            form += f"{start - reached}s{field.form}"
            reached = stop
        constants.append(whole[reached:])
        self._struct = struct.Struct(f"{form}{len(whole) - reached}s")
        self._constants = tuple(constants)
        self._order = order
        self._pick: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(
            *(2 * order.index(number) + 1 for number in range(len(fields)))
        )
        self.size = self._struct.size

    def pack(self, *values: Any) -> bytes:
        """Return the bytes with these values, in the order of ``varying``."""
        items: list[Any] = []
        for constant, number in zip(self._constants, self._order, strict=False):
            items += (constant, values[number])
        return self._struct.pack(*items, self._constants[-1])

    def matches(self, header: bytes, nbytes: int) -> bool:
        """Return whether a header, with a payload of ``nbytes`` to follow, matches."""
        whole = _PREFIX.pack(_HEADER, len(header)) + header + _PREFIX.pack(_PAYLOAD, nbytes)
        return len(whole) == self.size and self.values(memoryview(whole)) is not None

    def values(self, data: memoryview) -> tuple[Any, ...] | None:
        """Return the values, in the order of ``varying``, if these bytes match; else None."""
        items = self._struct.unpack_from(data)
        if items[::2] != self._constants:
            return None
        return self._pick(items)


def _length(data: bytes, at: int, form: str) -> tuple[int, int]:
    """Return where what a length announces begins, and the length."""
    [count] = struct.unpack_from(form, data, at + 1)
    return at + 1 + struct.calcsize(form), count


def _value(data: bytes, at: int, path: Path) -> Generator[tuple[Path, Field], None, int]:
    """Yield the values that are no maps or lists from a place on; return where they end."""
    mark = data[at]
    if mark <= 0x7F:
        yield path, Field(at, at + 1, "B", 0, 0x7F)
        return at + 1
    if mark >= 0xE0:
        yield path, Field(at, at + 1, "")
        return at + 1
    if mark in _INTEGERS:
        form, size, least, most = _INTEGERS[mark]
        start, stop = at + 1, at + 1 + size
        if int.from_bytes(data[start:stop]) < least:  # its writer does not mind the width
            least, most = 0, (1 << 8 * size) - 1 if size < 8 else MOST
        yield path, Field(start, stop, form, least, most)
        return stop
    if mark in _FLOATS:
        form, size = _FLOATS[mark]
        yield path, Field(at + 1, at + 1 + size, form)
        return at + 1 + size
    if mark in _OTHERS:
        yield path, Field(at, at + 1 + _OTHERS[mark], "")
        return at + 1 + _OTHERS[mark]
    if mark in _BINARIES:
        start, count = _length(data, at, _BINARIES[mark])
        yield path, Field(start, start + count, f"{count}s" if count else "")
        return start + count
    if 0xA0 <= mark <= 0xBF or mark in _TEXTS:
        start, count = (at + 1, mark & 0x1F) if mark <= 0xBF else _length(data, at, _TEXTS[mark])
        yield path, Field(start, start + count, "")
        return start + count
    if 0x90 <= mark <= 0x9F or mark in _LISTS:
        at, count = (at + 1, mark & 0xF) if mark <= 0x9F else _length(data, at, _LISTS[mark])
        for index in range(count):
            at = yield from _value(data, at, (*path, index))
        return at
    if 0x80 <= mark <= 0x8F or mark in _MAPS:
        at, count = (at + 1, mark & 0xF) if mark <= 0x8F else _length(data, at, _MAPS[mark])
        for _ in range(count):
            _path, key = next(_value(data, at, ()))  # a string: it is one value
            name = data[key.start : key.stop].decode()
            at = yield from _value(data, key.stop, (*path, name))
        return at
    raise ValueError(f"a value that begins with {mark:#04x}")
