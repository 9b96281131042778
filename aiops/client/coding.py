"""How a client's gradients are coded: the server's choice, and the encoders with their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.codecs import Encoder, NotFinite
from aiops.codecs.choice import Choice
from aiops.errors import BadPush
from aiops.layout import Array, Bytes, Layout, Tensor

Encoded = list[tuple[int, Bytes, Array]]
"""The tensors of one push that were coded: their payloads, and the encoder's rest before each."""


class Coding:
    """The encoders of one client, one per tensor, with error feedback.

    A gradient that is refused is its owner's again, who may push it anew, so nothing of it may stay
    in an encoder: `take_back` makes the rest what it was before.

    Parameters
    ----------
    layout
        The model's tensors.
    choice
        Which codec each is pushed in.
    """

    def __init__(self, layout: Layout, choice: Choice) -> None:
        self._layout = layout
        self._codecs = [choice.codec(tensor) for tensor in layout.tensors]
        self._encoders: dict[int, Encoder] = {}
        self._last: dict[int, Bytes] = {}  # the newest payload of each encoder

    @classmethod
    def planned(cls, layout: Layout, plan: Mapping[str, Any]) -> Coding | None:
        """Return what a client plan asks for; None: everything travels raw.

        A codec that is not known here is not used: a server takes raw tensors at any time.
        """
        choice = Choice.told(plan.get("push_codec", ()))
        return cls(layout, choice) if choice else None

    def coded(self, index: int) -> bool:
        """Whether a tensor travels coded."""
        return self._codecs[index] is not None

    def encode(self, index: int, array: Array, encoded: Encoded) -> tuple[str, Bytes]:
        """Return a tensor's codec and its payload, and note it in ``encoded``.

        Raises
        ------
        BadPush
            When a value is not finite, or 1e18 or more in magnitude; what was encoded for the same
            push has been taken back.
        """
        tensor, codec = self._layout.tensors[index], self._codecs[index]
        assert codec is not None
        encoder = self._encoders.get(index)
        if encoder is None:
            encoder = self._encoders[index] = codec.encoder(tensor.shape, feedback=True)
        with np.errstate(over="ignore"):  # a float64 beyond float32: the encoder refuses infinities
            flat = np.ascontiguousarray(array).reshape(-1).astype(np.float32, copy=False)
        assert encoder.rest is not None, "it was made with feedback"
        before = encoder.rest.copy()
        try:
            payload = np.frombuffer(encoder.encode(flat), np.uint8).copy()
        except NotFinite as fault:
            raise self._refusal(tensor, fault, flat) from None
        encoded.append((index, payload, before))
        self._last[index] = payload
        return codec.name, payload

    def take_back(self, encoded: Encoded) -> None:
        """Forget a push that was refused, or never sent.

        Where another push of the tensor has been encoded since (of requests that were pipelined),
        its rest is left alone: it has what this payload had left out.
        """
        for index, payload, before in encoded:
            rest = self._encoders[index].rest
            if rest is not None and self._last.get(index) is payload:
                rest[:] = before
        encoded.clear()

    def _refusal(self, tensor: Tensor, fault: NotFinite, flat: Array) -> BadPush:
        where = tuple(int(i) for i in np.unravel_index(fault.index, tensor.shape))
        value = float(flat[fault.index])
        return BadPush(
            f"{tensor.name!r} holds {value} at {list(where)}: every value must be finite and"
            " below 1e18 in magnitude; nothing of this push was sent",
            tensor=tensor.name,
            value=repr(value),
        )
