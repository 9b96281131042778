"""A client in memory: the session and the strategy of real runs, and a server to talk to.

It computes when `SimulatedClient.step` is called; all exchanges that follow are over when the call
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiops.client.params import Leased, Params
from aiops.client.request_kinds import Receipt, Request
from aiops.client.requests import Requests
from aiops.client.session import Session
from aiops.client.strategies import Direct, LocalStrategy, Transfer, directions_for, strategy_for
from aiops.client.strategies.overlapped import Overlapped
from aiops.errors import Refused, StaleGradient, UsageError
from aiops.model.layout import Array
from aiops.sim.turns.kept_request import request_of, request_state
from aiops.sim.turns.memory_server import URL, MemoryServer
from aiops.sim.turns.steady import SteadyTurn
from aiops.store.snapshots import Lease
from aiops.wire.connection import Connection

Gradient = Callable[[Params], Mapping[str, Array]]


class ReadKept(Protocol):
    """Reads an array that was kept."""

    def __call__(self, name: str, into: Array | None = None) -> Array:
        """Return the array of a name, in ``into`` or a new one."""


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
        Whether it computes the next gradient before its last push is answered (`Overlapped`): one
        at most, which is kept, and pushed when the last push has been answered.

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
        self._directions = directions_for(self.session.info.plan, self.params)

    def _model(self, ahead: bool) -> tuple[Params, LocalStrategy]:
        """Fetch the parameters; return them, with the strategy that trains them.

        They are read in the server's memory, unless the strategy writes to them.
        """
        plan, layout = self.session.info.plan, self.session.info.known_layout
        params = Leased(layout)
        self.ask(self.requests.fetch(params))
        if ahead:
            return params, Overlapped(params, aside=False)
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
        if self._directions is not None:
            gradients = self._directions.of(gradients)
            self._directions.took()
        if self._steady is not None and self.strategy.under_way is None:
            receipt = self._steady.exchange(gradients, self._server.now, self._server.journal)
            if receipt is not None:
                return receipt
        self.strategy.apply(gradients)
        self._blocked = self.strategy.due and self.strategy.under_way is not None
        if self._blocked:
            self.strategy.keep()
            return None
        transfer = self.strategy.transfer()
        return None if transfer is None else self._carry(transfer)

    def finish(self) -> None:
        """Push what the strategy has held back."""
        rest = self.strategy.rest()
        if rest is not None:
            self._carry(rest)

    @property
    def lease(self) -> Lease | None:
        """The lease on the version of the parameters that it reads in the server's memory."""
        lender = self.params.lender if isinstance(self.params, Leased) else None
        return lender if isinstance(lender, Lease) else None

    def arrays(self) -> dict[str, Array]:
        """Return the arrays, by name, that later turns depend on, but for the version leased."""
        found, coding = self._trained(), self.session.info.coding
        if coding is not None:
            for place, arrays in coding.state().items():
                found |= {f"coding/{place}/{name}": array for name, array in arrays.items()}
            if self._carried is not None:
                rests = coding.rests(self._carried.encoded)
                found |= {f"rest/{place}": rest for place, rest in rests.items()}
        return found

    def state(self) -> dict[str, Any]:
        """Return all else that later turns depend on, as plain values, for `restore`."""
        session, pending = self.session, self.session.pending
        coding, codings = session.info.coding, dict[int, list[str]]()
        if coding is not None:
            codings = {place: list(arrays) for place, arrays in coding.state().items()}
        ids = [id for id, request in pending.by_id.items() if request is self._carried]
        waiting = [request_state(id, pending.by_id[id], coding) for id in ids]
        return {
            "turns": [self.steps, self.recomputed, self.refused, self._blocked],
            "session": [pending.next_id, pending.seq, pending.answered],
            "ledger": session.ledger.state(),
            "strategy": self.strategy.state(),
            "coding": codings,
            "waiting": waiting,
            "steady": None if self._steady is None else self._steady.state(),
            "leased": self.lease is not None,
        }

    def restore(self, state: Mapping[str, Any], lease: Lease | None, read: ReadKept) -> None:
        """Continue as the client that was kept, on a fresh one of the same name.

        Parameters
        ----------
        state
            Of `state`.
        lease
            A lease on the version that it reads, if there was one.
        read
            Reads what `arrays` returned.
        """
        self.steps, self.recomputed, self.refused, self._blocked = state["turns"]
        if isinstance(self.params, Leased):
            if lease is None:
                self.params.own()
            else:
                self.params.read(lease.version.arena, lease.release)
        self.strategy.restore(state["strategy"])
        for name, array in self._trained().items():
            read(name, array)
        session, pending, coding = self.session, self.session.pending, self.session.info.coding
        pending.next_id, pending.seq, pending.answered = state["session"]
        session.ledger.restore(state["ledger"])
        session.wire.traffic = session.ledger.traffic
        if coding is not None:
            codings = state["coding"].items()
            coding.restore(
                {at: {name: read(f"coding/{at}/{name}") for name in names} for at, names in codings}
            )
        if state["steady"] is not None:
            steady = self._server.steady(self.peer, session, self.params, state["steady"])
            self._steady = steady
        transfer = self.strategy.under_way
        if transfer is not None:
            [waiting] = state["waiting"]
            id, request = request_of(waiting, transfer.into, coding, read)
            transfer.request = self._carried = pending.by_id[id] = request

    def _trained(self) -> dict[str, Array]:
        """Return the strategy's arrays, without parameters that are the server's."""
        found = self.strategy.arrays()
        if self.lease is not None:
            del found["params"]
        if self._directions is not None:
            momenta = self._directions.arrays().items()
            found |= {f"directions/{name}": momentum for name, momentum in momenta}
        return found

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
        if self._steady is None and isinstance(self.strategy, Direct | Overlapped):
            found = self._server.shortened(self.peer, self.session, self.params, request)
            self._steady = found
        if self._blocked:
            self._blocked = False
            transfer = self.strategy.transfer()
            if transfer is not None:
                self._carry(transfer)
