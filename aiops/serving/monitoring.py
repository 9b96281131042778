"""Let other programs observe a server by HTTP: its metrics, whether it lives, whether it is ready.

Trackers of experiments are sent its numbers besides (`aiops.serving.tracking`).

::

    /metrics   what Prometheus scrapes
    /healthz   200 while the event loop answers
    /readyz    200 if there is a model and pushes are taken; 503 with the reason
    /          with ``--dashboard`` the live page (`aiops.serving.live_page`)

The values are gathered on the event loop, of 64 clients at a time, with other work in between, and
the text is made of them on another thread. Scrapes at the same time share both. However often
others scrape, gathering and writing take a tenth of a processor's time at most: a scrape that comes
too early waits for its turn, for a few seconds at most. Time in which a thread waits for a
processor is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import ModuleType
from typing import Any, Self

from aiops import tracing
from aiops._version import __version__
from aiops.common.closing import AsyncClosing
from aiops.common.urls import address, is_loopback
from aiops.errors import UsageError
from aiops.metrics.catalog import INFO_LABELS
from aiops.net.http_listener import (
    Action,
    Handler,
    HttpListener,
    HttpResponse,
    QuickHandler,
    Streamer,
)
from aiops.net.yielding import yielding
from aiops.serving.config import Config
from aiops.serving.in_turns import in_turns
from aiops.serving.live_page import LivePage, Watched
from aiops.serving.norms import ParameterNorms
from aiops.serving.tracking import Tracking
from aiops.trackers import OnMetrics

_log = logging.getLogger("aiops.server")

_SHARE = 0.1
"""The most of a processor's time that gathering and writing take."""

_LONGEST = 2.5
"""Seconds that a scrape waits for its turn at most: it has five to be answered in."""


class Monitoring(AsyncClosing):
    """``async with Monitoring(config, running)`` answers at ``--metrics-port``, if there is one.

    With ``--dashboard`` there is one, by default a free one.

    Parameters
    ----------
    config
        The server's settings.
    running
        Returns the server that runs now, or None while there is none: another takes its place when
        a standby is promoted, and when a server goes back to a snapshot.

    on_metrics
        Callbacks that are sent its numbers, beside the trackers of the settings.

    Attributes
    ----------
    url
        Of its root; empty without ``--metrics-port`` and ``--dashboard``.

    Raises
    ------
    UsageError
        When the address cannot be had, or prometheus-client is not installed, or the package of a
        tracker or of ``--trace``.
    """

    def __init__(
        self,
        config: Config,
        running: Callable[[], Watched | None],
        on_metrics: Sequence[OnMetrics] = (),
    ) -> None:
        tracing.check(config.trace)
        self.url = ""
        self._tracking = Tracking(config, running, on_metrics)
        self._config, self._running = config, running
        self._norms = ParameterNorms(running)
        self._listener: HttpListener | None = None
        self._exposition: ModuleType | None = None
        self._page: LivePage | None = None
        self._gathering: asyncio.Task[bytes] | None = None
        self._next = 0.0  # the loop's time from which on values may be gathered again

    async def connect(self) -> Self:
        """Listen, if that is asked for, and send numbers to the trackers."""
        await self._listen()
        self._tracking.begin()
        return self

    async def _listen(self) -> None:
        config = self._config
        if config.metrics_port is None and not config.dashboard:
            return
        handlers: dict[str, Handler] = {}
        if config.metrics_port is not None:
            self._exposition = _exposition()
            handlers["/metrics"] = self._metrics
        quick: dict[str, QuickHandler] = {"/healthz": self._healthz, "/readyz": self._readyz}
        streams: dict[str, Streamer] = {}
        actions: dict[str, Action] = {}
        if config.dashboard:
            # Beyond the machine a token would travel in the clear.
            tokens = config.token is not None or config.tokens is not None
            tokens = tokens and is_loopback(config.metrics_host)
            self._page = LivePage(_info(config, {}), self._running, self._norms, tokens=tokens)
            actions = self._page.actions()
            quick |= self._page.files()
            streams["/events"] = self._page.events
        self._listener = HttpListener(handlers, quick, streams, actions)
        host = {"": "0.0.0.0", "*": "0.0.0.0"}.get(config.metrics_host, config.metrics_host)
        port = await self._listener.listen(host, config.metrics_port or 0)
        self.url = f"http://{address(host, port)}"
        if self._exposition is not None:
            _log.info("metrics at %s/metrics", self.url)
        if self._page is not None:
            self._page.begin()
            _log.info("the live page is at %s/", self.url)
        if not is_loopback(host):
            _log.warning(
                "all who reach %s can read the metrics, with the names of workers and tensors: have"
                " a firewall let only Prometheus and probes in",
                self.url,
            )

    async def close(self) -> None:
        """Listen no more, cut the connections, and let the trackers take what is left."""
        if self._page is not None:
            self._page.close()
        self._norms.close()
        if self._listener is not None:
            await self._listener.close()
        if self._gathering is not None:
            self._gathering.cancel()
        await self._tracking.close()

    def _healthz(self) -> HttpResponse:
        return HttpResponse(HTTPStatus.OK, b"ok\n")

    def _readyz(self) -> HttpResponse:
        why = self._not_ready()
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        return HttpResponse(status, f"{why or 'ready'}\n".encode())

    async def _metrics(self) -> HttpResponse:
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_task(self._text())
            self._gathering.add_done_callback(self._gathered)
        text = await asyncio.shield(self._gathering)  # others may wait for it, too
        assert self._exposition is not None, "it is imported before there are requests"
        return HttpResponse(HTTPStatus.OK, text, self._exposition.CONTENT_TYPE)

    def _gathered(self, task: asyncio.Task[bytes]) -> None:
        self._gathering = None
        if not task.cancelled():
            task.exception()  # those that wait for it have it; there may be none left

    async def _text(self) -> bytes:
        """Gather the values, when it is time, and make the text of them."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(min(max(0.0, self._next - loop.time()), _LONGEST))
        running, took = self._running(), 0.0
        report: dict[str, Any] = {}
        if running is not None:
            found, took = await in_turns(running.gather(self._config.metrics_workers))
            report.update(found)
        begun = time.thread_time()
        report["ready"] = not self._not_ready()
        self._norms.ask()
        self._norms.add_to(report)
        took += time.thread_time() - begun
        report["gathering_seconds"] = took
        self._next = loop.time() + took / _SHARE
        text, wrote = await asyncio.to_thread(self._written, report)
        self._next = loop.time() + (took + wrote) / _SHARE
        return text

    def _written(self, report: Mapping[str, Any]) -> tuple[bytes, float]:
        """Return the text, and the seconds of a processor that it took."""
        assert self._exposition is not None, "it is imported before there are requests"
        begun = time.thread_time()
        with yielding():  # the event loop has the interpreter when it wants it
            text: bytes = self._exposition.text(report, _info(self._config, report))
        return text, time.thread_time() - begun

    def _not_ready(self) -> str:
        running = self._running()
        return "it is starting" if running is None else running.not_ready


def _info(config: Config, report: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of `aiops_info`: a standby's algorithm is its primary's."""
    given = {
        "version": __version__,
        "policy": report.get("policy", config.policy),
        "gate": config.gate,
        "push_codec": ",".join(config.push_codec),
        "fetch_codec": ",".join(config.fetch_codec),
        "filter": (report.get("filter") or {}).get("filter", "off"),
        "acks": config.acknowledgement.name.lower(),
    }
    return {name: given[name] for name in INFO_LABELS}


def _exposition() -> ModuleType:
    try:
        from aiops.metrics import exposition
    except ImportError:
        raise UsageError(
            "--metrics-port needs prometheus-client: pip install 'aiops-ps[metrics]'"
        ) from None
    return exposition
