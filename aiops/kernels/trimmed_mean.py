"""The mean of each coordinate over several gradients, without its largest and smallest values.

The rule of a number of gradients is a sorting network in the vocabulary of all rules, so every
backend has it from one text: compare and exchange is a `minimum` and a `maximum`. What is sorted
does not depend on the order in which the values came, nor does the sum of the middle, to the bit.

>>> import numpy as np
>>> values = [np.float32([v]) for v in (1.0, 2e17, 3.0, -2e17, 5.0)]
>>> rule = trimmed_mean(5, 1)
>>> rule.function(*values, np.float32(1.0))[0].tolist()
[3.0]
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import maximum, minimum

__all__ = ["MOST", "NO_TRIM", "Trim", "left_out", "trimmed_mean"]

MOST = 64
"""The most gradients that a server may be set to take a trimmed mean of."""


class Trim(NamedTuple):
    """A trimmed mean of the gradients that are collected for a step, in place of their sum.

    ``share``: of the values of a coordinate, how many are left out at each end; 0: it is the sum.
    ``gathered``: the gradients of a step, usually.
    """

    share: float = 0.0
    gathered: int = 1


NO_TRIM = Trim()


def left_out(share: float, count: int) -> int:
    """Return how many values of a coordinate are left out at each end.

    They are at least ``share`` of all, and leave one, or two of an even number.
    """
    return min(math.ceil(share * count), (count - 1) // 2)


@lru_cache(maxsize=256)
def trimmed_mean(count: int, cut: int) -> Rule:
    """Return the rule of the trimmed mean of some gradients, at least 2.

    Parameters
    ----------
    count
        The number of gradients: the rule's ``w``, its ``g``, and its reads, in any order.
    cut
        The number of the smallest values of a coordinate, and of the largest, that are left out.

    Source
    ------
    Yin, Chen, Ramchandran & Bartlett 2018, *Byzantine-robust distributed learning: towards optimal
    statistical rates*, definition 2. The network is Batcher's merge exchange (Knuth, volume 3,
    algorithm 5.2.2M), without what no value of the middle depends on.
    """
    assert 0 <= 2 * cut < count, "a value is left"
    assert count > 1, "one is its own mean"
    name = f"trimmed_mean_{count}_{cut}"
    given = ["w", "g", *(f"g{number}" for number in range(2, count))]
    at, lines, made = list(given), list[str](), 0
    for low, high, smaller, larger in _needed(count, cut):
        pair = f"({at[low]}, {at[high]})"
        names = f"v{made}", f"v{made + 1}"
        made += 2
        lines += [f"    {names[0]} = minimum{pair}"] * smaller
        lines += [f"    {names[1]} = maximum{pair}"] * larger
        at[low], at[high] = names
    middle = at[cut : count - cut]
    total = " + ".join(middle)
    result = f"({total}) / {float(len(middle))}" if len(middle) > 1 else f"{total} + 0.0"
    text = f"def {name}({', '.join(given)}, step):\n"
    text += "\n".join([*lines, f"    return ({result},)"]) + "\n"
    return Rule(_compiled(name, text), reads=tuple(given[2:]))


def _needed(count: int, cut: int) -> list[tuple[int, int, bool, bool]]:
    """Return the network's exchanges, and which of the two results of each is needed."""
    needed, found = set(range(cut, count - cut)), list[tuple[int, int, bool, bool]]()
    for low, high in reversed([*_exchanges(count)]):
        smaller, larger = low in needed, high in needed
        if smaller or larger:
            found.append((low, high, smaller, larger))
            needed |= {low, high}
    return found[::-1]


def _exchanges(count: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of places that Batcher's merge exchange compares, in order."""
    top = 1 << (count - 1).bit_length() - 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(count - d) if i & p == r)
            if q == p:
                break
            q, r, d = q >> 1, p, q - p
        p >>= 1


def _compiled(name: str, text: str) -> Callable[..., Any]:
    """Return the function of a text, which `inspect` finds again: the parser reads it."""
    file = f"<{name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    found: dict[str, Any] = {"minimum": minimum, "maximum": maximum, "__name__": __name__}
    exec(compile(text, file, "exec"), found)
    function: Callable[..., Any] = found[name]
    return function
