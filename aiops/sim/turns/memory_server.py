"""A server and its clients in memory: every message crosses a wire, none crosses a socket.

The engine, the sessions and the strategies are those of real runs, and so are the bytes, which the
wires count. A client computes when `SimulatedClient.step` is called; all exchanges that follow
are over when the call returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from aiops.client.params import Leased, Params
from aiops.client.request_kinds import Receipt, Request
from aiops.client.requests import Requests
from aiops.client.session import Session
from aiops.client.strategies import Direct, LocalStrategy, Transfer, strategy_for
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Drop, Event, Joined, Left, Received, Reply, Warm
from aiops.engine.journal import Journal
from aiops.errors import Refused, StaleGradient, UsageError
from aiops.model.layout import Array
from aiops.sim.turns.memory_wire import MemoryLine
from aiops.sim.turns.pipelined import PipelinedPush
from aiops.sim.turns.steady import SteadyTurn, are_steady
from aiops.wire.connection import Buffer, Connection, SinkFor
from aiops.wire.handshake import Admitted, ServerHandshake
from aiops.wire.messages import Ack, Push

URL = "aiops://memory:7171"

Gradient = Callable[[Params], Mapping[str, Array]]


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
        journal: Journal | None = None,
        line: Callable[[SinkFor], MemoryLine] = MemoryLine,
    ) -> None:
        self.engine, self.journal, self._make_line = engine, journal, line
        self.workers: dict[int, SimulatedClient] = {}
        self.lines: dict[int, MemoryLine] = {}
        self._handshakes: dict[int, ServerHandshake] = {}
        self._events: deque[Event] = deque()
        self._answered: deque[SimulatedClient] = deque()  # clients with answers to be settled
        self._handling = False

    def connect(self, worker: SimulatedClient) -> int:
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
        if not (isinstance(push, Push) and isinstance(ack, Ack)):
            return None
        if not are_steady(push, ack, params.layout.nbytes):
            return None
        return SteadyTurn(shared, member, peer, wire.server.traffic, session, params, push, ack)

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
            self.post(Joined(self.now, peer, *admitted, traffic))

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


class SimulatedClient:
    """One worker: its session, and its strategy once it has the model.

    Parameters
    ----------
    server
        The server that it joins.
    name
        Its name, and its id.
    initial
        The parameters that it offers.
    ahead
        Whether it computes the next gradient before its last push is answered (`PipelinedPush`).

    Attributes
    ----------
    params
        Its parameters.
    strategy
        Decides when to push and fetch, and what.
    steps, recomputed
        Gradients that it has computed, and those of them that the policy refused.
    refused
        Whether the last gradient was refused and is to be computed again.
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
        self._steady: SteadyTurn | None = None
        self._blocked = False  # a gradient is applied, and its transfer waits for the last one
        self.peer = server.connect(self)
        self.session = Session(
            URL,
            client=name,
            name=name,
            role="worker",
            token=None,
            nonce=self._nonce,
            pongs=False,
            wire=self._wire,
        )
        self.requests = Requests(self.session)
        self.steps = self.recomputed = 0
        self.refused = False
        server.receive(self.peer, self.session.connected())
        self.ask(self.requests.define(initial))
        self.params, self.strategy = self._model(ahead)

    def _model(self, ahead: bool) -> tuple[Params, LocalStrategy]:
        """Fetch the parameters; return them, with the strategy that trains them.

        They are read in the server's memory, unless the strategy writes to them.
        """
        plan, layout = self.session.info.plan, self.session.info.known_layout
        params = Leased(layout)
        self.ask(self.requests.fetch(params))
        if ahead:
            return params, PipelinedPush(params)
        strategy = strategy_for(plan, params)
        if strategy.writes:
            mine = params.copy()
            params.release()
            return mine, strategy_for(plan, mine)
        return params, strategy

    def _nonce(self) -> bytes:
        self._nonces += 1
        return self._nonces.to_bytes(16, "little")

    def _wire(self) -> Connection:
        return self._server.lines[self.peer].client()

    def ask(self, request: Request) -> object:
        """Send a request, and return its result.

        Raises
        ------
        AiopsError
            The refusal; UsageError if the answer is held back.
        """
        self._send()
        if not request.done:
            raise UsageError(f"{self._server.engine.algorithm.name} holds the answer back")
        result: object = request.value()
        return result

    def _send(self) -> None:
        self._server.receive(self.peer, self.session.outgoing())

    @property
    def waits(self) -> bool:
        """True while it may not compute a gradient, because an answer is missing."""
        return self._blocked or (self.strategy.under_way is not None and self.strategy.waits)

    def step(self, gradient: Gradient) -> Receipt | None:
        """Compute one gradient for the strategy to use; return the receipt of a push, if any."""
        assert not self.waits, "it has to wait for an answer first"
        return self.give(gradient(self.params))

    def give(self, gradients: Mapping[str, Array]) -> Receipt | None:
        """Take the gradient of a mini-batch, computed at `params`, as `step` does."""
        self.steps += 1
        self.refused = False
        if self._steady is not None and self.strategy.under_way is None:
            receipt = self._steady.exchange(gradients, self._server.now, self._server.journal)
            if receipt is not None:
                return receipt
        self.strategy.apply(gradients)
        self._blocked = self.strategy.due and self.strategy.under_way is not None
        transfer = None if self._blocked else self.strategy.transfer()
        return None if transfer is None else self._carry(transfer)

    def finish(self) -> None:
        """Push what the strategy has held back."""
        rest = self.strategy.rest()
        if rest is not None:
            self._carry(rest)

    def _carry(self, transfer: Transfer) -> Receipt | None:
        self._receipt = None
        self._carried = transfer.ask(self.requests)
        self._server.receive(self.peer, self.session.outgoing())
        return self._receipt

    def settle(self) -> None:
        """Give the strategy the answer to its transfer, if it has arrived."""
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
        if self._steady is None and isinstance(self.strategy, Direct):
            found = self._server.shortened(self.peer, self.session, self.params, request)
            self._steady = found
        if self._blocked:
            self._blocked = False
            transfer = self.strategy.transfer()
            if transfer is not None:
                self._carry(transfer)
