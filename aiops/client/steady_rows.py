"""A message about rows to each server, and its answer, in as few steps as there can be.

Where rows are spread over several servers, each message about them is one to each server, so what
it costs beside its rows is paid once per server. `RowsExchange` is a short way for the whole of it,
as `aiops.client.steady` is for gradients of a whole model: headers are packed and compared, not
encoded and decoded (`aiops.wire.row_headers`), and answers are received where rows belong. ::

    exchange = RowsExchange.begun(session, request)   # None: this one takes the general path
    for share in exchange.shares:
        ...send share.unsent to its server, and count share.sent...
    for share in exchange.shares:
        while share.lacks and share.fits:
            share.took(recvmsg_into(share.room), exchange.id)
    exchange.finish()                                 # the request is done

It is a short path through the same state, not a state of its own: the request is one of the general
path, its numbers are the session's, and every byte is what the general path would have sent. So the
exchange can be handed over at any time (`hand_over`): after an error, a ping, a lost connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from aiops.client.handover import without
from aiops.client.request_kinds import RowsRequest
from aiops.client.session import Session
from aiops.model.layout import Array
from aiops.model.parts import LARGEST as LARGEST_INTEGER
from aiops.model.parts import Part
from aiops.model.placement import RAW
from aiops.wire.connection import Buffer
from aiops.wire.messages import TableRows
from aiops.wire.row_headers import ANSWERS, BYTES, FETCHES, PAYLOAD, PUSHES, RowHeader, packed

LARGEST: Final = 256 << 10
"""The most bytes of a share's payloads, and of its answer's: of more, the rows take the time."""


class ShareRoundTrip:
    """One server's share of an exchange, and its answer.

    Parameters
    ----------
    header, numbers
        The form of its header, and the values in it that precede those of its payloads.
    arrays
        The payloads.
    count, rows
        The rows that the answer is to bring, and the memory for them.

    Attributes
    ----------
    buffers
        What is to be sent.
    size
        Bytes of that.
    payload
        Bytes of the payloads in it.
    sent, received
        The bytes of it that have been sent, and of the answer that have come.
    fits
        False once the answer is known to be another than the one that is expected.
    values
        What varies in the answer's header (id, version, staleness...), once that has come.
    """

    received: int
    fits: bool

    __slots__ = (
        *("_answer", "_count", "_head", "_rows", "buffers", "fits", "payload", "received", "sent"),
        *("size", "values", "whole"),
    )

    def __init__(
        self,
        header: RowHeader,
        numbers: Sequence[int],
        arrays: Sequence[Array],
        count: int,
        rows: memoryview,
    ) -> None:
        fields, chunks, payload = [*numbers], list[Buffer](), 0
        for array in arrays:
            nbytes = array.nbytes
            fields += len(array), nbytes
            payload += nbytes
            chunks += PAYLOAD.pack(BYTES, nbytes), array.reshape(-1).view(np.uint8).data
        head = packed(header, fields)
        self.buffers: list[Buffer] = [head, *chunks]
        if chunks:  # the prefix of the first payload goes with the header
            self.buffers[:2] = [head + bytes(chunks[0])]
        self.payload = payload
        self.size: int = len(head) + PAYLOAD.size * len(arrays) + payload
        self._answer = ANSWERS[1 if count else 0]
        prefix = PAYLOAD.size if count else 0
        self._head = memoryview(bytearray(self._answer.template.size + prefix))
        self._count, self._rows = count, rows
        self.whole: int = len(self._head) + len(rows)  # bytes of the answer
        self.sent = self.received = 0
        self.fits = True
        self.values: tuple[int, ...] = ()

    @property
    def unsent(self) -> list[Buffer]:
        """The buffers that have not been sent yet, or what is left of them."""
        return without(self.buffers, self.sent) if self.sent else self.buffers

    @property
    def lacks(self) -> bool:
        """True if bytes of the answer are still to come."""
        return self.received < self.whole

    @property
    def room(self) -> list[memoryview]:
        """The memory for the next bytes of the answer."""
        begin, head = self.received, len(self._head)
        if begin < head:
            return [self._head[begin:], self._rows] if self._rows else [self._head[begin:]]
        return [self._rows[begin - head :]]

    def took(self, nbytes: int, id: int) -> None:
        """Note bytes of the answer, and look at its header once it is complete."""
        self.received += nbytes
        if self.values:
            return
        template = self._answer.template
        if self.received < len(self._head):
            known = min(self.received, PAYLOAD.size)  # another message may be shorter
            self.fits = self._head[:known] == self._answer.prefix[:known]
            return
        pieces = template.unpack(self._head)
        self.values = values = template.pick(pieces)
        self.fits = (
            pieces[::2] == template.constants
            and values[0] == id
            and max(values) <= LARGEST_INTEGER
            and (not self._count or self._announces(values))
        )

    def _announces(self, values: tuple[int, ...]) -> bool:
        """Return whether an answer announces the rows that were asked for."""
        prefix = PAYLOAD.unpack_from(self._head, len(self._head) - PAYLOAD.size)
        return values[3:5] == (self._count, len(self._rows)) and prefix == (BYTES, values[4])

    @property
    def overhead(self) -> int:
        """Bytes of the answer beside its rows."""
        return len(self._head)

    @property
    def came(self) -> list[memoryview]:
        """The bytes of the answer that have come."""
        head = len(self._head)
        return [self._head[: self.received], self._rows[: max(0, self.received - head)]]


class RowsExchange:
    """A request about rows that is under way in the short way.

    Parameters
    ----------
    session
        The session, which has nothing else under way.
    request
        The request, which was not asked yet.
    shares
        Those of all servers, the lead's first.
    id
        The request's.
    """

    id: int
    request: RowsRequest
    shares: list[ShareRoundTrip]

    def __init__(
        self, session: Session, request: RowsRequest, shares: list[ShareRoundTrip], id: int
    ) -> None:
        self._session, self.request, self.shares, self.id = session, request, shares, id

    @classmethod
    def begun(cls, session: Session, request: RowsRequest) -> RowsExchange | None:
        """Begin to carry a request; None: it has to take the general path.

        Nothing has happened in that case.
        """
        asked, info = request.asked, session.info
        if not session.takes_rows(request):
            return None
        row_bytes, into = asked.named.table.row_bytes, asked.into
        if asked.nbytes > LARGEST * info.rows.shards:
            return None  # a share would be too large; they are not cut in vain
        portions = info.rows.portions(asked)
        largest = max(sum(array.nbytes for array in portion.arrays) for portion in portions)
        if largest > LARGEST or max(len(each.wanted) for each in portions) * row_bytes > LARGEST:
            return None
        id = session.number_rows(request)
        table, headers = asked.named.index, FETCHES if not request.pushes else PUSHES
        shares = []
        for shard, portion in enumerate(portions):
            arrays = portion.arrays
            numbers = (id, request.seq, table, portion.base) if request.pushes else (id, table)
            rows = _NOWHERE if into is None else into.room(shard)
            given = numbers, arrays, len(portion.wanted), rows
            shares.append(ShareRoundTrip(headers[len(arrays)], *given))
        return cls(session, request, shares, id)

    def finish(self) -> None:
        """Take the answers, which are all there, and resolve the request."""
        shares, request, asked = self.shares, self.request, self.request.asked
        version = shares[0].values[1]
        staleness = max(share.values[2] for share in shares)
        parts: tuple[Part, ...] = ()
        if asked.into is not None:
            count, row_bytes = len(asked.into.out), asked.named.table.row_bytes
            if len(shares) > 1:
                asked.into.versions = [share.values[1] for share in shares]
            parts = (Part(0, count, RAW, count * row_bytes, version),) if count else ()
        answer = TableRows(self.id, version, staleness, parts)
        self._session.exchanged_rows(
            request,
            answer,
            len(shares),
            (sum(share.size for share in shares), sum(share.payload for share in shares)),
            (sum(share.whole for share in shares), sum(share.overhead for share in shares)),
        )
        request.resolve(request.finish(answer, self._session.info))

    def hand_over(self) -> list[tuple[list[Buffer], list[memoryview]]]:
        """Continue on the general path: by server, its unsent bytes and those that have come."""
        self._session.ask(self.request, self.id)
        outs = [self._session.outgoing()]
        outs += [channel.outgoing() for channel in self._session.shards.channels]
        return [
            (without(out, share.sent), share.came)
            for out, share in zip(outs, self.shares, strict=True)
        ]


_NOWHERE = memoryview(b"")
