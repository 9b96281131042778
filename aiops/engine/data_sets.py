"""Hand out the examples of data sets, so that each counts once an epoch though workers come and go.

Theory of operation
===================

**Tasks.** A *data set* is a name and a number of examples. An *epoch* is an order of all of them,
which workers compute from a seed (`aiops.data.order`); here there are only positions in that order.
A worker asks for a *task*: a range of positions of one epoch, which is its alone. Within a task it
works on one mini-batch after the other. The size of a task and the number of epochs are the
asker's: a run that is begun again with more epochs needs no other data set.

**An example is seen once: when a push that covers it is used.** Before a push, on the same
connection, a worker sends a `cover`: the ranges whose gradients the push is made of. They leave
their task (`DataTask.todo`) and wait with the push's sequence number (`PushCover`, in
`Member.covers`) until the push is answered, which happens in the same event as its update:

=====================  ============================================================================
used                   the examples count as seen
ignored, or refused    they return to the task; the worker may push for them again
a `barred` cover       the push is not used, and not refused: a range was not this worker's (any
                       more). So a push that comes late, from a worker that was given up, does not
                       apply examples that another worker has
=====================  ============================================================================

A push is repeated under its number after a lost connection, and applied once; its cover is repeated
before it, and settled once. Parameters and counts change in the same events, are journalled in the
same rows and captured in the same snapshots. So of each example of an epoch exactly one gradient
becomes part of the model, whatever ends workers, connections, and (as far as ``--acks`` promises
that acknowledged pushes survive) servers. A gradient may be *computed* more often.

What a worker's strategy does not push (a gate drops a gradient) is covered by its next push, or
counts at once when the worker asks for more (`TakeTask.seen`). Rows of tables that are pushed
beside a step are no part of this.

**Without pushes** (``average``) an example is seen when a round of averaging that has its effect is
taken by all its members (`aiops.engine.round_votes`). A worker reports the examples whose effect is
in its model and in no such round. If one of them is not its own any more, its model has what
another worker will do again: the round is not taken, and the worker starts over with the model of
the others (`RoundSettled.reset`).

**Tasks return.** A task's rest goes to other workers when its worker leaves; when it has been
without a connection for `GRACE` seconds; when nothing of what it holds was covered for
``--worker-deadline`` seconds; or when the client that took it asks for another one, and does not
list it among those it keeps (the list also returns a task whose answer was lost). The two times are
looked at only when a worker finds nothing else to do: until then nothing is gained by it. A holder
that asks for 0 examples gives back all that it does not keep, of other takers too.

**Who takes, who holds.** The *holder* of a task is the worker that pushes for it, the *taker* the
client that asked, another one where data is read in processes of their own. A task outlives its
taker, not its holder.

**Epochs.** At most two are open: tasks of the next one are handed out while the last ones of the
present one are under way. A worker that finds nothing to do waits: its request is answered when a
range is free or all is seen, at the latest after `HOLD` seconds (it asks again). Meanwhile barriers
do not wait for it.

**Bounds.** `MOST_SETS` data sets, `MOST_HELD` tasks of a holder, `MOST_TASKS` in all, `MOST_PIECES`
pieces of a task. Free ranges are merged with their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiops.engine.data_set import DataSet, DataTask, add, covers, length, remove
from aiops.engine.events import Effect, Reply, WakeAt
from aiops.engine.membership import Member, Membership
from aiops.engine.push_closure import PushClosure
from aiops.engine.replies import error_of
from aiops.errors import BadPush, Refused, Unavailable
from aiops.wire.data_messages import LONGEST_NAME, CoverPush, GivenTask, TakeTask
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.fields import Examples

GRACE = 5.0
"""Seconds that a worker whose connection ended has to come back before its tasks return."""

HOLD = 10.0
"""Seconds after which a request that waits is answered, though there is nothing to do."""

MOST_SETS, MOST_HELD, MOST_TASKS, MOST_PIECES = 64, 256, 1 << 16, 64
"""The most data sets; tasks of one holder; tasks in all; pieces of a task that are to do."""

MOST_COVERS = 256
"""The most pushes of one worker that are covered and not answered; it may have fewer under way."""


@dataclass(slots=True, eq=False)
class PushCover:
    """The examples of a push that is not answered yet; ``barred``: it must not be used."""

    owner: DataSets
    ranges: list[tuple[DataTask, int, int]]
    listed: Examples
    barred: bool = False

    def settle(self, used: bool) -> None:
        """Take the outcome of the push, once."""
        self.owner.settle(self, used)


@dataclass(slots=True)
class _Waiting:
    """A request that waits until there is something to do."""

    peer: int
    message: TakeTask
    data: DataSet
    taker: Member
    holder: Member
    due: float


class DataSets:
    """The data sets of one engine.

    Parameters
    ----------
    membership
        The workers.
    deadline
        Seconds without progress after which a worker's tasks return (``--worker-deadline``).
    closure
        While pushes are paused, no task returns for lack of progress.

    Attributes
    ----------
    waiting
        The requests that wait. While there are any, `answer` is due after each event.
    """

    def __init__(self, membership: Membership, deadline: float, closure: PushClosure) -> None:
        self._membership, self._deadline, self._closure = membership, deadline, closure
        self._sets: dict[str, DataSet] = {}
        self._tasks: dict[int, DataTask] = {}
        self._held: dict[int, set[int]] = {}  # numbers of tasks by holder
        self._absent: dict[int, float] = {}  # by holder: since when it has no connection
        self.waiting: list[_Waiting] = []
        self._numbers = 0

    # ------------------------------------------------------------ requests

    def take(self, peer: int, message: TakeTask, taker: Member, now: float) -> list[Effect]:
        """Take back what the client does not keep, count what it has seen; hand out a task.

        Raises
        ------
        Refused
            When the request does not fit the data set, or is of a client that may not have a task.
        """
        holder = self._holder(message, taker)
        data = self._data_set(message)
        self.count(holder, message.seen, now)
        keeps = set(message.keeps)
        for number in sorted(self._held.get(holder.number, ())):
            task = self._tasks[number]
            mine = task.taker == taker.number or (message.size == 0 and taker is holder)
            if number not in keeps and task.data is data and mine:
                self._close(task)
        self.waiting = [
            each for each in self.waiting if each.taker is not taker or each.data is not data
        ]
        if message.size == 0:
            over = data.epoch >= message.epochs
            return [Reply(peer, GivenTask(message.id, 0, data.epoch, 0, 0, over))]
        due = now + HOLD if message.wait else now
        self.waiting.append(_Waiting(peer, message, data, taker, holder, due))
        return self.answer(now)

    def answer(self, now: float) -> list[Effect]:
        """Answer the requests that waited, if there is something to do for them or nothing left."""
        waiting, self.waiting = self.waiting, []
        effects: list[Effect] = []
        looked = False
        for each in waiting:
            message, data = each.message, each.data
            picked = data.pick(message.size, message.epochs)
            if picked is None and not looked:
                looked = True
                self._expire(now)
                picked = data.pick(message.size, message.epochs)
            if picked is not None:
                each.holder.excused = False
                effects.append(self._give(each, data, *picked, now))
            elif data.epoch >= message.epochs or now >= each.due:
                over = data.epoch >= message.epochs
                each.holder.excused = over
                answer = GivenTask(message.id, 0, data.epoch, 0, 0, over)
                effects.append(Reply(each.peer, answer))
            else:
                each.holder.excused = True
                self.waiting.append(each)
        if self.waiting:
            effects.append(WakeAt(self._next(now)))
        return effects

    def cover(self, message: CoverPush, member: Member, now: float) -> bool:
        """Note what the next push is made of; return False if there are too many such notes."""
        seq = message.seq
        if seq <= member.last_seq:
            return True  # the push has come already
        before = member.covers.get(seq)
        if isinstance(before, PushCover):
            if not before.barred and before.listed == message.seen:
                return True
            before.settle(used=False)
        elif len(member.covers) >= MOST_COVERS:
            return False
        cover = member.covers[seq] = PushCover(self, [], message.seen)
        for number, start, stop in message.seen:
            task = self._of(member, number)
            if task is None or not remove(task.todo, start, stop):
                self._bar(cover)
                return True
            task.covered += stop - start
            task.since = now
            cover.ranges.append((task, start, stop))
            if len(task.todo) > MOST_PIECES:
                self._bar(cover)
                return True
        return True

    def settle(self, cover: PushCover, used: bool) -> None:
        """Take the outcome of a cover's push."""
        ranges, cover.ranges = cover.ranges, []
        for task, start, stop in ranges:
            task.covered -= stop - start
            if used:
                task.data.count(task.epoch, stop - start)
            elif task.closed:
                task.data.give_back(task.epoch, start, stop)
            else:
                add(task.todo, start, stop)
            self._done(task)

    def owned(self, member: Member | None, seen: Examples) -> bool:
        """Return whether all ranges are of a worker's tasks, and not covered."""
        return not seen or all(
            (task := self._of(member, number)) is not None and covers(task.todo, start, stop)
            for number, start, stop in seen
        )

    def count(self, member: Member | None, seen: Examples, now: float) -> None:
        """Count as seen, without a push, what is a worker's; pass over what is not."""
        for number, start, stop in seen:
            task = self._of(member, number)
            if task is not None and remove(task.todo, start, stop):
                task.since = now
                task.data.count(task.epoch, stop - start)
                self._done(task)

    def count_all(self, seen: Mapping[int, Examples], now: float) -> set[int]:
        """Count what the members of a round have seen, by connection, or nothing of it.

        Returns those of which some examples are not theirs any more; if there are any, none count.
        """
        rows = [(peer, self._membership.at(peer), ranges) for peer, ranges in seen.items()]
        outdated = {peer for peer, member, ranges in rows if not self.owned(member, ranges)}
        if not outdated:
            for _peer, member, ranges in rows:
                self.count(member, ranges, now)
        return outdated

    # ------------------------------------------------------------ workers

    def joined(self, member: Member) -> None:
        """Note that a worker has a connection (again)."""
        self._absent.pop(member.number, None)

    def left(self, peer: int, member: Member | None, now: float) -> None:
        """Note that a connection has ended; its worker may come back."""
        self.waiting = [each for each in self.waiting if each.peer != peer]
        if member is not None and self._held.get(member.number):
            self._absent[member.number] = now

    def gone(self, member: Member) -> None:
        """Take back the tasks of a worker that has left for good, or counts as gone."""
        self._absent.pop(member.number, None)
        self._give_up(member.number)

    # ------------------------------------------------------------ inside

    def _of(self, member: Member | None, number: int) -> DataTask | None:
        """Return a task, if it is a worker's."""
        task = self._tasks.get(number)
        if task is None or member is None or task.holder != member.number or task.closed:
            return None
        return task

    def _holder(self, message: TakeTask, taker: Member) -> Member:
        holder = taker
        if message.holder:
            found = self._membership.find(message.holder)
            if found is None:
                raise Refused("the holder of a task must be a client of this server that pushes")
            holder = found
        if not holder.worker:
            raise Refused("an observer may not hold a task; connect with role='worker'")
        if message.size and holder.peer is None:
            raise Unavailable("the worker that is to hold the task has no connection at present")
        return holder

    def _data_set(self, message: TakeTask) -> DataSet:
        """Return the data set of a request; make it if there is none of that name."""
        given = message.examples, message.block, message.seed
        data = self._sets.get(message.name)
        if data is None:
            if not 0 < len(message.name) <= LONGEST_NAME:
                raise BadPush(f"the name of a data set has 1 to {LONGEST_NAME} characters")
            if len(self._sets) >= MOST_SETS:
                raise Refused(f"this server has {MOST_SETS} data sets, and can have no more")
            data = self._sets[message.name] = DataSet(message.name, *given, message.epoch)
        known = data.examples, data.block, data.seed
        if given != known:
            names = ("examples", "block", "seed")
            name, mine, other = next(
                row for row in zip(names, given, known, strict=True) if row[1] != row[2]
            )
            raise BadPush(
                f"data set {message.name!r} has {name}={other}, and this worker says {name}={mine},"
                f" so that a position would mean another example; {data.epoch:,} epochs of it are"
                f" complete and {data.seen[data.epoch]:,} examples of the next are seen. Give all"
                " workers of a run the same data; data that has changed since needs another name,"
                " which begins with epoch 0"
            )
        return data

    def _give(
        self, each: _Waiting, data: DataSet, epoch: int, start: int, stop: int, now: float
    ) -> Reply:
        """Make a range the task of the worker that waits, or refuse it one more."""
        holder, message = each.holder, each.message
        held = self._held.setdefault(holder.number, set())
        if len(held) >= MOST_HELD or len(self._tasks) >= MOST_TASKS:
            add(data.free[epoch], start, stop)
            why = f"this worker holds {len(held)} tasks: complete some before it takes more"
            if len(held) < MOST_HELD:
                why = f"{len(self._tasks)} tasks are under way: ask again when some are complete"
            return Reply(each.peer, error_of(message.id, Refused(why)))
        self._numbers += 1
        number = self._numbers
        task = DataTask(number, data, epoch, holder.number, each.taker.number, now, [[start, stop]])
        self._tasks[number] = task
        held.add(number)
        return Reply(each.peer, GivenTask(message.id, number, epoch, start, stop, False))

    def _done(self, task: DataTask) -> None:
        """Forget a task of which nothing is left."""
        if task.covered or task.todo or task.number not in self._tasks:
            return
        del self._tasks[task.number]
        task.data.tasks += not task.closed
        held = self._held[task.holder]
        held.discard(task.number)
        if not held:
            del self._held[task.holder]

    def _close(self, task: DataTask) -> None:
        """Hand what is left of a task to others; what waits for an answer stays with its push."""
        task.closed = True
        for start, stop in task.todo:
            task.data.give_back(task.epoch, start, stop)
        task.todo = []
        self._done(task)

    def _bar(self, cover: PushCover) -> None:
        """Have a push not be used: its examples, or some, are not its worker's."""
        self.settle(cover, used=False)
        cover.barred = True

    def _give_up(self, holder: int) -> None:
        """Take back all tasks of a worker; its pushes that have not come are not used any more."""
        member = next((each for each in self._membership if each.number == holder), None)
        for number in sorted(self._held.get(holder, ())):
            self._close(self._tasks[number])
        if member is not None:
            for seq, cover in member.covers.items():
                if seq > member.last_seq and isinstance(cover, PushCover):
                    self._bar(cover)
        # Of a member that is forgotten nothing can come any more but the answers to its pushes.

    def go_on(self, now: float) -> None:
        """Begin the deadlines of all tasks again: pushes were paused, and are taken from now on."""
        for task in self._tasks.values():
            task.since = now

    def _expire(self, now: float) -> None:
        """Take back the tasks of workers that are late, or have been away for long."""
        for holder in [n for n, since in self._absent.items() if now >= since + GRACE]:
            del self._absent[holder]
            self._give_up(holder)
        for holder in sorted(self._held):
            progress = [self._tasks[number].since for number in self._held[holder]]
            if not self._closure.paused and now >= max(progress) + self._deadline:
                self._give_up(holder)

    def _next(self, now: float) -> float:
        """Return when a request that waits may be answered, if nothing happens before."""
        due = [each.due for each in self.waiting]
        due += [since + GRACE for since in self._absent.values()]
        for numbers in self._held.values():
            due.append(max(self._tasks[number].since for number in numbers) + self._deadline)
        later = [time for time in due if time > now]
        return min(later, default=now + HOLD)

    # ------------------------------------------------------------ what is known

    def report(self) -> list[dict[str, Any]]:
        """Return the statistics, a row for each data set."""
        under_way = dict.fromkeys(self._sets, 0)
        tasks = dict.fromkeys(self._sets, 0)
        for task in self._tasks.values():
            under_way[task.data.name] += length(task.todo) + task.covered
            tasks[task.data.name] += 1
        return [
            {
                "name": data.name,
                "examples": data.examples,
                "epoch": data.epoch,
                "seen": data.seen[data.epoch],
                "seen_ahead": data.seen.get(data.epoch + 1, 0),
                "tasks_done": data.tasks,
                "tasks_under_way": tasks[data.name],
                "examples_under_way": under_way[data.name],
                "examples_to_do": data.examples
                - data.given[data.epoch]
                + length(data.free[data.epoch]),
                "returned": data.returned,
                "waiting": sum(each.message.name == data.name for each in self.waiting),
            }
            for data in self._sets.values()
        ]

    def state(self, members: Iterable[Member]) -> dict[str, Any]:
        """Return everything as plain values, for `restore`; ``members``: whose covers there are."""
        covers = [
            [
                *(member.number, seq, cover.listed, cover.barred),
                [[task.number, start, stop] for task, start, stop in cover.ranges],
            ]
            for member in members
            for seq, cover in member.covers.items()
            if isinstance(cover, PushCover)
        ]
        return {
            "sets": [data.state() for data in self._sets.values()],
            "tasks": [task.state() for task in self._tasks.values()],
            "absent": dict(self._absent),
            "covers": covers,
            "waiting": [
                [each.peer, encode(each.message), each.taker.number, each.holder.number, each.due]
                for each in self.waiting
            ],
            "numbers": self._numbers,
        }

    def restore(self, state: Mapping[str, Any], members: Mapping[int, Member]) -> None:
        """Continue from what `state` returned; ``members``: by number."""
        for row in state["sets"]:
            self._sets[row[0]] = DataSet(*row)
        for number, name, epoch, holder, taker, since, todo, covered, closed in state["tasks"]:
            pieces = [list(piece) for piece in todo]
            whose = epoch, holder, taker, since
            task = DataTask(number, self._sets[name], *whose, pieces, covered, closed)
            self._tasks[number] = task
            self._held.setdefault(task.holder, set()).add(number)
        self._absent = dict(state["absent"])
        for number, seq, listed, barred, ranges in state["covers"]:
            found = [(self._tasks[task], start, stop) for task, start, stop in ranges]
            rows = tuple((task, start, stop) for task, start, stop in listed)
            members[number].covers[seq] = PushCover(self, found, rows, barred)
        for peer, header, taker, holder, due in state["waiting"]:
            message = decode(header)
            assert isinstance(message, TakeTask)
            data = self._sets[message.name]
            waiting = _Waiting(peer, message, data, members[taker], members[holder], due)
            self.waiting.append(waiting)
        self._numbers = state["numbers"]
