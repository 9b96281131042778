"""Find codecs, which encode tensors as payloads; each has a file of its own.

`find` makes a codec from a user's text; `codec_named` returns the class that decodes a payload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import metadata

from aiops.codecs.base import Codec, Encoder, NotFinite
from aiops.codecs.trial import try_codec
from aiops.common.load import imported
from aiops.errors import UsageError, nearest

__all__ = ["BUILT_IN", "Codec", "Encoder", "NotFinite", "checked_codec", "codec_named", "find"]

BUILT_IN: Mapping[str, str] = {
    "bf16": "aiops.codecs.half:BF16",
    "fp16": "aiops.codecs.half:FP16",
    "int8": "aiops.codecs.int8:Int8",
    "lowrank": "aiops.codecs.lowrank:LowRank",
    "onebit": "aiops.codecs.onebit:OneBit",
    "raw": "aiops.codecs.raw:Raw",
    "topk": "aiops.codecs.topk:TopK",
}
"""The place, ``module:Class``, of each codec of this package."""

_known: dict[str, type[Codec]] = {}


def find(spec: str) -> Codec:
    """Return a codec from a user's text, and make its name known to `codec_named`.

    Parameters
    ----------
    spec
        ``"int8"`` or ``"topk:0.01"``, of this package or an installed one (entry points
        ``aiops.codecs``); or ``"package.module:Class"``, ``"package.module:Class:settings"``.

    Raises
    ------
    UsageError
        When there is none (it names the nearest), the object is no `Codec` class, a setting is not
        allowed, or a codec of the user's does not decode what it encodes (`aiops.codecs.trial`).
    """
    name, _, settings = spec.partition(":")
    kind = _known.get(name)
    if kind is None:
        places = {point.name: point.value for point in metadata.entry_points(group="aiops.codecs")}
        place = BUILT_IN.get(name) or places.get(name)
        if place is None:
            if not settings.partition(":")[0].isidentifier():
                raise UsageError(
                    f"no codec is called {name!r}; {nearest(name, {*BUILT_IN, *places, *_known})}"
                )
            attribute, _, settings = settings.partition(":")
            place = f"{name}:{attribute}"
        kind = _load(place)
    codec = kind.make(settings)
    if not kind.__module__.startswith("aiops.codecs."):
        try_codec(codec)
    return codec


def codec_named(name: str) -> type[Codec] | None:
    """Return the class of the codec of that name, or None.

    It is one of this package, or one that `find` has returned in this process: the name comes from
    a peer, so no other module is imported.
    """
    if name not in _known and name in BUILT_IN:
        _load(BUILT_IN[name])
    return _known.get(name)


def checked_codec(name: str) -> type[Codec]:
    """Return what `codec_named` does for a name that was looked up before: there is a codec."""
    found = codec_named(name)
    if found is None:
        raise LookupError(f"there is no codec {name!r}")
    return found


def _load(place: str) -> type[Codec]:
    kind = imported(place, f"codec {place!r}")
    if not (isinstance(kind, type) and issubclass(kind, Codec)):
        raise UsageError(f"codec {place!r} is not a class derived from aiops.codecs.Codec")
    _check_form(place, kind)
    other = _known.setdefault(kind.name, kind)
    if other is not kind and f"{other.__module__}:{other.__qualname__}" != place:
        raise UsageError(
            f"codec {place!r} is called {kind.name!r}, and so is {other.__module__}:"
            f"{other.__qualname__}; give it a name of its own"
        )
    return other


def _check_form(place: str, kind: type[Codec]) -> None:
    """Refuse a class whose name is missing or taken, or whose settings have no defaults."""
    if not 0 < len(kind.name) <= 16 or ":" in kind.name:
        raise UsageError(
            f"codec {place!r}: its name is {kind.name!r}; write name = '...' in it, of 1 to 16"
            " characters and without a colon"
        )
    taken = BUILT_IN.get(kind.name)
    if taken is not None and taken != place:
        raise UsageError(f"codec {place!r} is called {kind.name!r}, and so is one of aiops's own")
    for setting in dataclasses.fields(kind):
        if not isinstance(setting.default, str | int | float):
            raise UsageError(
                f"codec {place!r}: the setting {setting.name} needs a default (a number or a"
                f" word): write {setting.name}: ... = ..."
            )
