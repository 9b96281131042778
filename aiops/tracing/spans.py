"""Spans as plain values, their ids, and which pushes have some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol, Self

Value = str | bool | int | float
"""What an attribute may be."""

FIRST = 10
"""Pushes of each worker that are traced, in any case, unless the environment has a sampler.

They are known by their numbers, which both sides know; pushes of rows count among them.
"""

SHARE = 0.01
"""Of the later ones: at ten thousand exchanges a second these are a hundred traces."""

LONGEST = 200
"""Characters of a sentence that a span has: it may be a peer's."""

LONGEST_NAME = 64
"""Those of a worker's name, on both sides alike: a server keeps no more."""

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
    resource
        Attributes of the server or the worker that made it (`aiops.tracing.Tracing` adds them).
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
    resource: Mapping[str, str | int] = {}


class Exporter(Protocol):
    """Sends spans away, on one thread."""

    def export(self, spans: Sequence[Span]) -> str:
        """Send spans; return the reason for which that was not done, or nothing.

        It may block its thread.
        """

    def close(self) -> None:
        """Send no more, and break off what `export` does at present, if that can be.

        It is called once, on any thread, and does not block it.
        """


def trace_of(client: str, seq: int) -> int:
    """Return the id of the trace of a client's push: the same on both sides of a connection."""
    return int.from_bytes(blake2b(f"{client}:{seq}".encode(), digest_size=16).digest()) or 1


FETCH = "aiops.fetch_params"
"""The name of the span of a fetch, on both sides."""

FETCH_ROWS, PUSH_ROWS = "aiops.fetch_rows", "aiops.push_rows"
"""The names of those of requests about rows; a push may bring rows, too."""


def trace_of_fetch(client: str, request: int) -> int:
    """Return the id of the trace of a client's fetch, of rows, too: by the number of the request.

    A client counts its requests over all of its connections, so that no two have one number.
    """
    key = f"{client}:fetch:{request}"
    return int.from_bytes(blake2b(key.encode(), digest_size=16).digest()) or 1


def trace_of_round(run: str, generation: int, number: int) -> int:
    """Return the id of the trace of a round of averaging: the same for all of its workers."""
    key = f"{run}:{generation}:{number}"
    return int.from_bytes(blake2b(key.encode(), digest_size=16).digest()) or 1


def span_of(trace: int, name: str) -> int:
    """Return the id of the span of this name in a trace, which has one."""
    key = trace.to_bytes(16)
    return int.from_bytes(blake2b(name.encode(), digest_size=8, key=key).digest()) or 1


def brief(text: str, most: int = LONGEST) -> str:
    """Return a text as a span has it: its beginning, if it is longer."""
    return text if len(text) <= most else text[: most - 1] + "…"


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

    @property
    def takes_none(self) -> bool:
        """True if no push is traced."""
        return self._first < 1 and self._bound < 1

    def takes(self, trace: int, seq: int, *, repeated: bool = False) -> bool:
        """Return whether a push is traced: the one with this number, whose trace this would be.

        Of a fetch it is the number of the request, and of an average that of the round.
        ``repeated``: it has been traced before, if it is one of the first.
        """
        return (not repeated and 0 < seq <= self._first) or trace % _ROUND < self._bound
