"""A server on a machine of its own, in virtual time: it can crash, lose its power, and come back.

The machine has a disk in memory and a host of the simulated network. When the server crashes, its
connections are reset, its port is closed, and none of its timers, tasks or threads does anything
any more. What it had written is on the disk, and after a loss of power what it had synced, and of
the rest what a seed chooses.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar, copy_context
from dataclasses import replace
from random import Random
from typing import Any

from aiops.errors import UsageError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.faulty_disk import FaultyDisk
from aiops.serving.embedded import config_of, serve
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
        ``state`` is one of the machine's disk; all other files
        are those of the real machine.

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
        Whether it serves workers: a standby does once it is promoted.
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
        self.error: BaseException | None = None
        self._loop, self._network, self._rng = loop, loop.network, Random(seed)
        self._stands_by = False  # `standby` runs, and is not promoted yet
        self._booted = 0.0  # the time at which its clock began
        self._life = object()
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
        self._life, self._end = object(), asyncio.Event()
        faults = self.faults if not self.faults.off else FaultyDisk(self.disk)
        self.faults, self.running, self.error = faults, True, None
        env = CURRENT_ENVIRONMENT.get()
        env = replace(env, disk=faults, now=lambda: self._loop.time() - self._booted)
        context = copy_context()
        context.run(HERE.set, self.host)
        context.run(CURRENT_ENVIRONMENT.set, env)
        context.run(_LIFE.set, self._life)
        self._ready = ready = self._loop.create_future()
        self._task = self._loop.create_task(self._serve(ready), name=self.host, context=context)
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            crashed, self.running = not self.running, False
            error = self._task.exception()
            if error is not None and not crashed:
                raise error
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
        end = self._end
        if "standby" in self.settings:
            await self._stand_by(ready, end)
            return
        async with serve(port=self.port, **self.settings) as server:
            self.server, self.serving = server, self.running  # it may have crashed in this start
            if not ready.done():
                ready.set_result(None)
            asked = [self._loop.create_task(one) for one in (end.wait(), server.until_ending())]
            try:
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in asked:
                    task.cancel()

    async def _stand_by(self, ready: asyncio.Future[None], end: asyncio.Event) -> None:
        """Be a standby, and the server that it becomes."""
        standby = StandbyServer(config_of({"port": self.port, **self.settings}))
        await standby.start()
        self.standby, self._stands_by = standby, self.running
        if not ready.done():
            ready.set_result(None)
        serving: list[Server] = []

        async def stop() -> None:
            await end.wait()
            (serving[0] if serving else standby).stop()

        stopping = self._loop.create_task(stop(), name="stop")
        try:
            server = await standby.stand_by()
            if server is not None:
                self.server, self.serving, self._stands_by = server, self.running, False
                serving.append(server)
                await server.serve()
        finally:
            stopping.cancel()

    async def stop(self) -> None:
        """End the server in good order, as SIGTERM does."""
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
            server = getattr(self, "server", None)
            if server is not None:
                server.forked()  # nothing of it is its own any more
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
