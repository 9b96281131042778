"""The interface of codecs: how a float32 tensor is encoded as bytes, and decoded.

A `Codec` is a value, its settings. An `Encoder` belongs to one tensor of one client, because with
error feedback (Seide et al. 2014, Karimireddy et al. 2019) it keeps what a payload left out and
adds it to the next tensor. Decoding needs no settings: a payload holds all that is needed. A
payload is checked before it is decoded, and `Codec.check` is safe on any bytes.

The NumPy functions are the specification; Numba's loops give the same bytes and the same floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from aiops.common.settings import read_settings
from aiops.errors import AiopsError, UsageError
from aiops.kernels import current_backend, surveyor
from aiops.kernels.parallel import ParallelMap, serial_map, survey

__all__ = [
    "HEADER",
    "LIMIT",
    "Bytes",
    "Codec",
    "Encoder",
    "Floats",
    "NotFinite",
    "Shape",
    "check_choices",
    "elements",
    "header_fault",
    "length_fault",
    "one_of",
    "read_header",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Shape = Sequence[int]

HEADER = 8
"""Bytes of the header of codecs that have one: uint32, a number; uint8, a form; three of 0."""

LIMIT = 1e18
"""The bound of decoded values: each is smaller in magnitude, as `aiops.kernels.survey` requires."""

SINGLE = np.dtype(np.float32)


class NotFinite(AiopsError, ValueError):
    """The tensor to be encoded holds NaN, an infinity, or 1e18 or more, first at ``index``."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(
            f"element {index} of the tensor is {value:g}, and what is encoded must be finite and"
            " below 1e18 in magnitude; skip this step",
            index=index,
        )
        self.index = index


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A way of encoding float32 tensors; the fields are its settings, each with a default."""

    name: ClassVar[str] = ""
    """The name in a part's ``codec``: 1 to 16 characters."""
    accumulates: ClassVar[bool] = False
    """Whether, with error feedback, a payload may add up many tensors: most of each is left out."""

    @classmethod
    def make(cls, settings: str = "") -> Self:
        """Make a codec from settings as a user writes them.

        Parameters
        ----------
        settings
            ``"fraction=0.01,values=bf16"``; a value without a name, ``"0.01"``, is the first
            setting's.

        Raises
        ------
        UsageError
            For an unknown or repeated setting, or a value of another type.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        return cls(**read_settings(f"codec {cls.name!r}", settings, defaults, first=True))

    @property
    def settings(self) -> str:
        """The text from which `make` makes an equal codec: ``"fraction=0.01"``."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        return ",".join(
            f"{field.name}={value}"
            for index, (field, value) in enumerate(values)
            if index == 0 or value != field.default
        )

    @property
    def spec(self) -> str:
        """The text of which `aiops.codecs.find` makes an equal codec: ``"topk:fraction=0.01"``."""
        written, kind = self.settings, type(self)
        ours = kind.__module__.startswith("aiops.codecs.")
        name = self.name if ours else f"{kind.__module__}:{kind.__qualname__}"
        return f"{name}:{written}" if written else name

    def most(self, shape: Shape) -> int:
        """Return the largest length of a payload of a float32 tensor of this shape, in bytes."""
        raise NotImplementedError

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """Return an encoder for one tensor of this shape, to be used for every step.

        Parameters
        ----------
        shape
            Of the tensor.
        feedback
            Whether to keep what a payload leaves out, and add it to the next tensor.
        backend
            ``"numba"``, ``"numpy"`` or ``"auto"``; all give the same bytes.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """Return what is wrong with a payload, such as ``"has 3 bytes instead of 8"``, or None.

        None: :meth:`decode` stays within the payload and the tensor, and gives finite values below
        1e18 in magnitude. Safe on any bytes.
        """
        raise NotImplementedError

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
        """Decode a payload into ``out``, float32[n], or with ``add`` add it to that.

        The payload must have passed :meth:`check` for this shape. A class overrides this or
        :meth:`pieces`.
        """
        serial_map(cls.pieces(payload, shape, out, add=add, backend=backend))

    @classmethod
    def pieces(
        cls,
        payload: Bytes,
        shape: Shape,
        out: Floats,
        *,
        add: bool = False,
        backend: str = "auto",
    ) -> Sequence[Callable[[], None]]:
        """Return :meth:`decode` in pieces, which several threads may call in any order."""
        return [partial(cls.decode, payload, shape, out, add=add, backend=backend)]

    @classmethod
    def warm(cls) -> None:
        """Compile the loops now, so that no payload waits for it; Numba must be installed."""


class Encoder:
    """Writes one tensor of one client, step after step; derive a class with :meth:`write`.

    Attributes
    ----------
    rest
        float32[n], the sum of what was encoded less what was decoded of it; None without feedback.
    payload
        uint8, room for the codec's `Codec.most` bytes.
    parallel_map
        Runs the pieces of a large tensor; by default one after the other. The bytes do not depend
        on it.
    """

    def __init__(self, codec: Codec, shape: Shape, *, feedback: bool, backend: str) -> None:
        self.codec = codec
        self.shape: tuple[int, ...] = tuple(shape)
        self.size: int = elements(shape)
        self._requested = backend
        self.rest: Floats | None = np.zeros(self.size, np.float32) if feedback else None
        self.payload: Bytes = np.empty(codec.most(shape), np.uint8)
        self._survey = surveyor(SINGLE, backend)
        self._last: memoryview | None = None
        self.parallel_map: ParallelMap = serial_map

    @property
    def backend(self) -> str:
        """The backend that encodes now: ``"numba"`` or ``"numpy"``."""
        return current_backend(self._requested)

    def encode(self, values: Floats) -> memoryview:
        """Encode a tensor, float32[n], and return its payload, which is valid until the next call.

        With feedback, ``values + rest`` is encoded, and ``rest`` becomes what that loses; a sum of
        1e18 or more is encoded as less, and the rest keeps the difference. ``values`` stay as they
        are.

        Raises
        ------
        NotFinite
            When a value is not finite, or is 1e18 or more in magnitude; ``rest`` is unchanged.
        UsageError
            When the array is not float32 and contiguous, or has another number of elements.
        """
        if values.dtype != SINGLE or values.size != self.size or not values.flags.c_contiguous:
            raise UsageError(
                f"the encoder of {self.size} elements was given {values.dtype} of shape"
                f" {values.shape}; pass a contiguous float32 array of that many elements"
            )
        flat = values.reshape(-1)
        if not flat.size:
            self._last = None
            return memoryview(b"")
        self.survey(flat)
        self._last = self.payload[: self.write(flat)].data
        return self._last

    def survey(self, values: Floats) -> None:
        """Raise `NotFinite` if an element cannot be encoded."""
        self._refuse_unfit(values, 0, survey(self._survey, values, self.parallel_map))

    def write(self, values: Floats) -> int:
        """Encode float32[n] (n > 0, all finite) into ``payload``; return the bytes written."""
        raise NotImplementedError

    def take_back(self) -> None:
        """Add what the last payload held to ``rest``, because the server refused it.

        Without feedback, or a second time for one payload, nothing happens.
        """
        if self.rest is not None and self._last is not None:
            payload = np.frombuffer(self._last, np.uint8)
            kind = type(self.codec)
            kind.decode(payload, self.shape, self.rest, add=True, backend=self.backend)
        self._last = None

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the arrays on which later payloads depend, by name, to be read.

        By default that is ``rest``, with feedback. An encoder that keeps more between two tensors
        overrides this and `restore`.
        """
        return {} if self.rest is None else {"rest": self.rest}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from copies of what `state` returned, on an encoder made alike."""
        for name, array in self.state().items():
            np.copyto(array, arrays[name])
        self._last = None

    def _refuse_unfit(self, values: Floats, start: int, index: int) -> None:
        if index >= 0:
            raise NotFinite(start + index, float(values[index]))


def one_of(default: str, *others: str) -> Any:
    """Return a dataclass field whose value is one of these words, as `check_choices` requires."""
    return field(default=default, metadata={"choices": (default, *others)})


def check_choices(codec: Codec) -> None:
    """Raise UsageError when a setting made by `one_of` is none of its words."""
    for each in fields(codec):
        choices = each.metadata.get("choices")
        value = getattr(codec, each.name)
        if choices and value not in choices:
            raise UsageError(
                f"codec {codec.name!r}: {each.name} cannot be {value!r}; choose from"
                f" {', '.join(choices)}"
            )


def elements(shape: Shape) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)


def length_fault(payload: Bytes, expected: int) -> str | None:
    """Return that a payload is not of the expected length, in bytes, or None."""
    if len(payload) == expected:
        return None
    return f"has {len(payload)} bytes instead of {expected}"


def header_fault(payload: Bytes, size: int, forms: Sequence[str]) -> str | None:
    """Return what is wrong with the `HEADER` of a tensor's payload, but for its number, or None.

    A tensor without elements (``size`` 0) has an empty payload.
    """
    if not size:
        return length_fault(payload, 0)
    if len(payload) < HEADER:
        return f"has {len(payload)} bytes, and its header alone {HEADER}"
    if payload[4] >= len(forms) or payload[5:HEADER].any():
        return f"has the form {bytes(payload[4:HEADER]).hex()}, which is none"
    return None


def read_header(payload: Bytes) -> tuple[int, int]:
    """Return the number and the form in the `HEADER` of a payload."""
    return int(payload[:4].view("<u4")[0]), int(payload[4])
