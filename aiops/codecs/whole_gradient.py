"""Coded gradients of a whole model, as they lie in one message, push after push.

Of most models every push has the same parts, with payloads of the same lengths: tensors in a
`BlockCodec`, and runs of small ones raw. All that follows the prefix of the first payload is then
one region of bytes: the payloads in order, and between them the prefixes of the others. Both sides
have that region in one buffer, and nothing of it is parsed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from aiops.codecs import codec_named
from aiops.codecs.base import Bytes
from aiops.codecs.block_codec import BlockCodec
from aiops.codecs.raw import NAME as RAW
from aiops.kernels import numba_pending, resolve
from aiops.kernels.payloads import FORMATS
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.parts import Parts

PREFIX = struct.Struct(">BI")
BINARY = 0xC6  # MessagePack's bin 32

MOST = 256
"""The most parts of such a gradient."""


class GradientPiece(NamedTuple):
    """A payload of the region, or of that of an answer (`aiops.codecs.whole_answer`).

    Attributes
    ----------
    begin, nbytes
        Its bytes in the region.
    start, stop
        The bytes of the arena that it is for.
    first, last
        The tensors: [first, last).
    codec
        Of the only one; None: they are raw.
    """

    begin: int
    nbytes: int
    start: int
    stop: int
    first: int
    last: int
    codec: type[BlockCodec] | None

    @property
    def size(self) -> int:
        """The number of elements."""
        return (self.stop - self.start) // 4

    @property
    def second(self) -> int:
        """Bytes of the first section of a coded payload, behind which the second begins."""
        assert self.codec is not None
        return self.codec.second(self.size)


def laid_out(layout: Layout, parts: Parts) -> tuple[tuple[GradientPiece, ...], int] | None:
    """Return how the payloads of parts lie in one region, and its bytes; None: not in a known way.

    That is known if the parts are of equal version and cover all of the model in order, each one a
    raw range or a tensor in a `BlockCodec`. A coded tensor may come several times, one after the
    other. The region is not longer than the model.
    """
    pieces: list[GradientPiece] = []
    at, region = 0, 0
    if len(parts) > MOST or layout.within is not None:
        return None
    for part in parts:
        start, stop, name, nbytes, version = part
        again = bool(pieces) and pieces[-1].codec is not None and name != RAW
        again = again and (start, stop) == (pieces[-1].start, pieces[-1].stop)
        if not (start < stop <= layout.nbytes and version == parts[0].version):
            return None
        if not (start == at or again):
            return None
        codec, first = None, layout.tensor_at(start)
        last = layout.first_from(stop) if stop < layout.nbytes else len(layout.tensors)
        if name != RAW:
            known, tensor = codec_named(name), layout.tensors[first]
            if known is None or not issubclass(known, BlockCodec) or name not in FORMATS:
                return None
            if (tensor.offset, tensor.offset + tensor.nbytes) != (start, stop):
                return None
            if tensor.dtype != np.float32:
                return None
            codec, last = known, first + 1
        if nbytes != (stop - start if codec is None else codec.length((stop - start) // 4)):
            return None
        region += PREFIX.size if pieces else 0
        pieces.append(GradientPiece(region, nbytes, start, stop, first, last, codec))
        at, region = stop, region + nbytes
    return (tuple(pieces), region) if at == layout.nbytes and region <= at else None


def are_ready(pieces: Sequence[GradientPiece], backend: str) -> bool:
    """Return whether nothing has to be compiled for the codecs of pieces.

    ``backend``: the requested one.
    """
    if numba_pending():
        return False
    codecs = {piece.codec for piece in pieces if piece.codec is not None}
    return all(codec.entered() for codec in codecs) or resolve(backend) == "numpy"


def is_introduced(region: Bytes, piece: GradientPiece) -> bool:
    """Return whether the prefix of a payload lies before it; the first one's is not in a region."""
    if not piece.begin:
        return True
    return PREFIX.unpack_from(region.data, piece.begin - PREFIX.size) == (BINARY, piece.nbytes)


class WholeGradient(NamedTuple):
    """The region of such a gradient.

    Attributes
    ----------
    parts, pieces
        The parts of the first such push; their payloads, in order.
    nbytes
        The bytes of the region.
    between
        Those of them that are prefixes.
    """

    parts: Parts
    pieces: Sequence[GradientPiece]
    nbytes: int
    between: int

    @classmethod
    def of(cls, layout: Layout, parts: Parts) -> WholeGradient | None:
        """Return the region of gradients that travel in these parts; None: there is none.

        There is one if the model is of float32 alone, some parts are coded and all codecs are
        `BlockCodec`, and the parts are of equal version and cover all tensors, none of them twice.
        It is not longer than the model.
        """
        if [section.dtype for section in layout.sections] != [np.float32]:
            return None
        if not parts or any(part[0] == before[0] for before, part in pairwise(parts)):
            return None
        found = laid_out(layout, parts)
        if found is None:
            return None
        pieces, region = found
        if all(piece.codec is None for piece in pieces):
            return None
        return cls(parts, pieces, region, PREFIX.size * (len(pieces) - 1))

    def is_ready(self, backend: str) -> bool:
        """Return whether nothing has to be compiled before gradients are decoded.

        ``backend``: the requested one.
        """
        return are_ready(self.pieces, backend)

    def region(self) -> Bytes:
        """Return a region with the prefixes, for payloads to be written into."""
        made: Bytes = np.zeros(self.nbytes, np.uint8)
        for piece in self.pieces[1:]:
            PREFIX.pack_into(made.data, piece.begin - PREFIX.size, BINARY, piece.nbytes)
        return made

    def payload(self, region: Bytes, piece: GradientPiece) -> Bytes:
        """Return a piece's payload, a view of a region."""
        return region[piece.begin : piece.begin + piece.nbytes]

    def decode(self, region: Bytes, into: Arena) -> bool:
        """Decode a received region into ``into``, where it is one; raw values are not surveyed.

        False: it is none, and what ``into`` holds then is of no meaning. Safe on any bytes.
        """
        for piece in self.pieces:
            if not is_introduced(region, piece):
                return False
            payload, shape = self.payload(region, piece), (piece.size,)
            out = into.data[piece.start : piece.stop]
            if piece.codec is None:
                out[:] = payload
            elif piece.codec.check(payload, shape) is None:
                piece.codec.decode(payload, shape, out.view(np.float32))
            else:
                return False
        return True
