"""The servers of a simulated cluster: one, or one and its standby, and an operator.

The operator starts each server again when it is down, and promotes the standby when a fault of the
plan says so. From then on the standby is the server that is to serve. The old one is started as
its standby, or, if the operator is naive, as before, until it says that it is superseded.

With ``--acks replicated`` the operator takes care: a standby is promoted only once it has all that
was acknowledged before the server had a standby at all, as ``aiops stats`` tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiops.common import generations
from aiops.errors import Superseded, UsageError
from aiops.lab.torture.cluster_plan import ClusterPlan
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.server_machine import ServerMachine

NAMES = "server", "standby"
"""The hosts."""

_AGAIN = 2.0
"""Virtual seconds between attempts to start a server whose disk is full, or to promote one."""

_PATIENCE = 60.0
"""Virtual seconds in which a standby has all rows, and an old server has learnt of the new one."""

_LOOK = 0.05
"""Virtual seconds between two looks at something that is waited for."""

_LIMIT = 5000.0


class ClusterServers:
    """The servers of a simulated cluster.

    Parameters
    ----------
    plan
        The cluster's.
    loop
        The virtual event loop.
    disk
        Makes a disk.
    emptied
        Called when a server begins to serve at version 0.

    Attributes
    ----------
    machines
        All of them; the first one serves at first.
    tasks
        The operator's.
    starts, promotions
        The starts of servers, and the standbys that began to serve.
    pause
        Virtual seconds from the end of a server until it is started again.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        loop: VirtualLoop,
        disk: Callable[[VirtualLoop], VirtualDisk],
        emptied: Callable[[], None],
    ) -> None:
        self._plan, self._loop, self._emptied = plan, loop, emptied
        self.machines = [
            ServerMachine(name, port=7171 + at, disk=disk(loop), seed=plan.seed, **plan.settings())
            for at, name in enumerate(NAMES[: 1 + plan.standby])
        ]
        self.tasks: list[asyncio.Task[None]] = []
        self.starts = self.promotions = 0
        self.pause = 0.0
        self._main = 0  # the number of the one that is to serve
        self._served = {0}  # those that have served
        self._naive = set[int]()  # old ones that are started as if they were to serve
        self._safe = True  # the standby has all that was acknowledged with none
        self._mark: int | None = None  # the row that it is to have for that

    @property
    def url(self) -> str:
        """The address for workers."""
        return "aiops://" + ",".join(one.url.removeprefix("aiops://") for one in self.machines)

    @property
    def main(self) -> ServerMachine:
        """The server that is to serve."""
        return self.machines[self._main]

    def machine(self, number: int) -> ServerMachine:
        """Return the server that is to serve (0), or the other one (1), if there is one."""
        return self.machines[(self._main + number) % len(self.machines)]

    def begin(self) -> None:
        """Start all of them, and start them again whenever they end."""
        for number, machine in enumerate(self.machines):
            self._task(self._supervise(number), f"supervisor of {machine.host}")

    def failures(self) -> list[str]:
        """Return what the operator could not do, one sentence each."""
        return [
            f"{task.get_name()}: {type(error).__name__}: {error}"
            for task in self.tasks
            if task.done() and not task.cancelled() and (error := task.exception()) is not None
        ]

    async def end(self) -> None:
        """End all of them in good order, and start none again."""
        for task in self.tasks:
            task.cancel()
        for machine in self.machines:
            await machine.stop()

    # -------------------------------------------------------------- the operator

    def _task(self, work: Any, name: str) -> None:
        self.tasks.append(self._loop.create_task(work, name=name))

    async def _supervise(self, number: int) -> None:
        """Start a server again and again; wrong is one that cannot, but for room."""
        machine = self.machines[number]
        while True:
            self._give_role(number)
            self.starts += 1
            try:
                await machine.start()
                if machine.serving and not machine.server.engine.version:
                    self._emptied()
                await self._loop.until(lambda: not machine.running, "it is down", limit=_LIMIT)
                if machine.error is not None:
                    raise machine.error
            except Superseded:
                if number == self._main:
                    raise
                self._naive.discard(number)
            except UsageError as error:
                if "No space left" not in str(error):
                    raise
                await asyncio.sleep(_AGAIN)
            await asyncio.sleep(self.pause)

    def _give_role(self, number: int) -> None:
        """Choose whether the server that is started next is a standby."""
        settings = self.machines[number].settings
        serves = number == self._main and number in self._served
        if serves or number in self._naive or len(self.machines) == 1:
            settings.pop("standby", None)
        else:
            settings["standby"] = self.machines[1 - number].url
        if number == self._main and not self._safe:
            self._mark = None  # it may have lost rows, and writes others under their numbers

    def look(self) -> None:
        """Learn from the statistics whether the standby has all."""
        if self._safe or not self.main.serving:
            return
        state = self.main.server.engine.report()["state"]
        if state["acks"] != "replicated":
            return
        if self._mark is None:
            self._mark = state["row"]
        self._safe = any(standby["synced"] >= self._mark for standby in state["standbys"])

    def promote(self) -> bool:
        """Promote the standby, unless the operator knows better; return whether it was told to."""
        self.look()
        number = 1 - self._main
        if len(self.machines) == 1 or self._main not in self._served:  # the last is not over
            return False
        if not (self._safe or self._plan.lossy) or not self._is_fed(number):
            return False
        if not self.machines[number].promote():
            return False
        if self._plan.naive:
            self._naive.add(self._main)
        self._main, self._safe = number, False
        self._served.discard(number)
        self._task(self._promote(number), f"promotion of {NAMES[number]}")
        return True

    def _is_fed(self, number: int) -> bool:
        """Return whether a standby has been fed since the last promotion.

        Else it may have what it had as the server: pushes of which workers were told that they are
        lost.
        """
        standby = getattr(self.machines[number], "standby", None)
        term = generations.term(self.main.server.generation)
        return standby is not None and generations.term(standby.generation) == term

    async def _promote(self, number: int) -> None:
        """Have a standby promoted, again and again if it crashes meanwhile."""
        machine = self.machines[number]
        while not machine.serving:
            machine.promote()
            await asyncio.sleep(_LOOK)
        self._served.add(number)
        self._naive.discard(number)
        self._mark = None
        self.promotions += 1
        if not machine.server.engine.version:
            self._emptied()

    # -------------------------------------------------------------- at the end

    async def change(self) -> str:
        """Kill the server, and have the standby take its place; return what is wrong, or nothing.

        Without a standby the server is started again.
        """
        main = self.main
        if len(self.machines) == 2 and not await self._until(self._has_all):
            return f"the standby has not got all rows in {_PATIENCE:g} s"
        main.crash()
        if len(self.machines) == 2 and not self.promote():
            return "the standby has all rows, and cannot be promoted"
        return ""

    async def settled(self) -> str:
        """Wait until one server serves and no other; return what is wrong, or nothing."""
        others = [one for one in self.machines if one is not self.main]
        if not await self._until(lambda: not any(one.serving for one in others)):
            return f"a server that was superseded serves for {_PATIENCE:g} s"
        if not await self._until(lambda: self.main.serving):
            return f"{self.main.host} does not serve {_PATIENCE:g} s after the faults ended"
        return ""

    def _has_all(self) -> bool:
        """Return whether the standby has all rows, and whether that was told."""
        if not self.main.serving:
            return False
        state = self.main.server.engine.report()["state"]
        self._safe = state["acks"] == "replicated" and any(
            standby["synced"] >= state["row"] for standby in state["standbys"]
        )
        return self._safe

    async def _until(self, there: Callable[[], bool]) -> bool:
        deadline = self._loop.time() + _PATIENCE
        while not there():
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(_LOOK)
        return True
