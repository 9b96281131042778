"""Carry out messages about rows of tables, in their turn among the updates.

Every push is applied at once, in the order of arrival, at a learning rate modulated with its
staleness: how many pushes the table has had since the rows were fetched. Work on rows takes its
turn among the updates of the dense parameters, so no row is read while it is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiops.algorithms.base import Algorithm
from aiops.engine.events import Effect, OnApplied, Received, Reply
from aiops.engine.membership import Member, Membership
from aiops.engine.replies import error_of, too_old
from aiops.engine.schedule_position import SchedulePosition
from aiops.engine.step_numbers import Modulations
from aiops.engine.table_receive import RowsSink, TableAdmission
from aiops.engine.validation import misfactored
from aiops.errors import BadPush, Refused
from aiops.model.layout import Ints
from aiops.model.tables import rows_parts
from aiops.store.sparse_table import SparseTable, TableJob
from aiops.wire.messages import Error, FetchRows, Message, PushRows, TableRows
from aiops.wire.sinks import Discard, Sink


@dataclass(slots=True, eq=False)
class TableWork:
    """A message about rows on its way through the engine.

    Its payload is fixed when it comes: if the push is repeated meanwhile, only the connection and
    the request id of the repetition are used. ``peer`` is None once its connection ended.
    """

    requests: TableRequests
    peer: int | None
    id: int
    table: int
    sink: RowsSink
    member: Member | None = None  # None: no push, or one that was applied before
    seq: int = 0
    staleness: int = 0
    row: int = 0  # of the journal, where its payload is
    lr_factor: float = 1.0

    def state(self) -> list[Any]:
        """Return the work as plain values, for `TableRequests.restore`.

        They begin with the row, the member's number (None: it is no push) and the sequence number.
        """
        member = self.member and self.member.number
        numbers = self.id, self.table, self.staleness, self.lr_factor
        return [self.row, member, self.seq, self.peer, *numbers]

    def issue(self) -> tuple[TableJob, OnApplied]:
        """Return the job, now that its turn has come."""
        return self.requests.issue(self), self._applied

    def _applied(self, sums: Ints, now: float) -> list[Effect]:
        """Answer the message: its job is done."""
        return self.requests.applied(self, sums, now)


class TableRequests:
    """One engine's tables.

    A request becomes `TableWork`, which the caller puts into the update queue.

    Parameters
    ----------
    algorithm, workers
        They give the learning rate, by the table's version, and the modulation.
    stores
        The tables, in the order of their numbers.
    membership
        Counts refusals.
    position
        Where the schedule of the learning rate is; None: it counts a table's updates.
    spread
        Admits the messages without rows that come if rows lie on several shards, so that the clocks
        of all count the same pushes. None: rows lie here alone, and such messages are refused.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        workers: int | None,
        stores: Sequence[SparseTable],
        membership: Membership,
        position: SchedulePosition | None = None,
        spread: TableAdmission | None = None,
    ) -> None:
        self._spread, self._position = spread, position
        self._algorithm, self.stores, self._membership = algorithm, stores, membership
        self._rates = algorithm.row_rates(workers)
        self._modulations = Modulations(algorithm)
        names = [store.named.name for store in stores]
        self._factors = {name: algorithm.rate_factor(name) for name in names}
        self._scalars = {name: algorithm.tensor_scalars(name) for name in names}
        self._pending: dict[tuple[str, int], TableWork] = {}  # by client and seq, unanswered
        self._unanswered: set[TableWork] = set()  # those, and requests that are no push

    # ------------------------------------------------------------ requests

    def with_sink(self, event: Received) -> Received:
        """Return a message with a sink if its rows all lie on other shards: it has no payload.

        Raises
        ------
        Refused
            When the model has no such table.
        """
        message = event.message
        assert isinstance(message, FetchRows | PushRows)
        if self._spread is None or event.sink is not None or message.parts:
            return event
        return replace(event, sink=self._spread.without_rows(message))

    def fetch(self, event: Received) -> TableWork:
        """Return the work of a request for rows.

        Raises
        ------
        Refused
            When it names no row, or one that the table does not have.
        """
        message, sink = event.message, event.sink
        assert isinstance(message, FetchRows)
        if isinstance(sink, Discard) and isinstance(sink.fault, Refused):
            raise sink.fault
        if not isinstance(sink, RowsSink):
            raise BadPush("the request names no row: ask for at least one")
        if sink.fault is not None:
            sink.free()
            raise sink.fault
        return self._noted(
            TableWork(self, event.peer, message.id, message.table, sink, row=event.row)
        )

    def push(self, event: Received, member: Member) -> TableWork:
        """Return the work of a push that is new and has passed every check."""
        message, sink = event.message, event.sink
        assert isinstance(message, PushRows)
        assert isinstance(sink, RowsSink)
        work = TableWork(
            *(self, event.peer, message.id, message.table, sink, member, message.seq),
            row=event.row,
            lr_factor=message.lr_factors[0] if message.lr_factors else 1.0,
        )
        self._pending[member.client, message.seq] = work
        return self._noted(work)

    def fault(self, sink: Sink | None, message: PushRows) -> Refused | None:
        """Return why a push of rows cannot be applied, or None."""
        if not isinstance(sink, RowsSink) or not (sink.pushes or self._spread is not None):
            return BadPush("it pushes no row")
        if len(message.lr_factors) > 1:
            return misfactored(message, 1)
        store = self.stores[message.table]
        if self._spread is None and sink.fault is None and sink.version > store.version:
            return BadPush(
                f"these rows of table {store.named.name!r} were fetched at version {sink.version},"
                f" but the server is at {store.version}: fetch them again (was it restarted?)",
                table=store.named.name,
            )
        return sink.fault

    def repeat(self, event: Received, member: Member) -> TableWork | Reply | None:
        """Answer a push that came before, on a connection since lost, without applying it.

        Returns the answer, or the work of gathering the rows that the repetition requests; None if
        the push is still pending. Its sink is freed, or used for the answer.
        """
        message, sink, peer = event.message, event.sink, event.peer
        assert isinstance(message, PushRows)
        pending = self._pending.get((member.client, message.seq))
        answer = member.answers.get(message.seq)
        found: Reply | None = None
        if pending is not None:
            pending.peer, pending.id = peer, message.id
        elif isinstance(answer, Error):
            again = Error(message.id, answer.code, answer.text, answer.details, False)
            found = Reply(peer, again)
        elif isinstance(answer, TableRows) and isinstance(sink, RowsSink) and sink.fault is None:
            if sink.wants:  # the rows that it requests, as they are now
                work = TableWork(self, peer, message.id, message.table, sink, row=event.row)
                work.staleness = answer.staleness
                return self._noted(work)
            found = Reply(peer, TableRows(message.id, answer.version, answer.staleness))
        else:
            found = Reply(peer, error_of(message.id, too_old(message.seq, member)))
        if isinstance(sink, RowsSink):
            sink.free()
        return found

    def restore(
        self, state: Sequence[Any], sink: RowsSink, members: Mapping[int, Member]
    ) -> TableWork:
        """Return work that continues from what `TableWork.state` returned.

        Parameters
        ----------
        state
            As plain values.
        sink
            Its payload.
        members
            By number.
        """
        row, number, seq, peer, id, table, staleness, factor = state
        member = None if number is None else members[number]
        work = TableWork(self, peer, id, table, sink, member, seq, staleness, row, factor)
        if member is not None:
            self._pending[member.client, seq] = work
        return self._noted(work)

    def _noted(self, work: TableWork) -> TableWork:
        self._unanswered.add(work)
        return work

    # ------------------------------------------------------------ connections

    def left(self, peer: int) -> None:
        """Send a connection that ended no answer; those to its pushes are kept."""
        for work in self._unanswered:
            if work.peer == peer:
                work.peer = None

    def give_up(self) -> list[tuple[int, int]]:
        """Return the connections and ids of what was not answered, to which nothing is sent."""
        waiting = [(work.peer, work.id) for work in self._unanswered if work.peer is not None]
        self.abandon()
        return waiting

    def abandon(self) -> None:
        """Do so for all connections that there have been."""
        for work in self._unanswered:
            work.peer = None

    # ------------------------------------------------------------ updates

    def issue(self, work: TableWork) -> TableJob:
        """Fix a push's staleness and learning rate."""
        sink = work.sink
        job = TableJob(self.stores[work.table])
        if work.member is not None:
            if len(sink.pushed):
                job.pushed = sink.pushed, sink.grads
            work.staleness = self._fix(job, sink.version, work.lr_factor)
        if len(sink.wanted):
            job.wanted = sink.wanted, sink.out
        return job

    def _fix(self, job: TableJob, version: int, factor: float = 1.0) -> int:
        """Make a job a push of rows that were fetched at a version; return its staleness."""
        store = job.store
        # Of several shards one may have been brought back to an earlier moment than others.
        staleness = max(0, store.version - version)
        job.push = True
        name, position, rate = store.named.name, self._position, self._rates
        if position is not None:
            position.rows_used()
        if callable(rate):
            rate = rate(store.version if position is None else position.at())
        job.step = rate * self._modulations[staleness] * self._factors[name] * factor
        job.scalars = self._algorithm.row_scalars(store.version + 1) + self._scalars[name]
        return staleness

    def applied(self, work: TableWork, sums: Ints, now: float) -> list[Effect]:
        """Count a job that is done, and answer it."""
        sink, member, store = work.sink, work.member, self.stores[work.table]
        self._unanswered.remove(work)
        if member is not None:
            del self._pending[member.client, work.seq]
            if sums[0] >= 0:
                place, count, *_fresh = (int(n) for n in sums)
                return self._refuse(work, member, store, place, now, finite=count >= 0)
            self._count(store, member, sink.pushes, work.staleness, sums, now)
            member.remember(work.seq, TableRows(work.id, store.version, work.staleness))
        parts = rows_parts(store.table, len(sink.wanted), store.version)
        answer = TableRows(work.id, store.version, work.staleness, parts)
        if not sink.wants or work.peer is None:
            sink.free()
        return _answer(work.peer, answer, sink if sink.wants else None)

    def _count(
        self, store: SparseTable, member: Member, rows: int, staleness: int, sums: Ints, now: float
    ) -> None:
        """Count a push of a number of rows that was applied."""
        _bad, _count, fresh, *evicted = sums.tolist()
        store.version += 1
        store.made += fresh - sum(evicted)
        store.evicted += sum(evicted)
        store.rows_pushed += rows
        store.total_staleness += staleness
        member.pushes += 1
        member.staleness, member.answered = staleness, now

    # ------------------------------------------------------------ at once

    def push_at_once(
        self,
        job: TableJob,
        member: Member,
        id: int,
        seq: int,
        version: int,
        run: Callable[[TableJob], Ints],
        now: float,
    ) -> int | None:
        """Carry out a push of rows, for which nothing has to be waited; return its staleness.

        None: the general way has to decide about it, and nothing was changed.

        Parameters
        ----------
        job
            The rows, which have passed their checks.
        member
            The client that pushes.
        id, seq, version
            Of the message.
        run
            Runs the job.
        now
            The time, in seconds.
        """
        spread, store = self._spread is not None, job.store
        if not member.worker or member.covers or seq <= member.last_seq:
            return None
        if not spread and (job.pushed is None or version > store.version):
            return None
        if self._position is not None:
            self._position.now = now
        staleness = self._fix(job, version)
        sums = run(job)
        if sums[0] >= 0:
            return None  # it is to be refused
        member.last_seq = seq
        rows = 0 if job.pushed is None else len(job.pushed[0])
        self._count(store, member, rows, staleness, sums, now)
        member.remember(seq, TableRows(id, store.version, staleness))
        return staleness

    def fetch_at_once(self, job: TableJob, run: Callable[[TableJob], Ints]) -> bool:
        """Gather rows, for which nothing has to be waited; return whether it has been done."""
        if job.wanted is None and self._spread is None:
            return False  # it is to be refused
        run(job)
        return True

    def _refuse(
        self,
        work: TableWork,
        member: Member,
        store: SparseTable,
        place: int,
        now: float,
        *,
        finite: bool,
    ) -> list[Effect]:
        row = int(work.sink.pushed[place])
        fault = store.named.bad_sum(row, place) if finite else store.named.bad_row(row)
        error = error_of(work.id, fault)
        self._membership.count_refusal(member, fault)
        member.answered = now
        member.remember(work.seq, error)
        work.sink.free()
        return _answer(work.peer, error)


def _answer(peer: int | None, message: Message, rows: RowsSink | None = None) -> list[Effect]:
    """Return the effects that send an answer: none if its connection ended."""
    return [] if peer is None else [Reply(peer, message, rows=rows)]
