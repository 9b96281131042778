"""The spans of a worker's averages (``AIOPS_TRACE``).

::

    aiops.average         the model has been copied, the mean has been taken over
      aiops.meet          until the server has named the workers of the round
      aiops.ring          the rest of it

A trace is one round, with such spans of each of its workers: the run, its generation and the number
of the round, which all know, are its id. Rounds without others have none. Without tracing none of
this is made: an averager then has plain `Rounds`.
"""

from __future__ import annotations

from aiops.client.rounds import Rounds
from aiops.tracing import Tracing
from aiops.tracing.spans import LONGEST_NAME, Span, Value, brief, span_of, trace_of_round
from aiops.wire.ring_messages import Round

__all__ = ["TracedRounds"]


class TracedRounds(Rounds):
    """`Rounds` that have spans. Nothing that fails in tracing reaches the average."""

    _joined = _met = 0

    async def _join(self) -> Round:
        tracing = self._traces
        self._joined = tracing.now()
        found = await super()._join()
        self._met = tracing.now()
        return found

    async def _average(self, found: Round) -> None:
        error = ""
        try:
            await super()._average(found)
        except BaseException as raised:
            error = brief(f"{type(raised).__name__}: {raised}")
            raise
        finally:
            self._traces.safely(self._averaged, found, error)

    @property
    def _traces(self) -> Tracing:
        tracing = self._client._tracing
        assert tracing is not None
        return tracing

    def _averaged(self, found: Round, error: str) -> None:
        tracing, session = self._traces, self._client._session
        run = session.info.run
        trace = trace_of_round(run.name, run.generation, found.number)
        if not tracing.sampler.takes(trace, found.number):
            return
        about: dict[str, Value] = {
            "aiops.worker": brief(session.identity.name, LONGEST_NAME),
            "aiops.round": found.number,
            "aiops.workers": len(found.members),
            "aiops.codec": found.codec,
        }
        times = self._joined, self._met, tracing.now()
        own = span_of(trace, f"aiops.average, {found.rank}")
        parts = [
            Span(name, trace, span_of(trace, f"{name}, {found.rank}"), own, begin, end)
            for name, begin, end in zip(
                ("aiops.meet", "aiops.ring"), times, times[1:], strict=False
            )
        ]
        begin, _met, end = times
        whole = Span("aiops.average", trace, own, 0, begin, end, "internal", about, error)
        tracing.offer([whole, *parts])
