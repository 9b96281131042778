"""The settings of an algorithm: its own, then those that it shares with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from aiops.algorithms.base import Algorithm
from aiops.algorithms.local import LocalTraining
from aiops.algorithms.optimised import Optimised
from aiops.algorithms.sasgd import Modulated

OWN = "Its own"
HEADINGS: Mapping[type[Algorithm], str] = {
    Modulated: "Modulation for staleness",
    LocalTraining: "Local training",
    Optimised: "The server's optimiser",
    Algorithm: "Learning rate and clipping",
}
"""What the settings of each shared base are listed under, in this order."""


@dataclass(frozen=True)
class Setting:
    """One setting; ``meaning`` as its docstring has it."""

    name: str
    type: str
    default: object
    meaning: str


@dataclass(frozen=True)
class Group:
    """Settings that stand together under a heading."""

    title: str
    settings: list[Setting]


def grouped(algorithm: type[Algorithm]) -> list[Group]:
    """Return all settings: its own (which its page explains), then each base's; none empty.

    >>> from aiops.algorithms.fasgd import FASGD
    >>> [(group.title, [s.name for s in group.settings]) for group in grouped(FASGD)]
    [('Its own', ['lr', 'gamma', 'beta', 'eps', 'least']), ('Learning rate and clipping', \
['schedule', 'scale_lr', 'clip'])]
    """
    meanings = algorithm.described()
    explained = [name for name in algorithm.own_settings() if not _below(algorithm, name)]
    own = list(dict.fromkeys(["lr", *explained]))  # an algorithm means its own by it, always
    found: dict[str, list[Setting]] = {OWN: []}
    for base in (b for b in algorithm.__mro__[1:] if issubclass(b, Algorithm)):
        found.setdefault(_heading(base), [])
    for field in dataclasses.fields(algorithm):
        owner = algorithm if field.name in own else _owner(algorithm, field.name)
        meaning = owner.described()[field.name] if _below(algorithm, field.name) else ""
        kind = type(field.default).__name__
        setting = Setting(field.name, kind, field.default, meaning or meanings[field.name])
        found[OWN if owner is algorithm else _heading(owner)].append(setting)
    found[OWN].sort(key=lambda setting: own.index(setting.name))
    order = list(HEADINGS.values())
    groups = [Group(title, settings) for title, settings in found.items() if settings]
    return sorted(groups, key=lambda g: order.index(g.title) if g.title in order else -1)


def _below(algorithm: type[Algorithm], name: str) -> bool:
    """Whether the page only points to what a base says of a setting."""
    text = algorithm.described()[name].rstrip(".").lower()
    return text.endswith("see below") and _owner(algorithm, name) is not algorithm


def _heading(base: type[Algorithm]) -> str:
    return HEADINGS.get(base, f"As in {getattr(base, 'name', base.__name__)}")


def _owner(algorithm: type[Algorithm], name: str) -> type[Algorithm]:
    """Return the class that brought a setting in: a default given later does not change that."""
    bases = [base for base in algorithm.__mro__ if name in vars(base).get("__annotations__", ())]
    return bases[-1]
