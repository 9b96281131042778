"""What a codec is: a way of writing a float32 tensor's bytes, and of reading them again.

A `Codec` is a value, its settings; an `Encoder` belongs to one tensor of one client, because with
error feedback (Seide et al. 2014, Karimireddy et al. 2019) it keeps what a payload left out and
adds it to the next tensor. Reading needs no settings: a payload says all. A payload is checked
before it is read, and whoever checks it may be sent any bytes at all.

The NumPy functions are the specification; Numba's loops give the same bytes and the same floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from aiops.errors import AiopsError, UsageError, nearest
from aiops.kernels import at_hand, surveyor
from aiops.kernels.sharing import LARGE, PIECE, ParallelMap, serial_map, survey

__all__ = [
    "CHUNK",
    "LIMIT",
    "Bytes",
    "ChunkEncoder",
    "Codec",
    "Encoder",
    "Floats",
    "NotFinite",
    "Shape",
    "check_choices",
    "choice",
    "elements",
    "length_fault",
    "parts",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Shape = Sequence[int]

LIMIT = 1e18
"""No decoded value may have this magnitude; see `aiops.kernels.survey`."""

CHUNK = 65_536
"""Elements looked over and then encoded while they are in cache; a multiple of every block."""

SINGLE = np.dtype(np.float32)


class NotFinite(AiopsError, ValueError):
    """A tensor that was to be encoded holds NaN, an infinity, or 1e18 or more; see ``index``."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(
            f"element {index} of the tensor is {value:g}, and what is encoded must be finite and"
            " below 1e18 in magnitude; skip this step",
            index=index,
        )
        self.index = index


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One way of writing float32 tensors; the fields are its settings, each with a default."""

    name: ClassVar[str] = ""
    """What a part's ``codec`` says: at most 16 characters."""
    saves_up: ClassVar[bool] = False
    """Whether, with error feedback, a payload may be many times one tensor: most is left out."""

    @classmethod
    def make(cls, settings: str = "") -> Self:
        """Make one of settings as a user writes them: ``"0.01"``, ``"fraction=0.01,values=bf16"``.

        A value without a name is the first setting's. Raises
        :class:`~aiops.errors.UsageError` for a setting that is none, or a value that cannot be.
        """
        known = {field.name: field for field in fields(cls)}
        given: dict[str, Any] = {}
        for index, item in enumerate(settings.split(",") if settings else ()):
            word, equals, text = (part.strip() for part in item.partition("="))
            if not equals:
                if index or not known:
                    raise UsageError(
                        f"codec {cls.name!r} cannot read {item!r}; "
                        + ("write setting=value" if known else "it has no settings")
                    )
                word, text = next(iter(known)), word
            if word not in known:
                hint = nearest(word, known) if known else "it has none"
                raise UsageError(f"codec {cls.name!r} has no setting {word!r}; {hint}")
            if word in given:
                raise UsageError(f"codec {cls.name!r} was given {word!r} twice; leave one out")
            given[word] = _value(cls.name, word, type(known[word].default), text)
        return cls(**given)

    @property
    def settings(self) -> str:
        """What `make` makes this of: ``"fraction=0.01"``."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        return ",".join(
            f"{field.name}={value}"
            for index, (field, value) in enumerate(values)
            if index == 0 or value != field.default
        )

    @property
    def spec(self) -> str:
        """What a user writes to get this: ``"topk:fraction=0.01"``; ``find(spec)`` equals it."""
        written, kind = self.settings, type(self)
        ours = kind.__module__.startswith("aiops.codecs.")
        name = self.name if ours else f"{kind.__module__}:{kind.__qualname__}"
        return f"{name}:{written}" if written else name

    def most(self, shape: Shape) -> int:
        """Return the most bytes that a payload of a float32 tensor of this shape can have."""
        raise NotImplementedError

    def encoder(self, shape: Shape, *, feedback: bool, backend: str = "auto") -> Encoder:
        """Return what writes one tensor of this shape, again and again.

        ``feedback``: keep what a payload leaves out, and add it to the next tensor. ``backend`` is
        ``"numba"``, ``"numpy"`` or ``"auto"``; all give the same bytes.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, payload: Bytes, shape: Shape, backend: str = "auto") -> str | None:
        """Say in half a sentence what is wrong with a payload (``"has 3 bytes instead of 8"``).

        Return None when :meth:`decode` may read it: then it lies within its own bounds and the
        tensor's, and gives finite values below 1e18. Safe on any bytes.
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
        """Write the tensor, flat, to ``out`` (float32[n]), or add it to that.

        The payload has passed :meth:`check` for this shape.
        """
        raise NotImplementedError

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
        """Return :meth:`decode` in pieces, which several threads may do in any order."""
        return [partial(cls.decode, payload, shape, out, add=add, backend=backend)]

    @classmethod
    def warm(cls) -> None:
        """Compile Numba's loops, which is installed, so that no payload has to wait for it."""


class Encoder:
    """Writes one tensor of one client, step after step; derive one with :meth:`write`.

    ``rest`` is float32[n], what has been encoded so far less what was decoded of it, or None
    without feedback. ``payload`` has room for the codec's ``most`` bytes. ``parallel_map`` may be
    set: who shares the work of a large tensor; the bytes do not depend on it.
    """

    def __init__(self, codec: Codec, shape: Shape, *, feedback: bool, backend: str) -> None:
        self.codec = codec
        self.shape = tuple(shape)
        self.size = elements(shape)
        self._wish = backend
        self.rest: Floats | None = np.zeros(self.size, np.float32) if feedback else None
        self.payload: Bytes = np.empty(codec.most(shape), np.uint8)
        self._survey = surveyor(SINGLE, backend)
        self._last: memoryview | None = None
        self.parallel_map: ParallelMap = serial_map

    @property
    def backend(self) -> str:
        """Who writes now: ``"numba"`` or ``"numpy"``."""
        return at_hand(self._wish)

    def encode(self, values: Floats) -> memoryview:
        """Write a tensor, float32[n], and return its payload, which is valid until the next call.

        With feedback what is written is ``values + rest``, and ``rest`` becomes what that loses.
        ``values`` are left alone. A sum of 1e18 or more is written as less; the rest keeps it.

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
        self.look_over(flat)
        self._last = self.payload[: self.write(flat)].data
        return self._last

    def look_over(self, values: Floats) -> None:
        """Raise `NotFinite` if an element is unfit."""
        self._refuse_unfit(values, 0, survey(self._survey, values, self.parallel_map))

    def write(self, values: Floats) -> int:
        """Encode float32[n] (n > 0, all fit) into ``payload``; return how many bytes that took."""
        raise NotImplementedError

    def take_back(self) -> None:
        """Put what the last payload held back into ``rest``: it was refused, nobody applied it.

        Without feedback, or a second time for one payload, nothing happens.
        """
        if self.rest is not None and self._last is not None:
            payload = np.frombuffer(self._last, np.uint8)
            kind = type(self.codec)
            kind.decode(payload, self.shape, self.rest, add=True, backend=self.backend)
        self._last = None

    def _refuse_unfit(self, values: Floats, start: int, index: int) -> None:
        if index >= 0:
            raise NotFinite(start + index, float(values[index]))


class ChunkEncoder(Encoder):
    """Writes a tensor chunk by chunk, each looked over just before, while it is in cache."""

    def look_over(self, values: Floats) -> None:
        """Look over everything first where there is a rest, which an error must not change."""
        if self.rest is not None:
            super().look_over(values)

    def write(self, values: Floats) -> int:
        """Encode chunk after chunk; the payload's length does not depend on the values."""
        unfit: list[tuple[int, int]] = []

        def write(begin: int, end: int) -> None:
            for start in range(begin, end, CHUNK):
                chunk = values[start : start + CHUNK]
                index = self._survey(chunk) if self.rest is None else -1
                if index >= 0:
                    unfit.append((start, index))
                    return
                rest = _NO_REST if self.rest is None else self.rest[start : start + CHUNK]
                self.write_chunk(chunk, rest, start)

        if values.nbytes < LARGE:
            write(0, self.size)
        else:
            self.parallel_map([partial(write, *part) for part in parts(self.size)])
        if unfit:
            start, index = min(unfit)
            self._refuse_unfit(values[start:], start, index)
        return len(self.payload)

    def write_chunk(self, values: Floats, rest: Floats, start: int) -> None:
        """Encode the elements from ``start`` on; ``rest`` is empty without feedback."""
        raise NotImplementedError


def parts(size: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last of the elements that one thread takes at a time: whole chunks."""
    each = CHUNK * max(1, PIECE // (4 * CHUNK))
    for start in range(0, size, each):
        yield start, min(start + each, size)


_NO_REST: Floats = np.empty(0, np.float32)


def choice(default: str, *others: str) -> Any:
    """Return a dataclass field that is one of some words; see `check_choices`."""
    return field(default=default, metadata={"choices": (default, *others)})


def check_choices(codec: Codec) -> None:
    """Raise UsageError when a setting made by `choice` is none of its words."""
    for each in fields(codec):
        choices = each.metadata.get("choices")
        value = getattr(codec, each.name)
        if choices and value not in choices:
            raise UsageError(
                f"codec {codec.name!r}: {each.name} cannot be {value!r}; choose from"
                f" {', '.join(choices)}"
            )


def elements(shape: Shape) -> int:
    """Return how many elements a tensor of this shape has."""
    return math.prod(shape)


def length_fault(payload: Bytes, expected: int) -> str | None:
    """Say that a payload is not as long as it has to be, if so."""
    if len(payload) == expected:
        return None
    return f"has {len(payload)} bytes instead of {expected}"


def _value(codec: str, word: str, kind: type, text: str) -> Any:
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"codec {codec!r}: {word} is {what}, not {text!r}") from None
