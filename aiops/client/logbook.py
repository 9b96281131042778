"""Numbers about a worker's training, from the loop that logs them to the message that has them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from aiops.errors import UsageError
from aiops.wire.fields import MAX_LOGGED, MAX_LOGGED_NAME
from aiops.wire.messages import Log

LEAST = 1.0
"""Seconds between two messages, at least."""

_LARGEST = 1e300
"""The largest number that is sent: the mean of many is finite."""

_KEPT = 10_000
"""Numbers that wait to be sent, at most: the last ones. Without a server they would pile up."""


class Logbook:
    """The numbers that one client has logged and not sent.

    Any thread may note, while another takes. A message has the mean of each number since the one
    before, so that nothing is lost by sending few; and the seconds computed and waited so far.

    Attributes
    ----------
    seconds
        Returns the seconds that this worker has computed, and those that it has waited; None: it is
        no worker, or has not begun.
    noted
        The numbers that wait to be sent, with their names.
    every
        Seconds between messages, where the server wants them whether anything was logged or not;
        None: it does not.
    """

    def __init__(self) -> None:
        self.seconds: Callable[[], tuple[float, float]] | None = None
        self.every: float | None = None
        self.noted: deque[tuple[str, float]] = deque(maxlen=_KEPT)
        self._names: set[str] = set()
        self._next = self._next_numbers = -math.inf  # when a message is due; one that has numbers

    def note(self, values: Mapping[str, Any]) -> None:
        """Note numbers by name, such as ``loss=0.3``; those that are not finite are left out.

        Raises
        ------
        UsageError
            When a value is no number, a name is too long, or there are too many names.
        """
        for name, given in values.items():
            value = _number(name, given)
            if name not in self._names:
                self._admit(name)
            if abs(value) <= _LARGEST:  # NaN is not
                self.noted.append((name, value))

    def _admit(self, name: str) -> None:
        if not (name.isprintable() and 0 < len(name.encode()) <= MAX_LOGGED_NAME):
            raise UsageError(
                f"the name of a number is printable, and has at most {MAX_LOGGED_NAME} bytes:"
                f" {name!r}"
            )
        if len(self._names) >= MAX_LOGGED:
            raise UsageError(
                f"a client logs at most {MAX_LOGGED} numbers, and {name!r} is one more"
            )
        self._names.add(name)

    def wait(self, now: float) -> float | None:
        """Return the seconds until there is something to be sent; None: there is nothing."""
        if self.noted:
            return max(0.0, self._next_numbers - now)
        if self.every is None or self.seconds is None:
            return None
        return max(0.0, self._next - now)

    def take(self, now: float | None = None) -> Log | None:
        """Return the message that is to be sent now; None: there is none.

        ``now``: the time, in seconds; None: what there is is sent at once, as when a client leaves.
        """
        if now is not None:
            if self.wait(now) != 0.0:
                return None
            self._next = now + max(LEAST, self.every or 0.0)
            if self.noted:  # seconds alone do not hold back the first numbers
                self._next_numbers = self._next
        sums = dict[str, tuple[float, int]]()
        for _ in range(len(self.noted)):
            name, value = self.noted.popleft()
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + value, count + 1
        if now is None and not sums:
            return None
        means = ((name, total / count) for name, (total, count) in sums.items())
        values = tuple((name, mean) for name, mean in means if math.isfinite(mean))
        compute, idle = (None, None) if self.seconds is None else self.seconds()
        return Log(0, values, compute, idle)


def _number(name: str, given: Any) -> float:
    """Return a value as a number; those too large for a float64 are infinite."""
    if not isinstance(given, str | bytes):
        try:
            return float(given.detach() if hasattr(given, "detach") else given)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError, RuntimeError):
            pass
    raise UsageError(f"log takes one number by name, and {name!r} is {type(given).__name__}")
