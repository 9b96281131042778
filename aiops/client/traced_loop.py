"""The steps of a worker that are traced: each push has spans, made when it is over.

::

    aiops.step                 from the end of the step before to the answer
      aiops.compute            the user's: until the gradient is handed in
      aiops.exchange           until the answer has been taken in; the server's span is below it
        aiops.push             until the last byte is handed to the system
        aiops.wait             until the first byte of the answer is there
        aiops.fetch            the rest of it

Without tracing none of this is made: a worker then has a plain `TrainingLoop`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiops.client.lr_factors import LrFactors
from aiops.client.program import Program
from aiops.client.request_kinds import Receipt
from aiops.client.strategies import Transfer
from aiops.client.training_loop import (
    BackgroundTransfer,
    Gradients,
    Op,
    SendInBackground,
    TrainingLoop,
)
from aiops.net.timed_socket import SocketTimes
from aiops.tracing import Tracing
from aiops.tracing.spans import Span, Value, span_of, trace_of

_STEP, _EXCHANGE = "aiops.step", "aiops.exchange"

_log = logging.getLogger("aiops.tracing")

_LONGEST = 200
"""Characters of an error that a span has."""


class StepTrace:
    """Makes the spans of one worker's pushes.

    Parameters
    ----------
    tracing
        Takes them.
    client
        The worker's id.
    about
        Attributes of its steps.
    last_push
        Returns the sequence number of its last push. It is asked for after a gradient that travels
        by itself; rows that another thread pushes in between would have their trace mixed up.
    times
        Those of its connection, if one message each way is an exchange.
    """

    def __init__(
        self,
        tracing: Tracing,
        client: str,
        about: Mapping[str, Value],
        last_push: Callable[[], int],
        times: Callable[[], SocketTimes | None],
    ) -> None:
        self.now, self.last_push = tracing.now, last_push
        self._tracing, self._client, self._about, self._times = tracing, client, about, times
        self.since = tracing.now()  # the end of the last step
        self._failed = False

    def pushed(
        self,
        seq: int,
        computed: int,
        begin: int,
        end: int,
        outcome: Receipt | BaseException | None,
        *,
        alone: bool = True,
    ) -> None:
        """Make the spans of a push; that fails for no reason that ends a step.

        Parameters
        ----------
        seq
            Its sequence number.
        computed, begin, end
            Where computing began, and the exchange; and its end.
        outcome
            What came of it.
        alone
            Nothing else was sent or received meanwhile.
        """
        try:
            trace = trace_of(self._client, seq)
            if self._tracing.sampler.takes(trace, seq):
                times = self._times() if alone else None
                spans = self._spans(trace, seq, (computed, begin, end), outcome, times)
                self._tracing.offer(spans)
        except Exception:  # the push has been made, and is not to be made again
            if not self._failed:
                self._failed = True
                _log.warning("a step could not be traced, and others may not", exc_info=True)

    def _spans(
        self,
        trace: int,
        seq: int,
        moments: tuple[int, int, int],
        outcome: Receipt | BaseException | None,
        times: SocketTimes | None,
    ) -> list[Span]:
        computed, begin, end = moments
        error = ""
        about: dict[str, Value] = {**self._about, "aiops.push": seq}
        if isinstance(outcome, Receipt):
            about |= {
                "aiops.version": outcome.version,
                "aiops.staleness": outcome.staleness,
                "aiops.used": outcome.used,
            }
            if outcome.why:
                about["aiops.unused_reason"] = outcome.why
        elif outcome is not None:
            error = f"{type(outcome).__name__}: {outcome}"[:_LONGEST]
        step, exchange = span_of(trace, _STEP), span_of(trace, _EXCHANGE)
        spans = [
            Span(_STEP, trace, step, 0, computed, end, "internal", about, error),
            _part("aiops.compute", trace, step, computed, begin),
            Span(_EXCHANGE, trace, exchange, step, begin, end, "client", about, error),
        ]
        if times is not None and begin <= times.sent <= times.came <= end:
            sent, came = times.sent, times.came
            spans += [
                _part("aiops.push", trace, exchange, begin, sent),
                _part("aiops.wait", trace, exchange, sent, came),
                _part("aiops.fetch", trace, exchange, came, end),
            ]
        return spans


def _part(name: str, trace: int, parent: int, begin: int, end: int) -> Span:
    return Span(name, trace, span_of(trace, name), parent, begin, end)


class TracedLoop(TrainingLoop):
    """A `TrainingLoop` whose pushes are traced; the parameters behind ``trace`` are its own."""

    def __init__(self, trace: StepTrace, *given: Any) -> None:
        super().__init__(*given)
        self._trace = trace
        self._computed = self._began = trace.since
        # The pushes in the background that are not over, or whose spans are not made yet.
        self._behind: list[tuple[Transfer, BackgroundTransfer, int, int]] = []

    def begin(self, *, again: bool) -> None:
        """Begin a step of which the gradient travels by itself."""
        super().begin(again=again)
        self._computed, self._began = self._trace.since, self._trace.now()

    def took(self, receipt: Receipt) -> Receipt:
        """Take what came of it, and make its spans."""
        super().took(receipt)
        self._pushed(self._trace.last_push(), receipt)
        return receipt

    def failed(self, error: BaseException, *, again: bool) -> Program[Op, Receipt | None]:
        """Make the spans of what failed, and go on."""
        self._pushed(self._trace.last_push(), error)
        return super().failed(error, again=again)

    def step(
        self, gradients: Gradients, lr_factors: LrFactors = None, *, again: bool
    ) -> Program[Op, Receipt | None]:
        """Take a step, and note what it sends in the background."""
        trace = self._trace
        self._computed, begun, answer = trace.since, trace.now(), None
        program = super().step(gradients, lr_factors, again=again)
        try:
            order = next(program)
            while True:
                try:
                    answer = yield order
                except BaseException as error:
                    order = program.throw(error)
                    continue
                if isinstance(order, SendInBackground):
                    self._behind.append((order.transfer, answer, self._computed, begun))
                order = program.send(answer)
        except StopIteration as ended:
            found: Receipt | None = ended.value
            return found
        finally:
            self._look_behind()
            trace.since = trace.now()

    def flush(self) -> Program[Op, None]:
        """Push the rest."""
        try:
            yield from super().flush()
        finally:
            self._look_behind()

    def _carry(self, transfer: Transfer) -> Program[Op, Receipt]:
        outcome: Receipt | BaseException | None = None
        self._began = self._trace.now()
        try:
            outcome = yield from super()._carry(transfer)
        except BaseException as error:
            outcome = error
            raise
        finally:
            if transfer.pushes and transfer.request is not None:
                self._pushed(transfer.request.seq, outcome)
        return outcome

    def _pushed(self, seq: int, outcome: Receipt | BaseException | None) -> None:
        trace = self._trace
        trace.pushed(seq, self._computed, self._began, trace.now(), outcome)
        self._computed = trace.since = trace.now()

    def _look_behind(self) -> None:
        """Make the spans of pushes in the background that are over."""
        for each in [each for each in self._behind if each[1].over]:
            self._behind.remove(each)
            transfer, background, computed, begun = each
            if transfer.pushes and transfer.request is not None:
                outcome = background.error or background.receipt
                seq, end = transfer.request.seq, background.ended
                self._trace.pushed(seq, computed, begun, max(begun, end), outcome, alone=False)
