"""Compare what clients saw with the model: an acknowledged push counts once, another at most once.

A client's pushes are numbered from 0. Push k has digit ``k % digits`` of cell ``k // digits`` in
the client's cells of a float64 model, to base 4: it changes the cell by ``-4 ** digit``. All sums
of fewer than 26 digits are exact, and a digit of 2 is a push that was applied twice. Under a policy
that scales a push by its staleness every push has a cell of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiops.model.layout import Array

DIGITS = 24
"""Pushes to a cell."""

_MOST = 5  # violations of one client that are told


@dataclass(frozen=True, slots=True)
class CellRange:
    """The cells of one client.

    Attributes
    ----------
    first, count
        The first cell, and their number.
    digits
        Pushes to a cell: `DIGITS`, or 1 where a push is scaled by its staleness.
    """

    first: int
    count: int
    digits: int = DIGITS

    @property
    def pushes(self) -> int:
        """The number of pushes that they have places for."""
        return self.count * self.digits

    def place(self, push: int) -> tuple[int, float]:
        """Return the cell of a push and the amount that it takes from it.

        >>> CellRange(10, 4, 24).place(25)
        (11, 4.0)
        """
        cell, digit = divmod(push, self.digits)
        return self.first + cell, 4.0**digit


@dataclass(slots=True)
class ClientView:
    """The acknowledgements that one client saw.

    Attributes
    ----------
    name
        The client's.
    cells
        Its cells.
    acknowledged
        The staleness of each acknowledged push, in order; the push after them is uncertain.
    ignored
        The acknowledged pushes that the server said it did not use.
    told
        What the client itself found wrong.
    ended
        Whether it ended by itself.
    rolled_back
        The acknowledged pushes of which it was told that the server has lost them.
    """

    name: str
    cells: CellRange
    acknowledged: list[int] = field(default_factory=list)
    ignored: set[int] = field(default_factory=set)
    told: list[str] = field(default_factory=list)
    ended: bool = False
    rolled_back: int = 0

    @classmethod
    def parse(cls, name: str, cells: CellRange, log: bytes) -> ClientView:
        """Read a client's log; a last line without its end was not written, as it was killed."""
        view, newest = cls(name, cells), 0
        for line in log.split(b"\n")[:-1]:
            kind, _, rest = line.decode(errors="replace").partition(" ")
            if kind == "ack":
                push, version, staleness, used = map(int, rest.split())
                if push != len(view.acknowledged):
                    view.told.append(f"push {push} was acknowledged out of turn")
                if version < newest:
                    view.told.append(f"version {newest} was followed by {version} (push {push})")
                newest = version
                if not used:
                    view.ignored.add(push)
                view.acknowledged.append(staleness)
            elif kind == "end":
                view.ended = True
            else:
                view.told.append(rest)
        return view


def violations(
    model: Array,
    views: Sequence[ClientView],
    *,
    scaled: bool = False,
    lossy: bool = False,
    offered: bool = False,
) -> list[str]:
    """Return what contradicts the promise, one sentence each.

    Parameters
    ----------
    model
        float64[cells], the model at the end; it began with zeros.
    views
        Of all clients that ever pushed.
    scaled
        Whether a push is divided by its staleness.
    lossy
        Whether acknowledged pushes may be lost: those of which the client was told, and any of one
        that was killed before it could be.
    offered
        Whether a server had lost everything, and was given the model as a worker had it: then
        pushes that are told to be lost may be part of it.
    """
    found: list[str] = []
    free = np.ones(len(model), bool)
    for view in views:
        cells = view.cells
        free[cells.first : cells.first + cells.count] = False
        amounts = -model[cells.first : cells.first + cells.count]
        wrong = list((_scaled if scaled else _whole)(view, amounts, lossy, offered))
        more = [f"and {len(wrong) - _MOST:,} more"] if len(wrong) > _MOST else []
        found += [f"{view.name}: {text}" for text in (*view.told, *wrong[:_MOST], *more)]
    if (model[free] != 0).any():
        found.append("cells of no client have changed")
    return found


def uncertain(model: Array, view: ClientView) -> bool:
    """Return whether the push after the last acknowledged one is part of the model."""
    push = len(view.acknowledged)
    if push >= view.cells.pushes:
        return False
    cell, amount = view.cells.place(push)
    return bool(-model[cell] >= amount)


def _whole(view: ClientView, amounts: Array, lossy: bool, offered: bool) -> Iterator[str]:
    digits = view.cells.digits
    if (amounts != np.floor(amounts)).any() or (amounts < 0).any() or (amounts >= 4.0**26).any():
        yield "a cell holds no sum of pushes"
        return
    whole = amounts.astype(np.int64)[:, None]
    counts = (whole >> (2 * np.arange(digits))) & 3
    if (whole >> (2 * digits)).any():
        yield "a cell holds more than its pushes"
    yield from _judge(view, counts.reshape(-1), lossy, offered)


def _scaled(view: ClientView, amounts: Array, lossy: bool, offered: bool) -> Iterator[str]:
    known = np.asarray(view.acknowledged, np.float64)
    last = amounts[len(known) : len(known) + 1]  # its staleness was never told
    whole = [amounts[: len(known)] * np.maximum(known, 1), np.sign(last), amounts[len(known) + 1 :]]
    if last.size and last[0] > 1:
        yield f"push {len(known)} counts {last[0]:g}"
    counts: Any = np.concatenate(whole)
    rounded = np.rint(counts)
    if not np.allclose(counts, rounded, rtol=0, atol=1e-9):
        yield "a push has another factor than its receipt says"
    yield from _judge(view, rounded.astype(np.int64), lossy, offered)


def _judge(view: ClientView, counts: Array, lossy: bool, offered: bool) -> Iterator[str]:
    """Yield a sentence for each push that counts otherwise than promised."""
    known = len(view.acknowledged)
    lost = 0
    for push in np.flatnonzero(counts[:known] != 1).tolist():
        wanted = 0 if push in view.ignored else 1
        if lossy and wanted == 1 and counts[push] == 0:
            lost += 1
        elif counts[push] != wanted:
            yield f"push {push} was acknowledged and counts {counts[push]} times, not {wanted}"
    if (lost < view.rolled_back and not offered) or (view.ended and lost > view.rolled_back):
        yield f"it was told that {view.rolled_back} of its pushes are lost, and {lost} are"
    for push in (np.flatnonzero(counts[known : known + 1] > 1) + known).tolist():
        yield f"push {push} was not acknowledged and counts {counts[push]} times"
    for push in (np.flatnonzero(counts[known + 1 :]) + known + 1).tolist():
        yield f"push {push} was never made and counts {counts[push]} times"
    for push in view.ignored:
        if push < known and counts[push] == 1:
            yield f"push {push} was ignored, as its receipt says, and counts"
