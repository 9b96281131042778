"""Pushes of workers whose exchanges are steady, and such of which one thing is changed.

A form's pushes differ in their numbers and their payloads alone. What is changed keeps the length
of the frame, mostly: a number of the header, a bit of the header or of the payloads, also of the
prefixes between these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

import msgpack
import numpy as np

from aiops.codecs import find
from aiops.codecs.choice import SMALL
from aiops.codecs.raw import NAME as RAW
from aiops.lab.torture.attacked_steady import CODECS
from aiops.lab.torture.frame_templates import FrameTemplate, framed, spans_of
from aiops.lab.torture.hostile_messages import NUMBERS, Target
from aiops.model.parts import Part
from aiops.wire.encoding import encode
from aiops.wire.messages import Push
from aiops.wire.template import PREFIX, slots

_GRADIENTS = 8  # of each form
_EDGES = (0.0, 1.0, -1.0, 9e17, 1e18, 3e38, 1e-45, float("nan"), float("inf"))
_VARYING = {"id", "seq", "have"}


class PushForm(NamedTuple):
    """A form of pushes.

    Attributes
    ----------
    template
        One of them.
    numbers
        Where the numbers lie in its header that differ from push to push, begin and end: the id,
        the sequence number, the version that the worker has, and the versions of all parts.
    gradients
        All that may follow the header.
    """

    template: FrameTemplate
    numbers: tuple[tuple[int, int], ...]
    gradients: tuple[bytes, ...]

    @classmethod
    def drawn(cls, rng: Random, target: Target, *, raw: bool = False) -> PushForm:
        """Return a form of pushes of the whole model, as some client may write them.

        ``raw``: none of its payloads is coded.
        """
        parts = _raw_parts(target) if raw else _parts(rng, target)
        # A server without a delta replica sends raw parameters, whatever is asked for.
        coded = not raw and rng.random() < 0.5
        header = encode(Push(0, 0, True, 0, tuple(parts), coded=coded))
        lot = rng.randrange(4)
        if lot:  # another client's: any order of keys, and integers of one width
            header = _written(rng, msgpack.unpackb(header), (0xCE, 0xCF, 0xD3)[lot - 1])
        found = slots(header)
        paths: list[tuple[str | int, ...]] = [("id",), ("seq",), ("have",)]
        paths += [("parts", index, 4) for index in range(len(parts))]
        numbers = tuple((found[p].begin - PREFIX, found[p].end - PREFIX) for p in paths)
        gradients = tuple(_payloads(rng, target, parts) for _ in range(_GRADIENTS))
        template = FrameTemplate("push", header, tuple(spans_of(header)), gradients[0])
        return cls(template, numbers, gradients)

    def filled(self, numbers: tuple[int, ...], gradient: bytes) -> FrameTemplate:
        """Return the push of these numbers and payloads; of the last number for all parts."""
        header = bytearray(self.template.header)
        for index, (begin, end) in enumerate(self.numbers):
            number = numbers[min(index, len(numbers) - 1)]
            header[begin:end] = _fit(number, end - begin)
        return self.template._replace(header=bytes(header), payloads=gradient)


def _fit(number: int, width: int) -> bytes:
    return (number & (1 << 8 * width) - 1).to_bytes(width, "big")


def _raw_parts(target: Target) -> list[Part]:
    return [Part(0, target.nbytes, RAW, target.nbytes, 0)]


def _parts(rng: Random, target: Target) -> list[Part]:
    """Return the parts of a push: raw, or coded where a tensor is large enough for that."""
    codable = all(dtype == "float32" for _name, dtype, _shape in target.tensors)
    if not codable or rng.random() < 0.3:
        return _raw_parts(target)
    parts = list[Part]()
    for (_name, _dtype, shape), (start, stop) in zip(target.tensors, target.layout, strict=True):
        if stop - start >= SMALL:
            codec = find(rng.choice(CODECS)).encoder(shape, feedback=False, backend="numpy")
            length = len(codec.encode(np.zeros(shape, np.float32)))
            parts.append(Part(start, stop, codec.codec.name, length, 0))
        elif parts and parts[-1].codec == RAW:
            parts[-1] = parts[-1]._replace(stop=stop, nbytes=stop - parts[-1].start)
        elif start < stop:
            parts.append(Part(start, stop, RAW, stop - start, 0))
    return parts


def _payloads(rng: Random, target: Target, parts: list[Part]) -> bytes:
    """Return the payloads of a gradient, framed: small values, and some at which sums break."""
    values = np.zeros(target.nbytes, np.uint8)
    for (_name, dtype, _shape), (start, stop) in zip(target.tensors, target.layout, strict=True):
        tensor = values[start:stop].view(dtype)
        for _ in range(rng.randrange(1 + len(tensor))):
            tensor[rng.randrange(len(tensor))] = rng.uniform(-1e-3, 1e-3)
    found = list[bytes]()
    for part in parts:
        data = values[part.start : part.stop]
        if part.codec == RAW:
            found.append(data.tobytes())
            continue
        single = data.view(np.float32)
        encoder = find(part.codec).encoder(single.shape, feedback=False, backend="numpy")
        found.append(bytes(encoder.encode(single)))
    return framed(found)


def _written(rng: Random, header: Mapping[str, Any], mark: int) -> bytes:
    """Write a header with its keys in any order, and what varies in integers of one width."""
    keys = [*header]
    rng.shuffle(keys)

    def number(value: int) -> bytes:
        return bytes([mark]) + _fit(value, 4 if mark == 0xCE else 8)

    out = bytes([0x80 + len(keys)])
    for key in keys:
        out += msgpack.packb(key)
        if key in _VARYING:
            out += number(header[key])
        elif key == "parts":
            out += bytes([0x90 + len(header[key])])
            for part in header[key]:
                out += b"\x95" + b"".join(map(msgpack.packb, part[:4])) + number(part[4])
        else:
            out += msgpack.packb(header[key])
    return out


def _number(rng: Random, form: PushForm, frame: FrameTemplate) -> bytes:
    """Change a number, to one at which something may break, or a little."""
    index = rng.randrange(len(form.numbers))
    begin, end = form.numbers[index]
    before = int.from_bytes(frame.header[begin:end], "big")
    number = rng.choice((before - 1, before + 1, rng.choice(NUMBERS), -rng.choice(NUMBERS)))
    if index == 1 and number > before and rng.random() < 0.98:  # a high one makes others too old
        number = before - rng.randrange(3)
    return _replaced(frame, begin, _fit(number, end - begin))


def _header_bit(rng: Random, form: PushForm, frame: FrameTemplate) -> bytes:
    at = rng.randrange(len(frame.header))
    return _replaced(frame, at, bytes([frame.header[at] ^ 1 << rng.randrange(8)]))


def _payload_bit(rng: Random, form: PushForm, frame: FrameTemplate) -> bytes:
    at = rng.randrange(len(frame.payloads))
    changed = bytes([frame.payloads[at] ^ 1 << rng.randrange(8)])
    return _replaced(frame, len(frame.header) + at, changed)


def _payload_value(rng: Random, form: PushForm, frame: FrameTemplate) -> bytes:
    """Change four bytes of the payloads to a number at which sums break."""
    at = PREFIX + rng.randrange(max(1, len(frame.payloads) - PREFIX)) // 4 * 4
    value = np.float32(rng.choice(_EDGES)).tobytes()[: len(frame.payloads) - at]
    return _replaced(frame, len(frame.header) + at, value)


def _prefix(rng: Random, form: PushForm, frame: FrameTemplate) -> bytes:
    """Change a prefix of the payloads."""
    places, at = list[int](), 0
    while at < len(frame.payloads):
        places.append(at)
        at += PREFIX + int.from_bytes(frame.payloads[at + 1 : at + PREFIX], "big")
    value = rng.choice((rng.randbytes(PREFIX), b"\xc6" + _fit(rng.choice(NUMBERS), 4)))
    return _replaced(frame, len(frame.header) + rng.choice(places), value)


def _replaced(frame: FrameTemplate, at: int, value: bytes) -> bytes:
    """Return a frame with other bytes, from an offset of its header and payloads on."""
    data = frame.right
    return data[: PREFIX + at] + value + data[PREFIX + at + len(value) :]


_Change = Callable[[Random, PushForm, FrameTemplate], bytes]
_CHANGES: tuple[_Change | None, ...] = (
    *(_number, _number, _number, _number, _header_bit, _payload_bit, _payload_bit),
    *(_payload_value, _payload_value, _prefix, None, None),
)


def changed_push(rng: Random, form: PushForm, frame: FrameTemplate) -> bytes | None:
    """Return a push of which one thing is changed, in a frame as long.

    None: one of another length is due.
    """
    change = rng.choice(_CHANGES)
    return None if change is None else change(rng, form, frame)
