"""Settings as users write them: ``key=value``, with commas between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from aiops.errors import UsageError, nearest

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
"""The types that settings have, in words."""

_NAMED = {kind.__name__: kind for kind in KINDS}
_FITTING = {"bool": bool, "int": Integral, "float": Real, "str": str}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_settings(
    owner: str, text: str, defaults: Mapping[str, Any], *, first: bool = False
) -> dict[str, Any]:
    """Return the settings in a text, each in the type of its default.

    Parameters
    ----------
    owner
        The object whose settings they are, as errors name it: ``"gate periodic"``.
    text
        Such as ``"fraction=0.01,values=bf16"``; may be empty.
    defaults
        The default of every setting that there is, by name.
    first
        Whether the text may begin with a value alone, ``"0.01"``: the first setting's.

    Raises
    ------
    UsageError
        For an unknown or repeated setting (it names the nearest), or a value of another type.
    """
    given: dict[str, Any] = {}
    for index, item in enumerate(text.split(",") if text.strip() else ()):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals and first and index == 0 and defaults:
            key, value = next(iter(defaults)), key
        elif not equals:
            remedy = "write setting=value" if defaults else "it has no settings"
            raise UsageError(f"{owner} cannot read {item.strip()!r}; {remedy}")
        if key in given:
            raise UsageError(f"{owner} was given {key!r} twice; leave one out")
        given[key] = read_setting(owner, key, value, defaults)
    return given


def read_setting(owner: str, key: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    """Return the value of one setting, a text or a value, in the type of its default.

    Parameters and errors are those of `read_settings`.
    """
    if key not in defaults:
        hint = nearest(key, defaults) if defaults else "it has none"
        raise UsageError(f"{owner} has no setting {key!r}; {hint}")
    kind = type(defaults[key])
    try:
        if kind is bool:
            return _TRUTHS[str(value).lower()]
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        return kind(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        wanted = KINDS.get(kind, f"a {kind.__name__}")
        raise UsageError(f"{owner}: {key} must be {wanted}, not {value!r}") from None


def whole_number(name: str, value: object, least: int, most: int) -> int:
    """Return a whole number, an integer of NumPy too, as an int.

    Raises
    ------
    UsageError
        When it is none, such as 2.0 or True, or out of range. It has the name, the range and the
        value.
    """
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if least <= number <= most:
            return number
    bits = most.bit_length()
    limit = f"2**{bits} - 1" if bits > 32 and most + 1 == 1 << bits else f"{most:,}"
    raise UsageError(f"{name} must be a whole number from {least} to {limit}, not {value!r}")


def check_texts(name: str, value: object) -> None:
    """Refuse a value that is no list or tuple of texts, such as one text, whose letters are."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return
    remedy = f": write [{value!r}]" if isinstance(value, str) else ""
    raise UsageError(f"{name} must be a list or tuple of texts, not {value!r}{remedy}")


def check_types(settings: Any) -> None:
    """Refuse a dataclass whose fields have values of other types than their annotations say.

    Those are ``bool``, ``int``, ``float``, ``str`` and ``tuple[str, ...]``, each with or without
    ``| None``.

    Raises
    ------
    UsageError
        It names the field, its type in words, and the value.
    """
    for field in fields(settings):
        kind, _, rest = str(field.type).partition(" | ")
        value = getattr(settings, field.name)
        if value is None and rest:
            continue
        if kind.startswith("tuple"):
            check_texts(field.name, value)
        elif not isinstance(value, _FITTING[kind]):
            words = KINDS[_NAMED[kind]] + (", or None" if rest else "")
            raise UsageError(f"{field.name} must be {words}, not {value!r}")
