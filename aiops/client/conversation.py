"""What a client can ask of a server, each as a request over the connection that there is.

Requests are numbered; a push also has a sequence number that stays the same when it is sent again
after a lost connection, so that the server applies it once. What may have to be sent again is
referred to by its request until it is answered: leave a gradient alone until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.client.coding import Encoded
from aiops.client.dialogue import Dialogue
from aiops.client.foreign import on_host
from aiops.client.incoming import wants_of
from aiops.client.outgoing import little_endian, parts_of
from aiops.client.params import Params, Stamped
from aiops.client.requests import Means, Receipt, Request
from aiops.client.rows import Asked
from aiops.model.layout import Array, Ints, Layout
from aiops.model.parts import Parts
from aiops.model.tables import Table, Tables
from aiops.wire import messages
from aiops.wire.fields import MAX_COUNT
from aiops.wire.messages import Ack, Message, Model, Report, TableRows


class Conversation(Dialogue):
    """One client's conversation with one server; see `Dialogue` for its parameters and errors."""

    # ------------------------------------------------------------ requests

    def define(
        self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None = None
    ) -> Request:
        """Offer a model; the result is (whether it was taken, the version)."""
        sparse = Tables(tables or {}, arrays).described
        arrays = {
            name: little_endian(np.asarray(on_host(name, array), order="C"))
            for name, array in arrays.items()
        }
        layout = Layout.of(arrays, empty=bool(sparse))
        parts: Parts = ()
        payloads: list[list[memoryview]] = []
        if arrays:
            parts, payloads = parts_of(layout, arrays, np.zeros(len(arrays), np.int64))
        rows = tuple((name, a.dtype.name, a.shape) for name, a in arrays.items())

        def finish(message: Message) -> tuple[bool, int]:
            assert isinstance(message, Model)
            self._learn(message)
            return message.created, message.version

        return self._ask(
            Request(
                "the answer to its offer of a model",
                lambda id: messages.Define(id, rows, parts, sparse),
                finish,
                payloads,
            )
        )

    def describe(self) -> Request:
        """Ask for the model's tensors; the result is None, `layout` is set."""

        def finish(message: Message) -> None:
            assert isinstance(message, Model)
            self._learn(message)

        return self._ask(Request("the model's description", messages.Describe, finish))

    def push(
        self,
        gradients: Mapping[str, Array],
        at: Stamped,
        into: Params | None,
        wanted: Ints | None = None,
        count: int = 1,
    ) -> Request:
        """Push gradients computed at ``at``; the result is a `Receipt`.

        With ``into`` (which may be ``at``) the parameters after the push are received there: those
        of the ``wanted`` tensors (None: all). ``count``: of how many mini-batches.
        """
        encoded: Encoded = []
        parts, payloads = parts_of(at.layout, gradients, at.versions, self._coding, encoded)
        self._seq += 1
        seq = self._seq

        def make(id: int) -> Message:
            self._want(request, into, wanted)
            asked = request.have, parts, request.wants
            batches = min(count, MAX_COUNT)
            return messages.Push(id, seq, into is not None, *asked, self._increments, batches)

        what = "the answer to its push"
        request = Request(what, make, self._receipt, payloads, into, at.connection)
        request.encoded = encoded
        return self._ask(request)

    def reapply(self, at: Stamped, into: Params | None, wanted: Ints | None = None) -> Request:
        """Have the server apply this client's last gradient again; the result is a `Receipt`.

        Its ``used`` is False if the server does not keep that gradient any more.
        """
        self._seq += 1
        seq = self._seq

        def make(id: int) -> Message:
            self._want(request, into, wanted)
            asked = request.have, request.wants
            return messages.Reapply(id, seq, into is not None, *asked, self._increments)

        what = "the answer to its push"
        request = Request(what, make, self._receipt, into=into, connection=at.connection)
        return self._ask(request)

    def fetch(self, into: Params, wanted: Ints | None = None) -> Request:
        """Ask for the parameters (of some tensors); the result is whether they changed."""

        def make(id: int) -> Message:
            self._want(request, into, wanted)
            return messages.Fetch(id, request.have, request.wants, self._increments)

        def finish(message: Message) -> bool:
            assert isinstance(message, messages.Params)
            return bool(message.parts)

        request = Request("the parameters it fetches", make, finish, into=into)
        return self._ask(request)

    def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Request:
        """Ask for rows of a table; the result is an array, ``[len(ids), width]``."""
        asked = self.rows.fetch(name, ids, out)
        if not len(asked.into.out):  # there is nothing to ask
            return Request(asked.what, asked.make, asked.finish, done=True, result=asked.into.out)
        return self._ask_rows(asked)

    def push_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        *,
        version: int | None = None,
        wanted: Any = None,
        out: Array | None = None,
    ) -> Request:
        """Push gradients of rows; the result is a `Receipt`, with ``wanted`` (it, the rows)."""

        def receipt(rows: TableRows) -> Receipt:
            return Receipt(rows.version, rows.staleness, float(rows.staleness), None, {})

        asked = self.rows.push(
            self._seq + 1,
            name,
            ids,
            grads,
            version=version,
            wanted=wanted,
            out=out,
            receipt=receipt,
        )
        self._seq += 1
        here = self.client, max(self._epoch, 1)
        return self._ask_rows(asked, self.rows.came_by.get(name, here))

    def meet(self, host: str, port: int, rounds: int) -> Request:
        """Be ready to average (or, with port 0, no longer); the result is a `messages.Round`."""
        assert self.layout is not None
        digest, nonce = self.layout.digest, self._nonce()

        def finish(message: Message) -> messages.Round:
            assert isinstance(message, messages.Round)
            return message

        return self._ask(
            Request(
                "the others of a round",
                lambda id: messages.JoinRound(id, host, port, rounds, digest, nonce),
                finish,
            )
        )

    def stats(self) -> Request:
        """Ask for the server's statistics; the result is a dict."""

        def finish(message: Message) -> Any:
            assert isinstance(message, Report)
            return _lists(message.report)

        return self._ask(Request("the statistics", messages.Stats, finish))

    def ping(self) -> Request:
        """Ask whether the server is alive; the result is None."""

        def finish(message: Message) -> None:
            assert isinstance(message, messages.Pong)

        return self._ask(Request("a sign of life", messages.Ping, finish))

    # ------------------------------------------------------------ inside

    def _want(self, request: Request, params: Params | None, wanted: Ints | None) -> None:
        """Note what to ask for. What came by another client, or from an earlier run of the
        server (whose versions of the same numbers were others), is not held.
        """
        if params is None:
            return
        client, epoch = params.connection
        if client != self.client or epoch < self._run_since:
            params.version = -1
        request.have, request.wants = wants_of(params, wanted)

    def _ask_rows(self, asked: Asked[Any], connection: tuple[str, int] = ("", 0)) -> Request:
        request = Request(asked.what, asked.make, asked.finish, asked.payloads, asked.into)
        request.connection = connection
        return self._ask(request)

    def _receipt(self, message: Message) -> Receipt:
        assert isinstance(message, Ack)
        told, layout = message.vbars, self.layout
        vbars = Means(layout, told) if told and layout is not None else {}
        stale = message.staleness, message.mean_staleness
        return Receipt(message.version, *stale, message.vbar, vbars, message.used)


def _lists(value: Any) -> Any:
    """Turn the wire's tuples into lists, as people expect in JSON-like values."""
    if isinstance(value, tuple):
        return [_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return value
