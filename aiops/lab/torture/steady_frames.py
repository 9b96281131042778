"""Workers whose exchanges are steady, and frames among these of which one thing is changed.

Each connection says a push after the other in one form, with the numbers that are due: so the
server learns the form, and answers by its short way (`aiops.engine.steady`), in compiled code where
there is any. What is changed keeps the length of the frame, mostly: a number of the header, a bit
of the header or of the payloads, also of the prefixes between these. Frames come whole, in two
pieces, or two at once.
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
from aiops.errors import RemoteProtocolError
from aiops.lab.torture.attack_trial import AttackResult
from aiops.lab.torture.attacked import Door
from aiops.lab.torture.attacked_steady import CODECS
from aiops.lab.torture.changed_frames import ChangedFrames
from aiops.lab.torture.fed_connection import FedConnection
from aiops.lab.torture.frame_templates import FrameTemplate, framed, spans_of
from aiops.lab.torture.hostile_messages import NUMBERS, Target
from aiops.model.parts import Part
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import PROTOCOL, Ack, Hello, Push
from aiops.wire.template import PREFIX, slots

_BATCH = 1000  # frames, after which all connections end
_FORMS = 12  # of pushes, each with
_GRADIENTS = 8  # of its own
_CLIENTS = 64  # the statistics of a server that remembers many are slow
_SOME = 4  # pushes, of which one is taken if any can be
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
    def drawn(cls, rng: Random, target: Target) -> PushForm:
        """Return a form of pushes of the whole model, as some client may write them."""
        parts = _parts(rng, target)
        coded = rng.random() < 0.5  # a server without a delta replica sends raw parameters
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


def _parts(rng: Random, target: Target) -> list[Part]:
    """Return the parts of a push: raw, or coded where a tensor is large enough for that."""
    codable = all(dtype == "float32" for _name, dtype, _shape in target.tensors)
    if not codable or rng.random() < 0.3:
        return [Part(0, target.nbytes, RAW, target.nbytes, 0)]
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


class SteadyWorker:
    """A worker on a connection.

    Parameters
    ----------
    connection
        On which it has said hello.
    form
        That of its pushes.
    client
        Its identity.

    Attributes
    ----------
    connection, form, client
        As above.
    id
        Of its last request.
    acknowledged
        Of its pushes, those that were.
    have, base
        The version that it has, and the updates that its tensors have had.
    """

    def __init__(self, connection: FedConnection, form: PushForm, client: str) -> None:
        self.connection, self.form, self.client = connection, form, client
        self.acknowledged = 0
        self.id, self.have, self.base = 0, 0, 0
        self._read = 0

    def listen(self) -> None:
        """Take in what the server has answered since."""
        said = self.connection.said
        for data in said[self._read :]:
            end = 5 + int.from_bytes(data[1:5], "big")
            if data[:1] != b"\xce" or end > len(data):
                continue
            try:
                message = decode(bytes(data[5:end]))
            except RemoteProtocolError:  # it was the middle of a payload
                continue
            if isinstance(message, Ack) and message.used:
                self.acknowledged += 1
                self.have = message.current
                self.base = min((part.version for part in message.parts), default=self.base)
        self._read = len(said)


class SteadyFrames(ChangedFrames):
    """Pushes of workers whose exchanges are steady, for one door of a server.

    Parameters
    ----------
    rng, result
        As of `ChangedFrames`.
    door
        Where they are sent.
    """

    def __init__(self, rng: Random, door: Door, result: AttackResult) -> None:
        assert door.accept is not None
        assert door.answered is not None
        self._accept, self._answered = door.accept, door.answered
        self._forms = [PushForm.drawn(rng, door.target) for _ in range(_FORMS)]
        self._epochs = {rng.randbytes(16).hex(): 0 for _ in range(_CLIENTS)}
        self._seq = 1 << 20
        super().__init__(rng, [form.template for form in self._forms], result)

    def send(self, together: int) -> None:
        """Send frames on some connections at once, and end these; three of ten are changed."""
        rng, result = self.rng, self.result
        workers = [self._connect() for _ in range(together)]
        end = result.frames + _BATCH
        while result.frames < end:
            at = rng.randrange(together)
            worker = workers[at]
            if worker.connection.over or worker.connection.paused:
                self._leave(worker)
                workers[at] = worker = self._connect()
            data = self._next(worker)
            lot = rng.randrange(16)
            if lot == 0:
                data += self._next(worker)
            elif lot < 3:
                cut = rng.randrange(len(data) + 1)
                worker.connection.feed(data[:cut])
                data = data[cut:]
            worker.connection.feed(data)
            worker.listen()
        for worker in workers:
            self._leave(worker)

    def _connect(self) -> SteadyWorker:
        """Make a connection, and say hello."""
        rng = self.rng
        connection = FedConnection(self._accept())
        self.result.sessions += 1
        client = rng.choice(list(self._epochs))
        self._epochs[client] = epoch = self._epochs[client] + 1
        nonce = rng.randbytes(16)
        hello = encode(Hello(0, PROTOCOL, client, epoch, "w", "worker", False, nonce, "steady"))
        connection.feed(b"\xce" + len(hello).to_bytes(4, "big") + hello)
        return SteadyWorker(connection, rng.choice(self._forms), client)

    def _leave(self, worker: SteadyWorker) -> None:
        """End a connection; count what compiled code answered there.

        A client is another from here on if a changed number has made all that follow too old.
        """
        if worker.id > _SOME and not worker.acknowledged and worker.client in self._epochs:
            del self._epochs[worker.client]
            self._epochs[self.rng.randbytes(16).hex()] = 0
        before = self._answered()
        self.end(worker.connection)
        self.result.compiled += before - self._answered()

    def _next(self, worker: SteadyWorker) -> bytes:
        """Return a worker's next push, or one in which something is changed."""
        rng, form = self.rng, worker.form
        self._seq += 1
        worker.id += 1
        numbers = worker.id, self._seq, worker.have, worker.base
        frame = form.filled(numbers, rng.choice(form.gradients))
        if rng.random() < 0.3:
            change = rng.choice(_CHANGES)
            if change is None:
                return self._other(frame)
            data = change(rng, form, frame)
            if _is_partial(data, frame) and rng.random() < 0.98:
                data = frame.right
        else:
            data = frame.right
        self.result.frames += 1
        self.result.sent += len(data)
        return data

    def _other(self, frame: FrameTemplate) -> bytes:
        """Return a push in which a value of any length is changed, or which is cut."""
        data = self.changed(frame, self.rng.getrandbits(32))
        if data is None or (_is_partial(data, frame) and self.rng.random() < 0.98):
            return frame.right
        return data


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


def _is_partial(data: bytes, frame: FrameTemplate) -> bool:
    """Return whether these bytes are a push of a part of the model.

    After one that is taken no exchange is steady: tensors have had updates in different numbers.
    """
    end = PREFIX + int.from_bytes(data[1:PREFIX], "big")
    try:
        found = decode(data[PREFIX:end]) if end <= len(data) else None
    except RemoteProtocolError:
        return False
    right = decode(frame.header)
    assert isinstance(right, Push)
    return isinstance(found, Push) and _covered(found) != _covered(right)


def _covered(push: Push) -> list[tuple[int, int]]:
    return [part[:2] for part in push.parts]


def _replaced(frame: FrameTemplate, at: int, value: bytes) -> bytes:
    """Return a frame with other bytes, from an offset of its header and payloads on."""
    data = frame.right
    return data[: PREFIX + at] + value + data[PREFIX + at + len(value) :]


_Change = Callable[[Random, PushForm, FrameTemplate], bytes]
_CHANGES: tuple[_Change | None, ...] = (
    *(_number, _number, _number, _number, _header_bit, _payload_bit, _payload_bit),
    *(_payload_value, _payload_value, _prefix, None, None),
)
