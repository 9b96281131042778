"""Admit payloads: check the header against the model, then provide a buffer.

`Admission.sink_for` is called as soon as a message's header is complete. A push that does not
fit the model is drained and refused. One that fits gets a buffer from a pool with a total bound
(while the pool is empty, the connection is not read), and is surveyed as it arrives
(`aiops.engine.receive`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aiops import kernels
from aiops.bandwidth.shares import too_slow_on
from aiops.codecs import raw
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.receive import CodedIncoming, PushSink, RawIncoming, check_codecs
from aiops.engine.table_receive import TableAdmission
from aiops.errors import BadPush, NotReady, Refused, UsageError
from aiops.kernels.parallel import LARGE, ParallelMap, serial_map, survey
from aiops.kernels.scan import Surveyor
from aiops.model.arena import aligned
from aiops.model.layout import Bytes, Cover, Layout
from aiops.model.placement import Placement
from aiops.model.tables import MAX_ROWS_BYTES, Tables
from aiops.wire.messages import Define, FetchRows, Message, Push, PushRows
from aiops.wire.sinks import Discard, Sink

ROOM, BUFFERS = 64 << 20, 4
"""The bound on the buffers of pushes: that many bytes, or that many models if these are larger."""


class Admission:
    """Provides sinks for the payloads of a server's incoming messages.

    Parameters
    ----------
    max_model
        Largest model, in bytes, that a worker may define.
    backend
        The kernels that survey payloads.
    buffers
        The number of models that the pool has room for; it has at least 64 MiB.
    budget
        Bytes per second that a client may move, or None: a model that they cannot carry is refused.
    shards, spread
        The number of servers, and the fewest bytes that one holds; whether rows of tables lie on
        all of them.
    parallel_map
        Threads that share the survey of large payloads.
    make
        Makes a buffer for a push.

    Attributes
    ----------
    pool
        Buffers of pushes.
    row_pool
        Buffers of requests for rows, held until their answers are sent.
    full_pool
        The pool in which `sink_for` found no room last.
    layout
        The model's, once it is defined.
    incoming
        The sink of a push whose parts are all raw.
    on_defined
        Called when the model is defined.
    """

    def __init__(
        self,
        max_model: int,
        backend: str = "auto",
        buffers: int = BUFFERS,
        *,
        budget: int | None = None,
        shards: tuple[int, int] = (1, 1),
        spread: bool = False,
        parallel_map: ParallelMap = serial_map,
        make: Callable[[int], Bytes] = aligned,
    ) -> None:
        self.max_model, self.buffers, self.budget = max_model, buffers, budget
        self._shards, self._spread = shards, spread
        self._backend, self._parallel_map = backend, parallel_map
        self.pool, self.row_pool = BufferPool(ROOM, make), BufferPool(4 * MAX_ROWS_BYTES)
        self.full_pool = self.pool
        self.layout: Layout | None = None
        self.incoming: type[RawIncoming] = RawIncoming
        self._surveys: list[Surveyor] = []  # one per section
        self._tables: TableAdmission | None = None
        self._defining = False
        self.on_defined: Callable[[], None] = lambda: None

    def too_slow(self, layout: Layout, *, tables: bool) -> str | None:
        """Return why the bandwidth budget cannot carry a model, or None.

        ``tables``: whether the model has any.
        """
        if self.budget is None:
            return None
        shards, least = self._shards
        pieces = Placement.even(layout, shards, least).layouts if shards > 1 else [layout]
        held = [[(t.name, t.nbytes) for t in piece.tensors] for piece in pieces]
        return too_slow_on(self.budget, held, rows=tables and self._spread)

    def defined(self, layout: Layout, tables: Tables | None = None) -> None:
        """Check payloads against this model from now on; None: rows are refused."""
        self.layout, self._surveys = layout, self._surveys_of(layout)
        self.pool.bound = max(ROOM, self.buffers * layout.nbytes)
        if tables is not None:
            self._tables = TableAdmission(tables, self.pool, self.row_pool, self._backend)
        self.on_defined()

    def surveyors(self, layout: Layout) -> list[Surveyor]:
        """Return one surveyor per section; it returns the index of its first bad value, or -1."""
        return [kernels.surveyor(section.dtype, self._backend) for section in layout.sections]

    @property
    def tables(self) -> TableAdmission:
        """The admission of rows of the model's tables; NotReady before there is a model."""
        if self._tables is None:
            raise NotReady("no worker has defined the model yet: a worker must do it")
        return self._tables

    @property
    def pools(self) -> tuple[BufferPool, BufferPool]:
        """The pool of pushes, and the pool of requests for rows."""
        return self.pool, self.row_pool

    def _surveys_of(self, layout: Layout) -> list[Surveyor]:
        found = self.surveyors(layout)
        if layout.nbytes < LARGE:  # too small to share among threads
            return found
        return [partial(survey, find, parallel_map=self._parallel_map) for find in found]

    def sink_for(self, message: Message) -> Sink | None:
        """Return the sink of a message's payloads; None: no room yet, wait in `full_pool`."""
        try:
            if type(message) is Push:
                parts, layout, self.full_pool = message.parts, self.layout, self.pool
                if layout is None or len(parts) != 1 or parts[0].codec != raw.NAME:
                    return self._place_push(message)
                cover, nbytes = layout.covered(parts), parts[0].nbytes  # the usual case
                buffer = self.pool.take(nbytes)
                if buffer is None:
                    return None
                return self.incoming(buffer, [nbytes], layout, cover, self.pool, self._surveys)
            if isinstance(message, FetchRows | PushRows):
                return self._place_rows(message)
            if isinstance(message, Define):
                self.full_pool = self.pool
                return self._place_define(message)
        except Refused as fault:
            return Discard(fault)
        return Discard(BadPush(f"a {message.kind!r} carries no payload"))

    def _place_push(self, message: Push) -> Sink | None:
        if self.layout is None:
            raise NotReady("no worker has defined the model yet: define it before the first push")
        parts = message.parts
        check_codecs(parts, coded=True)
        cover = self.layout.covered(parts)
        lengths = [part.nbytes for part in parts]
        buffer = self.pool.take(sum(lengths))
        if buffer is None:
            return None
        if any(part.codec != raw.NAME for part in parts):
            return CodedIncoming(buffer, parts, self.layout, cover, self.pool, self._surveys)
        return self.incoming(buffer, lengths, self.layout, cover, self.pool, self._surveys)

    def _place_rows(self, message: FetchRows | PushRows) -> Sink | None:
        tables = self.tables
        room = tables.room(message)
        self.full_pool = room.pool
        return tables.sink_for(room)

    def _place_define(self, message: Define) -> Sink | None:
        """One model is received at a time; later offers are only compared with it."""
        if self.layout is not None:
            return Discard()
        if self._defining:
            return None
        try:
            layout = Layout.shared(message.tensors)
        except UsageError as error:
            raise BadPush(str(error)) from None
        if layout.nbytes > self.max_model:
            raise BadPush(
                f"a model of {layout.nbytes} bytes is larger than this server takes"
                f" ({self.max_model}): start it with a larger --max-model"
            )
        slow = self.too_slow(layout, tables=bool(message.tables))
        if slow is not None:
            raise BadPush(f"the model is too large for this server's bandwidth budget: {slow}")
        check_codecs(message.parts)
        cover = layout.covered(message.parts)
        if not cover.whole:
            raise BadPush("the offered model lacks the values of some tensors: send all of them")
        lengths = [part.nbytes for part in message.parts]
        try:
            buffer = aligned(layout.nbytes)
        except MemoryError:
            raise BadPush(
                f"a model of {layout.nbytes} bytes does not fit into this server's memory"
            ) from None
        self._defining = True
        return OfferSink(buffer, lengths, layout, cover, self, self._surveys_of(layout))

    def offer_ended(self) -> None:
        """Let the next offer be received: this one is complete, or lost."""
        self._defining = False
        self.pool.retry()


class OfferSink(PushSink):
    """The sink of an offered model."""

    __slots__ = ("_admission", "layout")

    def __init__(
        self,
        buffer: Bytes,
        lengths: list[int],
        layout: Layout,
        cover: Cover,
        admission: Admission,
        surveys: Sequence[Surveyor],
    ) -> None:
        super().__init__(buffer, lengths, layout, cover, None, surveys)
        self.layout = layout
        self._admission: Admission | None = admission

    def free(self) -> None:
        """Let the next offer come."""
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.offer_ended()
