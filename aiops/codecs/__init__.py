"""Ways of writing a tensor's bytes for the wire: one per file, named in a part's ``codec``.

`find` makes a codec of what a user writes; `codec_named` is how a payload's reader is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import metadata

from aiops.codecs.base import Codec, Encoder, NotFinite
from aiops.common.load import imported
from aiops.errors import UsageError, nearest

__all__ = ["BUILT_IN", "Codec", "Encoder", "NotFinite", "codec_named", "find"]

BUILT_IN: Mapping[str, str] = {
    "bf16": "aiops.codecs.half:BF16",
    "fp16": "aiops.codecs.half:FP16",
    "int8": "aiops.codecs.int8:Int8",
    "lowrank": "aiops.codecs.lowrank:LowRank",
    "onebit": "aiops.codecs.onebit:OneBit",
    "raw": "aiops.codecs.raw:Raw",
    "topk": "aiops.codecs.topk:TopK",
}
"""The codecs of this package, and where they are."""

_known: dict[str, type[Codec]] = {}


def find(spec: str) -> Codec:
    """Return the codec that a user speaks of.

    ``"int8"`` and ``"topk:0.01"`` are of this package or of an installed one (entry points
    ``aiops.codecs``), ``"package.module:Class"`` and ``"package.module:Class:settings"`` of
    any. What has been found once is known to `codec_named` by its name.

    Raises
    ------
    UsageError
        When there is none, with the nearest name; when what is there is no `Codec`; or when a
        setting cannot be.
    """
    name, _, settings = spec.partition(":")
    kind = _known.get(name)
    if kind is None:
        places = {point.name: point.value for point in metadata.entry_points(group="aiops.codecs")}
        place = BUILT_IN.get(name) or places.get(name)
        if place is None:
            if not settings:
                raise UsageError(
                    f"no codec is called {name!r}; {nearest(name, {*BUILT_IN, *places, *_known})}"
                )
            attribute, _, settings = settings.partition(":")
            place = f"{name}:{attribute}"
        kind = _load(place)
    return kind.make(settings)


def codec_named(name: str) -> type[Codec] | None:
    """Return the codec that reads payloads of this name, or None; nothing foreign is imported.

    It is one of this package, or one that `find` has found in this process.
    """
    if name not in _known and name in BUILT_IN:
        _load(BUILT_IN[name])
    return _known.get(name)


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
    """Refuse a class that is not what a codec must be, before it fails somewhere else."""
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
