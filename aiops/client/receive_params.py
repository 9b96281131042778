"""Sinks that put arriving parameters into a client's arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiops.client.params import Params
from aiops.codecs import Codec, codec_named, raw
from aiops.errors import BadPush, Refused, RemoteProtocolError
from aiops.kernels.parallel import ParallelMap, copy, serial_map
from aiops.model.layout import Bytes, Ints, Tensor, level_of
from aiops.model.parts import Part, Parts, Wants
from aiops.model.placement import Pieces, Placement
from aiops.wire.shared_payloads import LentPayload
from aiops.wire.sinks import Sink


def wants_of(params: Params, wanted: Ints | None) -> tuple[int, Wants]:
    """Return what to ask for: the model version held, or runs of tensors with theirs.

    Parameters
    ----------
    params
        What is held.
    wanted
        The tensors to ask for, in arena order; None: all.
    """
    if wanted is None and params.level is not None:
        return params.level, ()
    held = params.held
    if wanted is None:
        if not len(held):
            return params.version, ()
        level = level_of(held)
        if level is not None:
            return level, ()
        wanted = params.layout.all
    if not len(wanted):
        return params.version, ()
    breaks = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(held[wanted]) != 0)) + 1
    firsts = wanted[np.concatenate(([0], breaks))]
    lasts = wanted[np.concatenate((breaks, [len(wanted)])) - 1] + 1
    runs = zip(firsts.tolist(), lasts.tolist(), held[firsts].tolist(), strict=True)
    return params.version, tuple(runs)


class ParameterSink(Sink):
    """The sink of one answer: raw parts go straight into the arena, increments beside it.

    The arrays of raw parts are a mixture of two versions until all has come, and are marked so;
    increments are added when the answer is complete, and leave no mixture. An increment is from the
    version that was held when it was asked for. Where another answer has brought the tensor further
    since (requests are pipelined), it comes too late, and is left out.

    Parameters
    ----------
    params
        Where they belong.
    parts
        What has been announced.
    have, wants
        What was asked for (without ``wants``: all), and which versions were held then.
    server
        The server's URL, for error texts.
    parallel_map
        Copies a lent model in parallel.
    pieces
        The model's tensors as they are coded, if they lie on several shards. How long an increment
        is that comes from another shard is not known before it comes.

    Raises
    ------
    RemoteProtocolError
        When these are other tensors than were asked for, or not all of those that were lacking.
    """

    parts: Parts

    def __init__(
        self,
        params: Params,
        parts: Parts,
        have: int,
        wants: Wants,
        server: str,
        parallel_map: ParallelMap = serial_map,
        pieces: Pieces | None = None,
    ) -> None:
        self._params, self.parts, self._server = params, parts, server
        self._parallel_map, self._cut = parallel_map, pieces
        self._data: memoryview | None = None  # of the arena, once something is written there
        layout = params.layout
        whole = len(parts) == 1 and parts[0][:4] == (0, layout.nbytes, raw.NAME, layout.nbytes)
        self._staged: dict[int, tuple[type[Codec], Bytes]] = {}  # increments: codec and payload
        self._whole = whole and not wants
        self.missing: set[int] = set()  # shards whose portions have not come
        if self._whole:
            self._tensors = layout.all
            params.now_at(-1)  # as `mark` does
            return
        self._from = np.full(len(params.held), have, np.int64)
        for first, last, held in wants:
            self._from[first:last] = held
        plain = tuple(part for part in parts if part.codec == raw.NAME)
        for number, part in enumerate(parts):
            if part.codec != raw.NAME:
                self._staged[number] = self._room(part)
        try:
            self._tensors = layout.covered(plain).tensors if plain else np.empty(0, np.int64)
        except BadPush as error:
            text = f"{server} sent parts that do not make up tensors of the model: {error}"
            raise RemoteProtocolError(text) from None
        self._check(wants)
        self.mark()

    @classmethod
    def of_shards(
        cls,
        params: Params,
        parts: Parts,
        have: int,
        wants: Wants,
        server: str,
        parallel_map: ParallelMap,
        placement: Placement,
    ) -> ParameterSink:
        """Return the sink of an answer of the lead's, of which other shards send portions.

        ``parts`` are those that the lead has announced. Raises as the constructor does.
        """
        try:
            pieces = placement.announced_pieces(parts, increments=True)
        except Refused as error:
            raise RemoteProtocolError(f"{server} sent {error}") from None
        whole = tuple(part for portion in pieces for part in portion)
        sink = cls(params, whole, have, wants, server, parallel_map, placement.all)
        sink.missing = {shard for shard in range(1, len(pieces)) if pieces[shard]}
        return sink

    @property
    def whole(self) -> bool:
        """True if this is the whole model, raw, perhaps in the server's memory."""
        return self._whole

    def mark(self) -> None:
        """Mark what is on its way raw: it may be a mixture until all has come."""
        if self._whole:
            self._params.now_at(-1)
        else:
            self._params.held[self._tensors] = -1

    def _check(self, wants: Wants) -> None:
        """Check that the parts were asked for, and that all lacking tensors come."""
        params = self._params
        asked = np.full(len(params.held), not wants)
        for first, last, _have in wants:
            asked[first:last] = True
        # A part also covers the tensors without elements at its edges, asked for or not.
        self._tensors = self._tensors[(asked | (params.layout.sizes > 0))[self._tensors]]
        lacking = asked & (self._from < 0) & (params.layout.sizes > 0)
        lacking[self._tensors] = False
        asked_for = asked[self._tensors].all() and all(
            asked[self._tensor_of(self.parts[number])] for number in self._staged
        )
        if lacking.any() or not asked_for:
            raise RemoteProtocolError(
                f"{self._server} sent parts that do not make up the tensors that were asked for"
            )

    def _room(self, part: Part) -> tuple[type[Codec], Bytes]:
        """Return an increment's codec, and room for it.

        Nothing is taken for one that cannot be right.
        """
        index = self._tensor_of(part)
        tensor = self._params.layout.tensors[index] if index >= 0 else None
        known = codec_named(part.codec)
        if tensor is None or tensor.dtype != np.float32 or part.nbytes > part.stop - part.start:
            raise RemoteProtocolError(f"{self._server} sent an increment of no tensor: {part}")
        if known is None:
            raise RemoteProtocolError(
                f"{self._server} sent an increment in the codec {part.codec!r}, which is not known"
                " here"
            )
        if self._from[index] < 0:
            raise RemoteProtocolError(
                f"{self._server} sent an increment of {tensor.name!r}, which is not held here"
            )
        return known, np.empty(part.nbytes, np.uint8)

    def announced(self, expected: Sequence[int], parts: Parts) -> bool:
        """Take note of what a shard sends of it; say whether that was announced.

        ``expected``: which parts these are.
        """
        if len(expected) != len(parts):
            return False
        whole = list(self.parts)
        for number, part in zip(expected, parts, strict=True):
            if number in self._staged and whole[number] == part._replace(nbytes=0):
                self._staged[number] = self._room(part)
            elif whole[number] != part:
                return False
            whole[number] = part
        self.parts = tuple(whole)
        return True

    def _tensor_of(self, part: Part) -> int:
        """Return the tensor of which a part is the range, or that of a piece; or -1."""
        if self._cut is not None:
            piece = self._cut.number(part.start, part.stop)
            return int(self._cut.owners[piece]) if piece >= 0 else -1
        index = self._params.layout.tensor_at(part.start)
        tensor = self._params.layout.tensors[index]
        fits = tensor.offset == part.start and tensor.offset + tensor.nbytes == part.stop
        return index if fits else -1

    def _piece_of(self, part: Part) -> Tensor:
        """Return the piece, if not the tensor, of which a part is the range."""
        if self._cut is not None:
            return self._cut.tensors[self._cut.number(part.start, part.stop)]
        return self._params.layout.tensors[self._tensor_of(part)]

    def view(self, part: int, offset: int) -> memoryview:
        """Return where the rest of a part belongs."""
        staged = self._staged.get(part)
        if staged is not None:
            return staged[1].data[offset:]
        if self._data is None:
            self._data = self._params.own().data.data
        return self._data[self.parts[part].start + offset : self.parts[part].stop]

    def adopt(self, lent: LentPayload) -> bool:
        """Take over a lent model: in place if the parameters permit it, else as a copy."""
        if not self._whole:
            return False
        if not self._params.lend(lent):
            copy(self._params.own().data, lent.data, self._parallel_map)
            lent.give_back()
        return True

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Nothing is looked at before all of it is there."""

    def abandoned(self) -> None:
        """The tensors on their way stay marked."""

    def finish(self) -> tuple[int, ...]:
        """All of it is there: add the increments, and note the tensors' versions.

        Returns the tensors whose increments came too late; they are what they were before.

        Raises
        ------
        RemoteProtocolError
            When an increment is not what its codec writes; none has been added then.
        """
        params, layout = self._params, self._params.layout
        if self._whole:  # the usual case
            params.age = self.parts[0].version
            return ()
        staged = {self._tensor_of(self.parts[number]) for number in self._staged}
        late = {tensor for tensor in staged if params.held[tensor] != self._from[tensor]}
        for number, (codec, payload) in self._staged.items():
            part = self.parts[number]
            tensor = self._piece_of(part)
            fault = codec.check(payload, tensor.shape)
            if fault is not None:
                raise RemoteProtocolError(
                    f"{self._server} sent an increment of {tensor.name!r} that is no {part.codec}:"
                    f" {fault}"
                )
        for number, part in enumerate(self.parts):
            if number in self._staged:
                if self._tensor_of(part) in late:
                    continue
                tensor = layout.tensors[self._tensor_of(part)]
                codec, payload = self._staged[number]
                first = (part.start - tensor.offset) // tensor.dtype.itemsize
                piece = self._piece_of(part)
                out = params.own().views[tensor.name].reshape(-1)[first : first + piece.size]
                codec.decode(payload, piece.shape, out, add=True)
                params.versions[layout.index[tensor.name]] = part.version
                continue
            first = layout.first_from(part.start)
            last = layout.first_from(part.stop)
            params.versions[first : len(layout.tensors) if part.stop == layout.nbytes else last] = (
                part.version
            )
        params.find_age()  # nearly always of one version
        return tuple(late)


class PortionSink(Sink):
    """The sink of one shard's portion of an answer.

    Parameters
    ----------
    into
        The sink of the whole answer.
    first
        Which of its parts is the portion's first.
    """

    def __init__(self, into: ParameterSink, first: int) -> None:
        self._into, self._first = into, first

    def view(self, part: int, offset: int) -> memoryview:
        """Return where the rest of a part belongs."""
        return self._into.view(self._first + part, offset)

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Nothing is looked at before all of it is there."""

    def abandoned(self) -> None:
        """The tensors on their way stay marked."""
