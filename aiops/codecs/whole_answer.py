"""Coded answers of a whole model, as they lie behind the header of one message.

A client that fetches coded has a version of the server's replica, and is sent the increments since:
for each tensor as many payloads as there were versions, each in a `BlockCodec`; and runs of small
tensors raw. As with a gradient (`aiops.codecs.whole_gradient`), all that follows the prefix of the
first payload is one region of bytes, of a length that does not depend on the values. An answer may
also have no part at all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from aiops.codecs.base import Bytes
from aiops.codecs.whole_gradient import PREFIX, GradientPiece, are_ready, is_introduced, laid_out
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.parts import Parts


class WholeAnswer(NamedTuple):
    """The region of such an answer.

    Attributes
    ----------
    parts, pieces
        The parts of the first such answer; their payloads, in order.
    nbytes
        The bytes of the region.
    between
        Those of them that are prefixes.
    """

    parts: Parts
    pieces: tuple[GradientPiece, ...]
    nbytes: int
    between: int

    @classmethod
    def of(cls, layout: Layout, parts: Parts) -> WholeAnswer | None:
        """Return the region of answers in these parts; None: there is none, as of `laid_out`."""
        if not parts:
            return cls(parts, (), 0, 0)
        found = laid_out(layout, parts)
        return None if found is None else cls(parts, *found, PREFIX.size * (len(parts) - 1))

    def is_ready(self, backend: str) -> bool:
        """Return whether nothing has to be compiled before increments are added.

        ``backend``: the requested one.
        """
        return are_ready(self.pieces, backend)

    def fits(self, region: Bytes) -> bool:
        """Return whether a received region is one: its prefixes, and all increments. Any bytes."""
        return all(
            is_introduced(region, piece)
            and (
                piece.codec is None
                or piece.codec.check(_payload(region, piece), _shape(piece)) is None
            )
            for piece in self.pieces
        )

    def add(self, region: Bytes, into: Arena) -> None:
        """Copy what is raw of a region that fits, and add the increments in order."""
        for piece in self.pieces:
            payload, out = _payload(region, piece), into.data[piece.start : piece.stop]
            if piece.codec is None:
                out[:] = payload
            else:
                piece.codec.decode(payload, _shape(piece), out.view(np.float32), add=True)


def _payload(region: Bytes, piece: GradientPiece) -> Bytes:
    return region[piece.begin : piece.begin + piece.nbytes]


def _shape(piece: GradientPiece) -> tuple[int]:
    return (piece.size,)
