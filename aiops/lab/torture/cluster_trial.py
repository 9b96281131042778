"""A simulated cluster with faults: real server, real client sessions, in virtual time.

All is decided by the plan, so a seed that fails fails again. While faults come, the workers push.
Then the faults end, and all must become well: each worker makes its pushes (liveness), and the
model has each acknowledged push exactly once, unless its worker was told that it is lost (safety).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiops.client.asyncio.client import AsyncClient
from aiops.client.asyncio.worker import AsyncWorker
from aiops.errors import AiopsError
from aiops.lab.torture.checker import ClientView, violations
from aiops.lab.torture.cluster_plan import PLACE, PROMOTION, ClusterFault, ClusterPlan
from aiops.lab.torture.cluster_servers import ClusterServers
from aiops.lab.torture.pusher import MODEL
from aiops.lab.torture.spread_rows import counted, fetch_cells, push_to_cell, tables_of
from aiops.model.layout import Array
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.host import Host
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.network import Network
from aiops.sim.virtual.server_machine import ServerMachine
from aiops.sim.virtual.world import World

_PATIENCE = 300.0  # virtual seconds in which all must be well, once the faults have ended
_TIMEOUT = 1000.0  # a worker's
_LIMIT = 5000.0  # virtual seconds of a trial


@dataclass(slots=True)
class SimulatedResult:
    """The findings of a trial; as of `TrialResult`, and the number of times each fault came.

    Attributes
    ----------
    plan
        The trial's.
    acknowledged, lost
        Pushes that a client saw acknowledged, and those that it was told are lost.
    starts, promotions, places
        Of servers, and of standbys: all of those of a site, and those of followers alone.
    virtual
        Virtual seconds that it took.
    wrong
        What contradicts the promise, one sentence each.
    seconds
        The time that it took.
    """

    plan: ClusterPlan
    acknowledged: int = 0
    lost: int = 0
    starts: int = 0
    promotions: int = 0
    places: int = 0
    virtual: float = 0.0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class ClusterTrial:
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan, self.result = plan, SimulatedResult(plan)
        self.views: list[ClientView] = []
        self._world = World(seed=plan.seed, limit=_LIMIT, pieces=plan.pieces or None)
        self._tasks: list[asyncio.Task[None]] = []
        self._current: list[int] = []  # the life of each worker
        self._healed = asyncio.Event()
        self._offered = False  # a server has lost all that it had
        self._bits = b""  # of the rows of tables that were fetched last

    def run(self) -> SimulatedResult:
        """Carry it out."""
        began = time.monotonic()
        try:
            self._world.run(self._all())
        except AiopsError as error:
            self.result.wrong.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            self.result.wrong.append(f"the simulation ended: {type(error).__name__}: {error}")
        self.result.acknowledged = sum(len(view.acknowledged) for view in self.views)
        self.result.lost = sum(view.rolled_back for view in self.views)
        self.result.seconds = time.monotonic() - began
        return self.result

    def disk(self, loop: VirtualLoop) -> VirtualDisk:
        """Return a server's disk."""
        return VirtualDisk(loop, self.plan.sync_seconds, inline=not self.plan.threads)

    def stepped(self, version: int) -> None:
        """Do nothing: a worker has been answered, with this version."""

    @property
    def machine(self) -> ServerMachine:
        """The server, or the one that serves at first."""
        return self.servers.machines[0]

    async def _all(self) -> None:
        plan, loop, network = self.plan, self._world.loop, self._world.network
        self.servers = servers = ClusterServers(plan, loop, self.disk, self._emptied)
        hosts = [machine.host for machine in servers.machines]
        names = [*hosts, *(_host(life) for life in range(plan.workers + plan.kills))]
        for name in names:
            network.add(Host(name, latency=plan.latency / 2, jitter=plan.jitter))
        servers.begin()
        for worker in range(plan.workers):
            self._current.append(worker)
            self._start_worker(worker, plan.pauses[worker])
        await self._play(network)
        self._heal(network, names)
        text = await servers.settled()  # a worker that leaves before cannot be told of a loss
        if text:
            self.result.wrong.append(text)
        self._healed.set()
        waiting = [task for task in self._tasks if not task.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=_PATIENCE)
        self.result.virtual = loop.time()
        for view, task in zip(self.views, self._tasks, strict=True):
            if not task.done():
                self.result.wrong.append(
                    f"{view.name} has not made its last pushes {_PATIENCE:g} s after the faults"
                    f" ended ({len(view.acknowledged)} are made)"
                )
        self.result.wrong += servers.failures()
        if not self.result.wrong:
            await self._check()
        self.result.starts, self.result.promotions = servers.starts, servers.promotions
        self.result.places = servers.places
        if not self.result.wrong:
            await servers.end()

    def _emptied(self) -> None:
        """Note that a server begins without a model, or with it as it was defined.

        After a promotion the old server may still acknowledge pushes, until it learns of it.
        """
        acknowledged = any(view.acknowledged for view in self.views)
        self._offered |= acknowledged or self.servers.promotions > 0

    # -------------------------------------------------------------- the workers

    def _start_worker(self, life: int, pause: float) -> None:
        view = ClientView(_host(life), self.plan.cells_of(life))
        self.views.append(view)
        with self._world.network.at(_host(life)):
            task = self._world.loop.create_task(self._push_on(view, pause), name=view.name)
        self._tasks.append(task)

    async def _push_on(self, view: ClientView, pause: float) -> None:
        """Make all pushes of a worker, and note what it saw."""
        plan, cells = self.plan, view.cells
        gradient, of_rows = np.zeros(plan.size), False
        mine = slice(cells.first, cells.first + cells.count)
        sums, newest = np.zeros(cells.count), [0, 0]  # of the tensor, and of the table
        tables = tables_of(plan.size) if plan.rows else {}
        try:
            worker = AsyncWorker(
                *(self.servers.url, {MODEL: np.zeros(plan.size)}),
                tables=tables,
                name=view.name,
                timeout=_TIMEOUT,
            )
            await worker.connect()
            push = last = 0
            while push < plan.pushes and last < plan.last:
                if push == plan.pushes - plan.last:
                    await self._healed.wait()
                last += self._healed.is_set()
                cell, amount = cells.place(push)
                of_rows = plan.rows and push % 2 == 1
                if of_rows:
                    receipt, rows = await push_to_cell(worker, cell)
                    same = bool((rows == -1).all())
                else:
                    gradient[cell] = plan.checked.scale * amount
                    receipt = await worker.step({MODEL: gradient})
                    gradient[cell] = 0.0
                before, newest[of_rows] = newest[of_rows], receipt.version
                if not plan.lossy and receipt.version < before:
                    view.told.append(f"version {before} was followed by {receipt.version}")
                view.rolled_back = worker.rolled_back
                view.acknowledged.append(receipt.staleness)
                self.stepped(receipt.version)
                if not receipt.used:
                    view.ignored.add(push)
                elif not of_rows:
                    sums[cell - cells.first] -= amount
                if not of_rows:
                    same = np.array_equal(worker.params[MODEL][mine], sums)
                known = plan.checked.own and not view.rolled_back and not self._offered
                if known and receipt.used and not same:
                    view.told.append(f"after push {push} the model lacks pushes of the worker")
                push += 1
                await asyncio.sleep(pause)
            view.rolled_back = worker.rolled_back
            view.ended = True
            await worker.close()
        except AiopsError as error:
            view.told.append(f"{type(error).__name__}: {error}")

    # -------------------------------------------------------------- the faults

    async def _play(self, network: Network) -> None:
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, fault.time - self._world.loop.time()))
            self._strike(fault, network)
        left = [fault.time + fault.seconds for fault in self.plan.faults]
        if left:
            await asyncio.sleep(max(0.0, min(max(left), 60.0) - self._world.loop.time()))

    def _strike(self, fault: ClusterFault, network: Network) -> None:
        loop, servers = self._world.loop, self.servers
        machine = servers.machine(fault.machine, fault.shard)
        host = machine.host if fault.target < 0 else _host(self._current[fault.target])
        servers.look()
        if fault.kind == PROMOTION:
            servers.promote()
            return
        servers.pause = min(fault.seconds, 8.0)
        if fault.kind == PLACE:
            servers.machine(0, fault.shard).crash()
            servers.take_place(fault.shard)
            return
        match fault.kind:
            case "cut":
                network.cut(host)
            case "silence" | "pause":
                name = machine.host if fault.kind == "pause" else host
                network.silence(name)
                loop.call_later(fault.seconds, network.restore, name)
            case "kill worker":
                self._replace(max(fault.target, 0), network)
            case "crash":
                machine.crash()
            case "power":
                machine.cut_power()
                machine.boot(fault.boot)
            case "crash at" | "power at":
                machine.crash_at(fault.point, fault.count, power=fault.kind == "power at")
            case "full disk":
                machine.disk.full = True
                loop.call_later(fault.seconds, self._empty, machine)
            case "slow disk":
                machine.disk.seconds = fault.seconds / 10
                loop.call_later(fault.seconds, self._hasten, machine)
            case "delay":
                network.host(host).delay += fault.seconds / 10
                loop.call_later(fault.seconds, self._hurry, network, host, fault.seconds / 10)
            case "clock":
                machine.leap(fault.seconds)
            case "stop":
                if machine.running:
                    loop.create_task(_ignoring(machine.stop()), name="stop")

    def _replace(self, worker: int, network: Network) -> None:
        """Kill a worker, and begin another in its place."""
        life = self._current[worker]
        network.kill(_host(life))
        self._tasks[life].cancel()
        self._current[worker] = len(self.views)
        self._start_worker(len(self.views), self.plan.pauses[worker])

    def _hurry(self, network: Network, name: str, seconds: float) -> None:
        host = network.host(name)
        host.delay = max(0.0, host.delay - seconds)

    def _empty(self, machine: ServerMachine) -> None:
        machine.disk.full = False

    def _hasten(self, machine: ServerMachine) -> None:
        machine.disk.seconds = self.plan.sync_seconds

    def _heal(self, network: Network, names: list[str]) -> None:
        """End all faults."""
        self.servers.pause = 0.0
        for machine in self.servers.machines:
            self._empty(machine)
            self._hasten(machine)
            machine.faults.spare()
        for name in names:
            network.host(name).delay = 0.0
            if network.host(name).silent:
                network.restore(name)

    # -------------------------------------------------------------- what is found

    async def _check(self) -> None:
        plan, servers, wrong = self.plan, self.servers, self.result.wrong
        text = await servers.settled()  # or it might be a superseded server that is looked at
        if text:
            wrong.append(text)
            return
        with self._world.network.at("checker"):
            if plan.checked.scale > 1:
                zeros = {MODEL: np.zeros(plan.size)}
                async with AsyncWorker(servers.url, zeros, name="flush", timeout=60.0) as worker:
                    for _ in range(plan.checked.scale - 1):
                        await worker.step(zeros)
            before, bits = await self._fetch(), self._bits
            if plan.checked.additive:
                wrong += violations(
                    before[1],
                    self.views,
                    scaled=plan.checked.scaled,
                    lossy=plan.lossy,
                    offered=self._offered,
                )
            else:
                told = [f"{view.name}: {text}" for view in self.views for text in view.told]
                wrong += told
            if not plan.lossy:
                text = await servers.change()
                after = before if text else await self._fetch()
                same = after[1].tobytes() == before[1].tobytes() and bits == self._bits
                if after[0] != before[0] or not same:
                    text = f"version {before[0]} has other bits, as version {after[0]}, after that"
                wrong += [text] if text else []
            text = await servers.settled()
            wrong += [text, *servers.failures()] if text else servers.failures()

    async def _fetch(self) -> tuple[int, Array]:
        async with AsyncClient(self.servers.url, timeout=60.0) as client:
            params = await client.fetch()
            model = np.array(params[MODEL])
            if self.plan.rows:  # a push has a cell of its own, in the one or in the other
                rows = await fetch_cells(client, self.plan.size)
                self._bits = rows.tobytes()
                model += counted(rows)
            return params.version, model


def _host(life: int) -> str:
    return f"worker-{life}"


async def _ignoring(stopping: Any) -> None:
    with contextlib.suppress(AiopsError):
        await stopping


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Log nothing: servers say what happens to their disks, here by the thousand."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
