"""A server on a machine of its own, in virtual time: it can crash, lose its power, and come back.

The machine has a disk in memory and a host of the simulated network. When the server crashes, its
connections are reset, its port is closed, and none of its timers, tasks or threads does anything
any more. What it had written is on the disk, and after a loss of power what it had synced, and of
the rest what a seed chooses.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any

from aiops.errors import ConnectionLost, UsageError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.faulty_disk import FaultyDisk
from aiops.serving import rollback
from aiops.serving.config import Config
from aiops.serving.embedded import config_of
from aiops.serving.server import Server
from aiops.serving.standby.server import StandbyServer
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.network import HERE, Network

_LIFE: ContextVar[object] = ContextVar("_LIFE", default=None)  # of the process that runs


class ServerMachine:
    """A machine that runs a server.

    ::

        async with ServerMachine(policy="asgd", state="state", acks="durable") as machine:
            async with aiops.AsyncWorker(machine.url, params) as worker:
                await worker.step(gradients)
                machine.crash()
                await machine.start()
                await worker.step(gradients)

    Parameters
    ----------
    host
        Its name in the network.
    port
        The server's, the same after each start.
    disk
        Its disk, which outlives the server; default: an empty one.
    seed
        Of what a loss of power loses.
    settings
        Those of `aiops.serve`; with ``standby`` it is one until it is promoted. The folder
        ``state`` is one of the machine's disk; all other files are those of the real machine. Each
        shard has a machine of its own: ``follower=True`` for one, and ``followers`` of the lead
        has ``host:port`` of each.

    Attributes
    ----------
    url
        The server's.
    disk
        As given. ``disk.full = True`` fills it.
    faults
        The disk as the running server has it (`FaultyDisk`): ``crash_at`` names a point.
    server
        The running server, or the last one; of a standby, the one that it has become.
    standby
        The running standby, or the last one.
    running
        Whether it runs.
    serving
        Whether it serves workers, or its lead: a standby does once it is promoted.
    on_serving
        Called each time that it begins to serve; also when it has gone back to an earlier moment.
    error
        The error with which the last server ended by itself (`Superseded`, say), or None.

    Raises
    ------
    UsageError
        Outside of `aiops.testing.run`.
    """

    def __init__(
        self,
        host: str = "server",
        *,
        port: int = 7171,
        disk: VirtualDisk | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop) or not isinstance(loop.network, Network):
            raise UsageError("a simulated machine is for a coroutine that run() runs")
        self.host, self.port, self.settings = host, port, settings
        self.disk = disk or VirtualDisk(loop)
        self.url = f"aiops://{host}:{port}"
        self.faults = FaultyDisk(self.disk)
        self.server: Server
        self.standby: StandbyServer
        self.running = self.serving = False
        self.on_serving: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self._loop, self._network, self._rng = loop, loop.network, Random(seed)
        self._stands_by = False  # `standby` runs, and is not promoted yet
        self._booted = 0.0  # the time at which its clock began
        self._life = object()
        self._process: Server | StandbyServer | None = None  # the last that was made
        self._end = asyncio.Event()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> ServerMachine:
        """Start it."""
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End the server in good order, if it runs."""
        await self.stop()

    async def start(self) -> None:
        """Start the server, and return when it listens or has crashed.

        Raises
        ------
        UsageError
            When it cannot start, or runs already; `DamagedState` when its disk is damaged.
        """
        if self.running:
            raise UsageError(f"the server on {self.host!r} runs already")
        self._network.revive(self._network.host(self.host).name)
        self._life, self._end, self._process = object(), asyncio.Event(), None
        faults = self.faults if not self.faults.off else FaultyDisk(self.disk)
        self.faults, self.running, self.error = faults, True, None
        env = CURRENT_ENVIRONMENT.get()
        env = dataclasses.replace(env, disk=faults, now=lambda: self._loop.time() - self._booted)
        context = copy_context()
        context.run(HERE.set, self.host)
        context.run(CURRENT_ENVIRONMENT.set, env)
        context.run(_LIFE.set, self._life)
        self._ready = ready = self._loop.create_future()
        self._task = self._loop.create_task(self._serve(ready), name=self.host, context=context)
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._ended(self._task)
            if self.error is not None:
                raise self.error
        else:
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Note that the server has ended, if it was not killed."""
        if task is self._task and self.running:
            self.running = self.serving = self._stands_by = False
            if not task.cancelled():
                self.error = task.exception()
            self._network.cut(self.host)  # connections that it had not accepted yet

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Run a server as `aiops.serving.main.run` does, to its end."""
        config, end = config_of({"port": self.port, **self.settings}), self._end
        if config.shards > 1:
            raise UsageError("each shard has a machine of its own: name them in followers")

        def make() -> Server:
            self.serving = False
            self._process = server = Server(dataclasses.replace(config, standby=None, shard=None))
            return server

        def present(server: Server) -> None:
            self.server, self.serving = server, self.running  # it may have crashed in this start
            self._stands_by = False
            if self.serving:
                self.on_serving()
            if end.is_set():
                server.stop()

        stopping = self._loop.create_task(self._stop_when(end), name="stop")
        try:
            if config.standby is None:
                try:
                    server = await rollback.start(make, end.is_set, next_term=False)
                except ConnectionLost:  # a lead was waiting for its followers
                    if not end.is_set():
                        raise
                    return
            else:
                promoted = await self._stand_by(config, ready)
                if promoted is None:
                    return
                server = promoted
            present(server)
            if not ready.done():
                ready.set_result(None)
            await rollback.serve(server, make, present, end.is_set)
        finally:
            stopping.cancel()

    async def _stand_by(self, config: Config, ready: asyncio.Future[None]) -> Server | None:
        """Be a standby, and return the server that it has become; None: it has ended."""
        self._process = self.standby = standby = StandbyServer(config)
        await standby.start()
        self._stands_by = self.running
        if not ready.done():
            ready.set_result(None)
        return await standby.stand_by()

    async def _stop_when(self, end: asyncio.Event) -> None:
        await end.wait()
        if self._process is not None:
            self._process.stop_with_lead()

    async def stop(self) -> None:
        """End the server in good order, as SIGTERM does: a follower ends with its lead."""
        if self.running:
            task = self._task
            self._end.set()
            await asyncio.wait([task])  # it may have crashed, and another runs already
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def promote(self) -> bool:
        """Have the running standby become the server, as ``aiops promote`` does.

        Returns False if there is none, or it has no whole state.
        """
        if not (self._stands_by and self.standby.whole):
            return False
        self.standby.promote()
        return True

    def crash(self) -> None:
        """End the server at once, as SIGKILL does: what it has written stays."""
        if self.running:
            self.running = self.serving = self._stands_by = False
            self.faults.end()
            self._network.kill(self.host)
            self._network.close_ports(self.host)
            if self._process is not None:
                self._process.forked()  # nothing of it is its own any more
            self._forget(self._life)
            Context().run(self._loop.call_soon, self._bury, self._life, self._task)
            if not self._ready.done():
                self._ready.set_result(None)

    def cut_power(self, *, flips: int = 0) -> None:
        """End the server, and lose what is not synced.

        Parameters
        ----------
        flips
            The number of files in which a bit is flipped.
        """
        self.crash()
        self.disk = self.disk.after_power_cut(self._rng, flips=flips)
        self.faults = FaultyDisk(self.disk)
        self.boot()

    def boot(self, clock: float = 0.0) -> None:
        """Set the machine's clock, which counts the seconds since it was booted."""
        self._booted = self._loop.time() - clock

    def leap(self, seconds: float) -> None:
        """Have the machine's clock jump ahead, as that of a virtual machine does that was moved."""
        self._booted -= seconds

    def crash_at(self, point: str, count: int = 1, *, power: bool = False) -> None:
        """Crash when the running server, or the next one, reaches a point (`points`).

        Parameters
        ----------
        point, count
            As of `FaultyDisk.crash_at`.
        power
            Whether the power is cut.
        """
        if self.faults.off:
            self.faults = FaultyDisk(self.disk)
        self.faults.crash_at(point, count, self.cut_power if power else self.crash)

    def _forget(self, life: object) -> None:
        """Cancel the timers of a process, and end its threads."""
        self._loop.drop(lambda context: context.get(_LIFE) is life)

    def _bury(self, life: object, task: asyncio.Task[None]) -> None:
        """Cancel what a process began in its last callbacks, and end its task."""
        self._forget(life)
        task.cancel()
