"""A server in memory: every message crosses a wire, none crosses a socket.

The engine is that of real runs, and so are the clients (`aiops.sim.turns.simulated_client`) and the
bytes, which the wires count. Whatever follows from a message is done when `MemoryServer.receive`
returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiops.algorithms.checks import failed_part
from aiops.client.params import Leased, Params
from aiops.client.request_kinds import Request
from aiops.client.session import Session
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Drop, Event, Joined, Left, Received, Reply, Warm
from aiops.engine.steady import ExchangeRecord
from aiops.model.parts import Part
from aiops.sim.turns.memory_wire import MemoryLine
from aiops.sim.turns.steady import SteadyTurn, are_steady, header_bytes
from aiops.wire.connection import Buffer, SinkFor
from aiops.wire.handshake import Admitted, ServerHandshake
from aiops.wire.messages import Ack, Push

URL = "aiops://memory:7171"


class ServedClient(Protocol):
    """A client as its server sees it (`aiops.sim.turns.simulated_client`)."""

    session: Session

    def settle(self) -> None:
        """Take the answer to the request under way, if it is there."""


class EventRecord(ExchangeRecord, Protocol):
    """Records the events of an engine, each before it is handled."""

    def note(self, event: Event) -> bool | None:
        """Record an event; return what `Engine.handle` takes with it."""


class MemoryServer:
    """One engine, and the server's end of every connection.

    Parameters
    ----------
    engine
        The server's.
    journal
        Records the events; None: there is no record.
    line
        Makes a connection, given the engine's `Admission.sink_for`.
    """

    now = 0.0

    def __init__(
        self,
        engine: Engine,
        *,
        journal: EventRecord | None = None,
        line: Callable[[SinkFor], MemoryLine] = MemoryLine,
    ) -> None:
        self.engine, self.journal, self._make_line = engine, journal, line
        self.workers: dict[int, ServedClient] = {}
        self.lines: dict[int, MemoryLine] = {}
        self._handshakes: dict[int, ServerHandshake] = {}
        self._events: deque[Event] = deque()
        self._answered: deque[ServedClient] = deque()  # clients with answers to be settled
        self._handling = False

    def connect(self, worker: ServedClient) -> int:
        """Open a connection; return its number."""
        peer = len(self.lines) + 1
        self.workers[peer] = worker
        self.lines[peer] = self._make_line(self.engine.admission.sink_for)
        self._handshakes[peer] = ServerHandshake(None, peer.to_bytes(16, "big"))
        return peer

    def disconnect(self, peer: int) -> None:
        """Lose a connection."""
        del self.workers[peer]
        self.lines[peer].server.lost()
        self.post(Left(self.now, peer))

    def resume(self, engine: Engine) -> None:
        """Go on with another engine, in which the same clients have the same connections."""
        self.engine = engine
        for peer, line in self.lines.items():
            member = engine.membership.at(peer)
            if member is None:
                raise LookupError(f"connection {peer} has no member")
            line.sink_for, line.server.traffic = engine.admission.sink_for, member.traffic

    def shortened(
        self, peer: int, session: Session, params: Params, request: Request
    ) -> SteadyTurn | None:
        """Return a client's short way, or None if an exchange could not have gone it."""
        shared, wire = self.engine.short_way, self.lines[peer]
        member = self.engine.membership.at(peer)
        if shared is None or member is None or not shared.store.whole_at_once:
            return None
        if not (isinstance(params, Leased) and params.borrowed):
            return None
        push, ack = getattr(request, "sent", None), request.reply
        if not (isinstance(push, Push) and isinstance(ack, Ack) and ack.used):
            return None
        if not are_steady(push, ack, params.layout.nbytes):
            return None
        numbers = push.parts, header_bytes(push), header_bytes(ack)
        return SteadyTurn(shared, member, peer, wire.server.traffic, session, params, *numbers)

    def steady(
        self, peer: int, session: Session, params: Params, state: Sequence[Any]
    ) -> SteadyTurn:
        """Return a client's short way, which `SteadyTurn.state` has described."""
        shared, member = self.engine.short_way, self.engine.membership.at(peer)
        if shared is None or member is None or not isinstance(params, Leased):
            raise ValueError(f"connection {peer} has no short way")
        parts, push, ack = state
        numbers = tuple(Part(*part) for part in parts), push, ack
        traffic = self.lines[peer].server.traffic
        return SteadyTurn(shared, member, peer, traffic, session, params, *numbers)

    def receive(self, peer: int, buffers: list[Buffer]) -> None:
        """Deliver what a client sends."""
        line, handshake = self.lines[peer], self._handshakes[peer]
        for message, sink in line.send(buffers):
            if handshake.admitted is not None:
                self.post(Received(self.now, peer, message, sink))
                continue
            admitted = handshake.receive(message)
            assert isinstance(admitted, Admitted), "no token is asked for in memory"
            traffic = line.server.traffic
            self.post(Joined(self.now, peer, admitted.hello, admitted.proof, traffic))

    def post(self, event: Event) -> None:
        """Let the engine handle an event, and carry out all effects that follow."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                leased = None if self.journal is None else self.journal.note(event)
                for effect in self.engine.handle(event, leased):
                    if isinstance(effect, Apply):
                        self._events.append(Applied(self.now, effect.ticket, effect.run()))
                    elif isinstance(effect, Reply):
                        self._reply(effect)
                    elif isinstance(effect, Warm):
                        effect.run()
                    elif isinstance(effect, Drop):
                        self.workers.pop(effect.peer, None)
        except Exception as error:
            theirs = failed_part(error, self.engine.algorithm, self.engine.policy)
            if theirs is None:
                raise
            raise theirs from error
        finally:
            self._handling = False
        while self._answered:
            self._answered.popleft().settle()

    def _reply(self, effect: Reply) -> None:
        worker, line = self.workers.get(effect.peer), self.lines[effect.peer]
        lease, rows = effect.lease, effect.rows
        if rows is not None:
            views = [[rows.answer]]
        else:
            parts = getattr(effect.message, "parts", ())
            views = [] if lease is None else lease.borrowed_views(parts)
        if worker is not None and line.server.state != "closed":
            line.answer(worker.session, effect.message, views, lease)
            self._answered.append(worker)
        elif lease is not None:
            lease.release()
        if rows is not None:
            rows.free()
