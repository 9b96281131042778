"""An engine driven inline: the smallest shell there is, with a clock that only tests turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aiops.algorithms import find
from aiops.algorithms.base import Algorithm
from aiops.codecs import raw
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    Copied,
    Drop,
    Event,
    Initialised,
    Joined,
    Left,
    Note,
    Options,
    Received,
    Reply,
    Tick,
    WakeAt,
)
from aiops.model.arena import aligned
from aiops.model.layout import Array, Layout, split
from aiops.model.parts import Part
from aiops.store.resources import Resources
from aiops.store.snapshots import Lease
from aiops.wire import messages
from aiops.wire.messages import Ack, Error, Message


class Inline:
    """An engine, and everything it said to each peer.

    With ``hold`` kernels are not run until `run_kernel` is called, so that a test can do things
    while an update is outstanding.
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        settings: Mapping[str, Any] | None = None,
        hold: bool = False,
        machine: Resources | None = None,
        **options: Any,
    ) -> None:
        if isinstance(algorithm, str):
            algorithm = find(algorithm).make(settings or {})
        self.engine = Engine(algorithm, Options(**options), machine)
        self.now = 1.0
        self.hold = hold
        self.said: dict[int, list[Message]] = {}
        self.rows: dict[int, list[bytes]] = {}  # what answers brought
        self.leases: list[tuple[int, Lease]] = []
        self.dropped: list[int] = []
        self.copies: list[Copied] = []
        self.notes: list[str] = []
        self.wake_at: float | None = None
        self.outstanding: Apply | None = None
        self.seqs: dict[int, int] = {}
        self.log: list[Event] = []
        self.on_event: Callable[[Event], bool | None] = lambda event: None
        self.listeners: dict[int, Callable[[Message, Lease | None], None]] = {}

    # ------------------------------------------------------------ events

    def post(self, event: Event) -> None:
        """Handle an event and everything that follows from it."""
        events: deque[Event] = deque([event])
        while events:
            event = events.popleft()
            self.log.append(event)
            leased = self.on_event(event)
            heard: list[Reply] = []
            for effect in self.engine.handle(event, leased):
                if isinstance(effect, Apply):
                    if self.hold:
                        assert self.outstanding is None, "one update at a time"
                        self.outstanding = effect
                    else:
                        events.append(Applied(self.now, effect.ticket, effect.run()))
                elif isinstance(effect, Reply):
                    self.said.setdefault(effect.peer, []).append(effect.message)
                    if effect.rows is not None:
                        self.rows.setdefault(effect.peer, []).append(bytes(effect.rows.answer))
                        effect.rows.free()
                    if effect.lease is not None:
                        self.leases.append((effect.peer, effect.lease))
                    if effect.peer in self.listeners:
                        heard.append(effect)
                elif isinstance(effect, Copied):
                    self.copies.append(effect)
                elif isinstance(effect, Drop):
                    self.dropped.append(effect.peer)
                elif isinstance(effect, WakeAt):
                    self.wake_at = effect.time
                elif isinstance(effect, Note):
                    self.notes.append(effect.text)
            self._tell(heard)

    def _tell(self, replies: list[Reply]) -> None:
        for reply in replies:
            self.listeners[reply.peer](reply.message, reply.lease)

    def run_kernel(self) -> None:
        """Run the outstanding update."""
        assert self.outstanding is not None
        effect, self.outstanding = self.outstanding, None
        self.post(Applied(self.now, effect.ticket, effect.run()))

    def wait(self, seconds: float) -> None:
        """Let time pass; send the tick that the engine asked for, if its time has come."""
        self.now += seconds
        if self.wake_at is not None and self.wake_at <= self.now:
            self.wake_at = None
            self.post(Tick(self.now))

    def define(self, arrays: Mapping[str, Array]) -> Layout:
        """Give the engine its model, as ``--init`` does."""
        layout = Layout.of(arrays)
        data = aligned(layout.nbytes)
        for tensor in layout.tensors:
            view = np.frombuffer(raw.encode(arrays[tensor.name]), np.uint8)
            data[tensor.offset : tensor.offset + tensor.nbytes] = view
        rows = tuple((t.name, t.dtype.name, t.shape) for t in layout.tensors)
        self.post(Initialised(self.now, rows, data))
        return layout

    def join(
        self, peer: int, role: str = "worker", client: str | None = None, epoch: int = 1
    ) -> None:
        """Have a client join on a connection of that number."""
        hello = messages.Hello(
            0, 1, client or f"client-{peer}", epoch, f"w{peer}", role, False, b"n" * 16, "test"
        )
        self.post(Joined(self.now, peer, hello))

    def leave(self, peer: int) -> None:
        """Cut a connection."""
        self.post(Left(self.now, peer))

    def push(
        self,
        peer: int,
        gradients: Mapping[str, Array],
        version: int | None = None,
        *,
        seq: int | None = None,
        fetch: bool = False,
        have: int = -1,
    ) -> Message | None:
        """Push gradients computed at a version (default: the current); return what was answered."""
        store = self.engine.store
        assert store is not None
        layout = store.layout
        if seq is None:
            seq = self.seqs[peer] = self.seqs.get(peer, 0) + 1
        parts: list[Part] = []
        data = b""
        for index in sorted(layout.index[name] for name in gradients):
            tensor = layout.tensors[index]
            base = int(store.current.tensor_versions[index]) if version is None else version
            parts += split(tensor.offset, tensor.offset + tensor.nbytes, "raw", base)
            data += bytes(raw.encode(gradients[tensor.name]))
        joined = tuple(_joined(parts))
        message = messages.Push(1000 * peer + seq, seq, fetch, have, joined)
        return self.receive(peer, message, data)

    def receive(self, peer: int, message: Message, data: bytes = b"") -> Message | None:
        """Have a message arrive; return the last thing said to its peer since."""
        before = len(self.said.get(peer, []))
        sink = None
        if data:
            sink = self.engine.admission.sink_for(message)
            assert sink is not None, "the receive buffers are used up"
            rest = memoryview(data)
            for part, described in enumerate(message.parts):  # type: ignore[attr-defined]
                offset = 0
                while offset < described.nbytes:
                    view = sink.view(part, offset)[: described.nbytes - offset]
                    view[:] = rest[: len(view)]
                    sink.filled(part, offset, len(view))
                    rest, offset = rest[len(view) :], offset + len(view)
        self.post(Received(self.now, peer, message, sink))
        said = self.said.get(peer, [])
        return said[-1] if len(said) > before else None

    # ------------------------------------------------------------ what came of it

    @property
    def version(self) -> int:
        """The model version."""
        assert self.engine.store is not None
        return self.engine.store.version

    def params(self) -> dict[str, Array]:
        """Copies of the current parameters."""
        assert self.engine.store is not None
        return {k: v.copy() for k, v in self.engine.store.current.arena.views.items()}

    def acks(self, peer: int) -> list[Ack]:
        """The acknowledgements a peer was given."""
        return [m for m in self.said.get(peer, []) if isinstance(m, Ack)]

    def errors(self, peer: int) -> list[Error]:
        """The errors a peer was given."""
        return [m for m in self.said.get(peer, []) if isinstance(m, Error)]

    def release(self) -> None:
        """Have all replies be sent."""
        for _peer, lease in self.leases:
            lease.release()
        self.leases.clear()


def _joined(parts: list[Part]) -> list[Part]:
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and last.stop == part.start and last.version == part.version:
            nbytes = last.nbytes + part.nbytes
            found[-1] = Part(last.start, part.stop, "raw", nbytes, part.version)
        else:
            found.append(part)
    return found
