"""The steady exchange of a client that fetches coded: its answers are increments.

It is `aiops.client.steady.SteadyExchange` with other answers, and several forms of them. All are
received beside the parameters. If one is all there, all of its increments are checked, and then
added; if not, or if it is of no known form, the general path goes on with the exchange, which
leaves the parameters as they are meanwhile. What it answers there makes another form known, by
which a new exchange is made.
"""

from __future__ import annotations

from typing import Any, Final

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.coded_answer import CodedAnswer
from aiops.client.coded_gradient import CodedGradient
from aiops.client.compiled_forms import Forms
from aiops.client.params import Params
from aiops.client.pending import PendingRequests
from aiops.client.request_kinds import Means, Receipt
from aiops.client.server_info import ServerInfo
from aiops.client.steady import SteadyExchange, coded_gradient
from aiops.model.layout import Layout
from aiops.wire.messages import Ack, Push

MOST: Final = 16
"""The most forms of answers that one exchange has; the oldest are forgotten."""


def learnt(
    push: Push,
    answer: Ack,
    header: bytes,
    info: ServerInfo,
    pending: PendingRequests,
    ledger: Ledger,
    before: SteadyExchange | None,
) -> SteadyExchange | None:
    """Return the steady exchange that is like one on the general path; None: of no such answers.

    Parameters
    ----------
    push, answer
        Both messages, a `steady_push` and the answer to it.
    header
        That of the answer, as it came.
    info, pending, ledger
        The session's.
    before
        The steady exchange until now, whose forms of answers are kept.

    Raises
    ------
    ValueError
        When there is none, whatever is answered.
    """
    layout = info.known_layout
    session = info.connection, pending, ledger
    if not info.increments:
        return SteadyExchange(layout, push, header, *session, coded_gradient(push, info))
    try:
        known = CodedAnswer(layout, header, answer.parts)
    except ValueError:  # the next may be one
        return None
    answers: tuple[CodedAnswer, ...] = ()
    if isinstance(before, IncrementExchange) and before.layout is layout:
        answers = tuple(each for each in before.answers if not each.has_form(header))
    return IncrementExchange(
        layout, push, (*answers, known)[-MOST:], *session, coded_gradient(push, info)
    )


class IncrementExchange(SteadyExchange):
    """The steady exchange of one connection whose answers are coded.

    Parameters
    ----------
    answers
        The forms of answers that are known, one or more.
    layout, push, connection, pending, ledger, coded
        As of `SteadyExchange`.

    Attributes
    ----------
    answers, layout
        As above.
    answer_size
        -1: it varies.
    """

    __slots__ = ("_counts", "answers")

    def __init__(
        self,
        layout: Layout,
        push: Push,
        answers: tuple[CodedAnswer, ...],
        connection: tuple[str, int],
        pending: PendingRequests,
        ledger: Ledger,
        coded: CodedGradient | None = None,
    ) -> None:
        self.answers = answers
        self._counts = [0] * len(answers)  # of exchanges that are not settled, by form
        super().__init__(layout, push, b"", connection, pending, ledger, coded)

    def _expect(self, ack: bytes) -> None:
        self.answer_size, self.direct = -1, False
        self._ack = self.answers[0].template
        self._has_vbar = self._has_vbars = False  # the answers know
        self._whole = memoryview(bytearray(max(answer.size for answer in self.answers)))
        self.room = self._whole
        self._payload = self._whole[:0]

    @property
    def layout(self) -> Layout:
        """The model."""
        return self._layout

    @property
    def forms(self) -> Forms:
        """The messages of this exchange, for compiled code."""
        return super().forms._replace(answers=self.answers)

    def _knows(self, ack: bytes) -> bool:
        return any(answer.has_form(ack) for answer in self.answers)

    def _found(self, received: int) -> tuple[int, tuple[Any, ...]] | None:
        """Return the form of the answer under way, and the values of its header.

        None: no such answer is, or its header has not come.
        """
        for index, answer in enumerate(self.answers):
            head = answer.template.size
            if head <= received:
                found = answer.values(bytes(self._whole[:head]))
                if found is not None:
                    return (index, found) if found[0] == self._id else None
        return None

    def rest(self, received: int) -> memoryview | None:
        """Return the buffer for the rest of an answer of which some bytes have been received.

        None if that is not an answer that can be finished here, or that is not known yet; or if
        nothing is lacking.
        """
        found = self._found(received) if self._params is not None else None
        if found is None:
            return None
        return self._whole[received : self.answers[found[0]].size] or None

    def finish(self, received: int) -> Receipt | None:
        """Take an answer, once its ``received`` bytes are all there; None if it does not match."""
        params = self._params
        known = self._found(received) if params is not None else None
        if params is None or known is None:
            return None
        index, found = known
        answer = self.answers[index]
        if received != answer.size or not answer.fits(self._whole):
            return None
        # To add an increment twice would be to have other parameters for good. Where Ctrl-C breaks
        # in they are a mixture, whatever becomes of the exchange.
        self._have, self._usual = -1, None
        params.level = -1
        answer.add(self._whole, params.own())
        return self._took((*found, index), params)

    def _took(self, found: tuple[Any, ...], params: Params) -> Receipt:
        """Take the values of an answer whose parameters are in their place, and its form."""
        _id, version, current, age, staleness, mean, *statistics, index = found
        age = self._age if age is None else age
        answer = self.answers[index]
        params.level = self._have = current
        params.age = self._age = age
        self._usual, self._params = params, None
        self.unsettled += 1
        self._counts[index] += 1
        if not answer.has_vbar:
            return Receipt(version, staleness, mean, None, {})
        vbars = Means(self._layout, statistics[1]) if answer.has_vbars else {}
        return Receipt(version, staleness, mean, statistics[0], vbars)

    def _account(self, push: tuple[str, int, int], last: int, count: int) -> None:
        counts, self._counts = self._counts, [0] * len(self.answers)
        for answer, several in zip(self.answers, counts, strict=True):
            if several:
                whole = answer.whole
                payload = whole.nbytes - whole.between
                ack = "ack", answer.size - payload, payload
                self._traffic.exchanged(push, ack, several)
                self._ledger.exchanged(last, True, self._parts, several, whole.parts)
