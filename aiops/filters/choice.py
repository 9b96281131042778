"""Read ``--filter``: the names of filters, each with its setting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from aiops.errors import UsageError, nearest
from aiops.filters.agreement import AgreementFilter
from aiops.filters.curvature import CurvatureFilter
from aiops.filters.kardam import KardamFilter
from aiops.filters.norm import FACTOR, NormFilter
from aiops.filters.observation import WORKERS, Filter
from aiops.filters.sample import Sample
from aiops.filters.versions import VERSIONS
from aiops.model.layout import Layout

OFF = "off"
ROBUST = "norm+curvature+agreement"
"""The filters that ``robust`` stands for: those that keep out most."""

_COMPARING = frozenset({"curvature", "kardam"})

_SHARE = 1 / 3
_SETTINGS: Mapping[str, tuple[float, Callable[[float], bool], str] | None] = {
    "norm": (FACTOR, lambda factor: 1 < factor < 1e6, "FACTOR, more than 1"),
    "curvature": None,
    "agreement": None,
    "kardam": (_SHARE, lambda share: 0 < share < 0.5, "SHARE of hostile workers, below 0.5"),
}
"""By filter, its setting's default, whether a value can be, and its description."""


def chosen(text: str) -> dict[str, float]:
    """Return the filters that a description names, each with its setting (0: it has none).

    Raises
    ------
    UsageError
        When it is no such description; the text tells what is wrong.

    Examples
    --------
    >>> chosen("norm:8+kardam:0.25")
    {'norm': 8.0, 'kardam': 0.25}
    >>> chosen("off"), list(chosen("robust"))
    ({}, ['norm', 'curvature', 'agreement'])
    """
    if text == OFF:
        return {}
    found: dict[str, float] = {}
    for word in (ROBUST if text == "robust" else text).split("+"):
        name, colon, given = word.partition(":")
        if name not in _SETTINGS or name in found:
            what = "is named twice" if name in found else f"is none: {nearest(name, _SETTINGS)}"
            raise UsageError(
                f"--filter must be off, robust, or filters joined by +, such as norm:20+curvature;"
                f" {name!r} {what}"
            )
        setting = _SETTINGS[name]
        if setting is None:
            if colon:
                raise UsageError(f"--filter: {name} has no setting, not {given!r}")
            found[name] = 0.0
            continue
        default, holds, description = setting
        try:
            found[name] = float(given) if colon else default
        except ValueError:
            found[name] = -1.0
        if not holds(found[name]):
            raise UsageError(f"--filter: {name}:{given} must be {name}:{description}")
    return found


def compares(text: str) -> bool:
    """Return whether filters compare gradients with the parameters that they were computed on."""
    return not _COMPARING.isdisjoint(chosen(text))


def made(text: str, tensors: list[str], sample: Sample, seed: int) -> list[Filter]:
    """Return the filters of a description, in its order."""
    filters: list[Filter] = []
    for name, setting in chosen(text).items():
        if name == "norm":
            filters.append(NormFilter(tensors, setting))
        elif name == "curvature":
            filters.append(CurvatureFilter(sample.size))
        elif name == "agreement":
            filters.append(AgreementFilter(sample.size, seed))
        else:
            filters.append(KardamFilter(sample.size, setting))
    return filters


@functools.lru_cache(maxsize=2)
def most_bytes(text: str, layout: Layout) -> int:
    """Return the most bytes that the filters of a description keep, of the most workers."""
    sample = Sample(layout, 0)
    filters = made(text, [tensor.name for tensor in layout.tensors], sample, 0)
    versions = VERSIONS if compares(text) else 0
    return WORKERS * sum(each.row_bytes for each in filters) + 8 * sample.size * versions
