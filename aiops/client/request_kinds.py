"""The kinds of requests of a client, and their results.

A `Request` lives until its answer. Each kind defines the message that is sent, each time that it is
sent (`Request.message`), the kind of message that answers it (`Request.answer`), and the result of
that (`Request.finish`). `aiops.client.requests.Requests` makes requests, and
`aiops.client.session.Session` sends them and receives the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from aiops.client.coding import Encoded
from aiops.client.outbox import Lending
from aiops.client.params import Params
from aiops.client.receive_params import wants_of
from aiops.client.rows import FetchedRowsSink, RowsAsked, RowsShare
from aiops.client.server_info import ServerInfo
from aiops.common.frozen import value
from aiops.errors import AiopsError, Unavailable
from aiops.model.layout import Array, Ints, Layout
from aiops.model.parts import Parts, Wants
from aiops.wire import data_messages, messages, ring_messages
from aiops.wire.fields import MAX_COUNT, Examples, Factors
from aiops.wire.messages import Ack, Message, Model, Report, TableRows


class Means(Mapping[str, float]):
    """The mean of the statistic per tensor, by name; decoded at each look-up.

    Parameters
    ----------
    layout
        The tensors.
    means
        float32, little endian, in arena order.
    """

    __slots__ = ("_layout", "_means")

    def __init__(self, layout: Layout, means: bytes) -> None:
        self._layout, self._means = layout, means

    def __getitem__(self, name: str) -> float:
        return float(np.frombuffer(self._means, "<f4")[self._layout.index[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.index)

    def __len__(self) -> int:
        return len(self._layout.index)

    def __repr__(self) -> str:
        return repr(dict(self))


@value
class Receipt:
    """The outcome of a push.

    Attributes
    ----------
    version
        The model version after it.
    staleness
        Updates between the parameters the gradient was computed on and its use: the largest over
        the tensors pushed.
    mean_staleness
        The same, as the mean weighted by the tensors' bytes.
    vbar
        The mean of the algorithm's statistic over all parameters, or None if it keeps none.
    vbars
        The same per tensor.
    used
        Whether the gradient is part of the model; False: the policy ignored it (it was too stale),
        or a filter did.
    pushed
        False when the step was local, as the policy has it, and no answer was waited for: the other
        fields are then those of the last push.
    why
        Why it is not used, a sentence; empty if it is.
    """

    version: int
    staleness: int
    mean_staleness: float
    vbar: float | None
    vbars: Mapping[str, float]
    used: bool = True
    pushed: bool = True
    why: str = ""


@value
class GateStatistics:
    """The statistics in an answer, for the bandwidth gates.

    Attributes
    ----------
    vbar
        The mean of the algorithm's statistic over all parameters, or None if it keeps none.
    vbars
        float32, the same per tensor in arena order; empty if it keeps none.
    gate
        c_push and c_fetch, where a budget has the server choose them.
    """

    vbar: float | None
    vbars: Array
    gate: tuple[float, ...]


class Request:
    """One request to the server, until its answer; the kinds of requests derive from it.

    Attributes
    ----------
    what
        The answer, in words.
    answer
        The class of the message that answers it.
    pushes
        Whether it is a push of any kind, which has a sequence number.
    of_rows
        Whether it is about rows of a table (`RowsRequest`).
    waits
        Whether the answer may wait for other workers; else the server answers at once.
    seq
        That number, the same however often it is sent; 0 until the session gives it one.
    payloads
        The views of each part that is sent.
    into
        Where parameters, or rows, are to be received.
    have, wants
        What of ``into`` was asked for last: the version held, and of which tensors (none: all).
    connection, base, table
        Of a push: the client and epoch by which the parameters came that it was computed at, and
        their version: the model's, or, if it is a push of rows, that of the table of a number.
    encoded
        The coded payloads of a push, to be taken back if it is refused.
    lent
        Its payloads that servers read where they lie here, by server.
    inline
        Whether its payloads are sent also where they could be lent: it has begun so.
    reply
        The answer, if it may carry statistics.
    attempted
        Whether it has been sent, or has begun to be.
    examples
        Of a push: the examples (task, start, stop) that its gradients were computed on.
    refusal
        The answer to its last sending, if that was a refusal that passes; it is to be asked again.
    on_done
        Called when the answer is there.
    """

    payloads: Sequence[Sequence[memoryview]]
    base: int
    connection: tuple[str, int]
    into: Params | FetchedRowsSink | None
    seq: int
    done: bool

    __slots__ = (
        *("attempted", "base", "connection", "done", "encoded", "error", "examples", "have"),
        *("inline", "into", "lent", "on_done", "payloads", "refusal", "reply", "result", "seq"),
        "wants",
    )

    table: int | None = None
    what: ClassVar[str] = ""
    pushes: ClassVar[bool] = False
    of_rows: ClassVar[bool] = False
    waits: ClassVar[bool] = True
    answer: ClassVar[type[Message]] = Message

    def __init__(
        self,
        payloads: Sequence[Sequence[memoryview]] = (),
        into: Params | FetchedRowsSink | None = None,
        connection: tuple[str, int] = ("", 0),
        base: int = -1,
    ) -> None:
        self.payloads, self.into, self.connection, self.base = payloads, into, connection, base
        self.done, self.seq = False, 0
        self.result: Any = None
        self.error: AiopsError | None = None
        self.encoded: Encoded = []
        self.examples: tuple[tuple[int, int, int], ...] = ()
        self.have = -1
        self.wants: Wants = ()
        self.lent: list[Lending] = []
        self.reply: Ack | messages.FetchedParams | None = None
        self.attempted = self.inline = False
        self.refusal: Unavailable | None = None
        self.on_done: Callable[[], None] | None = None

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return what is sent, on the connection that there is now."""
        raise NotImplementedError

    def finish(self, message: Any, info: ServerInfo) -> Any:
        """Return what an answer of the kind `answer` comes to, when all of it is there."""
        return None

    @property
    def statistics(self) -> GateStatistics | None:
        """The statistics in the answer, or None if it has none."""
        reply = self.reply
        if reply is None:
            return None
        return GateStatistics(reply.vbar, np.frombuffer(reply.vbars, "<f4"), reply.gate)

    def resolve(self, result: Any = None, error: AiopsError | None = None) -> None:
        """Take the answer, once."""
        if self.done:
            return
        self.done, self.result, self.error = True, result, error
        if error is None:
            self.payloads = ()  # it is not asked again
        if self.on_done is not None:
            self.on_done()

    def value(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


class DefineRequest(Request):
    """Offer a model; the result is (whether it was taken, the version)."""

    __slots__ = ("_parts", "_sparse", "_tensors")
    what = "the answer to its offer of a model"
    answer = Model

    def __init__(
        self,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        parts: Parts,
        payloads: Sequence[Sequence[memoryview]],
        sparse: Any,
    ) -> None:
        super().__init__(payloads)
        self._tensors, self._parts, self._sparse = tuple(tensors), parts, sparse

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the offer."""
        return messages.Define(id, self._tensors, self._parts, self._sparse)

    def finish(self, message: Model, info: ServerInfo) -> tuple[bool, int]:
        """Learn the model that there is."""
        info.learn(message)
        return message.created, message.version


class DescribeRequest(Request):
    """Ask for the model's tensors; the result is None."""

    __slots__ = ()
    what = "the model's description"
    answer = Model

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the question."""
        return messages.Describe(id)

    def finish(self, message: Model, info: ServerInfo) -> None:
        """Learn the model."""
        info.learn(message)


class PushRequest(Request):
    """Push gradients; the result is a `Receipt`.

    Parameters
    ----------
    parts, payloads
        The gradients as they travel.
    into, wanted
        Where the parameters after it are received, and of which tensors (None: of all).
    connection, base
        The client and epoch by which the parameters came that it was computed at, and the newest
        version of the model that any of them is of.
    count
        The mini-batches whose gradients it sums up.
    lr_factors
        As of `aiops.wire.messages.Push`.

    Attributes
    ----------
    sent
        The message as it was sent last.
    """

    have: int

    __slots__ = ("_count", "_lr_factors", "_parts", "_wanted", "sent")
    what = "the answer to its push"
    answer = Ack
    pushes = True

    def __init__(
        self,
        parts: Parts,
        payloads: Sequence[Sequence[memoryview]],
        into: Params | None,
        wanted: Ints | None,
        connection: tuple[str, int],
        base: int,
        count: int,
        lr_factors: Factors = (),
    ) -> None:
        super().__init__(payloads, into, connection, base)
        self._parts, self._wanted, self._count = parts, wanted, min(count, MAX_COUNT)
        self._lr_factors = lr_factors
        self.sent: messages.Push | None = None

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the push, which asks for what is not held now."""
        into = self.into
        if isinstance(into, Params):
            if into.connection != info.connection:
                info.check_held(into)
            if self._wanted is None and into.level is not None:  # the usual case
                self.have, self.wants = into.level, ()
            else:
                self.have, self.wants = wants_of(into, self._wanted)
        asked = self.have, self._parts, self.wants, info.increments, self._count
        self.sent = messages.Push(id, self.seq, into is not None, *asked, self._lr_factors)
        return self.sent

    def finish(self, message: Ack, info: ServerInfo) -> Receipt:
        """Return the receipt."""
        vbars: Mapping[str, float] = {}
        if message.vbars and info.layout is not None:
            vbars = Means(info.layout, message.vbars)
        stale = message.staleness, message.mean_staleness
        return Receipt(message.version, *stale, message.vbar, vbars, message.used, why=message.why)


class ReapplyRequest(PushRequest):
    """Have the server apply this client's last gradient again; the result is a `Receipt`."""

    have: int

    __slots__ = ()

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the message, which takes the place of a push."""
        into = self.into
        if isinstance(into, Params):
            info.check_held(into)
            self.have, self.wants = wants_of(into, self._wanted)
        asked = self.have, self.wants, info.increments
        return messages.Reapply(id, self.seq, into is not None, *asked, self._lr_factors)


class FetchRequest(Request):
    """Ask for the parameters (of some tensors); the result is whether they changed.

    ``evaluation``: as they are where the model is evaluated, of all tensors. Those are not the ones
    that any version held would be brought up to date with.
    """

    have: int

    __slots__ = ("_evaluation", "_params", "_wanted")
    what = "the parameters it fetches"
    answer = messages.FetchedParams

    def __init__(self, into: Params, wanted: Ints | None, evaluation: bool = False) -> None:
        super().__init__((), into)
        self._params, self._wanted, self._evaluation = into, wanted, evaluation

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the fetch, which asks for what is not held now."""
        info.check_held(self._params)
        if self._evaluation:
            self._params.version = self.have = -1
            self.wants = ()
            return messages.Fetch(id, -1, (), False, True)
        self.have, self.wants = wants_of(self._params, self._wanted)
        return messages.Fetch(id, self.have, self.wants, info.increments)

    def finish(self, message: messages.FetchedParams, info: ServerInfo) -> bool:
        """Return whether there was anything new."""
        return bool(message.parts)


class RowsRequest(Request):
    """A request about rows of a table, of which each server that has some is sent its share.

    Attributes
    ----------
    asked
        The rows.
    shares
        What each server is sent, the lead first, as it was sent last.
    """

    shares: list[RowsShare]
    payloads: list[list[memoryview]]
    asked: RowsAsked

    __slots__ = ("asked", "shares", "table")
    of_rows = True
    answer = TableRows

    def __init__(self, asked: RowsAsked, connection: tuple[str, int] = ("", 0)) -> None:
        super().__init__((), asked.into, connection, asked.base)
        self.asked, self.shares, self.table = asked, list[RowsShare](), asked.named.index

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return what the lead is sent, and have the shares of all servers."""
        self.shares = info.rows.shares(self.asked)
        self.payloads = self.shares[0].payloads
        return self.share_of(0, id)

    def share_of(self, shard: int, id: int) -> messages.FetchRows | messages.PushRows:
        """Return what one server is sent."""
        raise NotImplementedError


class FetchRowsRequest(RowsRequest):
    """Ask for rows of a table; the result is an array, ``[len(ids), width]``."""

    __slots__ = ()
    what = "the rows it fetches"

    def share_of(self, shard: int, id: int) -> messages.FetchRows:
        """Return the fetch."""
        return messages.FetchRows(id, self.asked.named.index, self.shares[shard].parts)

    def finish(self, message: TableRows, info: ServerInfo) -> Array:
        """Return the rows."""
        assert self.asked.into is not None, "a fetch asks for rows"
        return info.rows.arrived(self.asked.named, message, self.asked.into)


class PushRowsRequest(RowsRequest):
    """Push gradients of rows; the result is a `Receipt`, with rows wanted (it, the rows)."""

    __slots__ = ("_lr_factors",)
    what = "the answer to its push of rows"
    pushes = True

    def __init__(
        self, asked: RowsAsked, connection: tuple[str, int], lr_factors: Factors = ()
    ) -> None:
        super().__init__(asked, connection)
        self._lr_factors = lr_factors

    def share_of(self, shard: int, id: int) -> messages.PushRows:
        """Return the push."""
        share = self.shares[shard]
        asked = self.asked.named.index, share.base, share.parts, self._lr_factors
        return messages.PushRows(id, self.seq, *asked)

    def finish(self, message: TableRows, info: ServerInfo) -> Any:
        """Return the receipt, or both."""
        stale, asked = message.staleness, self.asked
        receipt = Receipt(message.version, stale, float(stale), None, {})
        info.rows.answered(asked.named, message)
        if asked.into is None:
            return receipt
        return receipt, info.rows.arrived(asked.named, message, asked.into)


class JoinRoundRequest(Request):
    """Be ready to average (or, with port 0, no longer); the result is a `Round`."""

    __slots__ = ("_fields",)
    what = "the others of a round"
    answer = ring_messages.Round

    def __init__(
        self,
        host: str,
        port: int,
        rounds: int,
        digest: bytes,
        nonce: bytes,
        have: bytes,
        settles: bool,
    ) -> None:
        super().__init__()
        self._fields = host, port, rounds, digest, nonce, have, settles

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the request to join a round."""
        return ring_messages.JoinRound(id, *self._fields)

    def finish(self, message: ring_messages.Round, info: ServerInfo) -> ring_messages.Round:
        """Return the round."""
        return message


class SettleRoundRequest(Request):
    """Report the end of a round; the result is a `RoundSettled`."""

    __slots__ = ("_fields",)
    what = "the others of a round to have its mean"
    answer = ring_messages.RoundSettled

    def __init__(self, number: int, whole: bool, seen: Examples) -> None:
        super().__init__()
        self._fields = number, whole, seen

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the report."""
        return ring_messages.SettleRound(id, *self._fields)

    def finish(
        self, message: ring_messages.RoundSettled, info: ServerInfo
    ) -> ring_messages.RoundSettled:
        """Return the outcome."""
        return message


class TakeTaskRequest(Request):
    """Ask for a task of a data set; the result is a `GivenTask`."""

    __slots__ = ("_asked",)
    what = "a task of a data set"
    answer = data_messages.GivenTask

    def __init__(self, asked: data_messages.TakeTask) -> None:
        super().__init__()
        self._asked = asked

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the question."""
        return replace(self._asked, id=id)

    def finish(self, message: data_messages.GivenTask, info: ServerInfo) -> data_messages.GivenTask:
        """Return the task."""
        return message


class StatsRequest(Request):
    """Ask for the server's statistics; the result is a dict."""

    __slots__ = ()
    what, waits = "the statistics", False
    answer = Report

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the question."""
        return messages.Stats(id)

    def finish(self, message: Report, info: ServerInfo) -> Any:
        """Return them."""
        return _lists(message.report)


class PingRequest(Request):
    """Ask whether the server is alive; the result is None."""

    __slots__ = ()
    what, waits = "a sign of life", False
    answer = messages.Pong

    def message(self, id: int, info: ServerInfo) -> Message:
        """Return the question."""
        return messages.Ping(id)


def _lists(value: Any) -> Any:
    """Turn the wire's tuples into lists, as people expect in JSON-like values."""
    if isinstance(value, tuple):
        return [_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return value
