"""The spans of a server's exchanges (``--trace``), made of the engine's events and effects.

::

    aiops.exchange        from the moment at which all of a push has come to its answer; it is below
                          the worker's span of that name
      aiops.queue         until its gradient is taken, alone or into a sum
      aiops.update        until that is done
      aiops.barrier       until the policy lets the worker go

An exchange of the short way (`aiops.engine.steady`) is one call, so it has one span; if its answer
waits for the journal (``--acks``), that ends with the wait. A
push that is sent again has one span more, with ``aiops.repeated``. A worker's fetch that is a
request of its own has one span, ``aiops.fetch_params``, and so have its fetches and pushes of rows,
``aiops.fetch_rows`` and ``aiops.push_rows``. The tracer stands around what decides: it
is not there without ``--trace``, and neither the engine nor the dispatcher knows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from aiops import tracing
from aiops.durable.commit_gate import EncodedReply
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Effect, Event, Left, Received, Reply
from aiops.engine.membership import Member
from aiops.engine.steady import Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.serving.config import Config
from aiops.store.parameters import UpdateJob
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
    Ack,
    Error,
    Fetch,
    FetchedParams,
    FetchRows,
    Push,
    PushRows,
    Reapply,
    TableRows,
)

Exchange: TypeAlias = Callable[[Steady | SteadyRows, int], bytes | memoryview | None]

_NAME = "aiops.exchange"
_PARTS = "aiops.queue", "aiops.update", "aiops.barrier"

_END = 0.5
"""Seconds in which the last spans are sent: Ctrl-C ends a server within two."""


@dataclass(slots=True)
class _OpenPush:
    """A push that is traced, and not answered yet; times in nanoseconds, 0: not yet.

    ``about``: the attributes that are known. ``name``: of its span; that of a fetch is another's.
    """

    trace: int
    peer: int
    about: dict[str, Value]
    received: int
    taken: int = 0
    applied: int = 0
    name: str = _NAME


class ExchangeTrace:
    """Traces the exchanges of one engine.

    Parameters
    ----------
    engine
        It; only read.
    tracing
        Takes the spans.
    """

    def __init__(self, engine: Engine, tracing: Tracing) -> None:
        self._engine, self._tracing, self._now = engine, tracing, tracing.now
        self._takes, self._safely = tracing.sampler.takes, tracing.safely
        self._open: dict[tuple[int, int], _OpenPush] = {}  # by connection and request
        self._updating: _OpenPush | None = None  # its gradient is in the outstanding update
        # Of steady exchanges whose answers wait for the journal, by connection, in order; None:
        # one that is not traced.
        self._held: dict[int, deque[_OpenPush | None]] = {}
        self.end, self.wait_closed = tracing.end, partial(tracing.wait_closed, _END)

    @property
    def pending(self) -> int:
        """The number of traced pushes that are not answered yet."""
        return len(self._open) + sum(map(len, self._held.values()))

    def exchanging(self, exchange: Exchange) -> Exchange:
        """Return a function that does as ``exchange``, and has what it answers traced."""

        def traced(way: Steady | SteadyRows, nbytes: int) -> bytes | memoryview | None:
            begin = self._now()
            if not isinstance(way, Steady):
                answer = exchange(way, nbytes)
                if answer:
                    self._safely(self._exchanged_rows, way, begin)
                return answer
            member, before = way.member, way.member.last_seq
            answer = exchange(way, nbytes)
            if member.last_seq != before and answer is not None:
                self._safely(self._exchanged, way, begin, not answer)
            return answer

        return traced

    def handling(self, handle: Callable[..., Sequence[Effect]]) -> Callable[..., Sequence[Effect]]:
        """Return a function that does as ``handle``, and has pushes among the events traced."""

        def traced(event: Event, *noted: Any) -> Sequence[Effect]:
            begin = self._now()
            if type(event) is Received:
                if isinstance(event.message, Push | Reapply | PushRows):
                    self._safely(self._received, event, begin)
                elif isinstance(event.message, Fetch | FetchRows):
                    self._safely(self._fetching, event, begin)
            effects = handle(event, *noted)
            if self._open or self._held:
                self._safely(self._handled, event, effects, begin)
            return effects

        return traced

    # ------------------------------------------------------------ inside

    def _exchanged(self, way: Steady, begin: int, held: bool) -> None:
        """Make the span of an exchange of the short way, now or when its answer is sent."""
        member, peer = way.member, way.peer
        seq = member.last_seq
        trace, push = trace_of(member.client, seq), None
        if self._takes(trace, seq):
            about = _about(member, seq, way.nbytes) | {
                "aiops.version": self._engine.version,
                "aiops.staleness": member.staleness,
                "aiops.used": True,
                "aiops.answer_bytes": way.nbytes,
            }
            push = _OpenPush(trace, peer, about, begin)
        if held:
            self._held.setdefault(peer, deque()).append(push)
        elif push is not None:
            self._tracing.offer([_whole(push, self._now())])

    def _exchanged_rows(self, way: SteadyRows, begin: int) -> None:
        """Make the span of a message about rows that went the short way."""
        request, member = way.answered, self._engine.membership.at(way.peer)
        if request is None or member is None or not member.worker:
            return
        id, seq, name = request.id, request.seq, PUSH_ROWS if request.seq else FETCH_ROWS
        trace = trace_of(member.client, seq) if seq else trace_of_fetch(member.client, id)
        if not self._takes(trace, seq or id):
            return
        store = self._engine.tables[request.number]
        about = _about(member, seq, sum(request.sizes)) if seq else _of(member)
        about |= {} if seq else {"aiops.request": id}
        about |= {
            **self._of_table(request.number),
            "aiops.version": store.version,
            "aiops.answer_bytes": request.wanted * store.table.row_bytes,
        }
        if seq:
            about["aiops.staleness"] = member.staleness
        push = _OpenPush(trace, way.peer, about, begin, name=name)
        self._tracing.offer([_whole(push, self._now())])

    def _of_table(self, number: int) -> dict[str, Value]:
        """Return the attribute of a table, if a peer has named one that there is."""
        tables = self._engine.tables
        if number >= len(tables):
            return {}
        return {"aiops.table": brief(tables[number].named.name, LONGEST_NAME)}

    def _received(self, event: Received, begin: int) -> None:
        message, member = event.message, self._engine.membership.at(event.peer)
        assert isinstance(message, Push | Reapply | PushRows)
        if member is None:
            return
        seq, repeated = message.seq, message.seq <= member.last_seq
        trace = trace_of(member.client, seq)
        if self._takes(trace, seq, repeated=repeated):
            nbytes, name = 0, _NAME
            if isinstance(message, Push | PushRows):
                nbytes = sum(part.nbytes for part in message.parts)
            about = _about(member, seq, nbytes)
            if isinstance(message, PushRows):
                name = PUSH_ROWS
                about |= self._of_table(message.table)
            if repeated:
                about["aiops.repeated"] = True
            push = _OpenPush(trace, event.peer, about, begin, name=name)
            self._open[event.peer, message.id] = push

    def _fetching(self, event: Received, begin: int) -> None:
        """Note a fetch, if it is a worker's: others have no traces."""
        message, member = event.message, self._engine.membership.at(event.peer)
        id = message.id
        if member is None or not member.worker:
            return
        trace = trace_of_fetch(member.client, id)
        if self._takes(trace, id):
            about, name = {**_of(member), "aiops.request": id}, FETCH
            if isinstance(message, FetchRows):
                name = FETCH_ROWS
                about |= self._of_table(message.table)
            self._open[event.peer, id] = _OpenPush(trace, event.peer, about, begin, name=name)

    def _handled(self, event: Event, effects: Sequence[Effect | EncodedReply], begin: int) -> None:
        """Note what an event has brought the open pushes."""
        kind = type(event)
        if kind is Applied and self._updating is not None:
            self._updating.applied, self._updating = begin, None
        elif kind is Left:
            gone = event.peer  # type: ignore[union-attr]
            self._held.pop(gone, None)
            for key in [key for key in self._open if key[0] == gone]:
                del self._open[key]
        for effect in effects:
            if isinstance(effect, EncodedReply):
                self._released(effect.peer)
            elif type(effect) is Apply:
                if isinstance(effect.job, UpdateJob):
                    self._update_begins()
            elif type(effect) is Reply:
                push = self._open.pop((effect.peer, effect.message.id), None)
                if push is not None:
                    self._answered(push, effect.message)

    def _released(self, peer: int) -> None:
        """Make the span of a steady exchange whose answer may be sent now."""
        held = self._held.get(peer)
        if not held:
            return
        push = held.popleft()
        if not held:
            del self._held[peer]
        if push is not None:
            self._tracing.offer([_whole(push, self._now())])

    def _update_begins(self) -> None:
        """Note that an update is outstanding, perhaps with the gradient of an open push."""
        training = self._engine.training
        taken = None if training is None else training.updates.maker.push
        if taken is None or taken.peer is None:
            return
        push = self._open.get((taken.peer, taken.message.id))
        if push is not None:
            push.taken, self._updating = self._now(), push

    def _answered(self, push: _OpenPush, message: object) -> None:
        end, error = self._now(), ""
        if isinstance(message, Ack):
            push.about |= {
                "aiops.version": message.version,
                "aiops.staleness": message.staleness,
                "aiops.used": message.used,
                "aiops.answer_bytes": sum(part.nbytes for part in message.parts),
            }
            if message.why:
                push.about["aiops.unused_reason"] = brief(message.why)
        elif isinstance(message, FetchedParams | TableRows):
            if push.name == PUSH_ROWS and isinstance(message, TableRows):
                push.about["aiops.staleness"] = message.staleness
            push.about |= {
                "aiops.version": message.version,
                "aiops.answer_bytes": sum(part.nbytes for part in message.parts),
            }
        elif isinstance(message, Error):
            error = push.about["aiops.refused"] = brief(message.text)
        whole, trace = _whole(push, end, error), push.trace
        if push.name != _NAME:
            self._tracing.offer([whole])
            return
        times = push.received, push.taken or end, push.applied or end, end
        parts = [
            Span(name, trace, span_of(trace, f"{name}, {whole.id}"), whole.id, begin, until)
            for name, begin, until in zip(_PARTS, times, times[1:], strict=False)
            if until > begin
        ]
        self._tracing.offer([whole, *parts])


def _of(member: Member) -> dict[str, Value]:
    name = brief(member.name, LONGEST_NAME)
    return {"aiops.worker": name, "aiops.worker_number": member.number}


def _about(member: Member, seq: int, nbytes: int) -> dict[str, Value]:
    return {**_of(member), "aiops.push": seq, "aiops.bytes": nbytes}


def _whole(push: _OpenPush, end: int, error: str = "") -> Span:
    """Return the span of an exchange: below the worker's, which has an id of its own.

    A push that is sent again has the same trace, and another span.
    """
    trace, begin = push.trace, push.received
    own = span_of(trace, f"{push.name}, server, {push.peer}, {begin}")
    worker = span_of(trace, push.name)
    return Span(push.name, trace, own, worker, begin, end, "server", push.about, error)


def start(
    config: Config, engine: Engine | None, now: Callable[[], int] | None
) -> ExchangeTrace | None:
    """Return what traces a server's exchanges by this clock; None if that is not asked for.

    Of a model on several servers the lead has the pushes.
    """
    if engine is None:
        return None
    about = {"aiops.run": engine.options.run, "aiops.policy": engine.algorithm.name}
    given = tracing.start(config.trace, "server", about, now)
    return None if given is None else ExchangeTrace(engine, given)
