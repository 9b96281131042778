"""Templates: match and write headers that differ only in a few values of fixed width.

From one exchange to the next only some integers of a header change: the request's id, the sequence
number, the versions. A `Template` is learnt from one header, with any order of keys and any widths
of integers. Another header is then compared with it, and its values are read, by a
single `struct` call; an answer is written by one. Both sides have templates of both messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from aiops.model.parts import LARGEST

PREFIX = 5
"""Bytes before a header, and before each payload."""

Path: TypeAlias = tuple[str | int, ...]
"""A value's path in a header: keys of maps and indices of lists, from the outermost in."""

_FIXED = {0xCA: "f", 0xCB: "d", 0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q"} | {
    0xD0: "b",
    0xD1: "h",
    0xD2: "i",
    0xD3: "q",
}
"""The `struct` codes of MessagePack's numbers of fixed width, by the byte that precedes them."""

_UNSIGNED = {0xCC: (1 << 7, 1), 0xCD: (1 << 8, 2), 0xCE: (1 << 16, 4), 0xCF: (1 << 32, 8)}
"""The least integer for which an encoder needs this form, and its width in bytes."""

_LENGTHS = {
    0xC4: 1,
    0xC5: 2,
    0xC6: 4,  # bytes
    0xD9: 1,
    0xDA: 2,
    0xDB: 4,  # text
    0xDC: 2,
    0xDD: 4,
    0xDE: 2,
    0xDF: 4,  # lists and maps
}
_SMALL = 0x7F  # the largest integer in the shortest form
_BYTES, _TEXTS, _LISTS = (0xC4, 0xC5, 0xC6), (0xD9, 0xDA, 0xDB), (0xDC, 0xDD)


class Slot(NamedTuple):
    """A value of a header: the begin and end of its bytes, and their `struct` code.

    ``least`` and ``most`` bound the unsigned integers that the header's writer puts into these
    bytes; an integer outside of them may have another width. Of other values they are 0.
    """

    path: Path
    begin: int
    end: int
    code: str
    least: int = 0
    most: int = 0


class Template:
    """A run of bytes in which only some values vary.

    Parameters
    ----------
    data
        The bytes that it is learnt from.
    slots
        The values that vary, in the order in which `values` is to return them.

    Attributes
    ----------
    size
        Bytes of the run.
    data, slots
        As given.
    bounds
        The `Slot.least` and `Slot.most` of each value that varies.
    unpack, constants, pick
        The steps of `values`, for callers in a hurry: unpack all pieces of the bytes from an
        offset on; the values that every second piece must have; pick the others in order.
    pack, pieces
        The same for `filled`: the pieces, every second of which is a value, to be packed.
    """

    constants: tuple[Any, ...]
    pack: Callable[..., bytes]
    pick: Callable[[Any], tuple[Any, ...]]
    unpack: Callable[..., tuple[Any, ...]]

    __slots__ = (
        *("bounds", "constants", "data", "pack", "pick", "pieces", "size", "slots", "unpack"),
    )

    def __init__(self, data: bytes, slots: Sequence[Slot]) -> None:
        codes, pieces, order = [], [], []
        reached = 0
        for slot in sorted(slots, key=lambda slot: slot.begin):
            codes += [f"{slot.begin - reached}s", slot.code]
            pieces += [data[reached : slot.begin], None]
            order.append(slot)
            reached = slot.end
        codes.append(f"{len(data) - reached}s")
        pieces.append(data[reached:])
        layout = Struct(">" + "".join(codes))
        self.size: int = layout.size
        self.data, self.slots = data, tuple(slots)
        self.unpack, self.pack = layout.unpack_from, layout.pack
        self.bounds: list[tuple[int, int]] = [(slot.least, slot.most) for slot in slots]
        self.constants = tuple(pieces[::2])
        self.pick = itemgetter(*(2 * order.index(slot) + 1 for slot in slots))
        self.pieces: list[Any] = pieces

    def values(self, data: bytes) -> tuple[int, ...] | None:
        """Return the values that vary, if all other bytes are those of the run; else None."""
        if len(data) != self.size:
            return None
        found = self.unpack(data)
        return self.pick(found) if found[::2] == self.constants else None

    def filled(self, values: Sequence[float | bytes | None]) -> bytes:
        """Return the run with these values, in the order in which they lie in it."""
        self.pieces[1::2] = values
        return self.pack(*self.pieces)


def framed(header: bytes, nbytes: int) -> bytes:
    """Return a header between its own prefix and that of a payload of ``nbytes``."""
    return b"\xce%b%b\xc6%b" % (len(header).to_bytes(4), header, nbytes.to_bytes(4))


def template_of(
    header: bytes, nbytes: int | None, numbers: Sequence[Path], others: Sequence[Path] = ()
) -> tuple[Template, Sequence[Path]]:
    """Return the template of messages like one, and which of the ``others`` vary in it.

    Parameters
    ----------
    header
        Its header.
    nbytes
        The bytes of its first payload, whose prefix is part of the template; None: it has none.
    numbers, others
        The paths of what varies, and of what may vary.

    Raises
    ------
    ValueError
        When there is nothing of constant width at one of the ``numbers``.
    """
    found = slots(header, shortest=True)
    varying = [path for path in others if path in found and found[path].end > found[path].begin]
    data = framed(header, nbytes or 0)
    try:
        return Template(
            data if nbytes is not None else data[:-PREFIX],
            [found[path] for path in (*numbers, *varying)],
        ), varying
    except KeyError as error:
        raise ValueError(f"no number that may vary at {error}") from None


def slots(header: bytes, *, shortest: bool = False) -> dict[Path, Slot]:
    """Return every number of fixed width, and every run of bytes, where they lie in `framed`.

    Parameters
    ----------
    header
        The bytes of one MessagePack map whose keys are texts; it has been decoded before.
    shortest
        Whether integers in their shortest form, a single byte up to 127, are among them. Their
        reader has to bound them. Default False.
    """
    return {
        slot.path: slot._replace(begin=slot.begin + PREFIX, end=slot.end + PREFIX)
        for slot in _walk(header, [0], ())
        if shortest or slot.most != _SMALL
    }


def _walk(data: bytes, at: list[int], path: Path) -> Iterator[Slot]:
    """Yield the slots of the value at ``at[0]``, which is moved past it."""
    mark, begin = data[at[0]], at[0] + 1
    if mark <= _SMALL:
        at[0] = begin
        yield Slot(path, begin - 1, begin, "B", 0, _SMALL)
        return
    if mark in _FIXED:
        at[0] = end = begin + Struct(">" + _FIXED[mark]).size
        least, width = _UNSIGNED.get(mark, (0, 0))
        if int.from_bytes(data[begin:end]) < least:  # its writer does not mind the width
            least = 0
        yield Slot(path, begin, end, _FIXED[mark], least, min((1 << 8 * width) - 1, LARGEST))
        return
    count, content = _extent(data, mark, begin)
    if mark in _BYTES:
        yield Slot(path, content, content + count, f"{count}s")
    if mark in _BYTES or mark in _TEXTS or 0xA0 <= mark <= 0xBF:
        at[0] = content + count
        return
    at[0] = content
    if mark in _LISTS or 0x90 <= mark <= 0x9F:
        for index in range(count):
            yield from _walk(data, at, (*path, index))
        return
    for _ in range(count):  # a map; everything else has no content
        length, content = _extent(data, data[at[0]], at[0] + 1)
        at[0] = content + length
        key = data[content : at[0]].decode()
        yield from _walk(data, at, (*path, key))


def _extent(data: bytes, mark: int, begin: int) -> tuple[int, int]:
    """Return the number of bytes, items or pairs of a value, and the offset of the first."""
    if mark in _LENGTHS:
        width = _LENGTHS[mark]
        return int.from_bytes(data[begin : begin + width], "big"), begin + width
    if 0xA0 <= mark <= 0xBF:
        return mark & 0x1F, begin
    return (mark & 0x0F if 0x80 <= mark <= 0x9F else 0), begin
