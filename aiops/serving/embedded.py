"""A server inside a program's own event loop, with its followers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Unpack, overload

from aiops.errors import UsageError
from aiops.serving import rollback
from aiops.serving.config import Config, shard_folder
from aiops.serving.monitoring import Monitoring
from aiops.serving.new_files import discard_unbegun, with_record
from aiops.serving.serve_keywords import ServeKeywords, read_keywords
from aiops.serving.server import Server
from aiops.serving.shard_count import settle_shards
from aiops.serving.standby.server import StandbyServer
from aiops.trackers import OnMetrics

_log = logging.getLogger("aiops.server")


@overload
def serve(
    *,
    standby: None = None,
    on_metrics: OnMetrics | None = None,
    **settings: Unpack[ServeKeywords],
) -> AbstractAsyncContextManager[Server]: ...
@overload
def serve(
    *, standby: str, on_metrics: OnMetrics | None = None, **settings: Unpack[ServeKeywords]
) -> AbstractAsyncContextManager[StandbyServer]: ...
def serve(
    *,
    standby: str | None = None,
    on_metrics: OnMetrics | None = None,
    **settings: Unpack[ServeKeywords],
) -> AbstractAsyncContextManager[Server] | AbstractAsyncContextManager[StandbyServer]:
    """Run a server inside this event loop, for as long as the ``async with`` block lasts.

    ::

        async with aiops.serve(port=0) as server:
            print(server.url)

    A fork of this process has no part in it: neither its port nor its connections nor its files.

    With ``standby`` it is a standby, which a call of `StandbyServer.promote` makes the server::

        async with aiops.serve(standby="aiops://a:7171", state="run/state") as standby:
            await primary_is_lost()
            standby.promote()
            server = await standby.promoted()

    Parameters
    ----------
    standby
        The URL of the primary that it is a standby of, or several, as workers are given them.
    on_metrics
        Called with the numbers of the run (`aiops.trackers.RunMetrics`) every ``track_every``
        seconds, on a thread of its own, which it may block; what it raises is logged.
    settings
        As of ``aiops serve``, with ``_`` for ``-`` (`ServeKeywords`); ``set`` may be a dict of the
        policy's settings, a codec may be given alone, and a path as text. ``shards="auto"`` is the
        number of the state, or of named followers; without these it is 1, as one event loop gains
        nothing by more.

    Raises
    ------
    UsageError, ConflictError
        When the settings cannot work.
    """
    if on_metrics is not None and not callable(on_metrics):
        raise UsageError(
            f"on_metrics is called with the numbers of a run, and {type(on_metrics).__name__} can"
            " not be called: give one function"
        )
    callbacks = () if on_metrics is None else (on_metrics,)
    if standby is None:
        return _serving(settings, callbacks)
    return _standing_by({**settings, "standby": standby}, callbacks)


@contextlib.asynccontextmanager
async def _serving(
    settings: Mapping[str, Any], on_metrics: Sequence[OnMetrics]
) -> AsyncIterator[Server]:
    # One event loop has no use for more processors.
    settled, why = settle_shards(read_keywords(settings), processors=1)
    config = Config(**settled)
    if why:
        _log.info("%s", why)
    async with contextlib.AsyncExitStack() as stack:
        config = await _with_followers(config, stack)
        yield await stack.enter_async_context(_running(config, on_metrics))


@contextlib.asynccontextmanager
async def _standing_by(
    settings: Mapping[str, Any], on_metrics: Sequence[OnMetrics]
) -> AsyncIterator[StandbyServer]:
    config = config_of(settings)
    if config.sharded and not config.followers:
        raise UsageError("standbys of shards are processes: aiops serve --shards N --standby URL")
    standby = StandbyServer(config)
    async with Monitoring(config, lambda: standby, on_metrics) as monitoring:
        standby.metrics_url = monitoring.url
        await standby.start()
        running = asyncio.ensure_future(standby.serve())
        try:
            yield standby
        finally:
            standby.stop()
            await running


def config_of(settings: Mapping[str, Any]) -> Config:
    """Return the `Config` of settings as `serve` takes them.

    Raises
    ------
    UsageError, ConflictError
        When there is no such setting, or its value is of another type or makes no sense.
    """
    return Config(**read_keywords(settings))


@contextlib.asynccontextmanager
async def _running(config: Config, on_metrics: Sequence[OnMetrics] = ()) -> AsyncIterator[Server]:
    present: list[Server] = []

    def running() -> Server | None:
        return present[0] if present else None

    async with Monitoring(config, running, on_metrics) as monitoring:
        server = await rollback.start(lambda: Server(config), next_term=False)
        server.metrics_url = monitoring.url
        present.append(server)

        def again() -> Server:
            return Server(dataclasses.replace(config, port=server.port))

        present_it = partial(present.__setitem__, 0)
        served = asyncio.ensure_future(rollback.serve(server, again, present_it))
        try:
            yield server
        finally:
            present[0].stop()
            await served


async def _with_followers(config: Config, stack: contextlib.AsyncExitStack) -> Config:
    """Run the followers of ``shards`` inside this event loop too, and name them in the config."""
    if config.shards == 1 or config.followers:
        return config
    recorded, ports = config.record is not None, list[str]()
    config = with_record(config)
    if recorded and config.state is not None:
        stack.callback(discard_unbegun, config.state)
    for shard in range(1, config.shards):
        follower = await stack.enter_async_context(_running(following(config, shard)))
        ports.append(f":{follower.port}")
    return dataclasses.replace(config, followers=ports)


def following(config: Config, shard: int = 1) -> Config:
    """Return the settings of a server's follower."""
    state = None if config.state is None else config.state / shard_folder(shard)
    return dataclasses.replace(
        config,
        shards=1,
        follower=True,
        port=0,
        state=state,
        init=None,
        save=None,
        save_every=None,
        ledger=None,
        bandwidth_budget=None,
        worker_budget=None,
        profile=None,
        metrics_port=None,
        dashboard=False,
        metrics_host=Config.metrics_host,
        track=[],
        trace="",
    )
