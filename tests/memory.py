"""A server that blocking clients reach through memory: a real engine, and sockets that are none.

A `MemorySocket` is what a client's connection takes for a socket. All that is sent is heard at
once, by a real engine, on the caller's thread; and what the engine answers waits to be received. So
everything that happens is decided by the test: in how many pieces bytes pass, when nothing passes
for a while, and after which byte the connection is lost.
"""

from __future__ import annotations

import contextvars
import dataclasses
import os
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from aiops.algorithms import find
from aiops.client.sync import connection, short_way
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Event, Joined, Left, Options, Received, Reply
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.wire import messages
from aiops.wire.handshake import Admitted, ServerHandshake
from aiops.wire.messages import Message
from aiops.wire.sinks import Sink
from tests.driven import Driven

URL = "aiops://127.0.0.1:7171"


@dataclasses.dataclass
class Faults:
    """What is to happen to the connection that is open, or the next one.

    Attributes
    ----------
    up, down
        Bytes that one call passes at most.
    slow_up, slow_down
        Calls that pass nothing, as if nothing had moved for a while.
    cut_up, cut_down
        Bytes that still pass before the connection is lost.
    """

    up: int | None = None
    down: int | None = None
    slow_up: int = 0
    slow_down: int = 0
    cut_up: int | None = None
    cut_down: int | None = None


class MemoryServer:
    """An engine, and the connections that clients have made to it."""

    def __init__(
        self,
        policy: str = "asgd",
        settings: Mapping[str, Any] | None = None,
        push_codec: Sequence[str] = (),
        fetch_codec: Sequence[str] = (),
    ) -> None:
        algorithm = find(policy).make({"lr": 0.5, **(settings or {})})
        codecs = {"push_codec": tuple(push_codec), "fetch_codec": tuple(fetch_codec)}
        self.engine = Engine(algorithm, Options(**codecs))
        self.sockets: list[MemorySocket] = []
        self.faults = Faults()  # of the sockets that are made from here on
        self.answer: Callable[[Message], Message] = lambda message: message
        self._random = 0
        self._fd = os.open(os.devnull, os.O_RDONLY)

    def call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call a function whose clients are to connect to this server."""
        return contextvars.copy_context().run(self._within, function, given, named)

    def _within(self, function: Callable[..., Any], given: Any, named: Any) -> Any:
        env = CURRENT_ENVIRONMENT.get()
        CURRENT_ENVIRONMENT.set(
            dataclasses.replace(
                env,
                token_bytes=self._token_bytes,
                randbelow=lambda n: 0,
                identity=lambda: "memory",
                connect_unix=lambda host, port: None,
                unconnected_socket=lambda host: MemorySocket(self),
            )
        )
        return function(*given, **named)

    def _token_bytes(self, count: int) -> bytes:
        self._random += 1
        return self._random.to_bytes(count, "big")

    def post(self, event: Event) -> None:
        """Have the engine handle an event, and do what follows from it."""
        events = [event]
        while events:
            for effect in self.engine.handle(events.pop(0)):
                if isinstance(effect, Apply):
                    events.append(Applied(0.0, effect.ticket, effect.run()))
                elif isinstance(effect, Reply):
                    lease = effect.lease
                    parts = getattr(effect.message, "parts", ())
                    views = [] if lease is None else lease.borrowed_views(parts)
                    payloads = [b"".join(view) for view in views]
                    self.sockets[effect.peer].say(self.answer(effect.message), *payloads)
                    if lease is not None:
                        lease.release()

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._fd)


class MemorySocket:
    """One connection, seen from the client."""

    family = -1

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self.peer = len(server.sockets)
        server.sockets.append(self)
        self.faults = server.faults
        self._handshake = ServerHandshake(None, self.peer.to_bytes(16, "big"))
        self.wire = Driven("server", server.engine.admission.sink_for)
        self.up = b""  # all that has been sent
        self.said = b""  # all that the server has said
        self.change: Callable[[bytes], bytes] = lambda data: data  # of what it says
        self._down = b""  # what is still to be received
        self.lost = False
        self.notify: Callable[[], None] = lambda: None  # called when there is something to receive

    # ------------------------------------------------------------ the server's side

    def say(self, message: Message, *payloads: bytes) -> None:
        """Say something."""
        if self.lost or self.wire.state == "closed":
            return
        buffers = self.wire.send(message, [[memoryview(payload)] for payload in payloads])
        data = self.change(b"".join(buffers))
        self.said += data
        self._down += data
        self.notify()

    def _hear(self, data: bytes) -> None:
        while data:
            room = self.wire.next_buffer()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            for message, sink in self.wire.take(count):
                self._take(message, sink)

    def _take(self, message: Message, sink: Sink | None) -> None:
        if self._handshake.admitted:
            self._server.post(Received(0.0, self.peer, message, sink))
            return
        admitted = self._handshake.receive(message)
        assert isinstance(admitted, Admitted)
        self._server.post(Joined(0.0, self.peer, *admitted[:2]))

    def lose(self) -> None:
        """Lose the connection, and what is under way on it."""
        if not self.lost:
            self.lost, self._down = True, b""
            self.wire.lost()
            if self._handshake.admitted:
                self._server.post(Left(0.0, self.peer))

    # ------------------------------------------------------------ the client's side

    def sendmsg(self, buffers: list[Any], _ancillary: Any = (), _flags: int = 0) -> int:
        """Send some of what there is."""
        faults = self.faults
        if faults.slow_up:
            faults.slow_up -= 1
            raise BlockingIOError
        data = b"".join(buffers)[: faults.up]
        if faults.cut_up is not None:
            data = data[: faults.cut_up]
            faults.cut_up -= len(data)
        if self.lost or not data:
            faults.cut_up = None
            self.lose()
            raise ConnectionResetError("it was cut")
        self.up += data
        self._hear(data)
        return len(data)

    def sendall(self, data: bytes) -> None:
        """Send all of it."""
        while data:
            data = data[self.sendmsg([data]) :]

    def recv_into(self, buffer: memoryview, nbytes: int = 0, _flags: int = 0) -> int:
        """Receive some of what there is."""
        faults = self.faults
        if faults.slow_down:
            faults.slow_down -= 1
            raise BlockingIOError
        data = self._down[: len(buffer)][: faults.down]
        if faults.cut_down is not None:
            data = data[: faults.cut_down]
            faults.cut_down -= len(data)
        if self.lost or not data:
            if faults.cut_down is None:
                assert self.lost, "this client waits for what nobody has said"
            faults.cut_down = None
            self.lose()
            return 0
        self._down = self._down[len(data) :]
        buffer[: len(data)] = data
        return len(data)

    @property
    def readable(self) -> bool:
        """Whether there is something to be received."""
        return bool(self._down) or self.lost

    def connect(self, _address: Any) -> None:
        """Be connected."""

    def settimeout(self, _seconds: float | None) -> None:
        """Take note of nothing: there is no time here."""

    def setsockopt(self, *_option: Any) -> None:
        """Take note of nothing."""

    def fileno(self) -> int:
        """Return a descriptor that can always be read."""
        return self._server._fd

    def shutdown(self, _how: int) -> None:
        """End it."""
        self.lose()

    def close(self) -> None:
        """End it."""
        self.lose()


def without_waiting(client: Any) -> None:
    """Have a blocking client try to connect again at once."""
    client._connection.dialler.wait = lambda seconds: None


def patch_select(patch: pytest.MonkeyPatch) -> None:
    """Have `attend` look at sockets of memory, too."""

    class Select:
        def __getattr__(self, name: str) -> Any:
            return getattr(select, name)

        def select(self, reading: list[Any], *others: Any) -> Any:
            if isinstance(reading[0], MemorySocket):
                return [sock for sock in reading if sock.readable], [], []
            return select.select(reading, *others)

    class Poll:
        def __init__(self, sock: MemorySocket) -> None:
            self._sock = sock

        def poll(self, milliseconds: float | None = None) -> list[Any]:
            """Return the socket: a caller that waits reads what a real one would have, or fails."""
            return [self._sock] if milliseconds != 0 or self._sock.readable else []

    def read_poll(sock: Any) -> Any:
        return Poll(sock) if isinstance(sock, MemorySocket) else found(sock)

    found = short_way.read_poll
    patch.setattr(connection, "select", Select())
    patch.setattr(short_way, "read_poll", read_poll)


PING = messages.Ping(0)
