"""Find algorithms by name; each has a file of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import metadata
from numbers import Real

from aiops.algorithms.base import Algorithm
from aiops.common.load import imported
from aiops.common.settings import KINDS
from aiops.errors import UsageError, nearest

DEFAULT = "schedule-free"
"""That of a server whose user names none: it asks for no choice of a rate and for no horizon."""

BUILT_IN: Mapping[str, str] = {
    "asgd": "aiops.algorithms.asgd:ASGD",
    "average": "aiops.algorithms.average:Average",
    "dcasgd": "aiops.algorithms.dcasgd:DCASGD",
    "diloco": "aiops.algorithms.diloco:DiLoCo",
    "downpour": "aiops.algorithms.downpour:Downpour",
    "eamsgd": "aiops.algorithms.easgd:EAMSGD",
    "easgd": "aiops.algorithms.easgd:EASGD",
    "exponential": "aiops.algorithms.exponential:Exponential",
    "fasgd": "aiops.algorithms.fasgd:FASGD",
    "fedbuff": "aiops.algorithms.fedbuff:FedBuff",
    "gap-aware": "aiops.algorithms.gapaware:GapAware",
    "hardsync": "aiops.algorithms.hardsync:Hardsync",
    "no-delay": "aiops.algorithms.nodelay:NoDelay",
    "rennala": "aiops.algorithms.rennala:Rennala",
    "ringmaster": "aiops.algorithms.ringmaster:Ringmaster",
    "sasgd": "aiops.algorithms.sasgd:SASGD",
    "schedule-free": "aiops.algorithms.schedulefree:ScheduleFree",
    "softsync": "aiops.algorithms.softsync:Softsync",
    "ssp": "aiops.algorithms.ssp:SSP",
}


def available() -> dict[str, str]:
    """Return the name and the place, ``module:Class``, of the built-in and installed algorithms."""
    others = metadata.entry_points(group="aiops.algorithms")
    return {**{point.name: point.value for point in others}, **BUILT_IN}


def find(name: str) -> type[Algorithm]:
    """Return the algorithm of that name, or the class at ``package.module:Class``.

    Raises
    ------
    UsageError
        When there is none (it names the nearest), or when the object there is no `Algorithm`.
    """
    place = BUILT_IN.get(name) or available().get(name, name)
    if ":" not in place:
        raise UsageError(f"no policy is called {name!r}; {nearest(name, available())}")
    found = imported(place, f"policy {name!r}")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UsageError(
            f"policy {name!r} is not a class derived from aiops.algorithms.base.Algorithm"
        )
    _check_form(name, found)
    return found


def _check_form(name: str, kind: type[Algorithm]) -> None:
    """Refuse a class that has no name, or whose settings are not fields with defaults."""
    if not isinstance(getattr(kind, "name", None), str):
        raise UsageError(f"policy {name!r}: {kind.__name__} has no name: write name = '...' in it")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for setting, annotation in vars(kind).get("__annotations__", {}).items():
        if setting not in fields and "ClassVar" not in str(annotation):
            raise UsageError(
                f"policy {name!r}: {setting} would be a setting if {kind.__name__} were a"
                " dataclass: write @dataclass(frozen=True, kw_only=True) above it"
            )
    for setting, field in fields.items():
        if field.default is dataclasses.MISSING:
            raise UsageError(
                f"policy {name!r}: the setting {setting} has no default, and every setting needs"
                f" one (a number, a word or a truth value): write {setting}: ... = ..."
            )
        _check_inherited(name, kind, setting, field.default)


def _check_inherited(name: str, kind: type[Algorithm], setting: str, default: object) -> None:
    """Refuse a default of another type than the setting has in a base, which checks it."""
    for base in kind.__mro__[1:]:
        if not base.__module__.startswith("aiops."):
            continue  # of the user's own, which knows what it takes
        usual = getattr(base, "__dataclass_fields__", {}).get(setting)
        if usual is None or usual.default is dataclasses.MISSING:
            continue
        wanted = type(usual.default)
        if isinstance(default, Real if wanted is float else wanted):
            continue
        raise UsageError(
            f"policy {name!r}: the default of {setting} is {default!r}, and in {base.__name__} it"
            f" is {KINDS.get(wanted, f'a {wanted.__name__}')}: write one, such as"
            f" {usual.default!r}"
        )
