"""The spans of a server's exchanges (``--trace``), made of the engine's events and effects.

::

    aiops.exchange        from the moment at which all of a push has come to its answer; it is below
                          the worker's span of that name
      aiops.queue         until its gradient is taken, alone or into a sum
      aiops.update        until that is done
      aiops.barrier       until the policy lets the worker go

An exchange of the short way (`aiops.engine.steady`) is one call, so it has one span. Pushes of rows
have none. The tracer stands around what decides: it is not there without ``--trace``, and neither
the engine nor the dispatcher knows it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from aiops import tracing
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Effect, Event, Left, Received, Reply
from aiops.engine.membership import Member
from aiops.engine.steady import Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.serving.config import Config
from aiops.store.parameters import UpdateJob
from aiops.tracing import Tracing
from aiops.tracing.spans import Span, Value, span_of, trace_of
from aiops.wire.messages import Ack, Error, Push, Reapply

Exchange: TypeAlias = Callable[[Steady | SteadyRows, int], bytes | memoryview | None]

_NAME = "aiops.exchange"
_PARTS = "aiops.queue", "aiops.update", "aiops.barrier"

_END = 0.5
"""Seconds in which the last spans are sent: Ctrl-C ends a server within two."""

_log = logging.getLogger("aiops.tracing")


@dataclass(slots=True)
class _OpenPush:
    """A push that is traced, and not answered yet; times in nanoseconds, 0: not yet."""

    trace: int
    seq: int
    member: Member
    nbytes: int
    received: int
    begun: int = 0
    applied: int = 0


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
        self._takes = tracing.sampler.takes
        self._open: dict[tuple[int, int], _OpenPush] = {}  # by connection and request
        self._updating: _OpenPush | None = None  # its gradient is in the outstanding update
        self._failed = False
        self.close = partial(tracing.close, _END)

    def exchanging(self, exchange: Exchange) -> Exchange:
        """Return a function that does as ``exchange``, and has what it answers traced."""

        def traced(way: Steady | SteadyRows, nbytes: int) -> bytes | memoryview | None:
            if not isinstance(way, Steady):  # rows
                return exchange(way, nbytes)
            member, before, begin = way.member, way.member.last_seq, self._now()
            answer = exchange(way, nbytes)
            if member.last_seq != before and answer is not None:
                self._safely(self._exchanged, member, begin, way.nbytes)
            return answer

        return traced

    def handling(self, handle: Callable[..., Sequence[Effect]]) -> Callable[..., Sequence[Effect]]:
        """Return a function that does as ``handle``, and has pushes among the events traced."""

        def traced(event: Event, *noted: Any) -> Sequence[Effect]:
            begin = self._now()
            if type(event) is Received and isinstance(event.message, Push | Reapply):
                self._safely(self._received, event, begin)
            effects = handle(event, *noted)
            if self._open:
                self._safely(self._handled, event, effects, begin)
            return effects

        return traced

    # ------------------------------------------------------------ inside

    def _safely(self, function: Callable[..., None], *given: Any) -> None:
        """Call a function of this class; what it raises is logged once, and the run goes on."""
        try:
            function(*given)
        except Exception:
            if not self._failed:
                self._failed = True
                _log.warning("an exchange could not be traced, and others may not", exc_info=True)

    def _exchanged(self, member: Member, begin: int, nbytes: int) -> None:
        """Make the span of an exchange of the short way."""
        seq = member.last_seq
        trace = trace_of(member.client, seq)
        if not self._takes(trace, seq):
            return
        about = self._about(member, seq, nbytes) | {
            "aiops.version": self._engine.version,
            "aiops.staleness": member.staleness,
            "aiops.used": True,
            "aiops.answer_bytes": nbytes,
        }
        self._tracing.offer([self._span(trace, begin, self._now(), about)])

    def _received(self, event: Received, begin: int) -> None:
        message, member = event.message, self._engine.membership.at(event.peer)
        assert isinstance(message, Push | Reapply)
        if member is None:
            return
        seq = message.seq
        trace = trace_of(member.client, seq)
        if self._takes(trace, seq):
            nbytes = sum(part.nbytes for part in message.parts) if type(message) is Push else 0
            self._open[event.peer, message.id] = _OpenPush(trace, seq, member, nbytes, begin)

    def _handled(self, event: Event, effects: Sequence[Effect], begin: int) -> None:
        """Note what an event has brought the open pushes."""
        kind = type(event)
        if kind is Applied and self._updating is not None:
            self._updating.applied, self._updating = begin, None
        elif kind is Left:
            gone = event.peer  # type: ignore[union-attr]
            for key in [key for key in self._open if key[0] == gone]:
                del self._open[key]
        for effect in effects:
            if type(effect) is Apply:
                if isinstance(effect.job, UpdateJob):
                    self._begun()
            elif type(effect) is Reply:
                push = self._open.pop((effect.peer, effect.message.id), None)
                if push is not None:
                    self._answered(push, effect.message)

    def _begun(self) -> None:
        """Note that an update is outstanding, perhaps with the gradient of an open push."""
        training = self._engine.training
        taken = None if training is None else training.updates.maker.push
        if taken is None or taken.peer is None:
            return
        push = self._open.get((taken.peer, taken.message.id))
        if push is not None:
            push.begun, self._updating = self._now(), push

    def _answered(self, push: _OpenPush, message: object) -> None:
        end, trace, error = self._now(), push.trace, ""
        about = self._about(push.member, push.seq, push.nbytes)
        if isinstance(message, Ack):
            about |= {
                "aiops.version": message.version,
                "aiops.staleness": message.staleness,
                "aiops.used": message.used,
                "aiops.answer_bytes": sum(part.nbytes for part in message.parts),
            }
            if message.why:
                about["aiops.unused_reason"] = message.why
        elif isinstance(message, Error):
            error = about["aiops.refused"] = message.text
        whole = self._span(trace, push.received, end, about, error)
        times = push.received, push.begun or end, push.applied or end, end
        parts = [
            Span(name, trace, span_of(trace, name), whole.id, begun, ended)
            for name, begun, ended in zip(_PARTS, times, times[1:], strict=False)
            if ended > begun
        ]
        self._tracing.offer([whole, *parts])

    def _about(self, member: Member, seq: int, nbytes: int) -> dict[str, Value]:
        return {
            "aiops.worker": member.name,
            "aiops.worker_number": member.number,
            "aiops.push": seq,
            "aiops.bytes": nbytes,
        }

    def _span(
        self, trace: int, begin: int, end: int, about: Mapping[str, Value], error: str = ""
    ) -> Span:
        """Return the span of an exchange: below the worker's, which has an id of its own."""
        own, worker = span_of(trace, f"{_NAME}, server"), span_of(trace, _NAME)
        return Span(_NAME, trace, own, worker, begin, end, "server", about, error)


def begun(config: Config, engine: Engine | None) -> ExchangeTrace | None:
    """Return what traces a server's exchanges; None if that is not asked for.

    Of a model on several servers the lead has the pushes.
    """
    if engine is None:
        return None
    about = {"aiops.run": engine.options.run, "aiops.policy": engine.algorithm.name}
    given = tracing.begun(config.trace, "server", about, os.environ)
    return None if given is None else ExchangeTrace(engine, given)
