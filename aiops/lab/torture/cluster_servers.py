"""The servers of a simulated cluster: one, or one and its standby, or its shards, and an operator.

Those that serve together are a *site*: a server alone, or a lead and its followers. The operator
starts each server again when it is down, and promotes the standby when a fault of the
plan says so. From then on the standby is the server that is to serve. The old one is started as
its standby, or, if the operator is naive, as before, until it says that it is superseded.

With ``--acks replicated`` the operator takes care: a standby is promoted only once it has all that
was acknowledged before the server had a standby at all, as ``aiops stats`` tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiops.common import generations
from aiops.errors import RolledBack, Superseded, UsageError
from aiops.lab.torture.cluster_plan import ClusterPlan
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.server_machine import ServerMachine

NAMES = "server", "standby"
"""The hosts of the two sites; a follower's has its number behind it."""

_PASSES = ("No space left", "cannot be had", "did not come back", "lacks what was trained at last")
"""Parts of the errors with which a server ends that is to be started again: the lead of shards does
when one of them is away."""

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
        All of them: those of the first site, which serves at first, then those of the other one.
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
            _machine(plan, disk(loop), site, shard)
            for site in range(1 + plan.standby)
            for shard in range(plan.shards)
        ]
        for lead in self._leads:
            lead.on_serving = partial(self._serves, lead)
        self.tasks: list[asyncio.Task[None]] = []
        self.starts = self.promotions = 0
        self.pause = 0.0
        self._main = 0  # the site that is to serve
        self._served = {0}  # the sites that have served
        self._naive = set[int]()  # old sites that are started as if they were to serve
        self._safe = True  # the standby has all that was acknowledged with none
        self._mark: int | None = None  # the row that it is to have for that

    @property
    def url(self) -> str:
        """The address for workers."""
        return "aiops://" + ",".join(one.url.removeprefix("aiops://") for one in self._leads)

    @property
    def main(self) -> ServerMachine:
        """The server that is to serve, or the lead of those."""
        return self._leads[self._main]

    @property
    def _leads(self) -> list[ServerMachine]:
        """The server, or the lead, of each site."""
        return self.machines[:: self._plan.shards]

    def site(self, number: int) -> list[ServerMachine]:
        """Return the machines of the site that is to serve (0), or of the other one (1)."""
        shards, sites = self._plan.shards, 1 + self._plan.standby
        first = (self._main + number) % sites * shards
        return self.machines[first : first + shards]

    def machine(self, number: int, shard: int = 0) -> ServerMachine:
        """Return a machine of the site that is to serve (0), or of the other one (1)."""
        return self.site(number)[shard % self._plan.shards]

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
        """Start a server again and again; wrong is one that cannot, but for `_PASSES`."""
        machine = self.machines[number]
        await asyncio.sleep(dict(enumerate(self._plan.late)).get(number, 0.0))
        while True:
            self._give_role(number)
            self.starts += 1
            try:
                await machine.start()
                await self._loop.until(lambda: not machine.running, "it is down", limit=_LIMIT)
                if machine.error is not None:
                    raise machine.error
            except Superseded:
                site = number // self._plan.shards
                if site == self._main:
                    raise
                self._naive.discard(site)
            except UsageError as error:
                if not any(text in str(error) for text in _PASSES):
                    raise
                await asyncio.sleep(_AGAIN)
            except RolledBack:  # it was to end as well
                pass
            await asyncio.sleep(self.pause)

    def _serves(self, lead: ServerMachine) -> None:
        """Note that a server, or a lead, begins to serve."""
        if not lead.server.version:
            self._emptied()

    def _give_role(self, number: int) -> None:
        """Choose whether the server that is started next is a standby."""
        settings, site = self.machines[number].settings, number // self._plan.shards
        serves = site == self._main and site in self._served
        if serves or site in self._naive or not self._plan.standby:
            settings.pop("standby", None)
        else:
            settings["standby"] = self._leads[1 - site].url
        if site == self._main and not self._safe:
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
        site = 1 - self._main
        if not self._plan.standby or self._main not in self._served:  # the last is not over
            return False
        if not (self._safe or self._plan.lossy) or not self._is_fed(site):
            return False
        if not self._leads[site].promote():
            return False
        if self._plan.naive:
            self._naive.add(self._main)
        self._main, self._safe = site, False
        self._served.discard(site)
        self._task(self._promote(site), f"promotion of {NAMES[site]}")
        return True

    def _is_fed(self, site: int) -> bool:
        """Return whether a standby has been fed since the last promotion.

        Else it may have what it had as the server: pushes of which workers were told that they are
        lost.
        """
        standby = getattr(self._leads[site], "standby", None)
        term = generations.term(self.main.server.generation)
        return standby is not None and generations.term(standby.generation) == term

    async def _promote(self, site: int) -> None:
        """Have a standby promoted, again and again if it crashes meanwhile."""
        machine = self._leads[site]
        while not machine.serving:
            machine.promote()
            await asyncio.sleep(_LOOK)
        self._served.add(site)
        self._naive.discard(site)
        self._mark = None
        self.promotions += 1
        self._serves(machine)

    # -------------------------------------------------------------- at the end

    async def change(self) -> str:
        """Kill the server, and have the standby take its place; return what is wrong, or nothing.

        Without a standby the server is started again; so are all shards.
        """
        site, standby = self.site(0), self._plan.standby
        if standby and not await self._until(self._has_all):
            return f"the standby has not got all rows in {_PATIENCE:g} s"
        for machine in site:
            machine.crash()
        if standby and not self.promote():
            return "the standby has all rows, and cannot be promoted"
        return ""

    async def settled(self) -> str:
        """Wait until one server serves and no other; return what is wrong, or nothing."""
        site = self.site(0)
        others = [one for one in self.machines if one not in site]
        if not await self._until(lambda: not any(one.serving for one in others)):
            return f"a server that was superseded serves for {_PATIENCE:g} s"
        if not await self._until(lambda: all(one.serving for one in site)):
            away = ", ".join(one.host for one in site if not one.serving)
            return f"not serving {_PATIENCE:g} s after the faults ended: {away}"
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


def _machine(plan: ClusterPlan, disk: VirtualDisk, site: int, shard: int) -> ServerMachine:
    """Return the machine of one shard of a site."""

    def host(shard: int) -> str:
        return f"{NAMES[site]}-{shard}" if shard else NAMES[site]

    def port(shard: int) -> int:
        return 7171 + site + 10 * shard

    settings = plan.settings()
    if shard:
        settings["follower"] = True
    elif plan.shards > 1:
        settings["followers"] = [f"{host(each)}:{port(each)}" for each in range(1, plan.shards)]
    return ServerMachine(
        host(shard), port=port(shard), disk=disk, seed=plan.seed + (shard << 32), **settings
    )
