"""Carry out messages about rows of tables, in their turn among the updates.

Every push is applied at once, in the order of arrival, at a learning rate modulated with its
staleness: how many pushes the table has had since the rows were fetched. Work on rows takes its
turn among the updates of the dense parameters, so no row is read while it is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiops.algorithms.base import Algorithm
from aiops.engine.events import Received, Reply
from aiops.engine.membership import Member
from aiops.engine.replies import Replies
from aiops.engine.table_receive import RowsSink
from aiops.errors import BadPush, Refused
from aiops.model.layout import Ints
from aiops.model.tables import rows_parts
from aiops.store.sparse_table import SparseTable, TableJob
from aiops.wire.messages import Error, FetchRows, PushRows, TableRows


@dataclass(slots=True, eq=False)
class TableWork:
    """A message about rows on its way through the engine.

    Its payload is fixed when it comes: if the push is repeated meanwhile, only the connection and
    the request id of the repetition are used.
    """

    desk: TableRequests
    peer: int
    id: int
    table: int
    sink: RowsSink
    member: Member | None = None  # None: no push, or one that was applied before
    seq: int = 0
    staleness: int = 0

    def issue(self) -> TableJob:
        """Return the job, now that its turn has come."""
        return self.desk.issue(self)

    def applied(self, sums: Ints) -> None:
        """Answer the message: its job is done."""
        self.desk.applied(self, sums)


class TableRequests:
    """One engine's tables.

    Parameters
    ----------
    algorithm, workers
        They give the learning rate, by the table's version, and the modulation.
    stores
        The tables, in the order of their numbers.
    answers
        It counts refusals; replies are appended to its list of effects.
    queue
        Appends work to the update queue.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        workers: int | None,
        stores: Sequence[SparseTable],
        answers: Replies,
        queue: Callable[[TableWork], None],
    ) -> None:
        self._algorithm, self.stores = algorithm, stores
        self._rate = algorithm.rates(workers)
        self._answers, self._effects, self._queue = answers, answers.effects, queue
        self._pending: dict[tuple[str, int], TableWork] = {}  # by client and seq, unanswered

    # ------------------------------------------------------------ requests

    def fetch(self, event: Received) -> None:
        """Queue a request for rows."""
        message, sink = event.message, event.sink
        assert isinstance(message, FetchRows)
        if not isinstance(sink, RowsSink):
            raise BadPush("the request names no row: ask for at least one")
        if sink.fault is not None:
            sink.free()
            raise sink.fault
        self._queue(TableWork(self, event.peer, message.id, message.table, sink))

    def push(self, event: Received, member: Member) -> None:
        """Queue a push that is new and has passed every check."""
        message, sink = event.message, event.sink
        assert isinstance(message, PushRows)
        assert isinstance(sink, RowsSink)
        work = TableWork(self, event.peer, message.id, message.table, sink, member, message.seq)
        self._pending[member.client, message.seq] = work
        self._queue(work)

    def fault(self, sink: RowsSink, message: PushRows) -> Refused | None:
        """Return why a push of rows cannot be applied, or None."""
        store = self.stores[message.table]
        if sink.fault is None and sink.version > store.version:
            return BadPush(
                f"these rows of table {store.named.name!r} were fetched at version {sink.version},"
                f" but the server is at {store.version}: fetch them again (was it restarted?)",
                table=store.named.name,
            )
        return sink.fault

    def repeated(self, event: Received, member: Member) -> bool:
        """Answer a push that came before, on a connection since lost, without applying it.

        Returns True if it had come before; its sink is then freed, or used for the answer.
        """
        message, sink = event.message, event.sink
        assert isinstance(message, PushRows)
        pending = self._pending.get((member.client, message.seq))
        if pending is None and message.seq > member.last_seq:
            return False
        answer = member.answers.get(message.seq)
        if pending is not None:
            pending.peer, pending.id = event.peer, message.id
        elif isinstance(answer, Error):
            again = Error(message.id, answer.code, answer.text, answer.details, False)
            self._effects.append(Reply(event.peer, again))
        elif isinstance(answer, TableRows) and isinstance(sink, RowsSink) and sink.fault is None:
            if len(sink.wanted):  # the rows that it requests, as they are now
                work = TableWork(self, event.peer, message.id, message.table, sink)
                work.staleness = answer.staleness
                self._queue(work)
                return True
            again_rows = TableRows(message.id, answer.version, answer.staleness)
            self._effects.append(Reply(event.peer, again_rows))
        else:
            fault = BadPush(
                f"push {message.seq} is older than what the server remembers of this client"
                f" (its last was {member.last_seq}); it was not applied again"
            )
            error = Error(message.id, fault.code, str(fault), fault.details, False)
            self._effects.append(Reply(event.peer, error))
        if isinstance(sink, RowsSink):
            sink.free()
        return True

    # ------------------------------------------------------------ updates

    def issue(self, work: TableWork) -> TableJob:
        """Fix a push's staleness and learning rate."""
        sink = work.sink
        store = self.stores[work.table]
        job = TableJob(store)
        if work.member is not None:
            work.staleness = store.version - sink.version
            job.pushed = sink.pushed, sink.grads
            job.step = self._rate(store.version) * self._algorithm.modulation(work.staleness)
        if len(sink.wanted):
            job.wanted = sink.wanted, sink.out
        return job

    def applied(self, work: TableWork, sums: Ints) -> None:
        """Count a job that is done, and answer it."""
        sink, member, store = work.sink, work.member, self.stores[work.table]
        if member is not None:
            del self._pending[member.client, work.seq]
            bad, _count, fresh = (int(n) for n in sums)
            if bad >= 0:
                self._refuse(work, member, store, bad)
                return
            store.version += 1
            store.made += fresh
            store.rows_pushed += len(sink.pushed)
            store.total_staleness += work.staleness
            member.pushes += 1
            member.staleness, member.answered = work.staleness, self._answers.now
            member.remember(work.seq, TableRows(work.id, store.version, work.staleness))
        wanted = len(sink.wanted)
        parts = rows_parts(store.table, wanted, store.version)
        answer = TableRows(work.id, store.version, work.staleness, parts)
        if not wanted:
            sink.free()
        self._effects.append(Reply(work.peer, answer, rows=sink if wanted else None))

    def _refuse(self, work: TableWork, member: Member, store: SparseTable, place: int) -> None:
        row = int(work.sink.pushed[place])
        fault = BadPush(
            f"table {store.named.name!r}: the gradients of row {row} (first at {place} of the push)"
            " add up to 1e18 or more in magnitude; nothing of this push was applied",
            table=store.named.name,
        )
        error = Error(work.id, fault.code, str(fault), fault.details, False)
        member.refused += 1
        member.answered = self._answers.now
        self._answers.refused[fault.code] += 1
        member.remember(work.seq, error)
        work.sink.free()
        self._effects.append(Reply(work.peer, error))
