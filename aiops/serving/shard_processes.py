"""Run the followers of a server on its machine: child processes, on free ports.

They run under `aiops.net.child_guard`: whenever this process is killed they end too, even one that
is still importing its policy, or has no connection to its lead yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from typing import Self

from aiops.common import urls
from aiops.common.closing import AsyncClosing
from aiops.errors import UsageError
from aiops.net.cpu_count import share
from aiops.net.thread_pool import MOST
from aiops.serving.config import Config

_log = logging.getLogger("aiops.server")

_START = 60.0  # seconds that a follower may take to begin to listen
_GRACE = 5.0  # seconds between asking a follower to end and ending it

FOLLOWERS_SETTINGS = (
    *(
        "policy",
        "set",
        "lr",
        "host",
        "consistency",
        "live_versions",
        "push_codec",
        "threads",
        "kernels",
        "device",
        "max_model",
    ),
    *("max_connections", "hello_deadline", "stall_deadline", "min_rate", "heartbeat"),
    *("drain_deadline", "log_format", "log_level"),
)
"""The lead's settings that followers get as flags; they get the token by the environment."""


class ShardProcesses(AsyncClosing):
    """The followers of a server. ``async with ShardProcesses(config) as children``
    ends them again.

    Parameters
    ----------
    config
        The server's settings.

    Attributes
    ----------
    config
        The same, with the addresses of the started followers, and with the threads of each process
        if ``threads`` was not set.

    Raises
    ------
    UsageError
        When one does not start; the error names it.
    """

    def __init__(self, config: Config) -> None:
        if config.shards > 1 and not config.followers and config.threads is None:
            # They are on one machine, and work at the same time.
            config = dataclasses.replace(config, threads=min(MOST, share(config.shards)))
        self.config = config
        self._processes: list[asyncio.subprocess.Process] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._ending = False

    async def connect(self) -> Self:
        """Start all of them at the same time."""
        config = self.config
        if config.shards == 1 or config.followers:
            return self
        shards = range(1, config.shards)
        started = await asyncio.gather(*(self._start(shard) for shard in shards))
        ports = [f":{port}" for port in started]
        self.config = dataclasses.replace(config, followers=ports)
        return self

    async def abandon(self) -> None:
        """End them by a signal: there is no lead to send them `Leave`."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        await self.close()

    async def close(self) -> None:
        """End those that have not ended with their lead."""
        self._ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE):
                for process in self._processes:
                    await process.wait()
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for watcher in self._watchers:
            await asyncio.wait([watcher])

    async def _start(self, shard: int) -> int:
        """Start one; return its port."""
        name = f"shard {shard} of {self.config.shards}"
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "aiops.net.child_guard",
                "aiops.server",
                "--follower",
                "--port",
                "0",
            ),
            *self.config.flags(FOLLOWERS_SETTINGS),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(self.config),
            start_new_session=True,  # a Ctrl-C at the terminal is for the lead to handle
        )
        self._processes.append(process)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START):
                line = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            raise UsageError(f"{name} did not begin to listen in {_START:g} s") from None
        if not line:
            status = await process.wait()
            raise UsageError(f"{name} did not start (exit status {status}): see its log above")
        _log.info("%s is process %d at %s", name, process.pid, line)
        self._watchers.append(asyncio.create_task(self._watch(name, process)))
        _host, port = urls.parse(line)
        return port

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Log that a follower ended, if it was not to end."""
        status = await process.wait()
        if status and not self._ending:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            _log.error("%s (process %d) ended %s", name, process.pid, how)


def _environment(config: Config) -> dict[str, str]:
    """Return this process's environment without settings that are the lead's alone."""
    found = {key: value for key, value in os.environ.items() if not key.startswith("AIOPS_")}
    if config.token is not None:
        found["AIOPS_TOKEN"] = config.token
    return found
