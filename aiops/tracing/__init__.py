"""Traces of exchanges for OpenTelemetry: ``--trace otlp:``, for servers and workers.

A trace is one push: the worker's step with its parts, and the server's exchange below it. Both
sides compute its ids from the client's id and the push's sequence number (`aiops.tracing.spans`),
which both know. So nothing about traces is on the wire, and both sides decide alike which pushes
have one. Spans are made when they are over, as plain values, and handed to a thread
(`aiops.tracing.delivery`) which alone uses OpenTelemetry (`aiops.tracing.export`).

What is traced is asked for by ``--trace`` of a server, or the variable ``AIOPS_TRACE`` of all
processes; or by OpenTelemetry's own ``OTEL_TRACES_EXPORTER=otlp``.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Protocol

from aiops.errors import UsageError
from aiops.tracing.delivery import SpanQueue
from aiops.tracing.spans import Exporter, Sampler

VARIABLE = "AIOPS_TRACE"
"""What workers read where a server has ``--trace``, whose variable it is, too."""

_OURS, _DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"

_log = logging.getLogger("aiops.tracing")


class Tracing:
    """The traces of one server or worker.

    Parameters
    ----------
    queue
        Takes the spans.
    sampler
        Decides which pushes are traced.

    Attributes
    ----------
    sampler
        As above.
    """

    now = staticmethod(time.time_ns)
    """Nanoseconds since 1970, as spans have them."""

    def __init__(self, queue: SpanQueue, sampler: Sampler) -> None:
        self._queue, self.sampler = queue, sampler
        self.offer = queue.offer

    def close(self, deadline: float = 1.5) -> None:
        """Send what is left, within this many seconds."""
        self._queue.close(deadline)


def check(text: str) -> None:
    """Check the text of ``--trace``, and that there is what it needs.

    Raises
    ------
    UsageError
        As `check_kind`, or when the packages of OpenTelemetry cannot be imported.
    """
    check_kind(text)
    if text:
        _exporters()


def check_kind(text: str) -> None:
    """Check the text of ``--trace``; empty: nothing is traced.

    Raises
    ------
    UsageError
        When there is no such kind.
    """
    if not text:
        return
    kind, colon, _endpoint = text.partition(":")
    if kind != "otlp" or not colon:
        raise UsageError(
            f"--trace {text}: traces are sent by OTLP, to the collector that the variables of"
            " OpenTelemetry name or that is given: otlp:, otlp:http://host:4318"
        )


def begun(
    text: str,
    role: str,
    attributes: Mapping[str, str | int],
    environment: Mapping[str, str] = os.environ,
) -> Tracing | None:
    """Return the tracing of a server or a worker, or None if it is not asked for.

    Parameters
    ----------
    text
        As of ``--trace``.
    role
        ``"server"`` or ``"worker"``.
    attributes
        Of all its spans.
    environment
        The variables of OpenTelemetry.

    Raises
    ------
    UsageError
        As `check`. Where only OpenTelemetry's variable asks for traces that is a warning.
    """
    if environment.get(_DISABLED, "").strip().lower() == "true":
        return None
    if not text:
        if "otlp" not in [kind.strip() for kind in environment.get(_OURS, "").split(",")]:
            return None
        try:
            check("otlp:")
        except UsageError as error:
            _log.warning("%s=%s, and nothing is traced: %s", _OURS, environment[_OURS], error)
            return None
    else:
        check(text)
    endpoint = text.partition(":")[2]
    sampler, unknown = Sampler.of(environment)
    if unknown:
        _log.warning("%s: %s", unknown, "the first pushes of a worker and 1 in 100 are traced")
    queue = SpanQueue(lambda: _exporters().opened(role, attributes, endpoint))
    return Tracing(queue, sampler)


class _Exporters(Protocol):
    def opened(self, role: str, attributes: Mapping[str, str | int], endpoint: str) -> Exporter: ...


def _exporters() -> _Exporters:
    try:
        module: _Exporters = importlib.import_module("aiops.tracing.export")
    except ImportError as error:
        raise UsageError(
            f"traces need packages that cannot be imported ({error}): pip install 'aiops-ps[otel]'"
        ) from None
    return module
