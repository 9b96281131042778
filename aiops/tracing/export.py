"""Export spans by OTLP, with the SDK of OpenTelemetry; nothing else of aiops imports that.

The SDK's own variables hold: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``,
``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES`` and the like.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from aiops._version import __version__
from aiops.tracing.spans import Span

_KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}

_THEIRS = logging.getLogger(OTLPSpanExporter.__module__)

_LONGEST = 300
"""Characters of what it says that are told."""

_PATH = "/v1/traces"
"""That of OTLP over HTTP, below an endpoint."""


class SpansOut:
    """Makes spans of the SDK's of ours, and has them exported.

    Parameters
    ----------
    exporter
        Of the SDK.
    resource
        What they are of.
    """

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter, self._resource = exporter, resource
        self._scope = InstrumentationScope("aiops", __version__)

    def export(self, spans: Sequence[Span]) -> str:
        """Export them; return the reason for which that failed, or nothing."""
        made = [self._made(span) for span in spans]
        with _Said() as said:
            done = self._exporter.export(made) is SpanExportResult.SUCCESS
        return "" if done else said.text or "the collector has not taken them"

    def close(self) -> None:
        """End the exporter, and its repetitions."""
        self._exporter.shutdown()

    def _made(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace, span.id, remote=False),
            parent=_context(span.trace, span.parent, remote=span.kind == "server")
            if span.parent
            else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.begin,
            end_time=span.end,
            instrumentation_scope=self._scope,
        )


class _Said(logging.Filter):
    """Keeps what the SDK's exporter logs on this thread: it is told once a minute, by us.

    What it logs elsewhere, for others in this process, is logged as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text, self._thread = "", threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.text = record.getMessage()[:_LONGEST]
        return False

    def __enter__(self) -> Self:
        _THEIRS.addFilter(self)
        return self

    def __exit__(self, *_error: object) -> None:
        _THEIRS.removeFilter(self)


def _context(trace: int, span: int, *, remote: bool) -> SpanContext:
    return SpanContext(trace, span, remote, TraceFlags(TraceFlags.SAMPLED))


def span_exporter(endpoint: str) -> SpanExporter:
    """Return the SDK's exporter by OTLP; an empty endpoint: that of its variables."""
    if not endpoint:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint.rstrip("/").removesuffix(_PATH) + _PATH)


def opened(role: str, attributes: Mapping[str, str | int], endpoint: str) -> SpansOut:
    """Return the exporter of a server or a worker."""
    about = {"service.version": __version__, **attributes}
    theirs = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in theirs:
        about["service.name"] = f"aiops-{role}"
    return SpansOut(span_exporter(endpoint), Resource.create(about))
