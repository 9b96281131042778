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
from aiops.tracing.spans import Span, brief

_KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}

_PATH = "/v1/traces"
"""That of OTLP over HTTP, below an endpoint."""

_THEIRS = "opentelemetry.exporter."
"""The beginning of the names of their loggers."""

_RESOURCES = 64
"""Servers or workers of a process whose descriptions are kept."""


class SdkExporter:
    """Makes spans of the SDK's of ours, and has them exported.

    Parameters
    ----------
    exporter
        Of the SDK.
    role
        ``"server"`` or ``"worker"``: what their service is called, unless the environment names it.
    """

    def __init__(self, exporter: SpanExporter, role: str) -> None:
        self._exporter, self._role = exporter, role
        self._scope = InstrumentationScope("aiops", __version__)
        self._resources: dict[tuple[object, ...], Resource] = {}

    def export(self, spans: Sequence[Span]) -> str:
        """Export them; return the reason for which that failed, or nothing."""
        made = [self._made(span) for span in spans]
        with _Said() as said:
            done = self._exporter.export(made) is SpanExportResult.SUCCESS
        return "" if done else said.text or "the collector has not taken them"

    def close(self) -> None:
        """End the exporter, which then repeats nothing more."""
        self._exporter.shutdown()

    def _resource(self, attributes: Mapping[str, str | int]) -> Resource:
        key = tuple(attributes.items())
        found = self._resources.get(key)
        if found is None:
            if len(self._resources) >= _RESOURCES:
                self._resources.clear()
            about = {"service.version": __version__, **attributes}
            theirs = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
            if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in theirs:
                about["service.name"] = f"aiops-{self._role}"
            found = self._resources[key] = Resource.create(about)
        return found

    def _made(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace, span.id, remote=False),
            parent=_context(span.trace, span.parent, remote=span.kind == "server")
            if span.parent
            else None,
            resource=self._resource(span.resource),
            attributes=dict(span.attributes),
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.begin,
            end_time=span.end,
            instrumentation_scope=self._scope,
        )


class _Said(logging.Filter):
    """Keeps what the SDK's exporters log on this thread: it is told once a minute, by us.

    What they log elsewhere, for others in this process, is logged as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text, self._thread = "", threading.get_ident()
        names = [*logging.root.manager.loggerDict]
        self._loggers = [logging.getLogger(name) for name in names if name.startswith(_THEIRS)]

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.text = brief(record.getMessage())
        return False

    def __enter__(self) -> Self:
        for logger in self._loggers:
            logger.addFilter(self)
        return self

    def __exit__(self, *_error: object) -> None:
        for logger in self._loggers:
            logger.removeFilter(self)


def _context(trace: int, span: int, *, remote: bool) -> SpanContext:
    return SpanContext(trace, span, remote, TraceFlags(TraceFlags.SAMPLED))


def span_exporter(endpoint: str) -> SpanExporter:
    """Return the SDK's exporter by OTLP; an empty endpoint: that of its variables."""
    if not endpoint:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint.rstrip("/").removesuffix(_PATH) + _PATH)


def opened(role: str, endpoint: str) -> SdkExporter:
    """Return the exporter of a process's servers, or of its workers."""
    return SdkExporter(span_exporter(endpoint), role)
