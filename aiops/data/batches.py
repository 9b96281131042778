"""Mini-batches of a data set, for a training loop that blocks or awaits."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from aiops.client.asyncio.averager import AsyncModelAverager
from aiops.client.asyncio.worker import AsyncWorker
from aiops.client.program import drive, drive_awaiting
from aiops.client.remote import Remote
from aiops.client.server_info import ServerInfo
from aiops.client.sync.averager import ModelAverager
from aiops.client.sync.worker import Worker
from aiops.common.settings import whole_number
from aiops.data.feed import AskTask, DataSetPlan, Feed, Minibatch, Op
from aiops.data.order import EpochOrder
from aiops.data.source import Source, source_of
from aiops.errors import AiopsError, UsageError
from aiops.model.parts import LARGEST
from aiops.wire.data_messages import LONGEST_NAME

Blocking: TypeAlias = Worker | ModelAverager
Awaiting: TypeAlias = AsyncWorker | AsyncModelAverager

_BATCHES = 16
"""Mini-batches of a task, unless its size is given."""


class SharedBatches:
    """The mini-batches of one worker, from one data set; `batches` makes it.

    Parameters
    ----------
    worker
        Takes the steps.
    source
        The examples.
    plan
        The data set, as the server knows it, and sizes.
    """

    def __init__(self, worker: Blocking | Awaiting, source: Source, plan: DataSetPlan) -> None:
        self._worker, self._source, self._plan = worker, source, plan
        self._feed = Feed(worker.info, plan)
        self._last: Minibatch | None = None
        self._steps = -1  # of the worker, when the last mini-batch was handed out
        self._loop: Callable[[], object] | None = None  # the last one over these mini-batches
        self.whose: tuple[str, str | None, str] = worker.url, worker.token, worker.info.client

    @property
    def epoch(self) -> int:
        """The epoch of the last mini-batch, from 0."""
        return self._feed.epoch

    @property
    def over(self) -> bool:
        """True once all examples of all epochs have been seen, by all workers together."""
        return self._feed.over

    # ------------------------------------------------------------ the two faces

    def __iter__(self) -> Iterator[Any]:
        """Yield mini-batches until every epoch is complete.

        Raises
        ------
        UsageError
            When another loop of this worker over the data set has not ended.
        """
        with self.ending():
            while (piece := self._next()) is not None:
                yield self.rows(piece)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Yield mini-batches until every epoch is complete; raises as `__iter__` does."""
        known = list[Callable[[], object]]()
        loop = self._awaiting(known)
        # After `break` the iterator is garbage, but asyncio closes it a little later: a
        # loop that begins in between is no second one.
        known.append(weakref.ref(loop))
        return loop

    async def _awaiting(self, known: Sequence[Callable[[], object]]) -> AsyncIterator[Any]:
        """Yield mini-batches; ``known``: the loop, as `ServerInfo.loops` has it."""
        worker = self._worker
        if not isinstance(worker, Awaiting):
            raise UsageError(f"a {type(worker).__name__}'s batches are iterated with `for`")

        async def carry_out(order: Op) -> Any:
            if isinstance(order, AskTask):
                return await worker.take_task(order.message)
            return await worker.push_rest()

        [loop] = known
        self._begin(loop)
        try:
            while (piece := await drive_awaiting(self._feed.next(), carry_out)) is not None:
                self._last, self._steps = piece, worker.steps
                yield self.rows(piece)
        finally:
            alone = self._ended(loop)
            if self._loop is loop and not (self.over or worker.closed):
                with contextlib.suppress(AiopsError):
                    end = self._feed.end(self._unused, tell=alone)
                    await drive_awaiting(end, carry_out)

    # ------------------------------------------------------------ for those who read elsewhere

    def rows(self, piece: Minibatch) -> Any:
        """Return the examples of a mini-batch."""
        order = self._plan.order
        return self._source.rows(order.indices(piece.epoch, piece.start, piece.stop))

    def feed_for(self, info: ServerInfo, holder: str) -> Feed:
        """Return the way of another client through the data set, which takes for this worker."""
        return Feed(info, self._plan, holder)

    def note(self, piece: Minibatch) -> None:
        """Note a mini-batch that was read elsewhere: the next push covers it."""
        self._feed.note(piece)
        self._last, self._steps = piece, self._worker.steps

    def one_task(self) -> Iterator[Any]:
        """Yield the mini-batches of one task, as soon as there is one; none: all is seen."""
        while (piece := self._next()) is not None:
            yield self.rows(piece)
            if self._feed.between_tasks:
                return

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Give back at the end what the server has given this worker, unless all is seen.

        Raises
        ------
        UsageError
            When another loop of this worker over the data set has not ended.
        """
        worker = self._worker
        if not isinstance(worker, Blocking):
            raise UsageError(f"an {type(worker).__name__}'s batches are iterated with `async for`")

        # A generator that is left is closed at once, so this ends before it is gone.
        def loop() -> bool:
            return True

        self._begin(loop)
        try:
            yield
        finally:
            self._ended(loop)
            if not (self.over or worker.closed):
                with contextlib.suppress(AiopsError):
                    drive(self._feed.end(self._unused), self._carry_out)

    # ------------------------------------------------------------ inside

    def _begin(self, loop: Callable[[], object]) -> None:
        """Note a loop; refuse it while another one over the data set goes on in this worker."""
        loops, name = self._worker.info.loops, self._plan.name
        if name in loops and loops[name]() is not None:
            gc.collect()  # an iterator that is garbage may be part of a cycle
        if name in loops and loops[name]() is not None:
            raise UsageError(
                f"this worker is in a loop over the data set {name!r} already, and what it pushes"
                " cannot be told apart for two: end that one first (close its iterator), or use"
                " another worker, or another name"
            )
        loops[name] = self._loop = loop

    def _ended(self, loop: Callable[[], object]) -> bool:
        """Note that a loop has ended; return whether no other one has begun since."""
        loops, name = self._worker.info.loops, self._plan.name
        if loops.get(name) is not loop:
            return False
        del loops[name]
        return True

    @property
    def _unused(self) -> Minibatch | None:
        """The last mini-batch, if no step was taken since it was handed out."""
        return self._last if self._worker.steps == self._steps else None

    def _next(self) -> Minibatch | None:
        piece = drive(self._feed.next(), self._carry_out)
        self._last, self._steps = piece, self._worker.steps
        return piece

    def _carry_out(self, order: Op) -> Any:
        assert isinstance(self._worker, Blocking), "`ending` has checked that"
        if isinstance(order, AskTask):
            return self._worker.take_task(order.message)
        return self._worker.push_rest()


def batches(
    worker: Blocking | Awaiting | Remote,
    data: Any,
    *,
    batch_size: int,
    epochs: int | None = 1,
    shuffle: bool | int = True,
    seed: int = 0,
    task_size: int | None = None,
    name: str = "data",
) -> SharedBatches:
    """Return mini-batches of a data set that the server shares out among all workers of a run.

    Each example is seen once an epoch by all workers together: it is part of one push that the
    server has used, or, of a `ModelAverager`, its effect is part of a round of averaging, whatever
    workers come, die and go. All workers give the same data, ``shuffle``,
    ``seed`` and ``name``. With ``--state`` the server keeps what was seen, so that a run which is
    begun again goes on where it was. Iterate with ``for``, or with ``async for`` for an
    `AsyncWorker`, and take one step for each mini-batch.

    Parameters
    ----------
    worker
        The worker or averager that takes the steps, or the optimizer of a framework that has one.
    data
        One array, a tuple or list of arrays, or a mapping of arrays by name, all of one length: a
        batch has the same form. Or a sequence of examples: a batch is a list. Or a `Source`
        (`RowRanges` is one), which makes the batch.
    batch_size
        Examples of a mini-batch; the last one of a task may be smaller.
    epochs
        The number of epochs, with those that are complete already; None: without end.
    shuffle
        True (default) or 1: any example may follow any. False or 0: they come in their order. A
        larger number: that many neighbours stay together, for data that is read from a disk.
    seed
        Of the order of each epoch.
    task_size
        The most examples that are handed out at a time; default: those of 16 mini-batches.
    name
        The name of the data set at the server: 1 to 256 characters.

    Raises
    ------
    UsageError
        When an argument is invalid. Iterating raises it while another loop of this worker over the
        data set has not ended; what `Worker.step` raises; and `BadPush` when another worker has
        given the data set another length, block or seed.
    """
    inner = worker.worker if isinstance(worker, Remote) else worker
    if not isinstance(inner, Blocking | Awaiting):
        raise UsageError(f"a worker is needed that takes steps, not {type(inner).__name__}")
    source = source_of(data)
    if not isinstance(shuffle, bool | np.bool_):
        shuffle = whole_number("shuffle, where it is not True or False,", shuffle, 0, LARGEST)
    order = EpochOrder(len(source), int(shuffle), seed)
    batch_size = whole_number("batch_size", batch_size, 1, LARGEST)
    if task_size is None:
        task_size = min(_BATCHES * batch_size, LARGEST)
    task_size = whole_number("task_size", task_size, 1, LARGEST)
    last = LARGEST if epochs is None else whole_number("epochs", epochs, 1, LARGEST)
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise UsageError(
            f"name must be a text of 1 to {LONGEST_NAME} characters, not {name!r}: workers that"
            " give the same one share the data set"
        )
    return SharedBatches(inner, source, DataSetPlan(str(name), order, batch_size, task_size, last))
