"""A form of coded answers: the header of one, and how increments lie behind it.

Successive answers to steady exchanges have as many increments as the server's replica had versions
in between, so an exchange (`aiops.client.steady_increments`) has several forms, each learnt from an
answer of the general path. Which one an answer has is found by comparing bytes: no byte of the
server's is a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aiops.codecs.whole_answer import WholeAnswer
from aiops.kernels import resolve
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.parts import LARGEST, Parts
from aiops.wire.template import PREFIX, Path, framed, template_of

_BEFORE: Sequence[Path] = (("id",), ("version",), ("current",))
_BEHIND: Sequence[Path] = (("staleness",), ("mean_staleness",))
_STATISTICS: Sequence[Path] = (("vbar",), ("vbars",))


class AnswerPiece(NamedTuple):
    """A payload of a `CodedAnswer`, for compiled code.

    Attributes
    ----------
    check, add
        Of `aiops.codecs.block_codec.Entries`; 0: its bytes are copied.
    start, stop
        The bytes of the arena that it is for.
    begin, nbytes, second
        The payload's bytes in the region, and those before its second section.
    """

    check: int
    add: int
    start: int
    stop: int
    begin: int
    nbytes: int
    second: int


class CodedAnswer:
    """A form of coded answers.

    Parameters
    ----------
    layout
        The model.
    ack
        The header of such an answer, as it came.
    parts
        Its parts.

    Raises
    ------
    ValueError
        When answers like this one need not be alike.

    Attributes
    ----------
    whole
        How its payloads lie behind the header.
    template
        The header in its frame, with the prefix of the first payload, if there is one. What varies:
        the id, four integers (three without parts), a mean, up to two statistics, and the version
        again for each further part.
    size
        The bytes of an answer.
    has_age, further_ages
        Whether it has parts, and so their version; and how often that stands again, at the end of
        what varies.
    has_vbar, has_vbars
        Which statistics it has.
    """

    __slots__ = ("further_ages", "has_age", "has_vbar", "has_vbars", "size", "template", "whole")

    def __init__(self, layout: Layout, ack: bytes, parts: Parts) -> None:
        whole = WholeAnswer.of(layout, parts)
        if whole is None:
            raise ValueError("payloads that differ in length from answer to answer")
        self.whole: WholeAnswer = whole
        self.has_age = bool(parts)
        ages: Sequence[Path] = [("parts", at, 4) for at in range(len(parts))]
        numbers = (*_BEFORE, *ages[:1], *_BEHIND)
        template, found = template_of(
            ack, parts[0].nbytes if parts else None, numbers, (*_STATISTICS, *ages[1:])
        )
        self.has_vbar, self.has_vbars = (path in found for path in _STATISTICS)
        if self.has_vbars and not self.has_vbar:
            raise ValueError("statistics by tensor, and none of the model")
        self.further_ages: int = len(ages[1:])
        bounds = template.bounds
        bounds = bounds[: len(numbers) - 1] + bounds[len(bounds) - self.further_ages :]
        all_vary = [*found[len(found) - self.further_ages :]] == ages[1:]
        if not all_vary or not all(most for _least, most in bounds):
            raise ValueError("integers of a form that this client does not write")
        self.template = template
        self.size = template.size + whole.nbytes

    def values(self, header: bytes) -> tuple[Any, ...] | None:
        """Return the values of a header in its frame; None: it is of another form.

        They are the id, version, current version, version of the tensors (None without parts),
        staleness, its mean, and the statistics. None also where an answer may not have them.
        """
        found: Any = self.template.values(header)
        if found is None:
            return None
        if not self.has_age:
            found = (*found[:3], None, *found[3:])
        count = len(found) - self.further_ages
        found, ages = found[:count], found[count:]
        integers = [each for each in found[1:5] if each is not None]
        fits = max(integers) <= LARGEST and found[5] - found[5] == 0.0  # the mean is finite
        fits = fits and not (self.has_vbar and found[6] - found[6] != 0.0)
        return found if fits and all(age == found[3] for age in ages) else None

    def has_form(self, ack: bytes) -> bool:
        """Return whether this is the form of a header."""
        data = framed(ack, self.whole.parts[0].nbytes) if self.has_age else framed(ack, 0)[:-PREFIX]
        return self.template.values(data) is not None

    def fits(self, room: memoryview) -> bool:
        """Return whether what lies behind the header in a buffer is what is announced."""
        return self.whole.fits(self._region(room))

    def add(self, room: memoryview, into: Arena) -> None:
        """Bring parameters up to date with what fits."""
        self.whole.add(self._region(room), into)

    def _region(self, room: memoryview) -> Any:
        return np.frombuffer(room, np.uint8)[self.template.size : self.size]

    def compiled(self) -> tuple[AnswerPiece, ...] | None:
        """Return the payloads for compiled code; None: their loops cannot be compiled.

        The loops are compiled now, if they are not yet.
        """
        if resolve("auto") != "numba":
            return None
        found: list[AnswerPiece] = []
        for piece in self.whole.pieces:
            place = piece.start, piece.stop, piece.begin, piece.nbytes
            if piece.codec is None:
                found.append(AnswerPiece(0, 0, *place, 0))
            else:
                entries = piece.codec.enter()
                found.append(AnswerPiece(entries.check, entries.add, *place, piece.second))
        return tuple(found)
