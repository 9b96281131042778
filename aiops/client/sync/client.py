"""The blocking client: plain sockets, no thread, no event loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aiops.client.calls import Ask, Call
from aiops.client.facade import Facade
from aiops.client.params import Params, Stamped
from aiops.client.program import T, drive
from aiops.client.request_kinds import Receipt, Request
from aiops.client.sync.connection import Connection
from aiops.client.transfer import Transfer
from aiops.common import forks
from aiops.common.closing import Closing
from aiops.model.layout import Array
from aiops.model.tables import Table


class Client(Facade, Closing):
    """A connection to a server, for code that waits.

    Every call has a deadline, reconnects with back-off if the connection is lost meanwhile, and
    applies a push exactly once however often it had to be sent. A client may be used by one thread
    at a time, and by the process that made it: in a fork every call raises `UsageError`.

    Parameters
    ----------
    url
        ``aiops://host:port``.
    role
        ``"observer"`` only reads and is never waited for; ``"worker"`` takes part.
    token
        The server's token; default ``$AIOPS_TOKEN``.
    name
        For people; default the role, host name and process id.
    timeout
        Seconds that a call may take in all (beyond what the server's barrier may need).
    pongs
        Promise the server to call `attend` every few seconds, so that it may ping.

    Raises
    ------
    DeadlineExceeded, ConnectionLost
        When the server cannot be reached.
    Unauthorised
        When the token is missing or wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        role: str = "observer",
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        pongs: bool = False,
    ) -> None:
        super().__init__(url, role=role, token=token, name=name, timeout=timeout, pongs=pongs)
        self._connection = Connection(self._session, self._host, self._port)
        forks.note(self)
        self._run(None)

    # ------------------------------------------------------------ what it can do

    def offer(self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None = None) -> bool:
        """Offer a model; return whether it was taken (False: the server has one, of this form)."""
        return self._do(self._calls.offer(arrays, tables))

    def define(
        self,
        arrays: Mapping[str, Array],
        tables: Mapping[str, Table] | None = None,
        *,
        views: bool = False,
    ) -> Params:
        """Offer a model; return the server's parameters (these, or those it had already).

        Parameters
        ----------
        arrays
            float64, float32, float16 or bfloat16 arrays by name.
        tables
            The model's sparse parameters by name (`aiops.Table`).
        views
            Return read-only parameters that are the server's own arrays, where it is on this
            machine; a fetch into them, or an exchange, makes them others.

        Raises
        ------
        BadPush
            When the server's model has other tensors or tables, or its policy does not work with
            tables; the text names the first difference.
        """
        return self._do(self._calls.define(arrays, tables, views))

    def fetch(self, into: Params | None = None) -> Params:
        """Return the server's parameters: ``into``, brought up to date, or a new copy.

        Raises
        ------
        NotReady
            When nobody has defined the model yet.
        """
        return self._do(self._calls.fetch(into))

    def push(self, params: Stamped, gradients: Mapping[str, Array]) -> Receipt:
        """Push gradients that were computed at ``params``; do not fetch.

        Parameters
        ----------
        params
            The parameters the gradients belong to (their versions are what matters).
        gradients
            All tensors, or some; shapes and dtypes as the tensors'.

        Raises
        ------
        UsageError
            When a gradient does not fit its tensor.
        BadPush
            When the server refuses a value; nothing was applied.
        StaleGradient
            When the policy wants it recomputed on newer parameters.
        """
        return self._do(self._calls.push(params, gradients))

    def exchange(
        self, params: Params, gradients: Mapping[str, Array], into: Params | None = None
    ) -> Receipt:
        """Push gradients computed at ``params`` and bring ``params`` up to date, in one round trip.

        Parameters
        ----------
        params, gradients
            As `push`'s.
        into
            Receive the parameters here instead, and leave ``params`` alone.

        Raises
        ------
        As `push`; after a `StaleGradient`, the parameters are up to date.
        """
        if self._session.plan.get("routine", "direct") != "direct":
            self._calls.check_direct()
        request: Receipt | Request | None = None
        if into is None or into is params:
            into = params
            if self._connection.steady is not None:
                request = self._connection.exchange(params, gradients)
        if request is None:
            request = self._requests.push(gradients, params, into)
        elif isinstance(request, Receipt):
            return request
        receipt: Receipt = self._run(request)
        return receipt

    def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Array:
        """Return rows of a table.

        Parameters
        ----------
        name
            The table's.
        ids
            int64[n] (any integers will do), each from 0 to the table's rows - 1; any order, and a
            row may come twice.
        out
            Where to: the table's dtype, contiguous, ``[n, width]``. Default: a new array.

        Raises
        ------
        UsageError
            When there is no such table, an id is out of range (it is named), there are more rows
            than one message carries (`Table.most`), or ``out`` does not fit.
        NotReady
            When nobody has defined the model yet.
        """
        return self._do(self._calls.fetch_rows(name, ids, out))

    def push_rows(self, name: str, ids: Any, grads: Any, version: int | None = None) -> Receipt:
        """Push gradients of rows of a table; they are applied at once, exactly once.

        Only these rows change (and the rule's state for them). Gradients of the same row are added
        up in the order in which they come.

        Parameters
        ----------
        name
            The table's.
        ids
            As `fetch_rows`'s; at least one.
        grads
            The table's dtype, ``[len(ids), width]``.
        version
            The version of the table at which the gradients were computed; default: the newest of
            which this client has fetched rows. Where rows are fetched ahead of those that are being
            trained, say the older one (`row_versions` after its fetch), or their gradients pass
            for fresher than they are. The receipt's staleness is the number of pushes the
            table has had since, and the learning rate is modulated with it.

        Raises
        ------
        UsageError
            As `fetch_rows`, and when the gradients do not fit.
        BadPush
            When the server refuses a value, or a sum of one row's gradients; nothing was applied.
        """
        return self._do(self._calls.push_rows(name, ids, grads, version))

    def exchange_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        next_ids: Any,
        *,
        out: Array | None = None,
        version: int | None = None,
    ) -> tuple[Receipt, Array]:
        """Push gradients and fetch rows of the same table, in one round trip.

        The rows are those after the push. Parameters and errors as in `push_rows` and
        `fetch_rows`; ``next_ids`` are the rows to fetch.
        """
        return self._do(self._calls.exchange_rows(name, ids, grads, next_ids, out, version))

    def carry(self, transfer: Transfer) -> Receipt | None:
        """Move what a routine wants moved (`aiops.client.strategies`); None for a mere fetch."""
        return self._do(self._calls.carry(transfer))

    def interrupt(self) -> None:
        """End the call that another thread is waiting in, with `ConnectionLost`.

        The client cannot be used afterwards, except to close it.
        """
        if self._forked:
            raise self._unusable()
        self._connection.interrupt()

    def stats(self) -> dict[str, Any]:
        """Return the server's statistics."""
        return self._do(self._calls.stats())

    def ping(self) -> float:
        """Return the seconds of one round trip."""
        began = time.perf_counter()
        self._do(self._calls.ping())
        return time.perf_counter() - began

    def attend(self) -> None:
        """Take in and answer what the server sent unasked (a ping); does not wait.

        Raises
        ------
        ConnectionLost
            When the connection is gone; the next call connects again.
        """
        if self._forked:
            raise self._unusable()
        self._connection.attend()

    def close(self) -> None:
        """Say goodbye and close; may be called twice. In a fork it does nothing."""
        if self._forked:
            return
        self._closed = True
        self._connection.close()

    def forked(self) -> None:
        """Let go of the connection in a fork, and refuse to work there."""
        super().forked()
        self._connection.forked()

    # ------------------------------------------------------------ inside

    def _do(self, call: Call[T]) -> T:
        """Carry out a call, and wait for what it comes to."""
        return drive(call, self._ask)

    def _ask(self, order: Ask) -> Any:
        return self._run(None if self._closed else order.make())

    def _run(self, request: Request | None) -> Any:
        """Return what a request came to (None: wait until the server said welcome)."""
        if self._closed:
            if request is not None:
                self._session.abandon(request)
            raise self._unusable()
        timeout = self.timeout if request is None else self._patience_for(request)
        return self._connection.carry(request, timeout, self.timeout)
