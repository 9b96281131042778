"""How a client's gradients are coded: the server's choice, and the encoders with their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.codecs import Encoder, NotFinite
from aiops.codecs.choice import Choice
from aiops.errors import BadPush
from aiops.layout import Array, Bytes, Layout, Tensor

Encoded = list[tuple[int, Bytes]]
"""The tensors of one push that were coded, and their payloads."""


class Coding:
    """The encoders of one client, one per tensor, with error feedback.

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
        flat = np.ascontiguousarray(array).reshape(-1).astype(np.float32, copy=False)
        try:
            payload = np.frombuffer(encoder.encode(flat), np.uint8).copy()
        except NotFinite as fault:
            self.take_back(encoded)
            raise self._refusal(tensor, fault, flat) from None
        encoded.append((index, payload))
        return codec.name, payload

    def take_back(self, encoded: Encoded) -> None:
        """Keep for the next push what one has carried that was refused."""
        for index, payload in encoded:
            encoder = self._encoders[index]
            if encoder.rest is not None:
                shape = self._layout.tensors[index].shape
                encoder.codec.decode(payload, shape, encoder.rest, add=True)
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
