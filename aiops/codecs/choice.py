"""Choose the codec of each tensor, for one direction at a time.

A user gives a list of codecs with patterns of names; the last that matches a tensor's name counts:
``["topk:0.01", "int8@embedding.*", "raw@*.bias"]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from aiops.codecs import codec_named, find
from aiops.codecs.base import Codec
from aiops.common.patterns import unmatched
from aiops.errors import UsageError
from aiops.model.layout import Tensor

SMALL = 1024
"""Bytes; smaller tensors are sent raw: they cost little, and biases should be exact."""


@dataclass(frozen=True)
class CodecChoice:
    """The codecs of one direction: pairs of a name pattern and a codec; the last match counts."""

    pairs: tuple[tuple[str, Codec], ...] = ()

    @classmethod
    def of(cls, specs: Sequence[str]) -> CodecChoice:
        """Return the choice that a user wrote: ``codec`` or ``codec@pattern`` each.

        Raises
        ------
        UsageError
            When a codec is unknown, or a setting is not allowed.
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
    def from_announced(cls, rows: Any) -> CodecChoice | None:
        """Return the choice in a message (as `announced`), or None if a codec is unknown here."""
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
        """Pattern, codec name and settings of each pair, as sent in messages."""
        return [[pattern, codec.name, codec.settings] for pattern, codec in self.pairs]

    def codec(self, tensor: Tensor) -> Codec | None:
        """Return the codec of a tensor, or None for raw, also where coding would not shorten it."""
        found = None
        for pattern, codec in self.pairs:
            if fnmatchcase(tensor.name, pattern):
                found = codec
        if found is None or found.name == "raw" or tensor.nbytes < SMALL:
            return None
        return found if found.most(tensor.shape) < tensor.nbytes else None

    def unmatched(self, tensors: Sequence[str]) -> str | None:
        """Return which pattern matches none of a model's tensors, in words; None: each does."""
        given = ((each, f"{codec.name}@{each}") for each, codec in self.pairs if each != "*")
        return unmatched(given, tensors)

    def __bool__(self) -> bool:
        return any(codec.name != "raw" for _pattern, codec in self.pairs)
