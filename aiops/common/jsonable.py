"""Conversion of values to JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Return a value as JSON types: a dataclass becomes its fields and its class's name.

    A float that is not finite becomes None: JSON cannot express it.

    >>> plain((1, None, float("nan")))
    [1, None, None]

    Raises
    ------
    TypeError
        When it holds anything else than dataclasses, mappings, sequences, text and numbers.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(f"{value!r} cannot be written as a setting or a result")
