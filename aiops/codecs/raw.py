"""``raw``: encode the elements as they lie in memory, little endian, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aiops.codecs.base import Bytes, Codec, Encoder, Floats, Shape, elements, length_fault
from aiops.kernels import survey
from aiops.model.layout import Array

NAME = "raw"


def encode(array: Array) -> memoryview:
    """Return the bytes of a tensor: the array's own memory when it is contiguous.

    Parameters
    ----------
    array
        Any shape; float64, float32, float16 or bfloat16, little endian.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data


@dataclass(frozen=True, kw_only=True)
class Raw(Codec):
    """float32 as it is, 4 bytes per element: the codec for code that treats all codecs alike."""

    name: ClassVar[str] = NAME

    def most(self, shape: Shape) -> int:
        """Return the length of every payload of a tensor of this shape, in bytes."""
        return 4 * elements(shape)

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """Return an encoder that copies, so that a payload stays as it is."""
        return _RawEncoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """Return that the length is wrong, or which element is not finite or too large, or None."""
        fault = length_fault(payload, 4 * elements(shape))
        if fault or not payload.size:
            return fault
        values = payload.view("<f4")
        index = survey(values, backend)
        return None if index < 0 else f"has {float(values[index]):g} for element {index}"

    @classmethod
    def decode(
        cls,
        payload: Bytes,
        shape: Shape,
        out: Floats,
        *,
        add: bool = False,
        backend: str = "auto",
    ) -> None:
        """Copy a checked payload to ``out``, or add it to that."""
        values = payload.view("<f4")
        np.add(out, values, out=out) if add else np.copyto(out, values)


class _RawEncoder(Encoder):
    def write(self, values: Floats) -> int:
        self.payload.view("<f4")[:] = values
        if self.rest is not None:  # what was taken back is sent again
            np.clip(np.add(values, self.rest), -_MOST, _MOST, out=self.payload.view("<f4"))
            self.rest += values - self.payload.view("<f4")
        return len(self.payload)


_MOST = np.nextafter(np.float32(1e18), np.float32(0.0))
