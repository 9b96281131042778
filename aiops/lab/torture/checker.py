"""Compare what clients saw with the model: an acknowledged push counts once, another at most once.

A client's pushes are numbered from 0. Push k has digit ``k % digits`` of cell ``k // digits`` in
the client's cells of a float64 model, to base 4: it changes the cell by ``-4 ** digit``. All sums
of fewer than 26 digits are exact, and a digit of 2 is a push that was applied twice. Under a policy
that scales a push by its staleness every push has a cell of its own. So it has under policies with
which the model is no sum of pushes: there `mean_violations` and `touched_violations` count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from aiops.model.layout import Array

DIGITS = 24
"""Pushes to a cell."""

Factors: TypeAlias = Callable[[Array], Array]
"""From the staleness of pushes to the factors with which they count."""

_MOST = 5  # violations of one client that are told


@dataclass(frozen=True, slots=True)
class CellRange:
    """The cells of one client.

    Attributes
    ----------
    first, count
        The first cell, and their number.
    digits
        Pushes to a cell: `DIGITS`, or 1 where each push has a cell of its own.
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
    versions
        The version of each of them.
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
    versions: list[int] = field(default_factory=list)
    ignored: set[int] = field(default_factory=set)
    told: list[str] = field(default_factory=list)
    ended: bool = False
    rolled_back: int = 0

    @classmethod
    def parse(cls, name: str, cells: CellRange, log: bytes, *, lossy: bool = False) -> ClientView:
        """Read a client's log; a last line without its end was not written, as it was killed.

        ``lossy``: versions may go back, as a server may lose what it has acknowledged.
        """
        view, newest = cls(name, cells), 0
        for line in log.split(b"\n")[:-1]:
            kind, _, rest = line.decode(errors="replace").partition(" ")
            if kind == "ack":
                push, version, staleness, used = map(int, rest.split())
                if push != len(view.acknowledged):
                    view.told.append(f"push {push} was acknowledged out of turn")
                if version < newest and not lossy:
                    view.told.append(f"version {newest} was followed by {version} (push {push})")
                newest = version
                if not used:
                    view.ignored.add(push)
                view.acknowledged.append(staleness)
                view.versions.append(version)
            elif kind == "lost":
                view.rolled_back = int(rest)
            elif kind == "end":
                view.ended = True
            else:
                view.told.append(rest)
        return view


def violations(
    model: Array,
    views: Sequence[ClientView],
    *,
    scaled: Factors | None = None,
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
        The factors of pushes, if they depend on their staleness; each has a cell of its own.
    lossy
        Whether acknowledged pushes may be lost: those of which the client was told, and any of one
        that was killed, or had made all its pushes and left, before it could be.
    offered
        Whether a server had lost everything, and was given the model as a worker had it: then
        pushes that are told to be lost may be part of it, and such as were applied and never
        acknowledged, which are ignored when they are sent again.
    """
    found: list[str] = []
    free = np.ones(len(model), bool)
    for view in views:
        cells = view.cells
        free[cells.first : cells.first + cells.count] = False
        amounts = -model[cells.first : cells.first + cells.count]
        if scaled is None:
            wrong = list(_whole(view, amounts, lossy, offered))
        else:
            wrong = list(_scaled(view, amounts, scaled, lossy, offered))
        found += _listed(view, wrong)
    if (model[free] != 0).any():
        found.append("cells of no client have changed")
    return found


def mean_violations(model: Array, version: int, views: Sequence[ClientView]) -> list[str]:
    """Return what contradicts the promise where each version adds the mean of a round of pushes.

    Each push has a cell of its own: it takes 1/d from it, where d pushes are in its round. So what
    all cells have lost is the number of versions, to a rounding error.

    Parameters
    ----------
    model, version
        float64[cells], the model at the end, and its version; it began with zeros as version 0.
    views
        Of all clients that ever pushed.
    """
    rounds = Counter(version for view in views for version in _used(view))
    found: list[str] = []
    for view in views:
        amounts, wrong = _own(model, view), []
        for push, (value, at) in enumerate(zip(amounts, view.versions, strict=False)):
            if push in view.ignored:
                if value:
                    wrong.append(f"push {push} was ignored, as its receipt says, and counts")
                continue
            members = 1 / value if value > 0 else 0.0
            if abs(members - round(members)) > 1e-6 or round(members) < rounds[at]:
                wrong.append(
                    f"push {push} counts {value:g} in a round with {rounds[at]} acknowledged pushes"
                )
        found += _listed(view, [*wrong, *_never(view, amounts)])
    if abs(-model.sum() - version) > 1e-6 * max(version, 1):
        found.append(f"{version} rounds count {-model.sum():g}: a push counts twice, or half")
    return found


def touched_violations(
    model: Array, version: int, views: Sequence[ClientView], *, cells: bool = True
) -> list[str]:
    """Return what contradicts the promise where a push changes its cell, by no known amount.

    Each push is applied at once and has a version, and a cell, of its own. So there are as many
    versions as acknowledged pushes, and as clients that were killed after their last one was
    applied, and no two pushes have the same.

    Parameters
    ----------
    model, version
        float64[cells], the model at the end, and its version; it began with zeros as version 0.
    views
        Of all clients that ever pushed.
    cells
        Whether a push changes its own cell and no other; otherwise versions alone are counted.
    """
    found: list[str] = []
    applied = applied_unseen = 0
    seen: Counter[int] = Counter()
    for view in views:
        amounts, used = _own(model, view), _used(view)
        wrong: list[str] = []
        applied += len(used)
        seen.update(used)
        if cells:
            wrong = [
                f"push {push} was acknowledged, and its cell is {amounts[push]:g}"
                for push in range(len(view.versions))
                if (amounts[push] != 0) == (push in view.ignored)
            ]
            wrong += _never(view, amounts)
            applied_unseen += bool(amounts[len(view.versions)])
        else:
            applied_unseen += not view.ended
        found += _listed(view, wrong)
    twice = sorted(version for version, count in seen.items() if count > 1)
    if twice:
        found.append(f"several pushes were acknowledged as version {twice[0]}")
    if not applied <= version <= applied + applied_unseen or (
        cells and version != applied + applied_unseen
    ):
        found.append(
            f"version {version} has {applied} acknowledged pushes, and {applied_unseen} uncertain"
            " ones"
        )
    return found


def _used(view: ClientView) -> list[int]:
    return [at for push, at in enumerate(view.versions) if push not in view.ignored]


def _own(model: Array, view: ClientView) -> list[float]:
    """Return what a client has taken from its cells, and a cell more than it may use."""
    cells = view.cells
    return [*(-model[cells.first : cells.first + cells.count]).tolist(), 0.0]


def _never(view: ClientView, amounts: Sequence[float]) -> list[str]:
    after = enumerate(amounts[len(view.versions) + 1 :], len(view.versions) + 1)
    return [f"push {push} was never made, and its cell has changed" for push, x in after if x]


def _listed(view: ClientView, wrong: list[str]) -> list[str]:
    more = [f"and {len(wrong) - _MOST:,} more"] if len(wrong) > _MOST else []
    return [f"{view.name}: {text}" for text in (*view.told, *wrong[:_MOST], *more)]


def uncertain(model: Array, view: ClientView) -> bool:
    """Return whether the push after the last acknowledged one is part of the model."""
    push = len(view.acknowledged)
    if push >= view.cells.pushes:
        return False
    cell, amount = view.cells.place(push)
    return bool(-model[cell] >= amount if view.cells.digits > 1 else model[cell] != 0)


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


def _scaled(
    view: ClientView, amounts: Array, scaled: Factors, lossy: bool, offered: bool
) -> Iterator[str]:
    known = len(view.acknowledged)
    counts: Any = amounts.astype(np.float64)
    counts[:known] /= scaled(np.asarray(view.acknowledged, np.float64))
    # The factor of the last push was never told. Nor was that of one which a model that was offered
    # had already, and which was ignored when it was sent again.
    untold = [*(sorted(view.ignored) if offered else ()), *range(known, len(amounts))[:1]]
    counts[untold] = np.sign(amounts[untold])
    for push in untold:
        if amounts[push] > 1:
            yield f"push {push} counts {amounts[push]:g}"
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
    stayed = view.ended and known < view.cells.pushes
    if (lost < view.rolled_back and not offered) or (stayed and lost > view.rolled_back):
        yield f"it was told that {view.rolled_back} of its pushes are lost, and {lost} are"
    for push in (np.flatnonzero(counts[known : known + 1] > 1) + known).tolist():
        yield f"push {push} was not acknowledged and counts {counts[push]} times"
    for push in (np.flatnonzero(counts[known + 1 :]) + known + 1).tolist():
        yield f"push {push} was never made and counts {counts[push]} times"
    for push in view.ignored:
        if push < known and counts[push] == 1 and not offered:
            yield f"push {push} was ignored, as its receipt says, and counts"
