"""Reading a client plan: it comes from a server, and is not believed blindly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from aiops.errors import UsageError

_LARGEST = 2**62


class Plan:
    """A plan's values, each checked as it is read.

    Parameters
    ----------
    values
        As the server announced them.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def whole(self, key: str, least: int, default: int | None = None) -> int:
        """Return a whole number of at least ``least``."""
        value = self.values.get(key, default)
        if type(value) is not int or not least <= value <= _LARGEST:
            self._refuse(key, f"a whole number from {least} on")
        return value

    def real(self, key: str, low: float, below: float, default: float | None = None) -> float:
        """Return a number with low ≤ x < below."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not low <= value < below:  # also if it is NaN
            self._refuse(key, f"a number from {low:g} to below {below:g}")
        return float(value)

    def word(self, key: str, known: Sequence[str], default: str) -> str:
        """Return one of some words."""
        value = self.values.get(key, default)
        if value not in known:
            self._refuse(key, f"one of {', '.join(known)}")
        return str(value)

    def truth(self, key: str) -> bool:
        """Return a truth value, False if it is not there."""
        value = self.values.get(key, False)
        if type(value) is not bool:
            self._refuse(key, "true or false")
        return value

    def inner(self) -> Mapping[str, Any]:
        """Return the local optimiser's settings; their own values are checked where it is made."""
        value = self.values.get("inner")
        if not isinstance(value, Mapping):
            self._refuse("inner", "a map of an optimizer's settings")
        inner = Plan({**_INNER, **value})
        for key in ("momentum", "beta1", "beta2", "alpha"):
            inner.real(key, 0, 1)
        for key in ("eps", "weight_decay", "clip"):
            inner.real(key, 0, math.inf)
        inner.real("lr", 0, 1e37)
        inner.real("scale", 1, 1e37)
        if not isinstance(inner.values["per_tensor"], str):
            inner._refuse("per_tensor", "a text")
        inner.truth("orthogonal")
        return inner.values

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        found = repr(self.values.get(key))[:60]
        raise UsageError(
            f"the server's plan for its workers has {key} = {found}, where this client needs"
            f" {wanted}: is the server of another release? upgrade aiops here or there"
        )


_INNER: Mapping[str, Any] = {
    "optimizer": "sgd",
    "schedule": "constant",
    "scale": 1.0,
    "momentum": 0.9,
    "beta1": 0.9,
    "beta2": 0.999,
    "alpha": 0.99,
    "eps": 0.0,
    "weight_decay": 0.0,
    "clip": 0.0,
    "per_tensor": "",
    "orthogonal": False,
}
