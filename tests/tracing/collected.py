"""Traces that are kept in memory, as the SDK of OpenTelemetry would export them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Collected:
    """The spans of all servers and workers so far."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter

    def spans(self, name: str = "", kind: str = "") -> list[Any]:
        """Return those of a name and a kind, in order of their begin; once their owners closed."""
        found = self._exporter.get_finished_spans()
        return sorted(
            (s for s in found if name in ("", s.name) and kind in ("", s.kind.name)),
            key=lambda span: span.start_time,
        )


@contextmanager
def collecting() -> Iterator[Collected]:
    """Have the processes' traces kept, of servers and of workers; skips without the packages."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from aiops.tracing import export

    kept = InMemorySpanExporter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "shutdown", lambda: None)  # several owners have this one
        patch.setenv("AIOPS_TRACE", "otlp:")
        patch.setattr(export, "span_exporter", lambda endpoint: kept)
        yield Collected(kept)
