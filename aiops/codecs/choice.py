"""Which codec each tensor travels in, one direction at a time.

What a user writes is a list, of which the last that fits a tensor's name counts:
``["topk:0.01", "int8@embedding.*", "raw@*.bias"]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from aiops.codecs import codec_named, find
from aiops.codecs.base import Codec
from aiops.errors import UsageError
from aiops.model.layout import Tensor

SMALL = 1024
"""Tensors of fewer bytes travel raw: they are no burden, and biases want to be exact."""


@dataclass(frozen=True)
class CodecChoice:
    """The codecs of one direction: pairs of a pattern of names and a codec, the last to fit."""

    pairs: tuple[tuple[str, Codec], ...] = ()

    @classmethod
    def of(cls, specs: Sequence[str]) -> CodecChoice:
        """Read what a user wrote: ``codec`` or ``codec@pattern`` each.

        Raises
        ------
        UsageError
            When there is no such codec, or a setting cannot be.
        """
        pairs = []
        for spec in specs:
            codec, at, pattern = spec.strip().rpartition("@")
            if not at:
                codec, pattern = pattern, "*"
            if not codec or not pattern:
                raise UsageError(f"{spec!r} is no choice of a codec: write codec or codec@pattern")
            pairs.append((pattern, find(codec)))
        return cls(tuple(pairs))

    @classmethod
    def told(cls, rows: Any) -> CodecChoice | None:
        """Read what the other side announces; None if it has a codec that is not known here."""
        pairs = []
        try:
            for pattern, name, settings in rows:
                codec = codec_named(name)
                if codec is None:
                    return None
                pairs.append((str(pattern), codec.make(settings)))
        except (TypeError, ValueError, AttributeError, UsageError):
            return None
        return cls(tuple(pairs))

    @property
    def announced(self) -> list[list[str]]:
        """What `told` reads: pattern, name and settings of each."""
        return [[pattern, codec.name, codec.settings] for pattern, codec in self.pairs]

    def codec(self, tensor: Tensor) -> Codec | None:
        """Return how a tensor travels; None: raw, which is also for what would not get shorter."""
        found = None
        for pattern, codec in self.pairs:
            if fnmatchcase(tensor.name, pattern):
                found = codec
        if found is None or found.name == "raw" or tensor.nbytes < SMALL:
            return None
        return found if found.most(tensor.shape) < tensor.nbytes else None

    def __bool__(self) -> bool:
        return any(codec.name != "raw" for _pattern, codec in self.pairs)
