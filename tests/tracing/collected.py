"""Traces that are kept in memory, instead of sent by OpenTelemetry's packages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from aiops import tracing
from aiops.tracing import delivery
from aiops.tracing.spans import FETCH, FETCH_ROWS, PUSH_ROWS, Span

_REQUESTS = FETCH, FETCH_ROWS, PUSH_ROWS


class Collected:
    """The spans of all servers and workers so far; it is their exporter."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def opened(self, role: str, endpoint: str) -> Collected:
        """Return the exporter, as `aiops.tracing.export.opened`."""
        return self

    def export(self, spans: Sequence[Span]) -> str:
        """Keep spans."""
        self._spans += spans
        return ""

    def close(self) -> None:
        """Do nothing: several owners have this one."""

    def spans(self, name: str = "", kind: str = "") -> list[Span]:
        """Return those of a name and a kind, in order of their begin; once their owners closed.

        Without a name they are those of pushes, and of averages.
        """
        named = [s for s in self._spans if (s.name == name if name else s.name not in _REQUESTS)]
        found = (span for span in named if kind in ("", span.kind))
        return sorted(found, key=lambda span: span.begin)


@contextmanager
def collecting() -> Iterator[Collected]:
    """Have the processes' traces kept, of servers and of workers."""
    kept = Collected()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "_QUEUES", {})  # of others that were not closed
        patch.setenv("AIOPS_TRACE", "otlp:")
        patch.setattr(tracing, "_exporters", lambda: kept)
        yield kept
