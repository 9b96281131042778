"""Coding of a client's gradients: the server's choice of codecs, and the encoders' memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from aiops.codecs import Codec, Encoder, NotFinite, raw
from aiops.codecs.choice import CodecChoice
from aiops.errors import BadPush
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.layout import Array, Bytes, Layout, Tensor
from aiops.model.placement import Placement


@dataclass(eq=False, slots=True, weakref_slot=True)
class Restorable:
    """The way back from one coded tensor of a push that is under way.

    It lives as long as the push can be taken back.

    Attributes
    ----------
    place
        The byte of the arena at which the tensor begins.
    rest
        float32[n], the encoder's rest from before the push; once the encoder's next push is
        encoded, by how much this one changed the rest.
    newest
        Whether it is the encoder's newest push that is.
    """

    place: int
    rest: Array
    newest: bool = True

    def followed(self, rest: Array) -> None:
        """Have another push encoded after it; ``rest`` is the encoder's in between."""
        np.subtract(rest, self.rest, out=self.rest)
        self.newest = False


Encoded = list[Restorable]
"""What was coded of one push."""


class Coding:
    """The encoders of one client, one per tensor, with error feedback.

    A tensor that lies on several shards is coded in pieces, each as a tensor of its own.

    A gradient that is refused may be pushed again, so nothing of it may stay in an encoder:
    `take_back` takes what it has left out from the rest (the error fed back into the next push).
    The rest is then as from before it, bit for bit if that was the newest push, and else, where
    pushes are pipelined, up to rounding.

    Parameters
    ----------
    layout
        The model's tensors.
    choice
        Which codec each is pushed in.
    placement
        Where the model lies, if not on one server.
    parallel_map
        Encodes large tensors in parallel.
    """

    def __init__(
        self,
        layout: Layout,
        choice: CodecChoice,
        placement: Placement | None = None,
        parallel_map: ParallelMap = serial_map,
    ) -> None:
        self._parallel_map = parallel_map
        self._pieces = [
            [(piece, choice.codec(piece)) for piece in _pieces(tensor, placement)]
            for tensor in layout.tensors
        ]
        self._encoders: dict[int, Encoder] = {}  # by where in the arena the piece begins
        # The newest push of each encoder, if it is still under way.
        self._newest: WeakValueDictionary[int, Restorable] = WeakValueDictionary()

    @classmethod
    def planned(
        cls,
        layout: Layout,
        plan: Mapping[str, Any],
        placement: Placement | None = None,
        parallel_map: ParallelMap = serial_map,
    ) -> Coding | None:
        """Return what a client plan asks for; None: everything travels raw.

        A codec that is not known here is not used: a server takes raw tensors at any time.
        """
        choice = CodecChoice.from_announced(plan.get("push_codec", ()))
        return cls(layout, choice, placement, parallel_map) if choice else None

    def coded(self, index: int) -> bool:
        """Return whether a tensor, or a piece of it, travels coded."""
        return any(codec is not None for _piece, codec in self._pieces[index])

    def encode(self, index: int, array: Array, encoded: Encoded) -> list[tuple[Tensor, str, Bytes]]:
        """Return a tensor's pieces (usually one, itself), each with its codec and its payload.

        What is coded is noted in ``encoded``.

        Raises
        ------
        BadPush
            When a value is not finite, or 1e18 or more in magnitude; what was encoded for the same
            push has been taken back.
        """
        pieces = self._pieces[index]
        flat, begin = np.ascontiguousarray(array).reshape(-1), 0
        found = []
        for piece, codec in pieces:
            values = flat[begin : begin + piece.size]
            if codec is None:
                found.append((piece, raw.NAME, values.view(np.uint8)))
            else:
                payload = self._encoded(piece, codec, values, array, begin, encoded)
                found.append((piece, codec.name, payload))
            begin += piece.size
        return found

    def encoder_at(self, place: int, codec: str) -> Encoder:
        """Return the encoder, of this codec, of the piece that begins at a byte of the arena.

        Raises
        ------
        ValueError
            When it has encoded nothing, or codes otherwise: the plan has changed since.
        """
        encoder = self._encoders.get(place)
        if encoder is None or encoder.codec.name != codec:
            raise ValueError(f"no tensor at byte {place} has been encoded in {codec}")
        return encoder

    def _encoder(self, piece: Tensor, codec: Codec) -> Encoder:
        """Make the encoder of a piece."""
        encoder = self._encoders[piece.offset] = codec.encoder(piece.shape, feedback=True)
        encoder.parallel_map = self._parallel_map
        return encoder

    def _encoded(
        self,
        piece: Tensor,
        codec: Codec,
        values: Array,
        array: Array,
        begin: int,
        encoded: Encoded,
    ) -> Bytes:
        encoder = self._encoders.get(piece.offset)
        if encoder is None:
            encoder = self._encoder(piece, codec)
        with np.errstate(over="ignore"):  # a float64 beyond float32: the encoder refuses infinities
            single = values.astype(np.float32, copy=False)
        assert encoder.rest is not None, "it was made with feedback"
        before = encoder.rest.copy()
        try:
            payload = np.frombuffer(encoder.encode(single), np.uint8).copy()
        except NotFinite as fault:
            value = float(single[fault.index])
            raise _refusal(piece.name, array, begin + fault.index, value) from None
        previous = self._newest.get(piece.offset)
        if previous is not None:
            previous.followed(before)
        self._newest[piece.offset] = newest = Restorable(piece.offset, before)
        encoded.append(newest)
        return payload

    def state(self) -> dict[int, Mapping[str, Array]]:
        """Return each encoder's arrays, to be read, by the byte at which its tensor begins."""
        return {place: encoder.state() for place, encoder in self._encoders.items()}

    def planned_arrays(self) -> dict[str, Array]:
        """Return the arrays of fresh encoders of all tensors, by name."""
        found: dict[str, Array] = {}
        for piece, codec in chain.from_iterable(self._pieces):
            if codec is not None:
                arrays = codec.encoder(piece.shape, feedback=True).state()
                found |= {f"{piece.name}/{name}": array for name, array in arrays.items()}
        return found

    def restore(self, state: Mapping[int, Mapping[str, Array]]) -> None:
        """Continue from copies of what `state` returned."""
        for piece, codec in chain.from_iterable(self._pieces):
            if piece.offset in state and codec is not None:
                self._encoder(piece, codec).restore(state[piece.offset])

    def rests(self, encoded: Encoded) -> dict[int, Array]:
        """Return the rests, by place, that `take_back` would restore, for `with_rests`.

        No other push may be under way.
        """
        assert all(each.newest for each in encoded), "a later push has been encoded"
        return {each.place: each.rest for each in encoded}

    def with_rests(self, rests: Mapping[int, Array]) -> Encoded:
        """Return what `take_back` needs of a push that was encoded before `restore`."""
        found: Encoded = []
        for place, before in rests.items():
            rest = self._encoders[place].rest
            if rest is None or before.shape != rest.shape:
                raise ValueError(f"a rest of shape {before.shape} at byte {place}")
            self._newest[place] = newest = Restorable(place, before)
            found.append(newest)
        return found

    def take_back(self, encoded: Encoded) -> None:
        """Forget a push that was refused, or never sent."""
        for each in encoded:
            rest = self._encoders[each.place].rest
            assert rest is not None, "it was made with feedback"
            if each.newest:
                rest[:] = each.rest
                continue
            rest -= each.rest
            newest = self._newest.get(each.place)
            if newest is not None:
                newest.rest -= each.rest
        encoded.clear()


def _pieces(tensor: Tensor, placement: Placement | None) -> list[Tensor]:
    """Return the pieces of a tensor, where it lies on several shards; else itself."""
    if placement is None:
        return [tensor]
    return placement.pieces(tensor)


def _refusal(name: str, array: Array, index: int, value: float) -> BadPush:
    where = tuple(int(i) for i in np.unravel_index(index, array.shape))
    return BadPush(
        f"{name!r} holds {value} at {list(where)}: every value must be finite and"
        " below 1e18 in magnitude; nothing of this push was sent",
        tensor=name,
        value=repr(value),
    )
