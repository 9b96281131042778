"""Draw the messages of hostile peers: the right form, with values at which sums and sizes break.

`HostileMessages` knows the grammar of the wire. So its messages come further than noise would:
most are right in all fields but a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from random import Random
from typing import Any, NamedTuple

import msgpack
import numpy as np

from aiops.codecs import BUILT_IN, find
from aiops.model.tables import Table, fetch_parts, push_parts
from aiops.wire.encoding import KINDS
from aiops.wire.messages import PROTOCOL
from aiops.wire.state_machine import HANDSHAKE

Header = dict[str, Any]
Drawn = tuple[Header, list[bytes]]
"""A header map, and the payloads that follow it."""

NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 63, 64, 65, 255, 256, 1023, 1024, 1025, 4096, 65535, 65536),
    *((1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 26, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
    *(1 << 32, (1 << 53) - 1, 1 << 53, 1 << 56, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
"""Integers at which something may break; MessagePack has none above."""

REALS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e18, 9e17, 1e-320, 1.8e308, math.nan, math.inf, -math.inf)
_SINGLES = (*REALS[:8], 3e38, 6e4, 1e-45, math.nan, math.inf, -math.inf)
_MOST = 1 << 16  # bytes of a payload
_GREETINGS = ("hello", "shard_hello", "lead_hello", "standby_hello", "ring_hello", "relay_hello")
DIRECTING = ("kick", "pause", "drain", "rollback_to", "promote")
"""What would end the trial: of a server without a token any client is an administrator."""

_ALL = tuple(kind for kind in KINDS if kind not in DIRECTING)
_OPEN = tuple(sorted({*HANDSHAKE["open"]["client"]} - {*DIRECTING} - {"leave", "share"}))
_LIKELY = (
    *("push",) * 8,
    *("fetch", "push_rows", "fetch_rows", "take_task", "cover", "reapply", "define") * 2,
)
_NOT_SAID = {"leave", "promote", "share", "roll_back"}
_OPENED = {"shard_hello": "shard open", "lead_hello": "lead open", "standby_hello": "standby open"}
_OPENED |= {"ring_hello": "ring open", "relay_hello": "relay challenged"}
_USUAL = {
    opening: tuple(sorted({*HANDSHAKE[state]["client"]} - _NOT_SAID))
    for opening, state in _OPENED.items()
}
"""By greeting: the requests that may follow it; of a hello, those that are `_OPEN`."""

_CODECS = ("raw", *sorted(BUILT_IN))


class Target(NamedTuple):
    """The facts of the model that a hostile peer knows.

    Attributes
    ----------
    tensors
        Name, dtype and shape of each.
    layout
        Their bytes in the arena: start, stop.
    nbytes
        The arena's.
    tables
        As a `Define` has them.
    token
        Whether the server asks for one.
    opening
        The greeting that is mostly said there.
    facts
        Values of fields of greetings, by name.
    knows
        The token that a hostile peer has; empty: it has none.
    directs
        Whether it tries to direct the server, too.
    checked
        Whether it asks for checksums.
    likely
        The requests that it makes most; empty: pushes, and what goes with them.
    """

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    layout: tuple[tuple[int, int], ...]
    nbytes: int
    tables: tuple[tuple[Any, ...], ...] = ()
    token: bool = False
    opening: str = "hello"
    facts: Mapping[str, Any] = {}
    knows: str = ""
    directs: bool = False
    checked: bool = False
    likely: tuple[str, ...] = ()


class HostileMessages:
    """Draws messages of one peer.

    Parameters
    ----------
    rng
        Decides everything.
    target
        The facts of the model.
    """

    def __init__(self, rng: Random, target: Target) -> None:
        self._rng, self._target = rng, target
        self._id = self._seq = 0
        self._client = rng.randbytes(8).hex()

    # ------------------------------------------------------------ whole messages

    def greeting(self) -> Drawn:
        """Return the first message of a connection."""
        rng, target = self._rng, self._target
        kind = target.opening if rng.random() < 0.92 else rng.choice(_GREETINGS)
        header = self._fields(kind)
        header.update((name, value) for name, value in target.facts.items() if name in header)
        if kind == "hello":
            header["role"] = rng.choice((*("worker",) * 9, "observer"))
        self._id = 0
        return {**header, "id": 0}, []

    def request(self) -> Drawn:
        """Return one of those that an open connection may carry, mostly; sometimes any other."""
        rng = self._rng
        lot = rng.random()
        if self._target.token and not self._target.knows and self._id == 0 and lot < 0.8:
            return self.proof()
        usual = _USUAL.get(self._target.opening, _OPEN)
        kind = rng.choice(usual if lot < 0.99 else _ALL)
        if lot < 0.2 and self._target.directs:
            kind = rng.choice(DIRECTING)
        elif lot < 0.75 and usual is _OPEN:
            kind = rng.choice(self._target.likely or _LIKELY)
        return self.of_kind(kind)

    def of_kind(self, kind: str) -> Drawn:
        """Return a message of this kind."""
        header = self._fields(kind)
        made = _MADE.get(kind)
        if made is not None:
            return made(self, header)
        return header, [self._rng.randbytes(part[3]) for part in header.get("parts", ())]

    def proof(self) -> Drawn:
        """Return a proof of a token, which is none."""
        return self._fields("prove"), []

    def _fields(self, kind: str) -> Header:
        self._id += 1
        header: Header = {"kind": kind}
        for field in fields(KINDS[kind]):
            header[field.name] = self.value(str(field.type))
        header["id"] = self._id
        if "protocol" in header:
            header["protocol"] = PROTOCOL
        if "client" in header:
            header["client"] = self._client
        if "seq" in header:
            self._seq += self._rng.choice((0, 1, 1, 1, 1, 1, 1, 2))
            header["seq"] = self._seq
        if "holder" in header and self._rng.random() < 0.8:
            header["holder"] = self._rng.choice(("", self._client))
        return header

    # ------------------------------------------------------------ values of fields

    def value(self, kind: str) -> Any:
        """Return a value that a field of this type accepts, mostly."""
        return _DRAW[kind](self)

    def number(self, most: int = 1 << 64) -> int:
        """Return a small number, mostly."""
        rng = self._rng
        if rng.random() < 0.8:
            return rng.randrange(min(5, most))
        return min(most - 1, rng.choice(NUMBERS) + rng.choice((0, 0, 0, -1, 1)) * (most > 5)) % most

    def text(self) -> str:
        """Return a short text, mostly."""
        lot = self._rng.random()
        if lot < 0.98:
            return self._rng.choice(("", "a", "w", "b", "words", "worker", "127.0.0.1", "é\0\n"))
        return "x" * self._rng.choice((64, 1024, 4096, 4097))

    def run(self, most: int) -> tuple[int, int]:
        """Return where a run begins, and where it has ended."""
        first = self.number(most)
        return first, first + 1 + self.number(most)

    def wants(self) -> list[Any]:
        """Return tensors that are wanted: none, or some of the model, mostly."""
        lot, version = self._rng.random(), self.number(4)
        if lot < 0.5:
            return []
        return [[0, len(self._target.tensors), version]] if lot < 0.9 else [[*self.run(5), version]]

    def bytes_of(self, *lengths: int) -> bytes:
        """Return bytes of one of these lengths."""
        return self._rng.randbytes(self._rng.choice(lengths))

    def several(self, draw: Callable[[], Any], most: int = 4) -> list[Any]:
        """Return a few values."""
        return [draw() for _ in range(self._rng.randrange(most + 1))]

    def plain(self, depth: int = 2) -> dict[str, Any]:
        """Return a map of plain values."""
        inner = partial(self.wild, depth)
        return {self.text(): inner() for _ in range(self._rng.randrange(3))}

    def shape(self) -> list[int]:
        """Return the shape of a tensor, a possible one mostly."""
        return self.several(lambda: self.number(1 << 63), 3)

    def offered(self) -> list[Any]:
        """Return tensors: those of the model, mostly."""
        if self._rng.random() < 0.7:
            return [list(row) for row in self._target.tensors]
        dtypes = ("float32", "float16", "float64", "int8", "bfloat16", "O", "x")
        return self.several(lambda: [self.text(), self._rng.choice(dtypes), self.shape()])

    def sparse(self) -> list[Any]:
        """Return tables: those of the model, mostly."""
        if self._rng.random() < 0.7:
            return [list(row) for row in self._target.tables]
        return self.several(
            lambda: [
                *(self.text(), self.number(1 << 63), self.number(1 << 63)),
                *(self._rng.choice(("float32", "float64", "int8")), self._rng.choice("zn")),
                *(self._rng.choice(REALS), self.number(1 << 63)),
            ]
        )

    def part(self) -> list[Any]:
        """Return a part of the arena, as long as it says mostly."""
        rng, (start, stop) = self._rng, self._range()
        codec = rng.choice(("raw", "raw", "raw", *_CODECS, "none"))
        length = stop - start if rng.random() < 0.9 else self.number()
        return [start, stop, codec, max(0, min(length, _MOST)), self.number()]

    def _range(self) -> tuple[int, int]:
        rng, target = self._rng, self._target
        lot = rng.random()
        if lot < 0.5:
            return 0, target.nbytes
        if lot < 0.8:
            return rng.choice(target.layout)
        start, stop = sorted(rng.randrange(target.nbytes + 1) for _ in range(2))
        return (start, stop) if lot < 0.97 else (self.number(), self.number())

    def wild(self, depth: int = 3) -> Any:
        """Return a value of any type."""
        rng = self._rng
        scalars: tuple[Callable[[], Any], ...] = (
            lambda: rng.choice(NUMBERS),
            lambda: -rng.choice((1, 2, 32, 33, 128, 1 << 15, 1 << 31, 1 << 53, 1 << 63)),
            lambda: rng.choice(REALS),
            lambda: rng.choice((None, True, False)),
            self.text,
            lambda: self.bytes_of(0, 1, 16, 32, 33, 5000),
            lambda: msgpack.ExtType(rng.randrange(128), b"x"),
            lambda: msgpack.Timestamp(rng.randrange(1 << 32), 5),
        )
        if depth <= 0 or rng.random() < 0.75:
            return rng.choice(scalars)()
        if rng.random() < 0.5:
            return [self.wild(depth - 1) for _ in range(rng.randrange(4))]
        return {rng.choice(("kind", "id", "", 1, None)): self.wild(depth - 1) for _ in range(2)}

    # ------------------------------------------------------------ messages with payloads

    def _define(self, header: Header) -> Drawn:
        target = self._target
        if self._rng.random() < 0.7:
            header["tensors"] = [list(row) for row in target.tensors]
            header["tables"] = [list(row) for row in target.tables]
            header["parts"] = [[0, target.nbytes, "raw", target.nbytes, 0]]
        return header, [self._values(part[3]) for part in header["parts"]]

    def _push(self, header: Header) -> Drawn:
        rng, target = self._rng, self._target
        header["have"] = rng.choice((-1, 0, 1, self.number(1 << 53)))
        header["count"] = 1 if rng.random() < 0.9 else self.number()
        lot = rng.random()
        if lot < 0.4:
            header["parts"] = [[0, target.nbytes, "raw", target.nbytes, 0]]
        elif lot < 0.6:
            header["parts"] = [[*each, "raw", each[1] - each[0], 0] for each in target.layout]
        elif lot < 0.9:
            return self._coded(header)
        if rng.random() < 0.2:
            rng.shuffle(header["parts"])
        return header, [self._values(part[3]) for part in header["parts"]]

    def _coded(self, header: Header) -> Drawn:
        rng, target = self._rng, self._target
        parts: list[Any] = []
        payloads: list[bytes] = []
        for (_name, dtype, shape), (start, stop) in zip(target.tensors, target.layout, strict=True):
            codec = rng.choice(_CODECS) if dtype == "float32" else "raw"
            values = np.frombuffer(self._values(stop - start), dtype).reshape(shape)
            payload = values.tobytes()
            if codec != "raw":
                tame = np.nan_to_num(values.astype(np.float32), posinf=1, neginf=-1)
                encoder = find(codec).encoder(shape, feedback=False, backend="numpy")
                payload = bytes(encoder.encode(np.clip(tame, -1e17, 1e17)))
            parts.append([start, stop, codec, len(payload), 0])
            payloads.append(payload)
        header["parts"] = parts
        return header, payloads

    def _fetch_rows(self, header: Header) -> Drawn:
        number, table = self._table()
        payload = self._rows()
        header.update(table=number, parts=[list(p) for p in fetch_parts(table, len(payload) // 8)])
        return header, [payload]

    def _push_rows(self, header: Header) -> Drawn:
        number, table = self._table()
        ids, wanted = self._rows(), self._rows() if self._rng.random() < 0.5 else b""
        payloads = [each for each in (ids, wanted) if each]
        payloads.append(self._values(len(ids) // 8 * table.row_bytes))
        parts = push_parts(table, len(ids) // 8, len(wanted) // 8)
        header.update(table=number, version=self.number(4), parts=[list(p) for p in parts])
        if self._rng.random() < 0.05:
            at = self._rng.randrange(len(parts))
            header["parts"][at][1] = count = self._rng.choice((0, 1, 2, self.number()))
            header["parts"][at][3] = count * 8 if count < 100 else 8
            payloads[at] = bytes(header["parts"][at][3])
        return header, payloads

    def _table(self) -> tuple[int, Table]:
        """Return a table and its number: the model's, mostly."""
        if not self._target.tables or self._rng.random() < 0.05:
            return self.number(1 << 53), Table(5, 2)
        number = self._rng.randrange(len(self._target.tables))
        return number, Table(*self._target.tables[number][1:])

    def _rows(self) -> bytes:
        count = self._rng.randrange(1, 6)
        return np.array([self.number() for _ in range(count)], np.uint64).tobytes()

    def _values(self, nbytes: int) -> bytes:
        """Return floats: zeros mostly, else any bits, or some at which sums break."""
        rng, lot = self._rng, self._rng.random()
        if lot < 0.7:
            return bytes(nbytes)
        if lot < 0.8:
            return rng.randbytes(nbytes)
        array = np.zeros(nbytes // 4, np.float32)
        for _ in range(2 if len(array) else 0):
            array[rng.randrange(len(array))] = rng.choice(_SINGLES)
        return array.tobytes() + bytes(nbytes % 4)


_DRAW: Mapping[str, Callable[[HostileMessages], Any]] = {
    "UInt": lambda m: m.number(1 << 53),
    "Positive": lambda m: 1 + m.number((1 << 53) - 1),
    "Batches": lambda m: 1 + m.number(1 << 20),
    "Have": lambda m: m.number(1 << 53) - 1,
    "bool": lambda m: bool(m.number(2)),
    "Real": lambda m: float(m.number(1 << 20)),
    "OptReal": lambda m: None,
    "Text": HostileMessages.text,
    "Reason": lambda m: m.text() * m.number(3),
    "Nonce": lambda m: m.bytes_of(16, 16, 16, 64),
    "Bytes32": lambda m: m.bytes_of(0, 0, 32),
    "Blob": lambda m: m.bytes_of(0, 1, 32, 32, 1000),
    "Plain": HostileMessages.plain,
    "Offered": HostileMessages.offered,
    "Rows": lambda m: [[*row, m.number(1 << 53)] for row in m.offered()],
    "Sparse": HostileMessages.sparse,
    "ShardTable": lambda m: m.several(
        lambda: [m.text(), 1 + m.number(65535), m.number(1 << 53)], 2
    ),
    "Members": lambda m: m.several(lambda: [m.text(), 1 + m.number(65535), True], 2),
    "Gate": lambda m: m.several(lambda: 0.5, 2),
    "Factors": lambda m: m.several(lambda: float(m.number(101)), 2),
    "Logged": lambda m: [
        list(each) for each in dict(m.several(lambda: (m.text(), float(m.number(101))))).items()
    ],
    "Versions": lambda m: m.several(lambda: m.number(1 << 53)),
    "Numbers": lambda m: m.several(lambda: m.number(1 << 53)),
    "Examples": lambda m: m.several(lambda: [m.number(9), *m.run(1 << 53)]),
    "Parts": lambda m: m.several(m.part),
    "Wants": HostileMessages.wants,
    "Ranges": lambda m: m.several(lambda: [*m.run(300), m.number(4)], 1),
}
"""By the name of a type of `aiops.wire.fields`: a value of it."""

_MADE: Mapping[str, Callable[[HostileMessages, Header], Drawn]] = {
    "define": HostileMessages._define,
    "push": HostileMessages._push,
    "fetch_rows": HostileMessages._fetch_rows,
    "push_rows": HostileMessages._push_rows,
}
