"""Flip single bits of what crossed in real sessions with checksums, and of a state's files.

Sessions are recorded once: a worker of a simulated server trains, with checksums, on a model with
tensors and a table. Then each flip is made in one message of theirs, which the other side's
connection is given: it must end before it returns the message. Of a state's files a reader must
refuse each, or, of a journal's newest rows, read those before.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aiops.client.asyncio.worker import AsyncWorker
from aiops.errors import AiopsError, Corrupted
from aiops.model.tables import Table
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.sim.virtual.server_machine import ServerMachine
from aiops.sim.virtual.world import World
from aiops.state.blocks import reader
from aiops.state.directory import GenerationFile, StateIdentity
from aiops.state.frames import SegmentScan
from aiops.state.snapshot_file import SnapshotFile
from aiops.wire.checked_connection import PREAMBLE, CheckedConnection
from aiops.wire.connection import with_sinks
from aiops.wire.decoding import decode
from aiops.wire.sinks import Discard
from aiops.wire.state_machine import HANDSHAKE, Side

_STEPS = 6
_TENSORS = (("w", "float32", (16, 4)), ("b", "float16", (5,)))
_TABLE = Table(1000, 4, scale=0.1, seed=1)
_CHECK = 9
_LIMIT = 1000.0  # virtual seconds
_OF_FILES = 50  # of as many flips one is in a file
_PIECE = 1000  # flips between two reports


class Crossed(NamedTuple):
    """One message as it crossed.

    Attributes
    ----------
    side
        Which received it.
    state
        The connection's, in which that is possible.
    items
        Checks that crossed before it, in its direction.
    data
        Its bytes; a client's first has the preamble.
    kind
        Its kind.
    """

    side: Side
    state: str
    items: int
    data: bytes
    kind: str


@dataclass
class FlipFindings:
    """The findings about flipped bits.

    Attributes
    ----------
    flips
        By what they were in.
    outcomes
        By what became of them.
    accepted
        Flips that changed what was done, one sentence each.
    seconds
        The time that it took.
    """

    flips: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {
            "flips": self.flips.total(),
            "in": dict(sorted(self.flips.items())),
            "outcomes": dict(sorted(self.outcomes.items())),
            "accepted": self.accepted,
            "flips_per_second": round(self.flips.total() / max(self.seconds, 1e-9)),
            "seconds": round(self.seconds, 1),
        }


class _Tap(asyncio.Protocol):
    """One end of a line that keeps what passes to the other."""

    def __init__(self, kept: bytearray, other: Callable[[], asyncio.Transport | None]) -> None:
        self._kept, self._other = kept, other
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Keep bytes, and pass them on."""
        self._kept += data
        other = self._other()
        if other is not None:
            other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """End the other end, too."""
        other = self._other()
        if other is not None:
            other.close()


async def _recorded(up: bytearray, down: bytearray) -> dict[str, bytes]:
    """Have a worker train with checksums; keep both directions' bytes, return the state's files."""
    settings: dict[str, Any] = {"policy": "fasgd", "state": "state", "fetch_codec": "int8"}
    async with ServerMachine(kernels="numpy", **settings) as machine:
        env, loop = CURRENT_ENVIRONMENT.get(), asyncio.get_running_loop()
        near = _Tap(up, lambda: far.transport)
        far = _Tap(down, lambda: near.transport)
        await env.dial(lambda: far, machine.host, machine.port)
        listener = loop.network.listen(lambda: near)  # type: ignore[attr-defined]
        zeros = {name: np.zeros(shape, dtype) for name, dtype, shape in _TENSORS}
        url = f"aiops://localhost:{listener.port}"
        async with AsyncWorker(
            url, zeros, tables={"t": _TABLE}, name="recorded", checksums=True
        ) as worker:
            chance = np.random.default_rng(1)
            for step in range(_STEPS):
                await worker.step({n: chance.normal(size=s).astype(d) for n, d, s in _TENSORS})
                ids = np.arange(step, step + 20)
                await worker.fetch_rows("t", ids)
                await worker.push_rows("t", ids, np.ones((20, 4), np.float32))
            await worker.stats()
        listener.close()
    folder, found = Path("state"), dict[str, bytes]()
    for name in machine.disk.names(folder):
        file = machine.disk.open(folder / name)
        data = bytearray(file.written(0)[1])
        file.read(memoryview(data), 0)
        found[name] = bytes(data)
    return found


def _messages(side: Side, stream: bytes) -> Iterator[Crossed]:
    """Cut the bytes that a side received into messages."""
    peer: Side = "client" if side == "server" else "server"
    at, items = 0, 0
    while at < len(stream):
        begin = at
        at += len(PREAMBLE) * (side == "server" and not begin)
        length = int.from_bytes(stream[at + 1 : at + 5], "big")
        at += 5 + _CHECK
        message: Any = decode(stream[at : at + length])
        at += length + _CHECK
        parts = getattr(message, "parts", ())
        at += sum(5 + part.nbytes + _CHECK for part in parts)
        state = next(s for s, said in HANDSHAKE.items() if message.kind in said.get(peer, ()))
        yield Crossed(side, state, items, stream[begin:at], message.kind)
        items += 2 + len(parts)


class FlippedBits:
    """Makes flips, by a seed."""

    def __init__(self, seed: int = 0) -> None:
        self.findings, self._rng = FlipFindings(), random.Random(f"bits {seed}")
        up, down = bytearray(), bytearray()
        files = World(seed=seed, limit=_LIMIT).run(_recorded(up, down))
        self._messages = [*_messages("server", bytes(up)), *_messages("client", bytes(down))]
        for each in self._messages:
            if not _received(each, each.data):
                raise AiopsError(f"a recorded {each.kind!r} is not received as it was sent")
        self._sizes = list(itertools.accumulate(len(each.data) for each in self._messages))
        self._files = [(name, data) for name, data in files.items() if _READERS.get(_kind(name))]
        self._read = [_READERS[_kind(name)](data) for name, data in self._files]

    def run(self, count: int, progress: Callable[[int], None] = lambda done: None) -> FlipFindings:
        """Make ``count`` flips."""
        began, found = time.monotonic(), self.findings
        for number in range(count):
            if number % _OF_FILES:
                self._flip_message()
            else:
                self._flip_file()
            if not number % _PIECE:
                progress(number)
        found.seconds += time.monotonic() - began
        progress(count)
        return found

    def _flip_message(self) -> None:
        at = self._rng.randrange(self._sizes[-1])
        each = self._messages[bisect.bisect_right(self._sizes, at)]
        data, bit = _flipped(self._rng, each.data)
        self.findings.flips[each.kind] += 1
        try:
            outcome = "accepted" if _received(each, data) else "waits for more"
        except Corrupted:
            outcome = "refused"
        if outcome != "refused":
            self.findings.accepted.append(f"{each.kind}, bit {bit}: {outcome}")
        self.findings.outcomes[outcome] += 1

    def _flip_file(self) -> None:
        number = self._rng.randrange(len(self._files))
        (name, whole), before = self._files[number], self._read[number]
        data, bit = _flipped(self._rng, whole)
        kind = _kind(name)
        self.findings.flips[kind] += 1
        try:
            found = _READERS[kind](data)
        except AiopsError:
            outcome = "refused"
        else:
            outcome = "accepted"
            if found == before:
                outcome = "a byte that means nothing"
            elif kind == "journal" and found == before[: len(found)]:
                outcome = "the rows before"
        if outcome == "accepted":
            self.findings.accepted.append(f"{name}, bit {bit}: {outcome}")
        self.findings.outcomes[outcome] += 1


def _flipped(rng: random.Random, data: bytes) -> tuple[bytes, int]:
    """Return bytes with one bit changed, and which."""
    bit = rng.randrange(8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed), bit


def _received(each: Crossed, data: bytes) -> bool:
    """Give a connection these bytes in the place of a message; return whether it returns one."""
    wire = CheckedConnection(each.side)
    wire.resume_at(each.items)
    wire.state = each.state
    while data:
        room = wire.next_buffer()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        if with_sinks(wire, wire.received(count), lambda message: Discard()):
            return True
    return False


def _kind(name: str) -> str:
    return name.partition("-")[0]


def _segment(data: bytes) -> list[Any]:
    rows = SegmentScan(data, "flipped", first=1, until=None)
    return [(row.number, row.kind, row.time, row.row, bytes(row.payload)) for row in rows]


def _snapshot(data: bytes) -> list[Any]:
    found = SnapshotFile(reader(data), len(data), "flipped")
    found.verify()
    return [found.header, found.arrays]


_READERS: Mapping[str, Callable[[bytes], list[Any]]] = {
    "identity": lambda data: [StateIdentity.unpack(data)],
    "generation": lambda data: [GenerationFile.unpack(data)],
    "journal": _segment,
    "snapshot": _snapshot,
}
"""By the kind of a file: what is read of it."""
