"""The steps of a worker that are traced: each push has spans, made when it is over.

::

    aiops.step                 from the end of the last step that pushed something to the answer
      aiops.compute            the user's: until the gradient is handed in
      aiops.exchange           until the answer has been taken in; the server's span is below it
        aiops.push             until the last byte is handed to the system
        aiops.wait             until the first byte of the answer is there
        aiops.fetch            the rest of it

Without tracing none of this is made: a worker then has a plain `TrainingLoop`.
"""

from __future__ import annotations

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
from aiops.tracing.spans import Span, Value, brief, span_of, trace_of

_STEP, _EXCHANGE = "aiops.step", "aiops.exchange"


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
        Returns the sequence number of its last push that was not of rows.
    times
        Those of its connection, if one message each way is an exchange.

    Attributes
    ----------
    now, safely
        Those of ``tracing``.
    last_push
        As above.
    since
        The end of the last step that pushed something, where computing of the next one began.
    """

    def __init__(
        self,
        tracing: Tracing,
        client: str,
        about: Mapping[str, Value],
        last_push: Callable[[], int],
        times: Callable[[], SocketTimes | None],
    ) -> None:
        self.now, self.safely, self.last_push = tracing.now, tracing.safely, last_push
        self._tracing, self._client, self._about, self._times = tracing, client, about, times
        self.since = tracing.now()

    def pushed(
        self,
        seq: int,
        computed: int,
        handed_in: int,
        end: int,
        outcome: Receipt | BaseException | None,
        *,
        alone: bool = True,
    ) -> None:
        """Make the spans of a push.

        Parameters
        ----------
        seq
            Its sequence number; 0: it had none yet, and there is nothing to trace.
        computed, handed_in, end
            Where computing began, and the exchange; and its end.
        outcome
            What came of it.
        alone
            Nothing else was sent or received meanwhile.
        """
        trace = trace_of(self._client, seq)
        if not seq or not self._tracing.sampler.takes(trace, seq):
            return
        error = ""
        about: dict[str, Value] = {**self._about, "aiops.push": seq}
        if isinstance(outcome, Receipt):
            about |= {
                "aiops.version": outcome.version,
                "aiops.staleness": outcome.staleness,
                "aiops.used": outcome.used,
            }
            if outcome.why:
                about["aiops.unused_reason"] = brief(outcome.why)
        elif outcome is not None:
            error = brief(f"{type(outcome).__name__}: {outcome}")
        step, exchange = span_of(trace, _STEP), span_of(trace, _EXCHANGE)
        spans = [
            Span(_STEP, trace, step, 0, computed, end, "internal", about, error),
            _part("aiops.compute", trace, step, computed, handed_in),
            Span(_EXCHANGE, trace, exchange, step, handed_in, end, "client", about, error),
        ]
        times = self._times() if alone else None
        if times is not None and handed_in <= times.sent <= times.received <= end:
            sent, received = times.sent, times.received
            spans += [
                _part("aiops.push", trace, exchange, handed_in, sent),
                _part("aiops.wait", trace, exchange, sent, received),
                _part("aiops.fetch", trace, exchange, received, end),
            ]
        self._tracing.offer(spans)


def _part(name: str, trace: int, parent: int, begin: int, end: int) -> Span:
    return Span(name, trace, span_of(trace, name), parent, begin, end)


class TracedLoop(TrainingLoop):
    """A `TrainingLoop` whose pushes are traced; the parameters behind ``trace`` are its own.

    Nothing that fails in tracing reaches the step, which has been applied by then.
    """

    def __init__(self, trace: StepTrace, *given: Any) -> None:
        super().__init__(*given)
        self._trace = trace
        self._handed_in, self._last_before = trace.since, 0
        # The pushes in the background that are not over, or whose spans are not made yet.
        self._in_background: list[tuple[Transfer, BackgroundTransfer, int, int]] = []

    def begin(self, *, again: bool) -> None:
        """Begin a step of which the gradient travels by itself."""
        super().begin(again=again)
        self._trace.safely(self._note_begin)

    def took(self, receipt: Receipt) -> Receipt:
        """Take what came of it, and make its spans."""
        super().took(receipt)
        self._trace.safely(self._exchanged, receipt)
        return receipt

    def failed(self, error: BaseException, *, again: bool) -> Program[Op, Receipt | None]:
        """Make the spans of what failed, and go on."""
        self._trace.safely(self._exchanged, error)
        return super().failed(error, again=again)

    def step(
        self, gradients: Gradients, lr_factors: LrFactors = None, *, again: bool
    ) -> Program[Op, Receipt | None]:
        """Take a step, and note what it sends in the background."""
        trace, answer, pushed = self._trace, None, False
        computed, handed_in = trace.since, trace.now()
        program = super().step(gradients, lr_factors, again=again)
        try:
            order = next(program)
            while True:
                try:
                    answer = yield order
                except BaseException as error:
                    order = program.throw(error)
                    continue
                if isinstance(order, SendInBackground) and order.transfer.pushes:
                    self._in_background.append((order.transfer, answer, computed, handed_in))
                    pushed = True
                order = program.send(answer)
        except StopIteration as ended:
            found: Receipt | None = ended.value
            return found
        finally:
            trace.safely(self._trace_those_over)
            if pushed:
                trace.since = trace.now()

    def flush(self) -> Program[Op, None]:
        """Push the rest."""
        try:
            yield from super().flush()
        finally:
            self._trace.safely(self._trace_those_over)

    def _carry(self, transfer: Transfer) -> Program[Op, Receipt]:
        outcome: Receipt | BaseException | None = None
        self._handed_in = self._trace.now()
        try:
            outcome = yield from super()._carry(transfer)
        except BaseException as error:
            outcome = error
            raise
        finally:
            if transfer.pushes and transfer.request is not None:
                self._trace.safely(self._pushed, transfer.request.seq, outcome)
        return outcome

    def _note_begin(self) -> None:
        self._last_before, self._handed_in = self._trace.last_push(), self._trace.now()

    def _exchanged(self, outcome: Receipt | BaseException) -> None:
        """Make the spans of an exchange, if it has become a push."""
        seq = self._trace.last_push()
        if seq > self._last_before:
            self._pushed(seq, outcome)

    def _pushed(self, seq: int, outcome: Receipt | BaseException | None) -> None:
        trace, end = self._trace, self._trace.now()
        computed, trace.since = trace.since, end
        trace.pushed(seq, computed, self._handed_in, end, outcome)

    def _trace_those_over(self) -> None:
        """Make the spans of pushes in the background that are over."""
        for each in [each for each in self._in_background if each[1].over]:
            self._in_background.remove(each)
            transfer, background, computed, handed_in = each
            if transfer.request is not None:
                outcome = background.error or background.receipt
                seq, end = transfer.request.seq, max(handed_in, background.ended)
                self._trace.pushed(seq, computed, handed_in, end, outcome, alone=False)
