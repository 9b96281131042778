"""The servers of a simulated cluster: one, or one and its standby, or its shards, and an operator.

Those that serve together are a *site*: a server alone, or a lead and its followers. The operator
starts each server again when it is down, and promotes the standby when a fault of the
plan says so. From then on the standby is the server that is to serve. The old one is started as
its standby, or, if the operator is naive, as before, until it says that it is superseded. The
standby of a follower may be told to take its place alone. Then those that serve are of both sites.

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

_TAKEN = "has taken this follower over"
"""Part of the error of a lead whose followers have a later one: its operator learns of that."""

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
    starts, promotions, places
        The starts of servers, the standbys that began to serve, and those that took the place of a
        follower alone.
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
        self.starts = self.promotions = self.places = 0
        self.pause = 0.0
        self._sites = [0] * plan.shards  # by shard, the site whose server is to serve
        self._served = {*range(plan.shards)}  # machines that have served since they were to
        self._placed = set[int]()  # machines that have taken the place of a follower alone
        self._naive = set[int]()  # old machines that are started as if they were to serve
        self._safe = True  # the standby has all that was acknowledged with none
        self._marks = list[int]()  # the rows that it is to have for that, by shard

    @property
    def url(self) -> str:
        """The address for workers."""
        return "aiops://" + ",".join(one.url.removeprefix("aiops://") for one in self._leads)

    @property
    def main(self) -> ServerMachine:
        """The server that is to serve, or the lead of those."""
        return self._leads[self._sites[0]]

    @property
    def _leads(self) -> list[ServerMachine]:
        """The server, or the lead, of each site."""
        return self.machines[:: self._plan.shards]

    def site(self, number: int) -> list[ServerMachine]:
        """Return the machines that are to serve (0), or the others (1)."""
        sites = 1 + self._plan.standby
        return [
            self.machines[(site + number) % sites * self._plan.shards + shard]
            for shard, site in enumerate(self._sites)
        ]

    def _is_to_serve(self, number: int) -> bool:
        site, shard = divmod(number, self._plan.shards)
        return self._sites[shard] == site

    def machine(self, number: int, shard: int = 0) -> ServerMachine:
        """Return a machine that is to serve (0), or that is not (1)."""
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
                if self._is_to_serve(number):
                    raise
                self._learn(number // self._plan.shards)
            except UsageError as error:
                if not any(text in str(error) for text in _PASSES):
                    raise
                if _TAKEN in str(error) and not self._is_to_serve(number):
                    self._learn(number // self._plan.shards)
                await asyncio.sleep(_AGAIN)
            except RolledBack:  # it was to end as well
                pass
            await asyncio.sleep(self.pause)

    def _serves(self, number: int) -> None:
        """Note that a server begins to serve."""
        self._look_for_places()
        if self._is_to_serve(number):
            self._served.add(number)
        if not number % self._plan.shards and not self.machines[number].server.version:
            self._emptied()

    def _lines(self) -> list[dict[str, Any]]:
        """Return what the lead that is to serve tells of its shards, if it does."""
        main, shards = self.main, self._plan.shards
        if shards == 1 or not (self._plan.standby and main.serving) or self._is_promoting:
            return []
        return main.server.coordinator.report()  # type: ignore[attr-defined,no-any-return]

    def _look_for_places(self) -> None:
        """Learn from the lead which standbys have taken the places of followers."""
        for shard, line in enumerate(self._lines()):
            ports = [self.machines[site * self._plan.shards + shard].port for site in (0, 1)]
            site = ports.index(line["port"]) if shard else self._sites[0]
            if site != self._sites[shard]:
                self._sites[shard], self._safe = site, False
                self._marks.clear()
                self._placed.add(site * self._plan.shards + shard)
                self.places += 1
            number = site * self._plan.shards + shard
            if self.machines[number].serving:
                self._served.add(number)

    def _learn(self, site: int) -> None:
        """Note that the old servers of a site are to be standbys."""
        self._naive -= {*range(site * self._plan.shards, (site + 1) * self._plan.shards)}

    def _is_misplaced(self, number: int) -> bool:
        """Return whether a follower waits for a lead that is to be a standby from now on.

        Or for one that leads another server in its place.
        """
        site, shard = divmod(number, self._plan.shards)
        machine = self.machines[number]
        if not (shard and machine.serving) or self._is_to_serve(number) or number in self._naive:
            return False
        if "standby" in machine.settings:  # it may have taken the place: the lead is to say it
            lines = self._lines()
            if not lines or lines[shard]["port"] == machine.port:
                return False
        return self._sites[0] == site or not self._leads[site].serving

    def _give_role(self, number: int) -> None:
        """Choose whether the server that is started next is a standby."""
        settings, (site, shard) = self.machines[number].settings, divmod(number, self._plan.shards)
        serves = self._is_to_serve(number) and number in self._served
        if serves and number in self._placed and self._plan.naive:
            pass  # with the flags of a standby, as before
        elif serves or number in self._naive or not self._plan.standby:
            settings.pop("standby", None)
            settings.pop("shard", None)
        else:  # that of a follower asks the lead where that is
            settings["standby"] = self.url if shard else self._leads[1 - site].url
            settings["shard"] = shard or None
        if self._is_to_serve(number) and not self._safe:
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
        return [machine.server.run_state.report() or {} for machine in site]

    def promote(self) -> bool:
        """Promote the standby, unless the operator knows better; return whether it was told to."""
        self.look()
        site, shards = 1 - self._sites[0], self._plan.shards
        if not self._plan.standby or self._is_promoting:
            return False
        if not (self._safe or self._plan.lossy) or not self._is_fed():
            return False
        if not self._leads[site].promote():
            return False
        stays = [self._sites[shard] == site for shard in range(shards)]  # the followers there
        if self._plan.naive:
            old = (1 - site) * shards
            self._naive |= {old + shard for shard in range(shards) if not stays[shard]}
        self._served -= {site * shards + shard for shard in range(shards) if not stays[shard]}
        self._sites, self._safe = [site] * shards, False
        self._task(self._promote(site), f"promotion of {NAMES[site]}")
        return True

    def _is_fed(self) -> bool:
        """Return whether all standbys have been fed since the last promotion.

        Else one may have what it had as the server: pushes of which workers were told that they are
        lost.
        """
        for server, machine in zip(self.site(0), self.site(1), strict=True):
            if self._sites[self.site(0).index(server)] != self._sites[0]:
                continue  # that server itself stays
            standby = getattr(machine, "standby", None)
            if standby is None or not standby.whole or machine.serving or not machine.running:
                return False
            generation = server.server.run_state.generation
            if generations.term(standby.generation) != generations.term(generation):
                return False
        return True

    async def _promote(self, site: int) -> None:
        """Have a standby promoted, again and again if it crashes meanwhile."""
        machine, lead = self._leads[site], site * self._plan.shards
        while lead not in self._served:
            machine.promote()
            await asyncio.sleep(_LOOK)
        self._learn(site)
        self._marks.clear()
        self.promotions += 1
        self._serves(lead)

    @property
    def _is_promoting(self) -> bool:
        """True until the standby that was promoted last serves."""
        return self._sites[0] * self._plan.shards not in self._served

    def take_place(self, shard: int) -> None:
        """Have the standby of a follower take its place, if the lead gives it."""
        if not self._is_promoting:
            self._task(self._take_place(shard), f"place of shard {shard}")

    async def _take_place(self, shard: int) -> None:
        """Ask again and again: until one of the two servers of the shard is led."""
        site = self._sites[shard]
        while self._sites[shard] == site and not self._is_promoting:
            self.machine(1, shard).promote()
            await asyncio.sleep(_LOOK)
            self._look_for_places()
            lines = self._lines()
            if lines and not lines[shard]["gone"]:
                return
            await asyncio.sleep(_AGAIN)

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
        # A place may be taken meanwhile. An operator who has not begun yet to start old servers is
        # to learn first that they are.
        if not await self._until(lambda: not (self._naive or any(map(_serving, self._others)))):
            return f"a server that was superseded serves for {_PATIENCE:g} s"
        if not await self._until(self._all_serve):
            away = ", ".join(one.host for one in self.site(0) if not one.serving)
            return f"not serving {_PATIENCE:g} s after the faults ended: {away}"
        return ""

    def _all_serve(self) -> bool:
        self._look_for_places()
        return all(map(_serving, self.site(0)))

    @property
    def _others(self) -> list[ServerMachine]:
        site = self.site(0)
        return [one for one in self.machines if one not in site]

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


def _serving(machine: ServerMachine) -> bool:
    return machine.serving


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
