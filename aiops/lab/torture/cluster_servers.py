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
from collections.abc import Callable, Mapping, Sequence
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
        for number, machine in enumerate(self.machines):
            machine.on_serving = partial(self._serves, number)
        self.tasks: list[asyncio.Task[None]] = []
        self.starts = self.promotions = 0
        self.pause = 0.0
        self._main = 0  # the site that is to serve
        self._served = {*range(plan.shards)}  # machines that have served since they were to
        self._naive = set[int]()  # old sites that are started as if they were to serve
        self._safe = True  # the standby has all that was acknowledged with none
        self._marks = list[int]()  # the rows that it is to have for that, by shard

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
                while machine.running and not self._is_misplaced(number):
                    await self._loop.until(
                        lambda: not machine.running or self._is_misplaced(number),
                        "it is down",
                        limit=_LIMIT,
                    )
                machine.crash()  # its lead's standby may lead it still
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

    def _serves(self, number: int) -> None:
        """Note that a server begins to serve."""
        site, shard = divmod(number, self._plan.shards)
        if site == self._main:
            self._served.add(number)
        if not shard and not self.machines[number].server.version:
            self._emptied()

    def _is_misplaced(self, number: int) -> bool:
        """Return whether a follower waits for a lead that is to be a standby from now on."""
        site, shard = divmod(number, self._plan.shards)
        if not shard or site == self._main or site in self._naive:
            return False
        return self.machines[number].serving and not self._leads[site].serving

    def _give_role(self, number: int) -> None:
        """Choose whether the server that is started next is a standby."""
        settings, site = self.machines[number].settings, number // self._plan.shards
        serves = site == self._main and number in self._served
        if serves or site in self._naive or not self._plan.standby:
            settings.pop("standby", None)
            settings.pop("shard", None)
        else:
            settings["standby"] = self._leads[1 - site].url
            settings["shard"] = number % self._plan.shards or None
        if site == self._main and not self._safe:
            self._marks.clear()  # it may have lost rows, and writes others under their numbers

    def look(self) -> None:
        """Learn from the statistics whether the standby has all."""
        states = [] if self._safe else self._states()
        if not states or any(state["acks"] != "replicated" for state in states):
            return
        if not self._marks:
            self._marks = [state["row"] for state in states]
        self._safe = _are_fed(states, self._marks)

    def _states(self) -> list[dict[str, Any]]:
        """Return what the servers that are to serve tell of their states, if all are up."""
        site = self.site(0)
        if not all(machine.serving for machine in site):
            return []
        return [machine.server.state_report() or {} for machine in site]

    def promote(self) -> bool:
        """Promote the standby, unless the operator knows better; return whether it was told to."""
        self.look()
        site, shards = 1 - self._main, self._plan.shards
        if not self._plan.standby or self._main * shards not in self._served:  # it is not over
            return False
        if not (self._safe or self._plan.lossy) or not self._is_fed():
            return False
        if not self._leads[site].promote():
            return False
        if self._plan.naive:
            self._naive.add(self._main)
        self._main, self._safe = site, False
        self._served -= {*range(site * shards, site * shards + shards)}
        self._task(self._promote(site), f"promotion of {NAMES[site]}")
        return True

    def _is_fed(self) -> bool:
        """Return whether all standbys have been fed since the last promotion.

        Else one may have what it had as the server: pushes of which workers were told that they are
        lost.
        """
        for server, machine in zip(self.site(0), self.site(1), strict=True):
            standby = getattr(machine, "standby", None)
            if standby is None or not standby.whole or machine.serving or not machine.running:
                return False
            if generations.term(standby.generation) != generations.term(server.server.generation):
                return False
        return True

    async def _promote(self, site: int) -> None:
        """Have a standby promoted, again and again if it crashes meanwhile."""
        machine, lead = self._leads[site], site * self._plan.shards
        while lead not in self._served:
            machine.promote()
            await asyncio.sleep(_LOOK)
        self._naive.discard(site)
        self._marks.clear()
        self.promotions += 1
        self._serves(lead)

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
        # An operator who has not begun yet to start old servers is to learn it first.
        if not await self._until(lambda: not (self._naive or any(one.serving for one in others))):
            return f"a server that was superseded serves for {_PATIENCE:g} s"
        if not await self._until(lambda: all(one.serving for one in site)):
            away = ", ".join(one.host for one in site if not one.serving)
            return f"not serving {_PATIENCE:g} s after the faults ended: {away}"
        return ""

    def _has_all(self) -> bool:
        """Return whether the standby has all rows, and whether that was told."""
        states = self._states()
        self._safe = (
            bool(states)
            and all(state["acks"] == "replicated" for state in states)
            and _are_fed(states, [state["row"] for state in states])
            and self._is_fed()
        )
        return self._safe

    async def _until(self, there: Callable[[], bool]) -> bool:
        deadline = self._loop.time() + _PATIENCE
        while not there():
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(_LOOK)
        return True


def _are_fed(states: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> bool:
    """Return whether a standby of each server has all rows up to one."""
    return all(
        any(standby["synced"] >= row for standby in state["standbys"])
        for state, row in zip(states, rows, strict=True)
    )


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
