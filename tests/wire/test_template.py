"""Templates of headers: which values may vary, and how wide they are."""

from __future__ import annotations

import msgpack

from aiops.model.parts import LARGEST
from aiops.wire.template import Template, framed, slots

HEADER = {"a": 5, "b": 300, "c": {"d": [1.5, b"xyz"]}, "e": None, "f": -3000, "g": "text", "h": b""}


def test_numbers_of_fixed_width_and_bytes_have_slots() -> None:
    data = msgpack.packb(HEADER)
    found, run = slots(data), framed(data, 0)
    assert set(found) == {("b",), ("c", "d", 0), ("c", "d", 1), ("f",), ("h",)}
    assert run[found["c", "d", 1].begin : found["c", "d", 1].end] == b"xyz"
    assert (found["b",].least, found["b",].most) == (256, 65_535)
    assert (found["f",].least, found["f",].most) == (0, 0), "signed: no bounds are known"


def test_integers_of_one_byte_have_slots_where_they_are_asked_for() -> None:
    data = msgpack.packb(HEADER)
    run, found = framed(data, 70_000), slots(data, shortest=True)
    assert run == b"\xce" + len(data).to_bytes(4) + data + b"\xc6" + (70_000).to_bytes(4)
    assert run[found["a",].begin : found["a",].end] == b"\x05"
    assert (found["a",].least, found["a",].most) == (0, 127)
    unpacked = msgpack.Unpacker()
    unpacked.feed(run[5:])
    assert unpacked.unpack() == HEADER


def test_a_writer_of_wide_integers_has_wide_bounds() -> None:
    data = b"\x81\xa1a\xcf" + (7).to_bytes(8)
    slot = slots(data)["a",]
    assert (slot.least, slot.most) == (0, LARGEST)


def test_a_template_reads_and_writes_what_varies() -> None:
    data = msgpack.packb(HEADER)
    run, found = framed(data, 12), slots(data)
    template = Template(run, [found["c", "d", 0], found["b",]])
    assert template.values(run) == (1.5, 300)
    assert template.bounds == [(0, 0), (256, 65_535)]
    other = template.filled((301, 2.5))
    assert template.values(other) == (2.5, 301)
    assert msgpack.unpackb(other[5:-5]) == {**HEADER, "b": 301, "c": {"d": [2.5, b"xyz"]}}
    assert template.values(other[:-1] + b"\0") is None
    assert template.values(other + b"\0") is None
