"""Answer messages about rows at once: fetches and pushes of rows, from bytes to bytes in one call.

A message about a few hundred rows takes longer to pass through the engine than its rows do, and
where rows are spread over several servers it is paid once on each. So, as the steady exchange does
(`aiops.engine.steady`), such a message takes a short way through the same state. It changes what
the general way changes: the rows, the table's clock, tickets, accounts, statistics and the
remembered answer. It makes no message, event or effect, and takes no buffer from a pool.

A message goes this way when all of this holds, and the general way (`Engine.handle`) when not:

* its header is one of `aiops.wire.row_headers`, and it and its answer have at most `LARGEST` bytes;
* it is the only one that has come and is not answered yet;
* nothing is outstanding or queued, nothing is recorded, and there is no bandwidth budget;
* it is a fetch, or a new push of a worker that may push, whose examples, if any, are no data set's;
* its rows are the table's, and its values pass their survey, as do the rows that it makes.

Until all of this has been checked nothing is changed, so that the general way finds the state as it
was, and makes the error of what is refused.

A message is received in its connection's head buffer, which grows to the largest message so far.
All connections of a server together grow them by at most `ROOM`; when there is none left, messages
that are larger than the buffer go the general way.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

import numpy as np

from aiops import kernels
from aiops.engine.membership import Membership
from aiops.engine.table_requests import TableRequests
from aiops.engine.update_queue import UpdateQueue
from aiops.kernels.scan import Surveyor
from aiops.model.arena import aligned
from aiops.model.layout import Array
from aiops.model.parts import LARGEST as LARGEST_INTEGER
from aiops.model.tables import ID_BYTES
from aiops.store.resources import Resources
from aiops.store.sparse_table import SparseTable, TableJob
from aiops.wire.connection import Connection
from aiops.wire.messages import FetchRows, TableRows
from aiops.wire.row_headers import ANSWERS, BYTES, PAYLOAD, REQUESTS, RowHeader, packed

LARGEST: Final = 256 << 10
"""The most bytes of a message's payloads, and of its answer's: of more, the rows take the time."""

ROOM: Final = 64 << 20
"""Bytes by which all connections of a server may make their head buffers larger."""

_LENGTH = Struct(">I")
_FETCH = FetchRows.kind
_OVERHEAD = ANSWERS[1].template.size + PAYLOAD.size
_SPREAD = 128
"""Bytes before the rows of an answer in its buffer: more than its header, and rows are aligned."""


class _Table(NamedTuple):
    """A table, what checks the rows of a message, and the scratch memory as its elements."""

    store: SparseTable
    bounded: Surveyor
    survey: Surveyor
    elements: Array


class RowsNumbers(NamedTuple):
    """The values of a message's header; of a fetch ``seq`` and ``version`` are 0.

    ``sizes``: the bytes of its payloads.
    """

    id: int
    seq: int
    number: int  # of the table
    version: int
    pushed: int
    wanted: int
    sizes: tuple[int, ...]


class RowsShortcut:
    """The state that all short ways of a server's rows share.

    Parameters
    ----------
    requests, updates, membership
        The engine's: what they change is what the general way changes.
    backend
        The kernels that survey payloads.
    machine
        Counts the time of updates.

    Attributes
    ----------
    room
        Bytes by which head buffers may still be made larger.
    now
        The time of the last message that went this way, in seconds.
    closed
        True if all messages go the general way from here on.
    cost
        The most bytes that the work of one message reads and writes.
    """

    def __init__(
        self,
        requests: TableRequests,
        updates: UpdateQueue,
        membership: Membership,
        backend: str,
        machine: Resources,
    ) -> None:
        self._requests, self._updates, self._membership = requests, updates, membership
        scratch = aligned(LARGEST)  # the payloads of the message that is being answered
        self._payloads, self._ids = scratch.data, scratch.view(np.int64)
        self._tables = [
            _Table(
                store,
                kernels.bounded(store.table.rows, backend),
                kernels.surveyor(store.dtype, backend),
                scratch.view(store.dtype),
            )
            for store in requests.stores
        ]
        self._run = machine.measure("kernel", TableJob.run)
        per_byte = max(store.record_bytes / store.table.row_bytes for store in requests.stores)
        self.cost = int(3 * LARGEST * per_byte)
        self.room, self.closed, self.now = ROOM, False, 0.0

    def read(self, header: RowHeader, values: tuple[int, ...]) -> RowsNumbers | None:
        """Return what a header asks for; None: the message must go the general way.

        ``values``: what varies in the header.
        """
        if header.kind == _FETCH:
            (id, number), seq, version, first = values[:2], 0, 0, 2
        else:
            (id, seq, number, version), first = values[:4], 4
        if number >= len(self._tables) or max(values) > LARGEST_INTEGER:
            return None
        counts, sizes = values[first::2], values[first + 1 :: 2]
        row_bytes = self._tables[number].store.table.row_bytes
        pushed = counts[0] if header.parts > 1 else 0
        wanted = counts[header.parts // 2] if header.parts % 2 else 0
        meant = [count * ID_BYTES for count in (pushed, wanted) if count]
        if pushed:
            meant.append(pushed * row_bytes)
        fits = list(sizes) == meant and (not pushed or counts[-1] == pushed)
        if not fits or max(sum(sizes), wanted * row_bytes) > LARGEST:
            return None
        return RowsNumbers(id, seq, number, version, pushed, wanted, sizes)

    def answer(
        self, peer: int, request: RowsNumbers, message: memoryview, fetches: bool, now: float
    ) -> memoryview | None:
        """Answer a request; None: it must go the general way, and nothing has been changed.

        Parameters
        ----------
        peer
            The connection.
        request, message
            The request, and what follows its header.
        fetches
            Whether it is a fetch.
        now
            The time, in seconds.
        """
        member, updates, requests = self._membership.at(peer), self._updates, self._requests
        if member is None or self.closed or not updates.idle:
            return None
        job = self._job(request, message)
        if job is None:
            return None
        room = np.empty(_SPREAD + request.wanted * job.store.table.row_bytes, np.uint8)
        if request.wanted:
            rows = room[_SPREAD:].view(job.store.dtype).reshape(request.wanted, -1)
            job.wanted = self._ids[request.pushed : request.pushed + request.wanted], rows
        staleness = 0
        if fetches:
            if not requests.fetch_at_once(job, self._run):
                return None
        else:
            given = request.id, request.seq, request.version, self._run, now
            found = None if updates.closure.why else requests.push_at_once(job, member, *given)
            if found is None:
                return None
            staleness = found
        self.now = now
        updates.worked(now)
        nbytes = len(room) - _SPREAD
        member.ledger.exchanged_rows(request.number, sum(request.sizes), nbytes)
        return _framed(room, request.id, job.store.version, staleness, request.wanted)

    def _job(self, request: RowsNumbers, message: memoryview) -> TableJob | None:
        """Return the work of a request but for the rows that are wanted, if its payloads are fit.

        They are copied to the scratch memory, where they are aligned.
        """
        payloads, at, to = self._payloads, 0, 0
        for size in request.sizes:
            if PAYLOAD.unpack_from(message, at) != (BYTES, size):
                return None
            at += PAYLOAD.size
            payloads[to : to + size] = message[at : at + size]
            at, to = at + size, to + size
        store, bounded, survey, elements = self._tables[request.number]
        pushed, width = request.pushed, store.table.width
        ids = self._ids[: pushed + request.wanted]
        if bounded(ids) >= 0:
            return None
        job = TableJob(store)
        if pushed:
            begin = ids.nbytes // store.dtype.itemsize
            gradients = elements[begin : begin + pushed * width]
            if survey(gradients) >= 0:
                return None
            job.pushed = ids[:pushed], gradients.reshape(pushed, width)
        return job


def _framed(room: Array, id: int, version: int, staleness: int, wanted: int) -> memoryview:
    """Return an answer, whose rows lie in ``room`` from `_SPREAD` on; its header is written there.

    No row is announced if none was wanted.
    """
    nbytes = len(room) - _SPREAD
    if not wanted:
        return memoryview(packed(ANSWERS[0], (id, version, staleness)))
    head = packed(ANSWERS[1], (id, version, staleness, wanted, nbytes, version))
    begin = _SPREAD - PAYLOAD.size - len(head)
    data = room.data
    data[begin : begin + len(head)] = head
    PAYLOAD.pack_into(data, _SPREAD - PAYLOAD.size, BYTES, nbytes)
    return data[begin:]


class SteadyRows:
    """One connection's short way for its messages about rows.

    Parameters
    ----------
    shared
        The state of the server that they change.
    peer
        The connection's number.
    wire
        Its state machine.

    Attributes
    ----------
    answered
        The request that was answered last.
    """

    def __init__(self, shared: RowsShortcut, peer: int, wire: Connection) -> None:
        self._shared, self.peer, self._wire = shared, peer, wire
        self._room = 0  # bytes by which the head buffer was made larger
        self.answered: RowsNumbers | None = None

    @property
    def cost(self) -> int:
        """The most bytes that the work of one message reads and writes."""
        return self._shared.cost

    def exchange(self, nbytes: int, now: float) -> memoryview | None:
        """Answer a message if these bytes complete it, and it meets all conditions.

        Parameters
        ----------
        nbytes
            The bytes that have arrived in the connection's last buffer.
        now
            The time, in seconds.

        Returns
        -------
        memoryview or None
            The answer; empty while the message is incomplete. None: it must go the general way, and
            nothing has been changed.
        """
        wire = self._wire
        message = wire.opening(nbytes)
        if message is None or len(message) < PAYLOAD.size:
            return None  # payload of a message that goes the general way, most often
        header = REQUESTS.get(PAYLOAD.size + _LENGTH.unpack_from(message, 1)[0])
        if header is None or len(message) < header.template.size:
            return None
        template = header.template
        pieces = template.unpack(message)
        if pieces[::2] != template.constants:
            return None
        request = self._shared.read(header, template.pick(pieces))
        if request is None:
            return None
        payload = sum(request.sizes)
        overhead = template.size + header.parts * PAYLOAD.size
        size = overhead + payload
        if len(message) > size:
            return None
        if len(message) < size:
            return self._await_rest(nbytes, size)
        fetches = header.kind == _FETCH
        answer = self._shared.answer(self.peer, request, message[template.size :], fetches, now)
        if answer is not None:
            self.answered = request
            wire.took(nbytes, header.kind, overhead, payload)
            rows = len(answer) - _OVERHEAD if request.wanted else 0
            wire.traffic.sent(TableRows.kind, len(answer) - rows, rows)
        return answer

    def _await_rest(self, nbytes: int, size: int) -> memoryview | None:
        """Have the head buffer take a message whole; None: there is no room for a larger one."""
        wire = self._wire
        more = wire.lacks(size)
        if more > self._shared.room:
            return None
        self._shared.room -= more
        self._room += more
        wire.await_rest(nbytes, size)
        return _INCOMPLETE

    def lost(self) -> None:
        """Give back the room for its head buffer: the connection has ended."""
        self._shared.room += self._room
        self._room = 0


_INCOMPLETE = memoryview(b"")
