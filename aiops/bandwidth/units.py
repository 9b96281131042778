"""Parse sizes and rates, format rates, and check that one can carry a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from aiops.bandwidth.token_bucket import USABLE
from aiops.errors import UsageError

LEAST = 1000
"""Bytes per second: a smaller budget could not even carry the handshakes."""

SLOWEST = 60.0
"""Seconds that the largest tensor may take: a tensor is the smallest unit that a gate sends."""

_MOST = 1 << 50
_BYTES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
_RATE = re.compile(
    r"\s*(\d[\d_]*(?:\.\d*)?|\.\d+)\s*([kmg]i?)?(b|bits?)?(/s|ps)?\s*", re.IGNORECASE | re.ASCII
)
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d*)?|\.\d+)\s*(?:([kmg]i?)?b)?\s*", re.IGNORECASE | re.ASCII)


def parse_size(flag: str, text: str) -> int:
    """Return a size in bytes.

    >>> [parse_size("--model", text) for text in ("5MB", "64KiB", "1.5 GB", "5000")]
    [5000000, 65536, 1500000000, 5000]

    Parameters
    ----------
    flag
        The flag that an error names.
    text
        A number of bytes, or a number with B, KB, MB, GB (1000), KiB, MiB or GiB (1024).

    Raises
    ------
    UsageError
        When it is no size, or there is no memory of it.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        why = "a rate, and no size" if _RATE.fullmatch(text) and "/s" in text.lower() else "no size"
        raise UsageError(
            f"{flag} {text!r} is {why}: write a number of bytes, or one with KB, MB, GB, KiB, MiB"
            f" or GiB, such as {_with_unit(text) or '64MiB'}"
        )
    number, scale = match.groups()
    size = float(number) * _BYTES[(scale or "").upper()]
    if not 1 <= size <= _MOST:
        raise UsageError(f"{flag} {text} is {size:g} bytes: give 1 byte to 1,048,576 GiB")
    return int(size)


def _with_unit(text: str) -> str | None:
    """Return a size that lacks its unit with one: ``5M`` as ``5MB``."""
    plain = text.strip()
    return f"{plain}B" if _SIZE.fullmatch(f"{plain}B") else None


def parse_rate(flag: str, text: str | float) -> int:
    """Return a rate in bytes per second.

    >>> [parse_rate("--bandwidth-budget", t) for t in ("2MB/s", "64KiB/s", "16 Mbit/s", "5000")]
    [2000000, 65536, 2000000, 5000]

    Parameters
    ----------
    flag
        The flag that an error names.
    text
        A number of bytes, or a number with B/s, KB/s, MB/s, GB/s (1000), KiB/s, MiB/s, GiB/s
        (1024), or kbit/s, Mbit/s, Gbit/s (1000 bits).

    Raises
    ------
    UsageError
        When it is no rate, or one that no server can keep.
    """
    match = _RATE.fullmatch(str(text))
    if match is None:
        raise UsageError(
            f"{flag} {text!r} is not a rate: write a number with B/s, KB/s, MB/s, GB/s, KiB/s,"
            " MiB/s, kbit/s or Mbit/s, such as 2MB/s"
        )
    number, scale, unit, _per = match.groups()
    if unit is None and (scale or _per):
        raise UsageError(f"{flag} {text!r} does not say of what: write {number}{scale or ''}B/s")
    if unit == "b":
        raise UsageError(
            f"{flag} {text!r} may mean bits or bytes: write {number}{scale or ''}B/s for bytes,"
            f" {number}{scale or ''}bit/s for bits"
        )
    bits = unit is not None and unit.lower().startswith("bit")
    rate = float(number) * _BYTES[(scale or "").upper()] / (8 if bits else 1)
    if not LEAST <= rate <= _MOST:
        raise UsageError(
            f"{flag} {text} is {rate:g} bytes per second: it must be from {LEAST} to {_MOST:g}"
        )
    return int(rate)


def format_rate(rate: float) -> str:
    """Write a rate so that `parse_rate` reads at least as much.

    >>> format_rate(1_999_001), format_rate(5000), format_rate(999)
    ('2MB/s', '5KB/s', '999B/s')
    """
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "KB/s")):
        if rate >= scale:
            return f"{math.ceil(rate / scale * 100) / 100:g}{unit}"
    return f"{math.ceil(rate)}B/s"


def too_slow(rate: float, tensors: Iterable[tuple[str, int]]) -> str | None:
    """Return why a budget cannot carry a model, or None.

    Parameters
    ----------
    rate
        Bytes per second.
    tensors
        Each one's name and its bytes.
    """
    name, nbytes = max(tensors, key=lambda tensor: tensor[1], default=("", 0))
    seconds = nbytes / (USABLE * rate)
    if seconds <= SLOWEST:
        return None
    return (
        f"{name!r} has {nbytes} bytes, which take {seconds:.0f} s under a budget of"
        f" {format_rate(rate)}, and a tensor must cross in {SLOWEST:g} s: the smallest budget that"
        f" would do is {format_rate(nbytes / (USABLE * SLOWEST))}"
    )
