"""The blocking client: plain sockets, no thread, no event loop."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from aiops.client.backoff import delays
from aiops.client.facade import Facade
from aiops.client.params import Params, Stamped
from aiops.client.requests import Receipt, Request
from aiops.client.transfer import Transfer
from aiops.closing import Closing
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    DeadlineExceeded,
    UsageError,
)
from aiops.layout import Array
from aiops.sockets import tune
from aiops.spin import Spin
from aiops.tables import Table
from aiops.wire import Buffer

_BEAT = 1.0  # seconds between looks at the clock in a call that waits
_GLANCE = getattr(socket, "MSG_DONTWAIT", 0)
_SEND, _RECEIVE = 1 << 20, 512 << 10
"""Bytes sent and received by one system call, at most.

On loopback 16 MiB take 4.5 GB/s so, and 3.3 GB/s by one call on each side: what the receiver copies
is still in the cache, and the sender lets go of the socket between calls, for acknowledgements.
"""

_VECTORS = 512  # buffers given to one sendmsg (the limit is 1,024)


class Client(Facade, Closing):
    """A connection to a server, for code that waits.

    Every call has a deadline, reconnects with back-off if the connection is lost meanwhile, and
    applies a push exactly once however often it had to be sent. A client may be used by one thread
    at a time.

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
        self._socket: socket.socket | None = None
        self._spin = Spin()
        self._interrupted = threading.Event()
        self._run(None, timeout)

    # ------------------------------------------------------------ what it can do

    def offer(self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None = None) -> bool:
        """Offer a model; return whether it was taken (False: the server has one, of this form)."""
        created, _version = self._run(self._talk.define(arrays, tables))
        return bool(created)

    def define(
        self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None = None
    ) -> Params:
        """Offer a model; return the server's parameters (these, or those it had already).

        Parameters
        ----------
        arrays
            float64, float32, float16 or bfloat16 arrays by name.
        tables
            The model's sparse parameters by name (`aiops.Table`).

        Raises
        ------
        BadPush
            When the server's model has other tensors or tables, or its policy does not work with
            tables; the text names the first difference.
        """
        self._run(self._talk.define(arrays, tables))
        return self.fetch()

    def fetch(self, into: Params | None = None) -> Params:
        """Return the server's parameters: ``into``, brought up to date, or a new copy.

        Raises
        ------
        NotReady
            When nobody has defined the model yet.
        """
        params = into if into is not None else self._room()
        self._run(self._talk.fetch(params))
        return params

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
        self._check_direct()
        receipt: Receipt = self._run(self._talk.push(gradients, params, None))
        return receipt

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
        self._check_direct()
        into = params if into is None else into
        receipt: Receipt = self._run(self._talk.push(gradients, params, into))
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
        self._know()
        rows: Array = self._run(self._talk.fetch_rows(name, ids, out))
        return rows

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
        self._know()
        receipt: Receipt = self._run(self._talk.push_rows(name, ids, grads, version=version))
        return receipt

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
        self._know()
        both: tuple[Receipt, Array] = self._run(
            self._talk.push_rows(name, ids, grads, version=version, wanted=next_ids, out=out)
        )
        return both

    def carry(self, transfer: Transfer) -> Receipt | None:
        """Move what a routine wants moved (`aiops.client.routines`); None for a mere fetch."""
        result = self._run(transfer.ask(self._talk))
        return result if isinstance(result, Receipt) else None

    def interrupt(self) -> None:
        """End the call that another thread is waiting in, with `ConnectionLost`.

        The client cannot be used afterwards, except to close it.
        """
        self._interrupted.set()
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def stats(self) -> dict[str, Any]:
        """Return the server's statistics."""
        report: dict[str, Any] = self._run(self._talk.stats())
        return report

    def ping(self) -> float:
        """Return the seconds of one round trip."""
        began = time.perf_counter()
        self._run(self._talk.ping())
        return time.perf_counter() - began

    def attend(self) -> None:
        """Take in and answer what the server sent unasked (a ping); does not wait.

        Raises
        ------
        ConnectionLost
            When the connection is gone; the next call connects again.
        """
        sock = self._socket
        if sock is None:
            return
        try:
            while select.select([sock], [], [], 0)[0]:
                self._receive(time.monotonic() + 1.0)
            self._flush_quietly(time.monotonic() + 1.0)
        except (AiopsError, OSError) as error:
            self._hang_up()
            raise ConnectionLost(f"{self.url}: {_reason(error)}") from error

    def close(self) -> None:
        """Say goodbye and close; may be called twice."""
        sock, self._socket, self._closed = self._socket, None, True
        if sock is None:
            return
        try:
            sock.settimeout(1.0)
            for buffer in self._talk.leave():
                sock.sendall(buffer)
        except OSError:
            pass  # it is gone already: nobody is there to say goodbye to
        finally:
            sock.close()
            self._talk.lost()

    # ------------------------------------------------------------ inside

    def _room(self) -> Params:
        self._know()
        assert self._talk.layout is not None
        return Params(self._talk.layout)

    def _know(self) -> None:
        """Have the model described, if it is not known yet."""
        if self._talk.layout is None:
            self._run(self._talk.describe())

    def _run(self, request: Request | None, timeout: float | None = None) -> Any:
        """Move bytes until a request is answered (None: until the server said welcome)."""
        if self._closed:
            if request is not None:
                self._talk.abandon(request)
            raise UsageError("this client is closed")
        now = time.monotonic()
        if timeout is None:
            timeout = self._patience_for(request)
        until, soon = now + timeout, now + min(timeout, self.timeout)  # soon: to have a connection
        pauses: Iterator[float] | None = None
        try:
            while not (request.done if request is not None else self._talk.ready):
                self._check_interrupted()
                ready = self._talk.ready
                try:
                    if self._socket is None:
                        self._connect(soon)
                    self._send(self._talk.outgoing(), until if ready else soon)
                    self._receive(until if ready else soon)
                except DeadlineExceeded:
                    raise
                except (ConnectionLost, OSError) as error:
                    self._hang_up()
                    self._check_interrupted()
                    if ready:  # it was there until now: begin anew
                        soon = min(until, time.monotonic() + self.timeout)
                        pauses = delays(self._here.below)
                    pauses = pauses or delays(self._here.below)
                    self._pause(next(pauses), soon, error)
        except BaseException:  # whatever it was, it may have come in mid-message
            if request is not None:
                self._talk.abandon(request)
            self._hang_up()
            raise
        self._flush_quietly(until)
        return request.value() if request is not None else None

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise ConnectionLost(f"{self.url}: this client was interrupted")

    def _flush_quietly(self, until: float) -> None:
        """Send what answers are left over (a pong, say); the next call sees if it cannot."""
        out = self._talk.outgoing()
        if out and self._socket is not None:
            try:
                self._send(out, until)
            except (AiopsError, OSError):
                self._hang_up()

    def _connect(self, until: float) -> None:
        left = self._left(until)
        self._socket = sock = socket.create_connection((self._host, self._port), timeout=left)
        self._check_interrupted()  # it may have come too early to find this socket
        tune(sock)
        sock.settimeout(None)
        beat = min(_BEAT, self.timeout / 4)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds = struct.pack("ll", int(beat), int(beat % 1 * 1e6) or 1)
            sock.setsockopt(socket.SOL_SOCKET, option, seconds)
        self._send(self._talk.connected(), until)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._talk.lost()

    def _pause(self, seconds: float, until: float, error: Exception) -> None:
        """Wait before connecting again, if there is time left for it."""
        if time.monotonic() + seconds >= until:
            raise ConnectionLost(
                f"{self.url} cannot be reached ({_reason(error)}): is the server running?"
            ) from error
        self._interrupted.wait(seconds)

    # The kernel itself wakes a call that waits for more than _BEAT (SO_RCVTIMEO, SO_SNDTIMEO), so
    # that a transfer of any size is one system call, and a deadline is still seen to.

    def _send(self, buffers: list[Buffer], until: float) -> None:
        sock = self._socket
        assert sock is not None
        if not buffers:
            return
        views = [memoryview(buffer) for buffer in buffers]
        first = 0
        while first < len(views):
            try:
                sent = sock.sendmsg(_up_to(_SEND, views[first : first + _VECTORS]))
            except BlockingIOError:
                self._left(until)
                continue
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _receive(self, until: float) -> None:
        sock = self._socket
        assert sock is not None
        # Of a payload all is waited for that is taken; of anything else what is there is taken.
        flags = socket.MSG_WAITALL if self._talk.missing else 0
        buffer = self._talk.next_buffer()[:_RECEIVE]
        look = self._spin.begin() if not flags else False
        while True:
            try:
                count = sock.recv_into(buffer, 0, _GLANCE if look else flags)
                break
            except BlockingIOError:
                if look:
                    look = self._spin.again()
                else:
                    self._left(until)
        if look:
            self._spin.found()
        self._talk.received(count)

    def _left(self, until: float) -> float:
        left = until - time.monotonic()
        if left <= 0:
            raise self._too_late()
        return left

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.url} did not send {self._talk.waiting_for} in time: it may be overloaded or"
            " waiting for other workers; `aiops stats` tells, and timeout=... allows more"
        )


def _up_to(most: int, views: list[memoryview]) -> list[memoryview]:
    """Return the first bytes of these views, at most so many."""
    found: list[memoryview] = []
    for view in views:
        if len(view) >= most:
            return [*found, view[:most]]
        found.append(view)
        most -= len(view)
    return found


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
