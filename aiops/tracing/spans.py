"""Spans as plain values, their ids, and which pushes have some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol, Self

Value = str | bool | int | float
"""What an attribute may be."""

FIRST = 10
"""Pushes of each worker that are traced, in any case, unless the environment has a sampler."""

SHARE = 0.01
"""Of the later ones: at ten thousand exchanges a second these are a hundred traces."""

_ROUND = 1 << 64


class Span(NamedTuple):
    """Something that took a while.

    Attributes
    ----------
    name
        What it was, such as ``"aiops.exchange"``.
    trace, id, parent
        The trace's id (16 bytes, as an integer), the span's (8 bytes), and that of the span it is
        a part of; 0: of none.
    begin, end
        In nanoseconds since 1970.
    kind
        ``"internal"``, ``"client"`` (it waits for a server) or ``"server"``.
    attributes
        By name.
    error
        The reason for which it failed; empty: it did not.
    """

    name: str
    trace: int
    id: int
    parent: int
    begin: int
    end: int
    kind: str = "internal"
    attributes: Mapping[str, Value] = {}
    error: str = ""


class Exporter(Protocol):
    """Sends spans away, on one thread, which it may block."""

    def export(self, spans: Sequence[Span]) -> str:
        """Send spans; return the reason for which that was not done, or nothing."""

    def close(self) -> None:
        """Send no more; another thread calls it to end an `export` that takes too long."""


def trace_of(client: str, seq: int) -> int:
    """Return the id of the trace of a client's push: the same on both sides of a connection."""
    return int.from_bytes(blake2b(f"{client}:{seq}".encode(), digest_size=16).digest()) or 1


def span_of(trace: int, name: str) -> int:
    """Return the id of the span of this name in a trace, which has one."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8, key=trace.to_bytes(16)).digest())


class Sampler:
    """Decides which pushes are traced; all processes with the same settings decide alike.

    Parameters
    ----------
    first
        Pushes of each client that are, in any case.
    share
        The share of all others that are. It is taken by the last half of a trace's id, as
        OpenTelemetry's ``TraceIdRatioBased`` does.
    """

    def __init__(self, first: int = FIRST, share: float = SHARE) -> None:
        self._first, self._bound = first, round(share * _ROUND)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> tuple[Self, str]:
        """Return that of ``OTEL_TRACES_SAMPLER`` and its ``_ARG``; and what cannot be read."""
        name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
        argument = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
        kind = name.removeprefix("parentbased_")  # of a push there is no other parent
        if kind in ("always_on", "always_off"):
            return cls(0, float(kind == "always_on")), ""
        if kind == "traceidratio":
            try:
                share = float(argument or "1")
            except ValueError:
                share = -1.0
            if 0 <= share <= 1:
                return cls(0, share), ""
            return cls(), f"OTEL_TRACES_SAMPLER_ARG={argument} is no number from 0 to 1"
        return cls(), f"OTEL_TRACES_SAMPLER={name} is none that aiops has" if name else ""

    def takes(self, trace: int, seq: int) -> bool:
        """Return whether a push is traced: the one with this number, whose trace this would be."""
        return seq <= self._first or trace % _ROUND < self._bound
