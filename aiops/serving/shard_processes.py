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
from collections.abc import Callable
from pathlib import Path
from typing import Self

from aiops.common import urls
from aiops.common.closing import AsyncClosing
from aiops.errors import UsageError
from aiops.net.cpu_count import share
from aiops.net.thread_pool import MOST
from aiops.serving.config import Config, shard_folder
from aiops.serving.new_files import discard_unbegun, with_record
from aiops.serving.shard_count import held_shards
from aiops.state.directory import IDENTITY_FILE

_log = logging.getLogger("aiops.server")

_START = 60.0  # seconds that a follower may take to begin to listen
_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before a follower is started again
_SOON = 0.5  # seconds that the end of a process takes to be logged
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
        "no_shm",
    ),
    *("max_connections", "hello_deadline", "stall_deadline", "min_rate", "failure_timeout"),
    *("drain_deadline", "log_format", "log_level", "acks", "snapshot_every", "keep_journal"),
    *("standby_deadline", "tls_cert", "tls_key", "tls_ca", "tokens"),
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
    on_start
        Called with the shard and the port of a follower that has been started again.
    standbys
        Whether one that is started is the standby of a follower.

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
        self._record: Path | None = None  # the folder of this start, with `--record`
        self._ending, self.standbys = False, config.standby is not None
        self.on_start: Callable[[int, int], None] = lambda shard, port: None
        self._lost: dict[int, str] = {}  # places that others have taken: the URL of the lead, each
        self._stand_by = set[int]()  # shards whose processes were started as standbys
        self._running: dict[int, asyncio.subprocess.Process] = {}

    async def connect(self) -> Self:
        """Start all of them at the same time."""
        if self.config.shards == 1 or self.config.followers:
            return self
        recorded = self.config.record is not None
        config = self.config = with_record(self.config)
        if recorded:
            self._record = config.state
        if config.state is not None:
            _check_place(config.state, config.shards)
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
        if self._record is not None:
            discard_unbegun(self._record)

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
            _done, waiting = await asyncio.wait([watcher], timeout=_SOON)
            for each in waiting:  # it was about to start one again
                each.cancel()

    def stand_by(self, shard: int, url: str) -> None:
        """Have a follower be the standby of the server that has taken its place.

        ``url``: that of the lead. What it has beyond that server is lost in any case: it is killed
        if it runs as a follower, and started again.
        """
        self._lost[shard] = url
        process = self._running.get(shard)
        if process is not None and process.returncode is None and shard not in self._stand_by:
            process.kill()

    async def _start(self, shard: int, port: int = 0) -> int:
        """Start one, at this port (0: a free one); return its port."""
        name = f"shard {shard} of {self.config.shards}"
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "aiops.net.child_guard",
                "aiops.server",
                "--follower",
                "--port",
                str(port),
            ),
            *self.config.flags(FOLLOWERS_SETTINGS),
            *self._state_flags(shard),
            *self._standby_flags(shard),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(self.config),
            start_new_session=True,  # a Ctrl-C at the terminal is for the lead to handle
        )
        self._processes.append(process)
        self._running[shard] = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START):
                line = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            process.kill()
            raise UsageError(f"{name} did not begin to listen in {_START:g} s") from None
        if not line:
            status = await process.wait()
            raise UsageError(f"{name} did not start (exit status {status}): see its log above")
        _log.info("%s is process %d at %s", name, process.pid, line)
        self._watchers.append(asyncio.create_task(self._watch(shard, process)))
        _host, port = urls.parse(line)
        return port

    def reload(self) -> None:
        """Have all of them read their certificates and tokens again."""
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGHUP)

    def _state_flags(self, shard: int) -> list[str]:
        state = self.config.state
        return [] if state is None else [f"--state={state / shard_folder(shard)}"]

    def _standby_flags(self, shard: int) -> list[str]:
        url = self._lost.get(shard, self.config.standby if self.standbys else None)
        self._stand_by -= {shard}
        if url is None:
            return []
        self._stand_by |= {shard}
        return [f"--standby={url}", f"--shard={shard}"]

    async def _watch(self, shard: int, process: asyncio.subprocess.Process) -> None:
        """Log that a follower ended, if it was not to end; start one with a state again."""
        name = f"shard {shard} of {self.config.shards}"
        status = await process.wait()
        if not status or self._ending:
            return
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        _log.error("%s (process %d) ended %s", name, process.pid, how)
        if self.config.state is not None:
            await self._start_again(shard)

    async def _start_again(self, shard: int) -> None:
        """Start a follower until it listens, with pauses between; first at its port of before.

        A lead on another machine may know it by that, whose standby it was.
        """
        pause, port = _PAUSE, int(self.config.followers[shard - 1].removeprefix(":"))
        while not self._ending:
            try:
                port = await self._start(shard, port)
                followers = [*self.config.followers]
                followers[shard - 1] = f":{port}"
                self.config = dataclasses.replace(self.config, followers=followers)
                self.on_start(shard, port)
                return
            except UsageError as error:
                _log.error("%s; it is tried again in %g s", error, pause)
                port = 0
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _environment(config: Config) -> dict[str, str]:
    """Return this process's environment without settings that are the lead's alone."""
    found = {key: value for key, value in os.environ.items() if not key.startswith("AIOPS_")}
    if config.token is not None:
        found["AIOPS_TOKEN"] = config.token
    return found


def _check_place(folder: Path, shards: int) -> None:
    """Check that a state, if there is one, is of that number of shards, before any is begun.

    Raises
    ------
    UsageError
        When it is of another number.
    """
    if (folder / IDENTITY_FILE).exists():
        raise UsageError(
            f"{folder} holds a whole model, and this server is to have shards of one: start it"
            " without --shards, or name another --state"
        )
    held = held_shards(folder)
    if held is not None and held != shards:
        raise UsageError(
            f"{folder} holds the states of {held} shards, and --shards is {shards}: give --shards"
            f" {held}, or name another --state"
        )
