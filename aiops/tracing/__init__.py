"""Traces of exchanges for OpenTelemetry: ``--trace otlp:``, for servers and workers.

A trace is one push: the worker's step with its parts, and the server's exchange below it; or one
fetch of a worker's that is a request of its own; or one round of averages. All sides compute its
ids (`aiops.tracing.spans`) from what they know: the client's id and the push's sequence number, or
the fetch's request, or the round's number. So nothing about traces is on the wire, and all decide
alike which of them have one. Spans are made when they are over, as plain values, and handed to a
thread (`aiops.tracing.delivery`) which alone uses OpenTelemetry (`aiops.tracing.export`).

What is traced is asked for by ``--trace`` of a server, or the variable ``AIOPS_TRACE`` of all
processes; or by OpenTelemetry's own ``OTEL_TRACES_EXPORTER=otlp``.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from aiops.errors import UsageError
from aiops.tracing.delivery import SpanQueue, shared
from aiops.tracing.spans import Exporter, Sampler, Span

VARIABLE = "AIOPS_TRACE"
"""What workers read where a server has ``--trace``, whose variable it is, too."""

_ASKED, _DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
_PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"

AT_CLOSE = 1.5
"""Seconds that the last of a process's servers, or workers, waits for its spans to be sent."""

_log = logging.getLogger("aiops.tracing")


class Tracing:
    """The traces of one server or worker.

    Parameters
    ----------
    sampler
        Decides which pushes are traced.
    now
        The clock of spans: nanoseconds since 1970.
    resource
        Attributes of all its spans.
    joins
        Returns the queue that takes them, joined; called once there are some.

    Attributes
    ----------
    sampler, now
        As above.
    """

    def __init__(
        self,
        sampler: Sampler,
        now: Callable[[], int],
        resource: Mapping[str, str | int],
        joins: Callable[[], SpanQueue],
    ) -> None:
        self.sampler, self.now = sampler, now
        self._resource, self._joins = resource, joins
        self._queue: SpanQueue | None = None
        self._ended = self._last = self._failed = False

    def offer(self, spans: Sequence[Span]) -> None:
        """Have spans exported; after the end they are lost."""
        if self._queue is None:
            if self._ended:
                return
            self._queue = self._joins()
        self._queue.offer([span._replace(resource=self._resource) for span in spans])

    def safely(self, function: Callable[..., object], *given: Any) -> None:
        """Call a function; what it raises is logged, once, and the run goes on."""
        try:
            function(*given)
        except Exception:
            if not self._failed:
                self._failed = True
                _log.warning("an exchange could not be traced, and others may not", exc_info=True)

    def end(self) -> None:
        """Have the thread end once it has sent what there is; `close` or `wait_closed` is due."""
        if not self._ended:
            self._ended = True
            self._last = self._queue is not None and self._queue.leave()

    def close(self, deadline: float = AT_CLOSE) -> None:
        """End; the last of its role in this process waits for its spans to be sent, so long."""
        self.end()
        if self._queue is not None and self._last:
            self._queue.close(deadline)

    async def wait_closed(self, deadline: float = AT_CLOSE) -> None:
        """Do as `close` in an event loop, which goes on meanwhile."""
        self.end()
        if self._queue is not None and self._last:
            await self._queue.wait_closed(deadline)


def check(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check the text of ``--trace``, and that there is what it needs.

    Raises
    ------
    UsageError
        As `check_kind`, or when the packages of OpenTelemetry cannot be imported.
    """
    check_kind(text)
    if text and not _disabled(environment):
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


def start(
    text: str,
    role: str,
    attributes: Mapping[str, str | int],
    now: Callable[[], int] | None,
    environment: Mapping[str, str] = os.environ,
) -> Tracing | None:
    """Return the tracing of a server or a worker; None if nothing of it is to be traced.

    Parameters
    ----------
    text
        As of ``--trace``.
    role
        ``"server"`` or ``"worker"``.
    attributes
        Of all its spans.
    now
        The clock of spans: nanoseconds since 1970. None: there is none, as in a simulation, whose
        times are no times of a trace.
    environment
        The variables of OpenTelemetry.

    Raises
    ------
    UsageError
        As `check`. Where only OpenTelemetry's variable asks for traces that is a warning.
    """
    if now is None or _disabled(environment):
        return None
    if not text:
        if "otlp" not in [kind.strip() for kind in environment.get(_ASKED, "").split(",")]:
            return None
        try:
            check("otlp:", environment)
        except UsageError as error:
            _log.warning("%s=%s, and nothing is traced: %s", _ASKED, environment[_ASKED], error)
            return None
    else:
        check(text, environment)
    endpoint = text.partition(":")[2]
    protocol = next((name for name in _PROTOCOLS if environment.get(name)), "")
    if not endpoint and protocol and environment[protocol].strip() != "http/protobuf":
        _log.warning(
            "%s=%s, and nothing is traced: aiops sends http/protobuf alone, which collectors take"
            " at port 4318: --trace otlp:http://host:4318",
            *(protocol, environment[protocol]),
        )
        return None
    sampler, unknown = Sampler.of(environment)
    if unknown:
        _log.warning("%s: %s", unknown, "the first pushes of a worker and 1 in 100 are traced")
    if sampler.takes_none:
        return None
    joins = partial(shared, role, endpoint, lambda: _exporters().opened(role, endpoint))
    return Tracing(sampler, now, attributes, joins)


def _disabled(environment: Mapping[str, str]) -> bool:
    return environment.get(_DISABLED, "").strip().lower() == "true"


class _Exporters(Protocol):
    def opened(self, role: str, endpoint: str) -> Exporter: ...


def _exporters() -> _Exporters:
    try:
        module: _Exporters = importlib.import_module("aiops.tracing.export")
    except ImportError as error:
        raise UsageError(
            f"traces need packages that cannot be imported ({error}): pip install 'aiops-ps[otel]'"
        ) from None
    return module
