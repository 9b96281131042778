"""Run a server as a process: signals, the limit of open files, follower processes."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable
from functools import partial

from aiops.common import urls
from aiops.errors import ConnectionLost, UsageError
from aiops.net import faults, signals
from aiops.serving import rollback
from aiops.serving.config import Config
from aiops.serving.monitoring import Monitoring
from aiops.serving.server import Server
from aiops.serving.shard_processes import ShardProcesses
from aiops.serving.standby.server import StandbyServer

_log = logging.getLogger("aiops.server")

_SPARE_FILES = 64
"""Open files that a server needs beside its connections."""


_FEWEST_FILES = 24
"""Open files without which a server cannot begin: its modules, its event loop, one connection."""


def check_files() -> None:
    """Check that this process may open the files without which there is no event loop.

    Raises
    ------
    UsageError
        When it may not.
    """
    most = _most_files()
    if most is not None and most < _FEWEST_FILES:
        raise UsageError(
            f"this process may open {most} files, and a server needs {_FEWEST_FILES} and one for"
            " each connection: raise the limit (ulimit -n)"
        )


async def run(config: Config, announce: Callable[[str], None]) -> None:
    """Run a server until a signal ends it; ``announce`` is given the URL when it listens.

    With ``shards`` the followers are child processes, which end with this one.
    """
    faults.use_environment_variable()
    try:
        await _serve(_with_room(config), announce)
    except signals.Ended as why:
        _log.info("%s came while the state was read, which is as it was", why)


async def _serve(config: Config, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it, which may be in the midst of reading a state."""
    server: Server | None = None
    standby: StandbyServer | None = None
    ending = False

    def end(number: int) -> None:
        nonlocal ending
        again, ending = ending, True
        running = server if standby is None else standby
        if running is None:
            return
        if again or number == signal.SIGINT:  # a person waits at the terminal
            running.stop()
        else:
            running.stop_with_lead()

    def promote(_number: int) -> None:
        if standby is not None and standby.server is None:
            standby.promote()

    def reload(_number: int) -> None:
        running = server if standby is None else standby
        if running is not None:
            running.reload()
        children.reload()

    _log.info("--failure-timeout %g: %s", config.failure_timeout, config.waits)
    asks = promote if config.standby is not None else None
    children = ShardProcesses(config)
    reloads = config.tls or config.tokens is not None
    with signals.handled(end, asks, reload if reloads else None):
        async with children, Monitoring(config, lambda: standby or server):
            if config.standby is not None:
                standby = StandbyServer(children.config)
                children.on_start = standby.follower_moved
                standby.on_promotion = partial(setattr, children, "standbys", False)
                announce(await standby.start())
                await standby.serve()
                return

            def make() -> Server:
                nonlocal server
                port = config.port if server is None else server.port
                server = Server(dataclasses.replace(children.config, port=port))
                children.on_start = server.follower_moved
                server.on_taken = partial(_stand_by, children, server)
                return server

            def present(started: Server) -> None:
                if ending:
                    started.stop()

            try:
                first = await rollback.start(make, lambda: ending, next_term=False)
            except ConnectionLost as why:  # it had begun nothing
                if not ending:
                    raise
                _log.info("%s", why)
                return
            present(first)
            announce(first.url)
            await rollback.serve(first, make, present, lambda: ending)


def _stand_by(children: ShardProcesses, server: Server, shard: int) -> None:
    """Have a follower of this machine be the standby of the one that has taken its place."""
    children.stand_by(shard, urls.local_url(server.url))


def _most_files() -> int | None:
    """Return the number of files that this process may open; None: as many as it likes."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _with_room(config: Config) -> Config:
    """Raise the limit of open files to one per connection; if that fails, lower the bound."""
    try:
        import resource
    except ImportError:  # not on Windows
        return config
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return config
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == wanted:
        return config
    allowed = max(1, most - _SPARE_FILES)
    _log.warning("at most %d connections: this process may open %d files", allowed, most)
    return dataclasses.replace(config, max_connections=allowed)
