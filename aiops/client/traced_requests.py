"""The spans of a worker's fetches and of its requests about rows (``AIOPS_TRACE``).

A fetch is a request of its own for the newest parameters, beside those that an exchange brings:
`aiops.Client.fetch` of a worker, and what gates and local steps ask for. Requests about rows are
fetches of rows, and pushes, which may bring rows, too. The spans are made where the client's
account notes them, and where rows take their short way. The trace of a fetch has the number of the
request, and that of a push its sequence number, which both sides know. Without tracing none of this
is made: a client then has a plain `Ledger` and a plain `Session`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.request_kinds import RowsRequest
from aiops.client.rows import Rows
from aiops.client.session import Session
from aiops.tracing import Tracing
from aiops.tracing.spans import (
    FETCH,
    FETCH_ROWS,
    LONGEST_NAME,
    PUSH_ROWS,
    Span,
    Value,
    brief,
    span_of,
    trace_of,
    trace_of_fetch,
)
from aiops.wire.messages import (
    Error,
    Fetch,
    FetchedParams,
    FetchRows,
    Message,
    PushRows,
    TableRows,
)

__all__ = ["RequestTracingLedger", "TracedSession"]


class _Sent(NamedTuple):
    """A request that is traced, and not answered yet; ``begin`` in nanoseconds."""

    name: str
    trace: int
    about: dict[str, Value]
    begin: int


class RequestTracingLedger(Ledger):
    """A client's account, of which fetches, and requests about rows, have spans.

    Nothing that fails in tracing reaches the client.

    Parameters
    ----------
    tracing
        Takes the spans.
    client
        The client's id.
    about
        Attributes of all of them.

    Attributes
    ----------
    rows
        The session's knowledge of its tables.
    """

    __slots__ = ("_about", "_client", "_sent", "_tracing", "rows")

    def __init__(self, tracing: Tracing, client: str, about: Mapping[str, Value]) -> None:
        super().__init__(own=True)
        self._tracing, self._client, self._about = tracing, client, about
        self._sent: dict[int, _Sent] = {}  # by the request's number
        self.rows = Rows()

    def asked(self, message: Message, taken: bool = True) -> None:
        """Note a request, and the time of one that has a span."""
        super().asked(message, taken)
        if type(message) is Fetch:
            self._tracing.safely(self._begin, FETCH, message.id)
        elif type(message) is FetchRows:
            self._tracing.safely(self._begin, FETCH_ROWS, message.id, message.table)
        elif type(message) is PushRows:
            push = message.table, message.seq
            self._tracing.safely(self._begin, PUSH_ROWS, message.id, *push)

    def answered(self, message: Message, taken: bool = True) -> None:
        """Note an answer, and make the span of its request."""
        super().answered(message, taken)
        if self._sent:
            self._tracing.safely(self._end, message)

    def disconnected(self) -> None:
        """Forget open requests: one that is sent again has another number."""
        super().disconnected()
        self._sent.clear()

    def sent_at_once(self, id: int, request: RowsRequest) -> None:
        """Note the time of a request about rows that goes the short way."""
        name = PUSH_ROWS if request.pushes else FETCH_ROWS
        self._tracing.safely(self._begin, name, id, request.asked.named.index, request.seq)

    def answered_at_once(self, answer: TableRows) -> None:
        """Make the span of a request about rows that went the short way."""
        if self._sent:
            self._tracing.safely(self._end, answer)

    def _begin(self, name: str, id: int, table: int = 0, seq: int = 0) -> None:
        if id in self._sent:
            return  # another server's share, or it was handed over by the short way
        push = name == PUSH_ROWS
        trace = trace_of(self._client, seq) if push else trace_of_fetch(self._client, id)
        if self._tracing.sampler.takes(trace, seq if push else id):
            about = {**self._about, "aiops.push" if push else "aiops.request": seq if push else id}
            if name != FETCH:
                about["aiops.table"] = brief(self.rows.tables.each[table].name, LONGEST_NAME)
            self._sent[id] = _Sent(name, trace, about, self._tracing.now())

    def _end(self, message: Message) -> None:
        sent = self._sent.pop(message.id, None)
        if sent is None:
            return
        name, trace, about, begin = sent
        error = ""
        if isinstance(message, FetchedParams | TableRows):
            about["aiops.version"] = message.version
            if name == PUSH_ROWS and isinstance(message, TableRows):
                about["aiops.staleness"] = message.staleness
            about["aiops.answer_bytes"] = sum(part.nbytes for part in message.parts)
        elif isinstance(message, Error):
            error = brief(f"{message.code}: {message.text}")
        own, end = span_of(trace, name), self._tracing.now()
        self._tracing.offer([Span(name, trace, own, 0, begin, end, "client", about, error)])


class TracedSession(Session):
    """A `Session` that has its account note requests about rows that go the short way.

    Parameters
    ----------
    traced
        The account.
    given
        As `Session`'s.
    """

    def __init__(self, server: str, *, traced: RequestTracingLedger, **given: Any) -> None:
        super().__init__(server, ledger=traced, **given)
        self._traced, traced.rows = traced, self.info.rows

    def number_rows(self, request: RowsRequest) -> int:
        """Give a request that is sent in the short way its numbers; return its id."""
        id = super().number_rows(request)
        self._traced.sent_at_once(id, request)
        return id

    def exchanged_rows(
        self,
        request: RowsRequest,
        answer: TableRows,
        messages: int,
        sent: tuple[int, int],
        came: tuple[int, int],
    ) -> None:
        """Enter a request about rows that was carried in the short way; make its span."""
        super().exchanged_rows(request, answer, messages, sent, came)
        self._traced.answered_at_once(answer)
