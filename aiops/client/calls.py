"""The calls of a client, sans-I/O: `Client` and `AsyncClient` drive them.

Each call is a program (`aiops.client.program`): a generator that yields requests to make, is sent
their results, and returns the result of the call. `Client` blocks for each answer, `AsyncClient`
awaits it; neither decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from aiops.client.params import Leased, Params, Stamped
from aiops.client.program import Program, T
from aiops.client.request_kinds import Receipt, Request
from aiops.client.requests import Requests, Transfer
from aiops.client.session import Session
from aiops.errors import NotReady, UsageError
from aiops.model.layout import Array
from aiops.model.tables import Table
from aiops.wire.data_messages import GivenTask, TakeTask


class Ask(NamedTuple):
    """Make this request, and wait for the answer.

    Attributes
    ----------
    make
        Makes the request, has it sent, and returns it.
    pushes
        Whether it counts as a push, of which only some may be under way at a time.
    """

    make: Callable[[], Request]
    pushes: bool = False


Call: TypeAlias = Program[Ask, T]


class Calls:
    """The calls of one client.

    Parameters
    ----------
    session
        Its session with the server.
    requests
        Makes its requests.
    """

    def __init__(self, session: Session, requests: Requests) -> None:
        self._session, self._requests = session, requests

    def offer(self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None) -> Call[bool]:
        """Offer a model; return whether it was taken."""
        created, _version = yield Ask(partial(self._requests.define, arrays, tables))
        return bool(created)

    def define(
        self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None, views: bool
    ) -> Call[Params]:
        """Offer a model; return the server's parameters.

        A server that is started again before they have come may have lost the model, and is offered
        it again. One that takes an offer and then has no model on the same connection is not.
        """
        while True:
            connection = self._session.info.connection  # the newest; an offer may outlast it
            yield Ask(partial(self._requests.define, arrays, tables))
            params = yield from self._room(views)
            try:
                yield Ask(partial(self._requests.fetch, params))
            except NotReady:
                if self._session.info.connection == connection:
                    raise
            else:
                return params

    def fetch(self, into: Params | None, *, evaluation: bool = False) -> Call[Params]:
        """Return the server's parameters, in ``into`` or in new arrays."""
        params = into if into is not None else (yield from self._room())
        yield Ask(partial(self._requests.fetch, params, evaluation=evaluation))
        if evaluation:  # so that no later fetch takes them for what gradients are computed at
            params.connection = ("", 0)
        return params

    def push(self, params: Stamped, gradients: Mapping[str, Array]) -> Call[Receipt]:
        """Push gradients that were computed at ``params``; do not fetch."""
        self.check_direct()
        receipt: Receipt = yield Ask(partial(self._requests.push, gradients, params, None), True)
        return receipt

    def carry(self, transfer: Transfer) -> Call[Receipt | None]:
        """Carry a strategy's transfer; return its receipt, or None for a mere fetch."""
        result = yield Ask(partial(transfer.ask, self._requests), True)
        return result if isinstance(result, Receipt) else None

    def fetch_rows(self, name: str, ids: Any, out: Array | None) -> Call[Array]:
        """Return rows of a table."""
        yield from self._describe()
        rows: Array = yield Ask(partial(self._requests.fetch_rows, name, ids, out))
        return rows

    def push_rows(
        self, name: str, ids: Any, grads: Any, version: int | None, lr_factor: float
    ) -> Call[Receipt]:
        """Push gradients of rows of a table."""
        yield from self._describe()
        rows = partial(self._requests.push_rows, name, ids, grads)
        push = partial(rows, version=version, lr_factor=lr_factor)
        receipt: Receipt = yield Ask(push, True)
        return receipt

    def exchange_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        next_ids: Any,
        out: Array | None,
        version: int | None,
    ) -> Call[tuple[Receipt, Array]]:
        """Push gradients and fetch rows of the same table, in one round trip."""
        yield from self._describe()
        push = partial(self._requests.push_rows, name, ids, grads, version=version)
        both: tuple[Receipt, Array] = yield Ask(partial(push, wanted=next_ids, out=out), True)
        return both

    def take_task(self, asked: TakeTask) -> Call[GivenTask]:
        """Ask for a task of a data set."""
        given: GivenTask = yield Ask(partial(self._requests.take_task, asked))
        return given

    def stats(self) -> Call[dict[str, Any]]:
        """Return the server's statistics."""
        report: dict[str, Any] = yield Ask(self._requests.stats)
        return report

    def ping(self) -> Call[None]:
        """Check that the server answers."""
        yield Ask(self._requests.ping)

    def check_direct(self) -> None:
        """Check that the server's policy takes bare gradients.

        Raises
        ------
        UsageError
            When its policy has the workers take local steps.
        """
        routine = self._session.info.plan.get("routine", "direct")
        if routine != "direct":
            raise UsageError(
                f"under {self._session.info.policy} workers take steps of their own (routine"
                f" {routine!r}), and a bare gradient would be taken for something else: use"
                " aiops.Worker, or follow the plan with aiops.client.strategies and carry()"
            )

    def _room(self, views: bool = False) -> Call[Params]:
        """Return room for the model."""
        yield from self._describe()
        layout = self._session.info.known_layout
        return Leased(layout) if views else Params(layout)

    def _describe(self) -> Call[None]:
        """Fetch the model's description, if it is not known yet."""
        if self._session.info.layout is None:
            yield Ask(self._requests.describe)
