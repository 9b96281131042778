"""Send the numbers of a run to trackers of experiments (``--track``, ``on_metrics``).

Every ``--track-every`` seconds the server's report is gathered on the event loop, and the numbers
in it are offered to each tracker's own thread (`aiops.trackers.delivery`), so that the loop waits
for none. The last ones are those of the moment at which the server ends. A standby sends none until
it is promoted; then it goes on with trackers of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiops.metrics.scalars import RunScalars
from aiops.serving.config import Config
from aiops.serving.in_turns import in_turns
from aiops.serving.live_page import Watched
from aiops.serving.repeated_error import RepeatedError
from aiops.trackers import OnMetrics, RunMetrics, Tracker, tracker_of
from aiops.trackers.delivery import Delivery

_SHARE = 0.01
"""The most of a processor's time that gathering takes."""

_END = 1.5
"""Seconds in which trackers take what is left, all together: Ctrl-C ends a server within two."""


class Tracking:
    """Tracks the server that runs now.

    Parameters
    ----------
    config
        The server's settings.
    running
        Returns the server, or None while there is none.
    on_metrics
        Callbacks beside the trackers of the settings.

    Raises
    ------
    UsageError
        When a tracker is unknown, or its package cannot be imported.
    """

    def __init__(
        self,
        config: Config,
        running: Callable[[], Watched | None],
        on_metrics: Sequence[OnMetrics] = (),
    ) -> None:
        self._every, self._running = config.track_every, running
        self._scalars, self._error = RunScalars(), RepeatedError()
        named = [(text, *tracker_of(text)) for text in config.track]
        settings = _settings(config)
        opens: dict[str, Callable[[], Tracker]] = {
            text: partial(opened, target, settings) for text, opened, target in named
        }
        for callback in on_metrics:
            opens[getattr(callback, "__qualname__", repr(callback))] = partial(_Callback, callback)
        self._opens = opens
        self._deliveries: list[Delivery] = []
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Send numbers from here on."""
        self._deliveries = [Delivery(name, opened) for name, opened in self._opens.items()]
        if self._deliveries:
            self._task = asyncio.get_running_loop().create_task(self._track())

    async def close(self) -> None:
        """Send the last numbers, and let the trackers end; without a run there are none."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self._send()
        for delivery in self._deliveries:
            delivery.end()
        until = time.monotonic() + _END
        for delivery in self._deliveries:
            await asyncio.to_thread(delivery.join, max(0.0, until - time.monotonic()))

    async def _track(self) -> None:
        took = await self._send()
        while True:
            await asyncio.sleep(max(self._every, took / _SHARE))
            took = await self._send()

    async def _send(self) -> float:
        """Offer the numbers of now; return the seconds of a processor that it took."""
        running = self._running()
        if running is None:
            return 0.0
        try:
            report, took = await in_turns(running.gather(0))
            begun = time.thread_time()
            if not report or "standby_of" in (report.get("state") or {}):
                return took
            values = self._scalars.take(time.monotonic(), report)
        except Exception as error:  # trackers are no reason for a server to end
            text = f"there are no numbers to track: {error!r}"
            self._error.log(time.monotonic(), repr(error), text)
            return 0.0
        metrics = RunMetrics(report.get("version", 0), time.time(), values)
        for delivery in self._deliveries:
            delivery.offer(metrics)
        return took + time.thread_time() - begun


class _Callback:
    """A callback as a tracker."""

    def __init__(self, callback: OnMetrics) -> None:
        self._callback = callback

    def on_metrics(self, metrics: RunMetrics) -> None:
        self._callback(metrics)

    def close(self) -> None:
        pass


def _settings(config: Config) -> dict[str, str]:
    """Return the settings of a run that tell of how it trains, as text."""
    given: dict[str, Any] = {
        "policy": config.policy,
        "lr": config.lr,
        "set": " ".join(config.set),
        "gate": config.gate,
        "push_codec": ",".join(config.push_codec),
        "fetch_codec": ",".join(config.fetch_codec),
        "filter": config.filter,
        "workers": config.workers,
        "shards": config.shards,
        "bandwidth_budget": config.bandwidth_budget,
    }
    return {name: str(value) for name, value in given.items() if value not in (None, "")}
