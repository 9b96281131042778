"""A server and its clients in memory: every byte crosses a wire, none crosses a socket.

The engine, the conversations and the routines are those of real runs, and so are the bytes, which
the wires count. Nothing happens by itself: a client computes when its `Seat` is told to, and
everything that follows from that has happened when the call returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiops.client.conversation import Conversation
from aiops.client.params import Params
from aiops.client.requests import Receipt, Request
from aiops.client.routines import Routine, Transfer, routine_for
from aiops.engine import Engine
from aiops.errors import Refused, StaleGradient, UsageError
from aiops.events import Applied, Apply, Drop, Event, Joined, Left, Received, Reply, Warm
from aiops.handshake import Greeter
from aiops.layout import Array
from aiops.wire import Buffer, Wire

URL = "aiops://memory:7171"

Gradient = Callable[[Params], Mapping[str, Array]]


class MemoryServer:
    """One engine, and the server's end of every connection.

    Parameters
    ----------
    engine
        Decides everything.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = 0.0
        self.seats: dict[int, Seat] = {}
        self._wires: dict[int, Wire] = {}
        self._greeters: dict[int, Greeter] = {}
        self._events: deque[Event] = deque()
        self._handling = False

    def connect(self, seat: Seat) -> int:
        """Open a connection; return its number."""
        peer = len(self._wires) + 1
        self.seats[peer] = seat
        self._wires[peer] = Wire("server", self.engine.intake.place)
        self._greeters[peer] = Greeter(None, peer.to_bytes(16, "big"))
        return peer

    def disconnect(self, peer: int) -> None:
        """A connection is gone."""
        del self.seats[peer]
        self._wires[peer].lost()
        self.post(Left(self.now, peer))

    def receive(self, peer: int, buffers: list[Buffer]) -> None:
        """Have bytes arrive."""
        wire, greeter = self._wires[peer], self._greeters[peer]
        for message, sink in _pour(wire, wire.received, buffers):
            if greeter.admitted:
                self.post(Received(self.now, peer, message, sink))
                continue
            answer = greeter.greet(message)
            assert answer is None, "no token is asked for in memory"
            assert greeter.hello is not None
            self.post(Joined(self.now, peer, greeter.hello, greeter.proof, wire.traffic))

    def post(self, event: Event) -> None:
        """Have the engine handle an event, and carry out what follows, to its end."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self.engine.handle(self._events.popleft()):
                    if isinstance(effect, Apply):
                        self._events.append(Applied(self.now, effect.ticket, effect.run()))
                    elif isinstance(effect, Warm):
                        effect.run()
                    elif isinstance(effect, Reply):
                        self._reply(effect)
                    elif isinstance(effect, Drop):
                        self.seats.pop(effect.peer, None)
        finally:
            self._handling = False

    def _reply(self, effect: Reply) -> None:
        seat, wire = self.seats.get(effect.peer), self._wires[effect.peer]
        lease = effect.lease
        if effect.rows is not None:
            views = [[effect.rows.answer]]
        else:
            parts = getattr(effect.message, "parts", ())
            views = [] if lease is None else lease.glimpses(parts)
        if seat is not None and wire.state != "closed":
            seat.receive(wire.send(effect.message, views))
        if effect.rows is not None:
            effect.rows.free()
        if lease is not None:
            lease.release()


class Seat:
    """One worker: its conversation, and its routine once it has the model.

    Parameters
    ----------
    server
        Which it joins.
    name
        Its name, and its id.
    initial
        The parameters that it offers.
    """

    def __init__(self, server: MemoryServer, name: str, initial: Mapping[str, Array]) -> None:
        self._server = server
        self._nonces = 0
        self.talk = Conversation(
            URL, client=name, name=name, role="worker", token=None, nonce=self._nonce, pongs=False
        )
        self.steps = self.recomputed = 0
        self.peer = server.connect(self)
        server.receive(self.peer, self.talk.connected())
        self.ask(self.talk.define(initial))
        assert self.talk.layout is not None
        assert self.talk.welcome is not None
        self.params = Params(self.talk.layout)
        self.ask(self.talk.fetch(self.params))
        self.routine: Routine = routine_for(self.talk.welcome.plan, self.params)
        self._carried: Request | None = None
        self._blocked = False  # a gradient is applied, and its transfer waits for the last one's

    def _nonce(self) -> bytes:
        self._nonces += 1
        return self._nonces.to_bytes(16, "little")

    def receive(self, buffers: list[Buffer]) -> None:
        """Have bytes arrive."""
        _pour(self.talk, self.talk.received, buffers)

    def ask(self, request: Request) -> object:
        """Send a request, and return its result.

        Raises
        ------
        AiopsError
            Whatever it was refused with; UsageError if it is not answered now.
        """
        self._send()
        if not request.done:
            raise UsageError(f"{self._server.engine.algorithm.name} holds the answer back")
        result: object = request.value()
        return result

    def _send(self) -> None:
        out = self.talk.outgoing()
        if out:
            self._server.receive(self.peer, out)

    @property
    def waits(self) -> bool:
        """Whether it may compute no gradient before something has arrived."""
        self._settle()
        return self._blocked or (self.routine.under_way is not None and self.routine.waits)

    def step(self, gradient: Gradient) -> Receipt | None:
        """Compute one gradient, and do what the routine says; return what has become of a push."""
        assert not self.waits, "it has to wait for an answer first"
        self.steps += 1
        self.routine.apply(gradient(self.params))
        self._blocked = self.routine.due and self.routine.under_way is not None
        return None if self._blocked else self._move()

    def _move(self) -> Receipt | None:
        transfer = self.routine.transfer()
        return None if transfer is None else self._carry(transfer)

    def finish(self) -> None:
        """Push the rest."""
        self._settle()
        rest = self.routine.rest()
        if rest is not None:
            self._carry(rest)

    def _carry(self, transfer: Transfer) -> Receipt | None:
        self._carried = transfer.ask(self.talk)
        self._send()
        return self._settle()

    def _settle(self) -> Receipt | None:
        """Hand the routine what has arrived."""
        request = self._carried
        if request is None or not request.done:
            return None
        self._carried = None
        try:
            result = request.value()
        except StaleGradient:
            self.routine.failed()
            self.recomputed += 1
            return None
        except Refused:
            self.routine.failed()
            raise
        receipt = result if isinstance(result, Receipt) else None
        self.routine.arrived(receipt)
        if self._blocked:
            self._blocked = False
            return self._move()
        return receipt


class _Receiver(Protocol):
    """Whoever bytes arrive at."""

    def next_buffer(self) -> memoryview:
        """Return where they belong."""


def _pour(end: _Receiver, received: Callable[[int], Any], buffers: list[Buffer]) -> list[Any]:
    """Have buffers arrive at one end; return what it makes of them."""
    made: list[Any] = []
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest):
            room = end.next_buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            made += received(count) or ()
    return made
