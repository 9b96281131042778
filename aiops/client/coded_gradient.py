"""The coded gradient of a steady exchange: it is encoded into one region, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aiops.client.coding import Coding, Encoded
from aiops.codecs.base import Bytes, Encoder, NotFinite
from aiops.codecs.whole_gradient import WholeGradient
from aiops.kernels import resolve
from aiops.model.layout import Array, Layout
from aiops.model.parts import Parts


class CodedPiece(NamedTuple):
    """A payload of a `CodedGradient`, for compiled code.

    Attributes
    ----------
    encode
        Of `aiops.codecs.block_codec.Entries`; 0: its tensors are copied.
    first, last, start
        The tensors, and the first byte of the arena.
    begin, nbytes, second
        The payload's bytes in the region, and those before its second section.
    rest, before
        float32[n] each: what the encoder has left out, and the same before the last push; None
        where nothing is encoded.
    """

    encode: int
    first: int
    last: int
    start: int
    begin: int
    nbytes: int
    second: int
    rest: Array | None
    before: Array | None


class CodedGradient:
    """The payloads of one push at a time, and the way back from it.

    Parameters
    ----------
    whole
        How they lie in the region.
    coding
        The client's encoders, each of which has encoded before.

    Raises
    ------
    ValueError
        When it has none for one of the payloads.

    Attributes
    ----------
    region
        The payloads of the last push, with the prefixes between them.
    whole
        As above.
    begun
        Whether the encoders may have changed for a push that is not under way yet.
    """

    def __init__(self, whole: WholeGradient, coding: Coding) -> None:
        self.whole, self._coding = whole, coding
        self.region: Bytes = whole.region()
        self.begun = False
        self._encoders: list[Encoder | None] = [
            None if piece.codec is None else coding.encoder_at(piece.start, piece.codec.name)
            for piece in whole.pieces
        ]
        self._before = [
            None if encoder is None else np.zeros(encoder.size, np.float32)
            for encoder in self._encoders
        ]

    @classmethod
    def of(cls, layout: Layout, parts: Parts, coding: Coding) -> CodedGradient | None:
        """Return that of pushes in parts like those of one that was encoded; None: there is none.

        See `WholeGradient.of`.
        """
        whole = WholeGradient.of(layout, parts)
        return None if whole is None else cls(whole, coding)

    def encode(self, arrays: Sequence[Array]) -> bool:
        """Encode the gradients of all tensors, which have their dtypes and shapes; it is `begun`.

        False: a value of one cannot be encoded, and the encoders are as they were.
        """
        for encoder, before in zip(self._encoders, self._before, strict=True):
            if encoder is not None and before is not None:
                before[:] = encoder.rest
        self.begun = True
        try:
            for piece, encoder in zip(self.whole.pieces, self._encoders, strict=True):
                payload = self.whole.payload(self.region, piece)
                if encoder is None:
                    flat = [array.reshape(-1) for array in arrays[piece.first : piece.last]]
                    payload[:] = np.concatenate(flat).view(np.uint8)
                else:
                    payload[:] = np.frombuffer(encoder.encode(arrays[piece.first]), np.uint8)
        except NotFinite:
            self.take_back()
            return False
        return True

    def take_back(self) -> None:
        """Have the encoders be as before a push that has `begun`; else they stay."""
        if not self.begun:
            return
        for encoder, before in zip(self._encoders, self._before, strict=True):
            if encoder is not None and encoder.rest is not None and before is not None:
                encoder.rest[:] = before
        self.begun = False

    def request(self, version: int) -> tuple[Parts, list[list[memoryview]], Encoded]:
        """Return the last push as one of the general path: its parts, payloads, and way back.

        ``version``: that of its tensors.
        """
        parts = tuple(part._replace(version=version) for part in self.whole.parts)
        payloads = [
            [self.whole.payload(self.region, piece).copy().data] for piece in self.whole.pieces
        ]
        rests = {
            piece.start: before.copy()
            for piece, before in zip(self.whole.pieces, self._before, strict=True)
            if before is not None
        }
        return parts, payloads, self._coding.with_rests(rests)

    def compiled(self) -> list[CodedPiece] | None:
        """Return the payloads for compiled code; None: their loops cannot be compiled.

        The loops are compiled now, if they are not yet.
        """
        if resolve("auto") != "numba":
            return None
        found: list[CodedPiece] = []
        for piece, encoder, before in zip(
            self.whole.pieces, self._encoders, self._before, strict=True
        ):
            place = piece.first, piece.last, piece.start, piece.begin, piece.nbytes
            if piece.codec is None or encoder is None:
                found.append(CodedPiece(0, *place, 0, None, None))
                continue
            entries = piece.codec.enter()
            found.append(CodedPiece(entries.encode, *place, piece.second, encoder.rest, before))
        return found
