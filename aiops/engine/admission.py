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
from aiops.bandwidth.units import too_slow
from aiops.codecs import BUILT_IN, codec_named, raw
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.receive import CodedIncoming, PushSink, RawIncoming
from aiops.errors import BadPush, NotReady, Refused, UsageError, nearest
from aiops.kernels.parallel import LARGE, ParallelMap, serial_map, survey
from aiops.kernels.scan import Surveyor
from aiops.model.arena import aligned
from aiops.model.layout import Bytes, Cover, Layout
from aiops.model.parts import Parts
from aiops.model.tables import MAX_ROWS_BYTES
from aiops.wire.messages import Define, FetchRows, Message, Push, PushRows
from aiops.wire.sinks import Discard, Sink

_ROOM = 64 << 20  # bytes: the bound on the buffers of pushes, unless `buffers` models are larger


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
    parallel_map
        Threads that share the survey of large payloads.
    make
        Makes a buffer for a push.
    """

    def __init__(
        self,
        max_model: int,
        backend: str = "auto",
        buffers: int = 4,
        *,
        parallel_map: ParallelMap = serial_map,
        make: Callable[[int], Bytes] = aligned,
    ) -> None:
        self.max_model = max_model
        self._backend, self._parallel_map = backend, parallel_map
        self._surveys: list[Surveyor] = []  # one per section
        self.buffers = buffers
        self.pool, self.answers = BufferPool(_ROOM, make), BufferPool(4 * MAX_ROWS_BYTES)
        self.lacking = self.pool  # where `sink_for` found no room last
        self.layout: Layout | None = None
        self.rows_sink_for: Callable[[FetchRows | PushRows], Sink | None] | None = None
        self._defining = False
        self.budget: int | None = None  # bytes per second that a client may move

    def too_slow(self, layout: Layout) -> str | None:
        """Return why the bandwidth budget cannot carry a model, or None."""
        if self.budget is None:
            return None
        return too_slow(self.budget, ((t.name, t.nbytes) for t in layout.tensors))

    def defined(self, layout: Layout) -> None:
        """Check pushes against this model from now on."""
        self.layout, self._surveys = layout, self._surveys_of(layout)
        self.pool.bound = max(_ROOM, self.buffers * layout.nbytes)

    @property
    def surveyors(self) -> list[Surveyor]:
        """One surveyor per section, which returns the index of its first bad value, or -1."""
        assert self.layout is not None
        return [kernels.surveyor(s.dtype, self._backend) for s in self.layout.sections]

    @property
    def pools(self) -> tuple[BufferPool, BufferPool]:
        """The pool of pushes, and the pool of requests for rows."""
        return self.pool, self.answers

    def _surveys_of(self, layout: Layout) -> list[Surveyor]:
        found = [kernels.surveyor(section.dtype, self._backend) for section in layout.sections]
        if layout.nbytes < LARGE:  # too small to share among threads
            return found
        return [partial(survey, find, parallel_map=self._parallel_map) for find in found]

    def sink_for(self, message: Message) -> Sink | None:
        """Return the sink of a message's payloads; None: no room now, wait in `lacking`'s line."""
        self.lacking = self.pool
        try:
            if type(message) is Push:
                return self._place_push(message)
            if isinstance(message, FetchRows | PushRows):
                if self.rows_sink_for is None:
                    raise NotReady("no worker has defined the model yet: a worker must do it")
                return self.rows_sink_for(message)
            if isinstance(message, Define):
                return self._place_define(message)
        except Refused as fault:
            return Discard(fault)
        return Discard(BadPush(f"a {message.kind!r} carries no payload"))

    def _place_push(self, message: Push) -> Sink | None:
        if self.layout is None:
            raise NotReady("no worker has defined the model yet: define it before the first push")
        parts = message.parts
        if len(parts) == 1 and parts[0].codec == raw.NAME:  # the usual case
            cover, nbytes = self.layout.covered(parts), parts[0].nbytes
            buffer = self.pool.take(nbytes)
            if buffer is None:
                return None
            return RawIncoming(buffer, [nbytes], self.layout, cover, self.pool, self._surveys)
        check_codecs(parts, coded=True)
        cover = self.layout.covered(parts)
        lengths = [part.nbytes for part in parts]
        buffer = self.pool.take(sum(lengths))
        if buffer is None:
            return None
        if any(part.codec != raw.NAME for part in parts):
            return CodedIncoming(buffer, parts, self.layout, cover, self.pool, self._surveys)
        return RawIncoming(buffer, lengths, self.layout, cover, self.pool, self._surveys)

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
        slow = self.too_slow(layout)
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

    __slots__ = ("_intake", "layout")

    def __init__(
        self,
        buffer: Bytes,
        lengths: list[int],
        layout: Layout,
        cover: Cover,
        intake: Admission,
        surveys: Sequence[Surveyor],
    ) -> None:
        super().__init__(buffer, lengths, layout, cover, None, surveys)
        self.layout = layout
        self._intake: Admission | None = intake

    def free(self) -> None:
        """Let the next offer come."""
        if self._intake is not None:
            intake, self._intake = self._intake, None
            intake.offer_ended()


def check_codecs(parts: Parts, *, coded: bool = False) -> None:
    """Refuse a codec that this server does not decode; without ``coded`` all but raw."""
    for part in parts:
        if part.codec == raw.NAME or (coded and codec_named(part.codec) is not None):
            continue
        if coded:
            raise BadPush(
                f"codec {part.codec!r} is not known here; {nearest(part.codec, BUILT_IN)}"
            )
        raise BadPush(f"codec {part.codec!r} is only for gradients of tensors: send this raw")
