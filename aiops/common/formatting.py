"""Numbers as text for people: bytes, durations, percentages, sparklines."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_BARS = "▁▂▃▄▅▆▇█"


def nbytes(count: float) -> str:
    """Return a number of bytes with a unit (powers of ten).

    >>> [nbytes(n) for n in (0, 999, 1000, 12_345_678, 250_000_000)]
    ['0 B', '999 B', '1.0 kB', '12.3 MB', '250 MB']
    """
    for scale, unit in _SCALES:
        if count >= scale:
            return f"{count / scale:.{1 if count < 100 * scale else 0}f} {unit}"
    return f"{count:.0f} B"


def seconds(value: float) -> str:
    """Return a duration.

    >>> [seconds(s) for s in (0.000123, 0.25, 12.34, 75, 7260)]
    ['0.12 ms', '250 ms', '12.3 s', '1 min 15 s', '2 h 1 min']
    """
    if value < 1:
        return f"{value * 1e3:.2f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def percent(share: float) -> str:
    """Return a share of 1 as a percentage.

    >>> percent(0.9731)
    '97.3%'
    """
    return f"{share:.1%}"


def ending(status: int | None) -> str:
    """Return an exit status as the end of a sentence.

    >>> ending(3), ending(-9)
    ('ended with status 3', 'was ended by signal 9')
    """
    if status is not None and status < 0:
        return f"was ended by signal {-status}"
    return f"ended with status {status}"


def printable(text: str) -> str:
    """Return a text of a peer without what would control a terminal.

    >>> printable("w\\x1b[2J\\n1")
    'w�[2J�1'
    """
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def optional(value: float | None, form: str) -> str:
    """Format a number that may be missing.

    >>> optional(0.01234, ".3g"), optional(None, ".3g")
    ('0.0123', '–')
    """
    return "–" if value is None else format(value, form)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Draw the last ``width`` values as a line of small bars; a value that is not finite is a gap.

    >>> sparkline([3, 2, 1, 0])
    '█▆▃▁'
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    steps = [
        int((value - low) / span * (len(_BARS) - 1) + 0.5) if math.isfinite(value) else -1
        for value in shown
    ]
    return "".join(_BARS[step] if step >= 0 else " " for step in steps)
