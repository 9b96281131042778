"""The spans of a worker's fetches (``AIOPS_TRACE``), made where its account notes them.

A fetch is a request of its own for the newest parameters, beside those that an exchange brings:
`aiops.Client.fetch` of a worker, and what gates and local steps ask for. Its trace has the number
of the request, which both sides know (`aiops.tracing.spans.trace_of_fetch`). Without tracing none
of this is made: a client then has a plain `Ledger`.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiops.bandwidth.byte_accounting import Ledger
from aiops.tracing import Tracing
from aiops.tracing.spans import FETCH, Span, Value, brief, span_of, trace_of_fetch
from aiops.wire.messages import Error, Fetch, FetchedParams, Message

__all__ = ["FetchTracingLedger"]


class FetchTracingLedger(Ledger):
    """A client's account, of which the fetches have spans.

    Nothing that fails in tracing reaches the client.

    Parameters
    ----------
    tracing
        Takes the spans.
    client
        The client's id.
    about
        Attributes of all of them.
    """

    __slots__ = ("_about", "_client", "_sent", "_tracing")

    def __init__(self, tracing: Tracing, client: str, about: Mapping[str, Value]) -> None:
        super().__init__(own=True)
        self._tracing, self._client, self._about = tracing, client, about
        self._sent: dict[int, int] = {}  # when a fetch that is not answered was sent, by its number

    def asked(self, message: Message, taken: bool = True) -> None:
        """Note a request, and the time of a fetch."""
        super().asked(message, taken)
        if type(message) is Fetch:
            self._tracing.safely(self._begin, message.id)

    def answered(self, message: Message, taken: bool = True) -> None:
        """Note an answer, and make the span of a fetch."""
        super().answered(message, taken)
        if self._sent:
            self._tracing.safely(self._end, message)

    def disconnected(self) -> None:
        """Forget open requests: one that is sent again has another number."""
        super().disconnected()
        self._sent.clear()

    def _begin(self, id: int) -> None:
        if self._tracing.sampler.takes(trace_of_fetch(self._client, id), id):
            self._sent[id] = self._tracing.now()

    def _end(self, message: Message) -> None:
        begin = self._sent.pop(message.id, None)
        if begin is None:
            return
        trace = trace_of_fetch(self._client, message.id)
        about, error = {**self._about, "aiops.request": message.id}, ""
        if isinstance(message, FetchedParams):
            about |= {
                "aiops.version": message.version,
                "aiops.answer_bytes": sum(part.nbytes for part in message.parts),
            }
        elif isinstance(message, Error):
            error = brief(f"{message.code}: {message.text}")
        own, end = span_of(trace, FETCH), self._tracing.now()
        self._tracing.offer([Span(FETCH, trace, own, 0, begin, end, "client", about, error)])
