"""The blocking client: plain sockets, no thread, no event loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from aiops.client.calls import Ask, Call
from aiops.client.facade import Facade
from aiops.client.params import Params, Stamped
from aiops.client.program import T, drive
from aiops.client.request_kinds import Receipt, Request, RowsRequest
from aiops.client.requests import Transfer
from aiops.client.sync.connection import BlockingConnection, MoreRequests
from aiops.client.training_loop import TrainingLoop
from aiops.common import forks
from aiops.common.closing import Closing
from aiops.common.tls_files import Tls
from aiops.errors import ConnectionLost
from aiops.model.layout import Array
from aiops.model.tables import Table
from aiops.net.timed_socket import SocketTimes
from aiops.tracing import Tracing
from aiops.wire.data_messages import GivenTask, TakeTask


class Client(Facade, Closing):
    """A blocking connection to a server.

    Every call has a deadline. It connects again with back-off if the connection is lost meanwhile,
    and asks again if the server is full or shuts down. A push is applied exactly once, however
    often it has to be sent. A client may be used by one thread at a time, and by the process that
    made it: in a fork every call raises `UsageError`.

    Parameters
    ----------
    url
        ``aiops://host[:port]``. Alternatives are separated by commas: ``aiops://a:7171,b:7171``;
        the first that welcomes this client is used, until it ends. Of a model on several shards,
        the lead's, or ``aiops://lead:port+follower:port+...``. Default: the variable ``AIOPS_URL``,
        which ``aiops run`` sets.
    role
        ``"observer"`` (default): reads, and is not counted as a worker. ``"worker"``: takes part in
        training, and barriers may wait for it.
    token
        The server's token; default ``$AIOPS_TOKEN``.
    name
        The name in reports, at most 1,024 bytes; default: role, host name and process id.
    timeout
        Seconds that a call may take in all, beyond the wait that the server's plan announces for a
        barrier (not of `ping` and `stats`) or a bandwidth budget; more than 0, default 60.
    pongs
        True: the server may ping, and `attend` is called every few seconds. Default False.
    tls
        The files of TLS, for a URL ``aiops+tls://host[:port]``: `aiops.Tls`. Default: those of the
        variables ``AIOPS_TLS_CA``, ``AIOPS_TLS_CERT`` and ``AIOPS_TLS_KEY``.
    checksums
        True: all bytes, both ways, are covered by checksums (XXH3, of the package ``xxhash``), and
        a connection with a wrong one is made again. The server is then reached by TCP, on this
        machine too. Default: whether the variable ``AIOPS_CHECKSUMS`` is 1.

    Raises
    ------
    UsageError
        When the URL, the name or the time-out is invalid. Every call: when the client is closed.
    ConnectionLost, DeadlineExceeded
        When the server cannot be reached or does not answer in time. Every call may raise them;
        whether a push that was under way has been applied is then unknown.
    RemoteProtocolError
        When the server breaks the protocol. Every call may raise it.
    Unavailable
        When the server is full or shuts down until the time is up. Every call may raise it; what it
        pushed has not been applied.
    Unauthorised
        When the token is missing or wrong.
    Untrusted
        When this client and the server do not accept each other's certificates.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        role: str = "observer",
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        pongs: bool = False,
        tls: Tls | None = None,
        checksums: bool | None = None,
    ) -> None:
        super().__init__(
            url,
            role=role,
            token=token,
            name=name,
            timeout=timeout,
            pongs=pongs,
            tls=tls,
            checksums=checksums,
        )
        self._connection = BlockingConnection(self._session, self._servers, self._tls)
        forks.note(self)
        self._run(None)

    # ------------------------------------------------------------ what it can do

    def offer(self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None = None) -> bool:
        """Offer a model; return True if it was taken, False if the server has one of this form.

        Parameters and errors as `define`'s.
        """
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
            The initial values: float64, float32, float16 or bfloat16 arrays of any shape, by name.
        tables
            The model's sparse parameters by name (`aiops.Table`); default: none. With tables,
            ``arrays`` may be empty.
        views
            True: return read-only parameters, which lie in the server's memory if it is on this
            machine. A fetch into them, or an exchange, replaces the arrays. Default False: copies.

        Raises
        ------
        UsageError
            When an array or a table cannot be trained; the text names it.
        BadPush
            When the server's model has other tensors or tables, or its policy does not work with
            tables; the text names the first difference.
        """
        return self._do(self._calls.define(arrays, tables, views))

    def fetch(self, into: Params | None = None, *, evaluation: bool = False) -> Params:
        """Return the server's parameters.

        Parameters
        ----------
        into
            The parameters to bring up to date and return; what they hold already is not sent
            again. Default: new ones.
        evaluation
            True: return them as they are where the model is evaluated and saved (``--save``). Under
            some policies that is not where gradients are computed: with ``schedule-free`` it is
            nearer to an average. All of them are sent. Compute no gradients at these. Default
            False.

        Raises
        ------
        NotReady
            When no worker has defined the model yet.
        """
        return self._do(self._calls.fetch(into, evaluation=evaluation))

    def push(self, params: Stamped, gradients: Mapping[str, Array]) -> Receipt:
        """Push gradients that were computed at ``params``; do not fetch.

        Parameters
        ----------
        params
            The parameters that the gradients were computed at; only their versions are used.
        gradients
            Arrays by name, of all tensors or some; shapes and dtypes as the tensors'.

        Returns
        -------
        The push's `Receipt`.

        Raises
        ------
        UsageError
            When a gradient does not fit its tensor, or the policy has workers take local steps.
        BadPush
            When a value is not finite, or is 1e18 or more in magnitude; nothing was applied.
        StaleGradient
            When the policy wants it recomputed on newer parameters.
        Restarted
            When the server was restarted since ``params`` came: fetch, and compute it again. The
            text says whether it was sent before, and may have been applied to the earlier run's
            parameters.
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
            The parameters to bring up to date instead of ``params``.

        Returns
        -------
        The push's `Receipt`.

        Raises
        ------
        As `push`. After `StaleGradient` the parameters are up to date, but not after `Restarted`.
        """
        into = params if into is None else into
        if self._connection.short.steady is not None and into is params:
            outcome = self._connection.short.exchange(params, gradients)
            if isinstance(outcome, Request):
                carried: Receipt = self._run(outcome)
                return carried
            if outcome is not None:
                return outcome
        if self._session.info.plan.get("routine", "direct") != "direct":
            self._calls.check_direct()
        receipt: Receipt = self._run(self._requests.push(gradients, params, into))
        return receipt

    def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Array:
        """Return rows of a table.

        Parameters
        ----------
        name
            The table's name.
        ids
            int64[n] (any integers are converted), each from 0 to the table's rows - 1, in any
            order; a row may occur twice.
        out
            The array to fill: ``[n, width]``, of the table's dtype, contiguous. Default: a new one.

        Returns
        -------
        ``out`` or the new array: ``[n, width]``, of the table's dtype.

        Raises
        ------
        UsageError
            When there is no such table, an id is out of range (it is named), there are more rows
            than one message carries (`Table.most`), or ``out`` does not fit.
        NotReady
            When no worker has defined the model yet.
        """
        if self._connection.short.takes_rows:
            rows: Array = self._at_once(self._requests.rows_to_fetch(name, ids, out))
            return rows
        return self._do(self._calls.fetch_rows(name, ids, out))

    def push_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        version: int | None = None,
        *,
        lr_factor: float = 1.0,
    ) -> Receipt:
        """Push gradients of rows of a table; they are applied at once, exactly once.

        Only these rows change (and the rule's state for them). Gradients of the same row are added
        up in the order in which they come.

        Parameters
        ----------
        name
            The table's name.
        ids
            As `fetch_rows`'s; at least one.
        grads
            ``[len(ids), width]``, of the table's dtype.
        version
            The version of the table at which the gradients were computed; default: the newest of
            which this client has fetched rows. If rows are fetched ahead of those in training, pass
            the older one (`row_versions` after its fetch); their gradients would count as fresher
            than they are. The receipt's staleness is the number of pushes that the table has had
            since, and the learning rate is modulated with it.
        lr_factor
            What the learning rate is multiplied by, from 0 to 100. Default: 1.

        Returns
        -------
        The push's `Receipt`; ``version`` is the table's.

        Raises
        ------
        UsageError
            As `fetch_rows`, and when the gradients do not fit, or ``lr_factor`` may be no factor.
        BadPush
            When the server refuses a value, or a sum of one row's gradients; nothing was applied.
        """
        if self._connection.short.takes_rows and lr_factor == 1:
            receipt: Receipt = self._at_once(self._requests.rows_to_push(name, ids, grads, version))
            return receipt
        return self._do(self._calls.push_rows(name, ids, grads, version, lr_factor))

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

        Parameters
        ----------
        name, ids, grads, version
            As `push_rows`'s.
        next_ids, out
            The rows to fetch, and the array to fill: as ``ids`` and ``out`` of `fetch_rows`.

        Returns
        -------
        The push's `Receipt`, and the rows as they are after the push.

        Raises
        ------
        As `push_rows` and `fetch_rows`.
        """
        if self._connection.short.takes_rows:
            request = self._requests.rows_to_push(name, ids, grads, version, next_ids, out)
            both: tuple[Receipt, Array] = self._at_once(request)
            return both
        return self._do(self._calls.exchange_rows(name, ids, grads, next_ids, out, version))

    def carry(self, transfer: Transfer, more: MoreRequests | None = None) -> Receipt | None:
        """Carry a strategy's transfer (`aiops.client.strategies`); None for a mere fetch.

        ``more``: other transfers, which it has asked (`ask`) and sent while the answer to this one
        is waited for. Each is carried afterwards by a call of its own.
        """
        if more is None:
            return self._do(self._calls.carry(transfer))
        self._connection.both_ways = True
        result = self._run(None if self._closed else self.ask(transfer), more)
        return result if isinstance(result, Receipt) else None

    def ask(self, transfer: Transfer) -> Request:
        """Have a transfer sent by the present call of `carry`; return its request."""
        return transfer.ask(self._requests)

    def interrupt(self) -> None:
        """End the call that another thread is waiting in, with `ConnectionLost`.

        The client cannot be used afterwards, except to close it.
        """
        if self._forked:
            raise self._unusable()
        self._connection.interrupt()

    def take_task(self, asked: TakeTask) -> GivenTask:
        """Ask for a task of a data set (`aiops.data` does); return the answer.

        Raises
        ------
        NotReady
            When no worker has defined the model yet.
        BadPush, Refused
            When the data set is another one, or this client may not have a task.
        """
        return self._do(self._calls.take_task(asked))

    def stats(self) -> dict[str, Any]:
        """Return the server's statistics: a dict of JSON's types."""
        return self._do(self._calls.stats())

    def log(self, **values: Any) -> None:
        """Log numbers about the training, such as ``loss=0.3``, for those who watch the server.

        They are sent once a second at most, as means since the last time; a connection that is
        lost is no error. A client that is no worker may log, too: one that measures the accuracy,
        say.

        Parameters
        ----------
        values
            Up to 16 numbers by name. Those that are not finite are left out. Of a tensor on a GPU
            the call waits for its value.

        Raises
        ------
        UsageError
            When a value is no number, a name is longer than 64 bytes, or there are too many names.
        """
        self.note_log(values)
        if self._session.book.wait(time.monotonic()) == 0.0 and not self._closed:
            with contextlib.suppress(ConnectionLost):
                self.attend()

    def ping(self) -> float:
        """Return the seconds that one round trip to the server took."""
        began = time.perf_counter()
        self._do(self._calls.ping())
        return time.perf_counter() - began

    def attend(self) -> None:
        """Process and answer what the server sent unasked (a ping); does not wait.

        Raises
        ------
        ConnectionLost
            When the connection is gone; the next call connects again.
        """
        if self._forked:
            raise self._unusable()
        self._connection.attend()

    def close(self) -> None:
        """Leave the server and close; may be called twice. In a fork it does nothing."""
        if self._forked:
            return
        self._closed, traced = True, self._tracing
        if traced is not None:
            traced.end()
        try:
            self._connection.close()
        finally:
            if traced is not None:
                traced.close()

    def forked(self) -> None:
        """Close the descriptors in a fork, and refuse to work there."""
        super().forked()
        self._connection.forked()

    # ------------------------------------------------------------ inside

    def _traced_loop(self, tracing: Tracing, *given: Any) -> TrainingLoop:
        self._connection.note_times(tracing.now)
        return super()._traced_loop(tracing, *given)

    def _socket_times(self) -> SocketTimes | None:
        connection = self._connection
        return None if self._session.shards.channels else connection.times

    def _do(self, call: Call[T]) -> T:
        """Carry out a call; return its result."""
        return drive(call, self._ask)

    def _at_once(self, request: RowsRequest) -> Any:
        """Return the result of a request about rows, carried in the short way if it may be."""
        if request.done or (not self._closed and self._connection.exchange_rows(request)):
            return request.result
        return self._run(request)

    def _ask(self, order: Ask) -> Any:
        return self._run(None if self._closed else order.make())

    def _run(self, request: Request | None, more: MoreRequests | None = None) -> Any:
        """Return a request's result (None: wait until the session is ready)."""
        if self._closed:
            if request is not None:
                self._session.abandon(request)
            raise self._unusable()
        if self._session.book.noted:
            self._session.log(time.monotonic())  # goes with what is sent
        timeout = self.timeout if request is None else self._patience_for(request)
        return self._connection.carry(request, timeout, self.timeout, more)
