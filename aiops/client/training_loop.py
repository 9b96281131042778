"""The steps of a worker, sans-I/O: `Worker` and `AsyncWorker` drive them.

A `LocalStrategy` decides what travels. `TrainingLoop` decides the rest: what is waited for, what is
sent in the background, how to go on after a transfer that failed or was broken off, and how to go
on with a server that was restarted.

Each method of a worker is a program (`aiops.client.program`), whose operations the worker carries
out: `Send`, `SendInBackground`, `JoinBackground` and `Offer`. A program may be broken off at any
operation. The next one goes on from what is known then: nothing is lost, and nothing is pushed
twice. What takes long before a step, `TrainingLoop.directions`, is called by the worker, in a
thread if need be.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.encode_push import check_by_name
from aiops.client.lr_factors import LrFactors, checked
from aiops.client.params import MakeRoom, Params
from aiops.client.program import Program
from aiops.client.request_kinds import Receipt
from aiops.client.server_info import ServerInfo
from aiops.client.strategies import Direct, LocalStrategy, Transfer, directions_for, strategy_for
from aiops.errors import AiopsError, NotReady, Refused, Restarted, StaleGradient, UsageError
from aiops.model.layout import Array

Gradients: TypeAlias = Mapping[str, Array]

_log = logging.getLogger("aiops.client")

_SERVER_RESTARTED = (Restarted, NotReady)
"""The refusals of a server that has other parameters than it had, or none."""


class BackgroundTransfer(Protocol):
    """A transfer that the worker carries in the background."""

    @property
    def over(self) -> bool:
        """True once it has been answered, or has failed."""

    @property
    def receipt(self) -> Receipt | None:
        """The answer, once it is over; None to a mere fetch, or if it failed."""

    @property
    def error(self) -> BaseException | None:
        """The error it failed with, if it is over and failed."""

    @property
    def ended(self) -> int:
        """The moment at which it was over, in nanoseconds since 1970, if it is traced; else 0."""


@dataclass(frozen=True, slots=True)
class Send:
    """Carry this, and wait for the answer: its `Receipt`, or None for a mere fetch."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class SendInBackground:
    """Carry this in the background; the result is its `BackgroundTransfer`."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class JoinBackground:
    """Wait until this background transfer is over."""

    background: BackgroundTransfer


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer a model to a server that has none; the answer is whether it was taken."""

    params: Params


Op: TypeAlias = Send | SendInBackground | JoinBackground | Offer


class TrainingLoop:
    """The steps of one worker.

    Parameters
    ----------
    info
        The server that it trains with.
    ledger
        The client's account, which is told what gates hold back.
    params
        The server's parameters; the strategy's from here on.
    clock
        Seconds, from any beginning.
    overlap
        How many exchanges may be under way while gradients are computed (`strategy_for`).

    Attributes
    ----------
    params, last, steps, recomputed, compute_seconds, idle_seconds
        As `Worker`'s.
    strategy
        The strategy that the client plan names.
    direct
        True if each gradient travels by itself, so that no program is needed for a step.
    directed
        The tensors of which `directions` travel in the place of gradients.

    Raises
    ------
    UsageError
        When the plan asks for what this client does not know, the model cannot be trained so, or
        ``overlap`` does not work with the plan.
    """

    steps: int
    recomputed: int
    idle_seconds: float
    compute_seconds: float

    def __init__(
        self,
        info: ServerInfo,
        ledger: Ledger,
        params: Params,
        clock: Callable[[], float],
        overlap: int = 0,
    ) -> None:
        self._info, self._ledger, self._clock = info, ledger, clock
        self.params = params
        self.strategy: LocalStrategy = strategy_for(self._plan, params, overlap)
        self.last: Receipt | None = None
        self.steps = 0
        self.recomputed = 0
        self.idle_seconds = self.compute_seconds = 0.0
        self._since = clock()
        # Those under way, the oldest first, each with the number of its step.
        self._background: deque[tuple[int, BackgroundTransfer]] = deque()
        self._own_steps = "inner" in self._plan  # they stay as they began, with their directions
        self._make_directions()
        self.direct: bool = "gate" not in self._plan and type(self.strategy) is Direct

    def _make_directions(self) -> None:
        """Make directions from here on as the plan has it."""
        self._memory = self._plan.get("orthogonal")
        self._directions = directions_for(self._plan, self.params)
        self.directed: frozenset[str] = (
            self._directions.names if self._directions else frozenset[str]()
        )

    @property
    def _plan(self) -> Mapping[str, Any]:
        """The client plan, which may be another one since the server was restarted."""
        return self._info.plan

    def seconds(self) -> tuple[float, float]:
        """Return the seconds computed so far, and those waited."""
        return self.compute_seconds, self.idle_seconds

    # ------------------------------------------------------------ the programs

    def check(self, *, again: bool) -> None:
        """Check that a gradient can be computed again (``again``), if the policy asks for that.

        Raises
        ------
        UsageError
            When it cannot.
        """
        if not again and self._plan.get("recompute"):
            raise UsageError(
                f"{self._info.policy} may ask for a gradient again: call step(function)"
                " with a function params → gradients"
            )

    # A gradient that travels by itself takes no program: the worker calls `begin`, exchanges it for
    # the parameters, and calls `took`, or drives `failed`.

    def begin(self, *, again: bool) -> None:
        """Begin such a step (`direct`): computing is over. Raises as `check` does."""
        if not again and self._info.plan.get("recompute"):
            self.check(again=again)
        now = self._clock()
        self.compute_seconds += now - self._since
        self._since = now

    def took(self, receipt: Receipt) -> Receipt:
        """Take what came of it, and the step is over; return it."""
        if self._directions is not None:
            self._directions.took()
        now = self._clock()
        self.idle_seconds += now - self._since
        self._since = now
        self.last = receipt
        self.steps += 1
        return receipt

    def failed(self, error: BaseException, *, again: bool) -> Program[Op, Receipt | None]:
        """Go on after such a step failed; return what `step` does."""
        self._count(idle=True)
        try:
            receipt = yield from self._recover(error, again)
        finally:
            self._count()
        self.steps += receipt is not None
        return receipt

    def lr_factors(self, factors: LrFactors) -> LrFactors:
        """Return the factors of a step's learning rates, if they may be such (`checked`)."""
        return checked(factors, self.params.layout)

    def directions(self, gradients: Gradients, make_room: MakeRoom) -> Gradients:
        """Return what a step is to be taken with, if some gradients are `directed`; else them.

        ``make_room``: see `Directions.of`. No other thread may do it meanwhile. They count in later
        ones once the step is taken.

        Raises
        ------
        UsageError
            As `Directions.of`, and when they are not arrays by name.
        """
        if self._directions is None:
            return gradients
        check_by_name(gradients)
        return self._directions.of(gradients, make_room)

    def elsewhere(
        self, gradients: Gradients, make_room: MakeRoom
    ) -> Callable[[], Gradients] | None:
        """Return what does as `directions` in another thread, if it would hold up an event loop."""
        if self._directions is None:
            return None
        check_by_name(gradients)
        return self._directions.elsewhere(gradients, make_room)

    def step(
        self, gradients: Gradients, lr_factors: LrFactors = None, *, again: bool
    ) -> Program[Op, Receipt | None]:
        """Take the gradients of a mini-batch, computed at `params`.

        ``lr_factors``: of the learning rates, as `checked` returned them. Returns None, where it
        can be done ``again``, when they are to be computed again, at `params` as they are now.
        """
        receipt: Receipt | None
        check_by_name(gradients)
        try:
            try:
                receipt = yield from self._step(gradients, lr_factors)
            except (StaleGradient, NotReady) as error:
                receipt = yield from self._recover(error, again)
        finally:
            self._count()
        self.steps += receipt is not None
        return receipt

    def refresh(self) -> Program[Op, int]:
        """Fetch the newest parameters; return their version."""
        try:
            yield from self._settle()
            yield from self._carry(self.strategy.refresh())
        except _SERVER_RESTARTED:
            yield from self._resume()
        return self.params.version

    def flush(self) -> Program[Op, None]:
        """Wait for what is on its way, and push the rest.

        Of several failures the first is raised, and the others are notes of it.
        """
        flushed = False
        while not flushed:  # again only after another restart of the server
            try:
                yield from self._settle_all()
                rest = self.strategy.rest()
                if rest is not None:
                    yield from self._carry(rest)
                flushed = True
            except _SERVER_RESTARTED:
                yield from self._resume()

    def offer(self) -> Program[Op, None]:
        """Offer the model to a server that has come back without one.

        A request of rows has told that. `params` stay as they are: gradients may be being computed
        at them.
        """
        try:
            yield from self._settle()  # else what is on its way would count once more
        except _SERVER_RESTARTED:
            yield from self._resume()
            return
        _log.warning("%s has no model any more: it is offered this worker's", self._info.url)
        if (yield Offer(self.strategy.offer())):
            self.strategy.offered()

    # ------------------------------------------------------------ inside

    def _recover(self, error: BaseException, again: bool) -> Program[Op, Receipt | None]:
        """Go on after a gradient that was not taken, or raise the error."""
        if isinstance(error, _SERVER_RESTARTED):
            yield from self._resume()
            if not (again or self.strategy.local):
                self._info.examples.clear()  # the gradient is dropped, so they were not seen
            if not again or self.strategy.local:
                return replace(self._nothing(), used=False)
        elif not (again and isinstance(error, StaleGradient)):
            raise error
        self.recomputed += 1
        return None

    def _step(self, gradients: Gradients, lr_factors: LrFactors) -> Program[Op, Receipt]:
        strategy = self.strategy
        if self._background and self._background[0][1].error is not None:
            yield from self._settle()  # raise that error before this step changes anything
        strategy.apply(gradients, lr_factors)
        if strategy.local:  # they are in its own steps, or in what it keeps
            self._used()
        yield from self._settle(strategy.depth - strategy.due)
        transfer = strategy.transfer()
        if "gate" in self._plan:
            self._note_held(transfer)
        if transfer is not None and strategy.waits:
            receipt = yield from self._carry(transfer)
            self._used()
            return receipt
        if transfer is not None:
            if transfer.pushes:
                transfer.examples = self._info.take_examples()  # not those of later gradients
            self._background.append((self.steps + 1, (yield SendInBackground(transfer))))
        self._used()
        yield from self._settle(0 if strategy.waits else strategy.depth)
        return self._nothing() if self.last is None else replace(self.last, pushed=False)

    def _used(self) -> None:
        """Have the gradients of this step count in later directions."""
        if self._directions is not None:
            self._directions.took()

    def _note_held(self, transfer: Transfer | None) -> None:
        """Enter in the ledger the tensors that the gates held back after a mini-batch."""
        tensors, ledger = self.params.layout.tensors, self._ledger
        pushed = transfer.arrays if transfer is not None else None
        if pushed is not None and len(pushed) < len(tensors):
            held = [index for index, tensor in enumerate(tensors) if tensor.name not in pushed]
            ledger.skipped_push(np.array(held, np.int64))
        elif pushed is None and not (transfer is not None and transfer.again):
            ledger.skipped_push()
        if transfer is None or transfer.into is None:
            ledger.skipped_fetch()

    def _resume(self) -> Program[Op, None]:
        """Go on with a server that was restarted.

        Steps that were only taken here stay on top of its parameters. If it has come back without
        any, it is offered these: what is then lost is the optimiser's state and the tables' rows.
        It may come back so again before they are fetched; then it is offered them again.
        """
        server = self._info.url
        try:
            yield from self._settle_all()
        except AiopsError as error:  # it belonged to the same parameters
            _log.warning("%s", error)
        _log.warning("%s was restarted: going on with its parameters", server)
        if not self._own_steps and self._plan.get("orthogonal") != self._memory:
            self._make_directions()
        self.strategy.restarted()
        connection = None  # the newest before the last offer, which may have outlasted it
        while True:
            try:
                yield from self._carry(self.strategy.refresh())
                return
            except NotReady:
                if self._info.connection == connection:  # it took the offer, and has no model
                    raise
            _log.warning("%s has no model any more: it is offered this worker's", server)
            connection = self._info.connection
            if (yield Offer(self.strategy.offer())):
                self.strategy.offered()

    def _carry(self, transfer: Transfer) -> Program[Op, Receipt]:
        """Carry a transfer, and wait for the answer."""
        if self._info.examples and transfer.request is None and transfer.pushes:
            transfer.examples = self._info.take_examples()
        self._count()
        try:
            receipt = yield Send(transfer)
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            self._count(idle=True)
        self.strategy.arrived(receipt)
        return self._note(receipt)

    def _failed(self, error: BaseException) -> None:
        """Have the strategy take back a transfer that is known not to have been applied.

        A transfer that may have been applied stays under way, and is carried again: the server
        knows its number. (A gradient that travels as it is is dropped in any case.)
        """
        if isinstance(error, Refused | UsageError) or not self.strategy.local:
            self.strategy.failed()

    def _settle(self, most: int = 0) -> Program[Op, None]:
        """Merge what has arrived in the background, and wait until at most ``most`` is under way.

        Raises
        ------
        AiopsError
            That of a transfer that failed; the text names its step.
        """
        if not self._background and self.strategy.under_way is not None:
            yield from self._carry(self.strategy.under_way)  # the wait for it was broken off
        while self._background:
            step, background = self._background[0]
            if not background.over:
                if len(self._background) <= most:
                    return
                self._count()
                try:
                    yield JoinBackground(background)
                finally:
                    self._count(idle=True)
            self._background.popleft()
            if background.error is not None:
                self._failed(background.error)
                raise _of_step(step, background.error)
            self.strategy.arrived(background.receipt)
            if background.receipt is not None:
                self._note(background.receipt)

    def _settle_all(self) -> Program[Op, None]:
        """Wait for all that is under way, whatever becomes of it, and raise the first failure."""
        first: AiopsError | None = None
        while first is None or self._background:
            left = len(self._background)
            try:
                yield from self._settle()
                break
            except AiopsError as error:
                if len(self._background) == left:  # the wait itself failed
                    raise
                if first is None:
                    first = error
                else:
                    first.add_note(str(error))
        if first is not None:
            raise first

    def _note(self, receipt: Receipt | None) -> Receipt:
        if receipt is not None:
            self.last = receipt
            return receipt
        return self._nothing()

    def _nothing(self) -> Receipt:
        """Return the receipt of a step of which nothing travelled."""
        return Receipt(self.params.version, 0, 0.0, None, {}, pushed=False)

    def _count(self, *, idle: bool = False) -> None:
        """Count the time since the last look as spent waiting, or computing."""
        now = self._clock()
        if idle:
            self.idle_seconds += now - self._since
        else:
            self.compute_seconds += now - self._since
        self._since = now


def _of_step(step: int, error: BaseException) -> BaseException:
    """Return the error of a transfer in the background, which a later step raises."""
    if not isinstance(error, AiopsError):
        return error
    named = type(error)(f"step {step}, whose push was in the background: {error}", **error.details)
    named.__cause__ = error
    return named
