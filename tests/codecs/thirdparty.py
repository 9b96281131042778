"""A third party's codec: signs alone, in one file, with NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aiops.codecs.base import Codec, Encoder, elements, length_fault


@dataclass(frozen=True, kw_only=True)
class Signs(Codec):
    """Each element is its sign times ``size``; the payload says the size, too."""

    name: ClassVar[str] = "signs"

    size: float = 1.0
    note: str = "none"

    def most(self, shape):
        return 4 + elements(shape)

    def encoder(self, shape, *, feedback, backend="auto"):
        return SignsEncoder(self, shape, feedback=feedback, backend=backend)

    @classmethod
    def check(cls, payload, shape, backend="auto"):
        return length_fault(payload, 4 + elements(shape))

    @classmethod
    def decode(cls, payload, shape, out, *, add=False, backend="auto"):
        values = payload[4:].view(np.int8) * payload[:4].view("<f4")
        out[:] = out + values if add else values


class SignsEncoder(Encoder):
    def write(self, values):
        if self.rest is not None:
            self.rest += values
            values = self.rest
        size = np.float32(self.codec.size)
        self.payload[:4].view("<f4")[:] = size
        self.payload[4:].view(np.int8)[:] = signs = np.sign(values)
        if self.rest is not None:
            self.rest -= signs * size
        return len(self.payload)


@dataclass(frozen=True, kw_only=True)
class Nameless(Signs):
    name: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Thief(Signs):
    name: ClassVar[str] = "int8"


@dataclass(frozen=True, kw_only=True)
class Double(Signs):
    name: ClassVar[str] = "signs"


@dataclass(frozen=True, kw_only=True)
class Unset(Signs):
    name: ClassVar[str] = "unset"

    table: object = None


@dataclass(frozen=True, kw_only=True)
class NoEncoder(Codec):
    name: ClassVar[str] = "no-encoder"

    def most(self, shape):
        return 4


class Unwritten(Encoder):
    def wrte(self, values):
        return len(self.payload)


@dataclass(frozen=True, kw_only=True)
class NoWrite(Signs):
    name: ClassVar[str] = "no-write"

    def encoder(self, shape, *, feedback, backend="auto"):
        return Unwritten(self, shape, feedback=feedback, backend=backend)


@dataclass(frozen=True, kw_only=True)
class NoReturn(Signs):
    name: ClassVar[str] = "no-return"

    def encoder(self, shape, *, feedback, backend="auto"):
        super().encoder(shape, feedback=feedback, backend=backend)


@dataclass(frozen=True, kw_only=True)
class NoDecode(NoWrite):
    name: ClassVar[str] = "no-decode"
    decode = Codec.decode


@dataclass(frozen=True, kw_only=True)
class Failing(Signs):
    name: ClassVar[str] = "failing"

    @classmethod
    def decode(cls, payload, shape, out, *, add=False, backend="auto"):
        raise IndexError("there is no such thing")


@dataclass(frozen=True, kw_only=True)
class Refusing(Signs):
    name: ClassVar[str] = "refusing"

    @classmethod
    def check(cls, payload, shape, backend="auto"):
        return f"has {len(payload)} bytes instead of {4 + elements(shape)}"


@dataclass(frozen=True, kw_only=True)
class Infinite(Signs):
    name: ClassVar[str] = "infinite"

    @classmethod
    def decode(cls, payload, shape, out, *, add=False, backend="auto"):
        out[:] = np.inf


@dataclass(frozen=True, kw_only=True)
class Adding(Signs):
    name: ClassVar[str] = "adding"

    @classmethod
    def decode(cls, payload, shape, out, *, add=False, backend="auto"):
        super().decode(payload, shape, out, add=True, backend=backend)


@dataclass(frozen=True, kw_only=True)
class Overwriting(Signs):
    name: ClassVar[str] = "overwriting"

    @classmethod
    def decode(cls, payload, shape, out, *, add=False, backend="auto"):
        super().decode(payload, shape, out, add=False, backend=backend)


@dataclass(frozen=True, kw_only=True)
class ForLarge(Signs):
    """It makes small tensors no smaller, and has no encoder for them."""

    name: ClassVar[str] = "for-large"

    def most(self, shape):
        return super().most(shape) if elements(shape) > 1000 else 4 * elements(shape) + 4

    def encoder(self, shape, **how):
        assert elements(shape) > 1000
        return super().encoder(shape, **how)


@dataclass(frozen=True, kw_only=True)
class ForNone(ForLarge):
    name: ClassVar[str] = "for-none"

    def most(self, shape):
        return 4 * elements(shape)
