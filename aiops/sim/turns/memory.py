"""A server and its clients in memory: every message crosses a wire, none crosses a socket.

The engine, the conversations and the routines are those of real runs, and so are the bytes, which
the wires count. Nothing happens by itself: a client computes when its `Seat` is told to, and
everything that follows from that has happened when the call returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from aiops.client.leased import Leased
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt, Request
from aiops.client.requests import Requests
from aiops.client.session import Session, stream
from aiops.client.strategies import LocalStrategy, Transfer, strategy_for
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Drop, Event, Joined, Left, Received, Reply, Warm
from aiops.errors import Refused, StaleGradient, UsageError
from aiops.model.layout import Array
from aiops.sim.turns.ahead import Ahead
from aiops.sim.turns.handover import HandedWire, Parcel
from aiops.wire.connection import Buffer, Connection
from aiops.wire.handshake import Greeter
from aiops.wire.messages import Message
from aiops.wire.sinks import Sink

URL = "aiops://memory:7171"

Gradient = Callable[[Params], Mapping[str, Array]]


class MemoryServer:
    """One engine, and the server's end of every connection.

    Parameters
    ----------
    engine
        Decides everything.
    handed
        Whether messages are handed over as they are (`aiops.sim.turns.handover`) instead of as
        bytes: the same is said and counted, and done sooner.
    pieces
        Says how many bytes arrive at a time; by default all that there are.
    """

    def __init__(
        self, engine: Engine, *, handed: bool = False, pieces: Callable[[], int] | None = None
    ) -> None:
        self.engine, self.handed, self.pieces = engine, handed, pieces
        self.now = 0.0
        self.seats: dict[int, Seat] = {}
        self._wires: dict[int, Connection] = {}
        self._greeters: dict[int, Greeter] = {}
        self._events: deque[Event] = deque()
        self._heard: deque[Seat] = deque()  # who has been told something since
        self._handling = False

    def connect(self, seat: Seat) -> int:
        """Open a connection; return its number."""
        peer = len(self._wires) + 1
        self.seats[peer] = seat
        place = self.engine.intake.place
        self._wires[peer] = (
            HandedWire("server", place) if self.handed else Connection("server", place)
        )
        self._greeters[peer] = Greeter(None, peer.to_bytes(16, "big"))
        return peer

    def disconnect(self, peer: int) -> None:
        """A connection is gone."""
        del self.seats[peer]
        self._wires[peer].lost()
        self.post(Left(self.now, peer))

    def receive(self, peer: int, talk: Session, buffers: list[Buffer]) -> None:
        """Have what a client has to say arrive."""
        wire = self._wires[peer]
        if not isinstance(wire, HandedWire):
            for message, sink in _pour(wire, wire.received, buffers, self.pieces):
                self._hear(peer, message, sink)
            return
        assert isinstance(talk.wire, HandedWire)
        while talk.wire.outbox:
            parcel = talk.wire.outbox.popleft()
            wire.inbox.append(parcel)
            for message, sink in wire.received(parcel.nbytes):
                self._hear(peer, message, sink)

    def _hear(self, peer: int, message: Message, sink: Sink | None) -> None:
        greeter = self._greeters[peer]
        if greeter.admitted:
            self.post(Received(self.now, peer, message, sink))
            return
        answer = greeter.greet(message)
        assert answer is None, "no token is asked for in memory"
        assert greeter.hello is not None
        traffic = self._wires[peer].traffic
        self.post(Joined(self.now, peer, greeter.hello, greeter.proof, traffic))

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
                    elif isinstance(effect, Reply):
                        self._reply(effect)
                    elif isinstance(effect, Warm):
                        effect.run()
                    elif isinstance(effect, Drop):
                        self.seats.pop(effect.peer, None)
        finally:
            self._handling = False
        while self._heard:
            self._heard.popleft().settle()

    def _reply(self, effect: Reply) -> None:
        seat, wire = self.seats.get(effect.peer), self._wires[effect.peer]
        lease, rows = effect.lease, effect.rows
        if rows is not None:
            views = [[rows.answer]]
        else:
            parts = getattr(effect.message, "parts", ())
            views = [] if lease is None else lease.glimpses(parts)
        if seat is not None and wire.state != "closed":
            if isinstance(wire, HandedWire):
                wire.hand(effect.message, views, lease)
                lease = None  # it is the receiver's now
                seat.take(wire.outbox.popleft())
            else:
                seat.receive(wire.send(effect.message, views))
            self._heard.append(seat)
        if rows is not None:
            rows.free()
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
    ahead
        Whether it computes the next gradient before its last push has been answered (`Ahead`).
    """

    def __init__(
        self,
        server: MemoryServer,
        name: str,
        initial: Mapping[str, Array],
        *,
        ahead: bool = False,
    ) -> None:
        self._server = server
        self._nonces = 0
        self._carried: Request | None = None
        self._receipt: Receipt | None = None
        self._blocked = False  # a gradient is applied, and its transfer waits for the last one's
        self.session = Session(
            URL,
            client=name,
            name=name,
            role="worker",
            token=None,
            nonce=self._nonce,
            pongs=False,
            wire=partial(HandedWire, "client") if server.handed else stream,
        )
        self.requests = Requests(self.session)
        self.steps = self.recomputed = 0
        self.refused = False  # the last gradient was: it is to be computed again
        self.peer = server.connect(self)
        server.receive(self.peer, self.session, self.session.connected())
        self.ask(self.requests.define(initial))
        self.params, self.strategy = self._model(ahead)

    def _model(self, ahead: bool) -> tuple[Params, LocalStrategy]:
        """Fetch the parameters; return them, with the routine that trains them.

        They are read where the server keeps them, if the routine leaves them as they are.
        """
        plan, layout = self.session.plan, self.session.known_layout
        params = Leased(layout) if self._server.handed else Params(layout)
        self.ask(self.requests.fetch(params))
        if ahead:
            return params, Ahead(params)
        routine = strategy_for(plan, params)
        if isinstance(params, Leased) and routine.writes:
            mine = params.copy()
            params.let_go()
            return mine, strategy_for(plan, mine)
        return params, routine

    def _nonce(self) -> bytes:
        self._nonces += 1
        return self._nonces.to_bytes(16, "little")

    def receive(self, buffers: list[Buffer]) -> None:
        """Have bytes arrive."""
        _pour(self.session, self.session.received, buffers, self._server.pieces)

    def take(self, parcel: Parcel) -> None:
        """Have a message arrive."""
        assert isinstance(self.session.wire, HandedWire)
        self.session.wire.inbox.append(parcel)
        self.session.received(parcel.nbytes)

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
        self._server.receive(self.peer, self.session, self.session.outgoing())

    @property
    def waits(self) -> bool:
        """Whether it may compute no gradient before something has arrived."""
        return self._blocked or (self.strategy.under_way is not None and self.strategy.waits)

    def step(self, gradient: Gradient) -> Receipt | None:
        """Compute one gradient, and do what the routine says; return what has become of a push."""
        return self.give(gradient(self.params))

    def give(self, gradients: Mapping[str, Array]) -> Receipt | None:
        """Hand in the gradient of a mini-batch, computed at `params`, as `step` does."""
        assert not self.waits, "it has to wait for an answer first"
        self.steps += 1
        self.refused = False
        self.strategy.apply(gradients)
        self._blocked = self.strategy.due and self.strategy.under_way is not None
        return None if self._blocked else self._move()

    def _move(self) -> Receipt | None:
        transfer = self.strategy.transfer()
        return None if transfer is None else self._carry(transfer)

    def finish(self) -> None:
        """Push the rest."""
        rest = self.strategy.rest()
        if rest is not None:
            self._carry(rest)

    def _carry(self, transfer: Transfer) -> Receipt | None:
        self._receipt = None
        self._carried = transfer.ask(self.requests)
        self._send()
        return self._receipt

    def settle(self) -> None:
        """Hand the routine what has arrived, if it is what was carried."""
        request = self._carried
        if request is None or not request.done:
            return
        self._carried = None
        try:
            result = request.value()
        except StaleGradient:
            self.strategy.failed()
            self.recomputed += 1
            self.refused = True
            return
        except Refused:
            self.strategy.failed()
            raise
        receipt = self._receipt = result if isinstance(result, Receipt) else None
        self.strategy.arrived(receipt)
        if self._blocked:
            self._blocked = False
            self._move()


class _Receiver(Protocol):
    """Whoever bytes arrive at."""

    def next_buffer(self) -> memoryview:
        """Return where they belong."""


def _pour(
    end: _Receiver,
    received: Callable[[int], Any],
    buffers: list[Buffer],
    pieces: Callable[[], int] | None,
) -> list[Any]:
    """Have buffers arrive at one end; return what it makes of them."""
    made: list[Any] = []
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest):
            room = end.next_buffer()
            count = min(len(room), len(rest))
            if pieces is not None:
                count = min(count, pieces())
            room[:count] = rest[:count]
            rest = rest[count:]
            made += received(count) or ()
    return made
