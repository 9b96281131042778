"""The requests of a session that are not answered yet, and the answers as they arrive."""

from __future__ import annotations

from collections.abc import Callable

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.backoff import unreachable_since
from aiops.client.known_run import AcknowledgedPushes
from aiops.client.outbox import Outbox
from aiops.client.params import Params
from aiops.client.receive_params import ParameterSink
from aiops.client.request_kinds import Request
from aiops.client.rows import FetchedRowsSink
from aiops.client.server_info import ServerInfo
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    Unavailable,
    refusal,
)
from aiops.kernels.parallel import ParallelMap
from aiops.model.parts import Parts
from aiops.wire import messages
from aiops.wire.messages import Ack, Error, Message, TableRows
from aiops.wire.sinks import Discard, Sink

APPLIED = "applied"
"""The key in the details of a refusal of which a shard has applied its share of the push."""

_BRINGS_PARAMETERS = (Ack, messages.FetchedParams)


class PendingRequests:
    """The requests under way, by id.

    Parameters
    ----------
    info
        The server, as far as it is known.
    outbox
        Owns the memory that requests lend.
    ledger
        Accounts for every answer.
    parallel_map
        Copies a lent model in parallel.

    Attributes
    ----------
    by_id
        The requests, in the order in which they were asked; the session adds them.
    next_id, seq
        The id of the next request, and the sequence number of the last push, without those of the
        steady exchanges that are not in the accounts yet.
    model_seq
        The sequence number of the last push that was not of rows, without steady exchanges.
    acknowledged
        The numbers of the pushes that are known to be part of the model, as far as those above.
    spread
        Those among them of rows that lie on several shards.
    answered
        Answers received so far.
    refused
        The last refusal that passes, while requests wait to be asked again because of one.
    """

    answered: int

    def __init__(
        self, info: ServerInfo, outbox: Outbox, ledger: Ledger, parallel_map: ParallelMap
    ) -> None:
        self._info, self._outbox, self._ledger = info, outbox, ledger
        self._parallel_map = parallel_map
        self.by_id: dict[int, Request] = {}
        self.next_id = 1
        self.seq = self.model_seq = 0
        self.acknowledged: AcknowledgedPushes = AcknowledgedPushes()
        self.spread: AcknowledgedPushes = AcknowledgedPushes()
        self.answered = 0
        self.refused: Unavailable | None = None
        self._arriving: dict[int, Sink] = {}  # of answers that have begun to arrive, by id

    # ------------------------------------------------------------ requests

    def take(self, wanted: Callable[[Request], bool] = lambda request: True) -> list[Request]:
        """Remove requests, all by default; return them in the order in which they were asked.

        One that was refused and asked again stands behind later ones. Pushes are put in the order
        of their numbers: the server takes no number below the last.
        """
        taken = [request for request in self.by_id.values() if wanted(request)]
        self.by_id = {id: other for id, other in self.by_id.items() if not wanted(other)}
        pushes = iter(sorted((each for each in taken if each.pushes), key=lambda push: push.seq))
        return [next(pushes) if request.pushes else request for request in taken]

    def abandon(self, request: Request) -> bool:
        """Remove a request; an answer that comes later is thrown away.

        Returns whether its answer is being received: the rest is written into the request's arrays
        then, unless the driver ends the connection.
        """
        arriving = any(self.by_id.get(id) is request for id in self._arriving)
        if request.refusal is not None and self._info.coding is not None:
            self._info.coding.take_back(request.encoded)
        self.by_id = {id: other for id, other in self.by_id.items() if other is not request}
        return arriving

    def lost(self) -> None:
        """Forget the answers that were arriving: the connection is gone."""
        self._arriving.clear()
        self.refused = None

    def reject(self, request: Request, error: AiopsError) -> None:
        """Resolve a request with an error.

        The encoding of a push that was not used is undone: its gradient may be pushed again.
        """
        if self._info.coding is not None:
            self._info.coding.take_back(request.encoded)
        self._info.examples[:0] = request.examples
        request.examples = ()
        request.resolve(error=error)

    def fail(self, error: AiopsError) -> None:
        """Give all requests this error, each as `given_up` has it."""
        for request in self.take():
            found = given_up(request, error)
            if request.refusal is not None:
                self.reject(request, found)
            else:
                request.resolve(error=found)

    def reject_refused(self, refusal: Unavailable) -> None:
        """Give all requests that the server could not take this error."""
        self.refused = None
        for request in self.take(lambda request: request.refusal is not None):
            self.reject(request, given_up(request, refusal))

    # ------------------------------------------------------------ answers

    def sink_for(self, message: Message) -> Sink:
        """Return the sink of an answer's payloads.

        Raises
        ------
        RemoteProtocolError
            When it brings other tensors or rows than were asked for.
        """
        id = message.id
        request = self.by_id.get(id)
        if request is None or request.into is None:
            return Discard()
        info, into = self._info, request.into
        parts: Parts = message.parts  # type: ignore[attr-defined]
        sink: Sink | None
        if isinstance(into, Params):
            asked, server = (request.have, request.wants), info.url
            if info.placement is None:
                sink = ParameterSink(into, parts, *asked, server, self._parallel_map)
            else:
                sink = ParameterSink.of_shards(
                    into, parts, *asked, server, self._parallel_map, info.placement
                )
        else:
            sink = into.sink(parts)
            if sink is None:
                raise RemoteProtocolError(f"{info.url} sent other rows than were asked for")
        self._arriving[id] = sink
        return sink

    def arriving(self, id: int) -> ParameterSink | None:
        """Return the sink of parameters that have begun to arrive in answer to a request."""
        sink = self._arriving.get(id)
        return sink if isinstance(sink, ParameterSink) else None

    def rows_sink(self, shard: int, message: TableRows) -> Sink:
        """Return the sink of the rows that a shard sends in answer to a request.

        Raises
        ------
        RemoteProtocolError
            When they are others than were asked for.
        """
        request = self.by_id.get(message.id)
        if request is None or not isinstance(request.into, FetchedRowsSink):
            return Discard()
        sink = request.into.sink(message.parts, shard)
        if sink is None:
            raise RemoteProtocolError(f"{self._info.url} sent other rows than were asked for")
        return sink

    def resolve(self, message: Message, sink: Sink | None) -> Request | None:
        """Resolve the request that a complete message answers.

        Returns the request if it was answered as it asked to be; None if it was abandoned, refused,
        or answered by what makes no sense. One that was refused because the server is not available
        stays pending.
        """
        self.answered += 1
        id = message.id
        self._ledger.answered(message, not isinstance(sink, Discard))
        self._arriving.pop(id, None)
        request = self.by_id.pop(id, None)
        if request is None:
            return None  # it was abandoned
        for lent in request.lent:  # the servers have read it
            self._outbox.take_back(lent)
        request.lent = []
        url = self._info.url
        try:
            if isinstance(message, Error):
                if message.parts:
                    self._note_version(request, message.version, sink)
                refused = refusal(message.code, f"{url}: {message.text}", message.details)
                if isinstance(refused, Unavailable):
                    request.refusal = self.refused = refused
                    self.by_id[id] = request
                else:
                    self.reject(request, refused)
                return None
            if isinstance(message, _BRINGS_PARAMETERS):
                count, layout = len(message.vbars) / 4, self._info.layout
                if count and layout is not None and count != len(layout.tensors):
                    raise ValueError(f"statistics of {count:g} tensors")
                request.reply = message
                current = message.current if isinstance(message, Ack) else message.version
                self._note_version(request, current, sink)
                if isinstance(message, Ack) and not message.used and self._info.coding is not None:
                    self._info.coding.take_back(request.encoded)
            request.encoded.clear()
            if type(message) is not request.answer:
                raise ValueError(f"a {request.answer.kind!r} was asked for")
            if request.pushes and (type(message) is not Ack or message.used):
                seq, runs = request.seq, self.acknowledged.runs
                if runs and runs[-1][1] + 1 == seq:  # nearly always
                    runs[-1][1] = seq
                else:
                    self.acknowledged.add(seq, seq)
                if request.of_rows and self._info.rows.shards > 1:
                    self.spread.add(seq, seq)
            request.resolve(request.finish(message, self._info))
        except (RemoteProtocolError, Refused) as error:
            request.resolve(error=error)
        except ValueError as error:
            text = f"{url} answered {request.what!r} with a {message.kind!r}: {error}"
            request.resolve(error=RemoteProtocolError(text))
        return request if request.error is None else None

    def _note_version(self, request: Request, version: int, sink: Sink | None) -> None:
        """Note the version of the parameters that an answer has brought."""
        late = sink.finish() if isinstance(sink, ParameterSink) else ()
        into = request.into
        if into is not None and not isinstance(into, FetchedRowsSink):
            into.connection = self._info.connection
            into.now_at(version, request.wants, late)
        # Pipelined: the next answer may already be coming into the same arrays, which `now_at` has
        # just marked as whole.
        for other in self._arriving.values():
            if isinstance(other, ParameterSink):
                other.mark()


def given_up(request: Request, error: AiopsError) -> AiopsError:
    """Return the error of a request that is given up because of this one.

    It is a `Refused` only if it is known that the server did not apply the request.
    """
    if isinstance(error, Unavailable):
        refused = request.refusal is not None and APPLIED not in request.refusal.details
        if request.pushes and request.attempted and not refused:
            return ConnectionLost(
                f"{error}; whether it has applied the push that it did not answer is unknown",
                **error.details,
            )
    elif isinstance(error, ConnectionLost) and request.refusal is not None:
        return unreachable_since(request.refusal, error)
    return error
