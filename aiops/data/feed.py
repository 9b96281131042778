"""A worker's way through a data set, sans-I/O: which examples come next, and what is asked when.

`SharedBatches` drives it, blocking or awaiting (`aiops.client.program`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from aiops.client.program import Program
from aiops.client.server_info import ServerInfo
from aiops.common.frozen import value
from aiops.data.order import EpochOrder
from aiops.wire.data_messages import GivenTask, TakeTask
from aiops.wire.fields import MAX_LISTED

_KEPT = 2
"""Tasks that are not given back though all of their batches were handed out: pushes of the last
ones may be under way in the background."""


_MOST_IN_HAND, _ATTEMPTS = 128, 10
"""Tasks with examples that do not count yet, from which on a worker first pushes (or averages), and
how often it tries. A server lets a worker have twice as many."""


@dataclass(frozen=True, slots=True)
class AskTask:
    """Ask the server for a task; the result is its answer."""

    message: TakeTask


@dataclass(frozen=True, slots=True)
class PushRest:
    """Push what the worker has not pushed yet; of one that averages: average."""


Op: TypeAlias = AskTask | PushRest


@value
class Minibatch:
    """The positions ``start`` to ``stop`` of an epoch: a mini-batch, of a task."""

    task: int
    epoch: int
    start: int
    stop: int


@value
class DataSetPlan:
    """A data set, and how a worker goes through it.

    ``batch_size``, ``task_size``: examples of a mini-batch, and of a task at most. ``epochs``: the
    number of them, with those that are complete.
    """

    name: str
    order: EpochOrder
    batch_size: int
    task_size: int
    epochs: int


class Feed:
    """The examples that one worker is given.

    Parameters
    ----------
    info
        The server, as far as it is known; it has the examples that the next push covers.
    plan
        The data set, and sizes.
    holder
        The id of the client that pushes, if it is another one than this. Then nothing is waited
        for, and nothing is noted in ``info``.

    Attributes
    ----------
    epoch
        That of the last piece; 0 before.
    over
        Whether all examples of all epochs have been seen, by all workers together.
    """

    epoch: int
    over: bool

    def __init__(self, info: ServerInfo, plan: DataSetPlan, holder: str = "") -> None:
        self._info, self._plan, self._holder = info, plan, holder
        self._task: GivenTask | None = None
        self._at = 0  # of the task: the first position that was not handed out
        self._kept: deque[int] = deque(maxlen=MAX_LISTED // 2 if holder else _KEPT)
        self._run = ""
        self.epoch = 0
        self.over = False

    @property
    def between_tasks(self) -> bool:
        """True if the next mini-batch is of another task."""
        return self._task is None or self._at == self._task.stop

    def note(self, piece: Minibatch) -> None:
        """Note that the next push covers a mini-batch."""
        self.epoch = piece.epoch
        self._info.note_examples(piece.task, piece.start, piece.stop)

    def next(self, *, wait: bool = True) -> Program[Op, Minibatch | None]:
        """Return the next mini-batch, or None: all is seen, or (without ``wait``) none is free."""
        if self._run != self._info.run.name:  # another server, which has given nothing yet
            self._run, self._task = self._info.run.name, None
            self._kept.clear()
            if not self._holder:
                self._info.examples.clear()
        if self._task is None or self.between_tasks:
            self._task = yield from self._take(wait)
            if self._task is None:
                return None
            self._at, self._run = self._task.start, self._info.run.name
            self._kept.append(self._task.task)
        task, start = self._task, self._at
        self._at = min(start + self._plan.batch_size, task.stop)
        piece = Minibatch(task.task, task.epoch, start, self._at)
        self.epoch = task.epoch
        if not self._holder:
            self.note(piece)
        return piece

    def end(self, last: Minibatch | None, *, tell: bool = True) -> Program[Op, None]:
        """Give back what was not handed out; ``last``: a piece that was not pushed either.

        Without ``tell``, another loop of this worker asks for tasks of the data set by now: that
        says what is kept, and from here its own tasks would be given back.
        """
        if last is not None:
            self._drop(last)
        self._task = None
        self._kept.clear()
        if tell:
            yield AskTask(self._message(size=0, wait=False))

    # ------------------------------------------------------------ inside

    def _take(self, wait: bool) -> Program[Op, GivenTask | None]:
        """Return another task; None if there is none."""
        for _ in range(_ATTEMPTS):
            if len(self._info.tasks_in_hand) < _MOST_IN_HAND:
                break
            yield PushRest()
        answer: GivenTask = yield AskTask(self._message(wait=False))
        if wait and not (answer.task or answer.over):
            # Others have the rest, or this worker's own last examples were not pushed.
            yield PushRest()
            self._kept.clear()
        while wait and not (answer.task or answer.over):
            if self._info.unsettled:
                yield PushRest()
            seen = tuple(self._info.examples)
            answer = yield AskTask(self._message(wait=True, seen=seen))
            self._info.examples = self._info.examples[len(seen) :]
        self.over = answer.over
        return answer if answer.task else None

    def _message(
        self, *, wait: bool, size: int | None = None, seen: tuple[tuple[int, int, int], ...] = ()
    ) -> TakeTask:
        keeps = {*self._kept, *self._info.tasks_in_hand}
        plan, order = self._plan, self._plan.order
        size = plan.task_size if size is None else size
        known = plan.name, order.examples, order.block, order.seed, self.epoch, plan.epochs
        return TakeTask(0, *known, size, wait, self._holder, tuple(sorted(keeps)), seen)

    def _drop(self, piece: Minibatch) -> None:
        """Take a piece back from what the next push covers."""
        examples = self._info.examples
        if examples and examples[-1][0] == piece.task and examples[-1][2] == piece.stop:
            task, start, _stop = examples.pop()
            if start < piece.start:
                examples.append((task, start, piece.start))
