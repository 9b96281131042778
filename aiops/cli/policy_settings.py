"""The settings of an algorithm: its own, then those that it shares with others."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aiops.algorithms.base import Algorithm
from aiops.algorithms.local_training import LocalTraining
from aiops.algorithms.modulation import Modulated
from aiops.algorithms.server_optimizer import Optimised

OWN = "Its own"
HEADINGS: Mapping[type[Algorithm], str] = {
    Modulated: "Modulation for staleness",
    LocalTraining: "Local training",
    Optimised: "The server's optimiser",
    Algorithm: "Learning rate and clipping",
}
"""The headings of the settings of each shared base, in this order."""


@dataclass(frozen=True)
class Setting:
    """One setting of an algorithm, with its meaning from the docstring."""

    name: str
    type: str
    default: object
    meaning: str


@dataclass(frozen=True)
class SettingGroup:
    """Settings that are listed under one heading."""

    title: str
    settings: list[Setting]


def grouped(algorithm: type[Algorithm]) -> list[SettingGroup]:
    """Return all settings: its own (which its page explains), then each base's; none empty.

    >>> from aiops.algorithms.fasgd import FASGD
    >>> [(group.title, [s.name for s in group.settings]) for group in grouped(FASGD)]
    [('Its own', ['lr', 'gamma', 'beta', 'eps', 'least']), ('Learning rate and clipping', \
['schedule', 'scale_lr', 'clip'])]
    """
    meanings = described(algorithm)
    explained = [name for name in own_settings(algorithm) if not _below(algorithm, name)]
    own = list(dict.fromkeys(["lr", *explained]))  # lr has another meaning in each algorithm
    found: dict[str, list[Setting]] = {OWN: []}
    for base in (b for b in algorithm.__mro__[1:] if issubclass(b, Algorithm)):
        found.setdefault(_heading(base), [])
    for field in dataclasses.fields(algorithm):
        owner = algorithm if field.name in own else _owner(algorithm, field.name)
        meaning = described(owner)[field.name] if _below(algorithm, field.name) else ""
        kind = type(field.default).__name__
        setting = Setting(field.name, kind, field.default, meaning or meanings[field.name])
        found[OWN if owner is algorithm else _heading(owner)].append(setting)
    found[OWN].sort(key=lambda setting: own.index(setting.name))
    order = list(HEADINGS.values())
    groups = [SettingGroup(title, settings) for title, settings in found.items() if settings]
    return sorted(groups, key=lambda g: order.index(g.title) if g.title in order else -1)


def described(kind: type[Algorithm]) -> dict[str, str]:
    """Return the meaning of each setting: from the page of the class, or else of a base of it."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        for name, text in _descriptions(inspect.cleandoc(base.__doc__ or "")):
            found.setdefault(name, text)
    return {field.name: found.get(field.name, "") for field in dataclasses.fields(kind)}


def own_settings(kind: type[Algorithm]) -> list[str]:
    """Return the settings that a class's own page explains, or that the class defines."""
    explained = [name for name, _text in _descriptions(inspect.cleandoc(kind.__doc__ or ""))]
    own = dict.fromkeys([*explained, *vars(kind).get("__annotations__", ())])
    fields = {field.name for field in dataclasses.fields(kind)}
    return [name for name in own if name in fields]


def _descriptions(page: str) -> Iterator[tuple[str, str]]:
    """Yield (setting, description) from the section "Settings" of a docstring."""
    _before, _heading, section = page.partition("Settings\n--------\n")
    names: list[str] = []
    lines: list[str] = []
    for line in [*section.splitlines(), ""]:
        if line.startswith("    "):
            lines.append(line.strip())
            continue
        yield from ((name, " ".join(lines)) for name in names)
        names, lines = [], []
        head, colon, _type = line.partition(" : ")
        if not colon:
            return
        names = [name.strip() for name in head.split(",")]


def _below(algorithm: type[Algorithm], name: str) -> bool:
    """Return True if the page only refers to a base's explanation of a setting."""
    text = described(algorithm)[name].rstrip(".").lower()
    return text.endswith("see below") and _owner(algorithm, name) is not algorithm


def _heading(base: type[Algorithm]) -> str:
    return HEADINGS.get(base, f"As in {getattr(base, 'name', base.__name__)}")


def _owner(algorithm: type[Algorithm], name: str) -> type[Algorithm]:
    """Return the class that introduced a setting; a subclass may only change its default."""
    bases = [base for base in algorithm.__mro__ if name in vars(base).get("__annotations__", ())]
    return bases[-1]
