"""Attack a server through its partner: a lead by its follower, a standby by its primary.

The partner joins as it should, and its answers are changed now and then (`ChangedLine`). While they
are, honest work may be refused. Afterwards all must go on: the line is cut, which is as if an
honest partner had been started in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np

from aiops.client.asyncio.client import AsyncClient
from aiops.client.asyncio.worker import AsyncWorker
from aiops.errors import AiopsError, DeadlineExceeded, UsageError
from aiops.lab.torture.attacked import (
    TABLE,
    TENSORS,
    TOKEN,
    AttackedServer,
    AttackPlan,
    ones,
    target_of,
)
from aiops.lab.torture.attacked_shards import AttackedShards
from aiops.lab.torture.attacked_standby import AttackedStandby
from aiops.lab.torture.changed_line import ChangedLine
from aiops.net.memory_use import resident
from aiops.shards.lead import Lead
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.server_machine import ServerMachine
from aiops.wire.state_machine import HANDSHAKE

_STEPS = 8  # of honest work while the partner is hostile
_PATIENCE = 40.0  # virtual seconds for one of them
_OTHER_TIME = "give both the states of one time"
"""The end of what a lead says of a follower that has more than the moment to which it has gone back
for what that one had said."""

_BACK = 200.0  # virtual seconds until all goes on


class AttackedByPartner(AttackedServer, ABC):
    """A server whose partner is hostile at times, behind a line.

    Attributes
    ----------
    line
        That to the partner.
    over
        True once nothing can go on, as it should be: the model is lost with a server.
    """

    line: ChangedLine
    over = False

    @abstractmethod
    async def trouble(self) -> list[str]:
        """Have honest work go on beside a hostile partner; return what is wrong."""

    @abstractmethod
    async def recover(self) -> list[str]:
        """Have an honest partner again; return what does not go on."""


def _line(plan: AttackPlan, state: str) -> ChangedLine:
    """Return a line to the servers that speak to their partner in a state of the wire."""
    kinds = sorted({*HANDSHAKE[state]["server"]} - {"ping"})
    greeting = state.replace(" open", "_hello")
    rng = Random(f"line {plan.seed}")
    return ChangedLine(rng, greeting, kinds, target_of(plan.tables))


class AttackedLead(AttackedByPartner, AttackedShards):
    """A lead, an honest follower, and one that is hostile at times.

    With a state, the model goes on afterwards. Without one it is lost with the follower: then the
    lead has to say so, and to answer all that needs no follower.
    """

    def __init__(self, plan: AttackPlan) -> None:
        self.line = _line(plan, "lead open")
        super().__init__(plan, self.line)
        self._may = 0  # pushes so far, used or not

    def settings(self) -> dict[str, Any]:
        """Return those of all three; with some seeds gradients are clipped."""
        found = super().settings()
        if self.plan.seed % 3 == 1 and not self.plan.tables and self.plan.policy != "easgd":
            found["set"] = {**found.get("set", {}), "clip": 0.5}
        if self.plan.state:
            found["acks"] = ("written", "durable", "applied")[self.plan.seed % 3]
            found["snapshot_every"] = 3.0
        return found

    def address(self, machine: ServerMachine) -> str:
        """Return where a server is reached: the first follower behind the line."""
        if machine.host == "follower-1":
            return super().address(machine)
        return f"{machine.host}:{machine.port}"

    async def begin(self) -> None:
        """Start all three, and have them a model."""
        self.machine = await self.start()
        for _ in range(2):
            wrong = await self._go_on()
            if wrong:
                raise AssertionError(f"all are honest: {wrong}")

    async def trouble(self) -> list[str]:
        """Have a worker train, and an observer look."""
        wrong = list[str]()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._train_on())
            group.create_task(self._observe(wrong))
        return wrong

    async def _train_on(self) -> None:
        """Train as far as it goes: a follower may refuse all that a worker does."""
        with contextlib.suppress(AiopsError, TimeoutError):  # a documented error
            async with asyncio.timeout(3 * _PATIENCE), self._another("w", _PATIENCE) as worker:
                for _ in range(_STEPS):
                    await asyncio.sleep(0.5)
                    await self._push(worker)

    def _another(self, name: str, timeout: float) -> AsyncWorker:
        return AsyncWorker(
            self.machine.url,
            {tensor: np.zeros(shape, dtype) for tensor, dtype, shape in TENSORS},
            tables={"t": TABLE} if self.plan.tables else None,
            token=TOKEN if self.plan.token else None,
            name=name,
            timeout=timeout,
        )

    async def _push(self, worker: AsyncWorker) -> bool:
        self._may += 1
        receipt = await worker.step(ones())
        if self.plan.tables:
            ids = np.arange(20)
            await worker.fetch_rows("t", ids)
            await worker.push_rows("t", ids, np.ones((20, 4), np.float32))
        return receipt.used or self.plan.policy == "filtered"

    async def _observe(self, wrong: list[str]) -> None:
        """Join and look at the statistics, which may have to wait for the follower."""
        token = TOKEN if self.plan.token else None
        given: dict[str, Any] = {"token": token, "name": "observer", "timeout": _PATIENCE}
        try:
            async with AsyncClient(self.machine.url, **given) as client:
                self._memory = (await client.stats())["memory"]
        except DeadlineExceeded as error:
            wrong.append(f"an observer was not answered: {error}")
        except AiopsError:
            pass

    async def recover(self) -> list[str]:
        """Cut the line, and have a worker make a step."""
        self.line.rate = 0.0
        self.line.cut()
        await asyncio.sleep(1.0)
        if self.plan.state:
            await self._lead_again()
            for machine in self.machines:
                if not machine.running:
                    return [f"{machine.host} has ended: {machine.error!r}"]
            wrong = await self._go_on()
            self.over = _OTHER_TIME in wrong
            return [f"once the follower was honest: {wrong}"] if wrong and not self.over else []
        self.over, found = True, list[str]()
        if not self.machine.running:
            return [f"the lead has ended: {self.machine.error!r}"]
        await self._observe(found)
        lead = self.machine.server.coordinator
        lost = isinstance(lead, Lead) and lead.lost
        return found if lost else [*found, "the lead does not know that its follower is lost"]

    async def _lead_again(self) -> None:
        """Start all again, if the lead has ended as it begins: a follower was none, as it said.

        Then its followers end with it.
        """
        if not self.machine.running and isinstance(self.machine.error, UsageError):
            for machine in (*self._followers, self.machine):
                if not machine.running and (
                    machine.error is None or isinstance(machine.error, AiopsError)
                ):
                    await machine.start()

    async def _go_on(self) -> str:
        """Have a worker make a step; return what was wrong, or an empty text."""
        try:
            async with asyncio.timeout(_BACK), self._another("honest", _BACK) as worker:
                return "" if await self._push(worker) else "a step was not used"
        except (AiopsError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"

    async def step(self) -> str:
        """Have a worker make a step, unless the model is lost."""
        return "" if self.over else await self._go_on()

    async def check(self) -> list[str]:
        """Return what is wrong with the lead: its part of the model above all."""
        if not self.machine.running:
            return [f"the lead has ended: {self.machine.error!r}"]
        wrong = list[str]()
        grown = (resident() or 0) - self._before
        if grown > self._memory["bound"]:
            wrong.append(f"the process has grown by {grown} bytes")
        mine = self.machine.server.engine.defined_store.current.arena.data
        values = np.frombuffer(mine[: len(mine) // 4 * 4].tobytes(), np.float32)
        if not np.isfinite(values).all():
            wrong.append(f"the lead's part of the model is not finite: {values}")
        if self.plan.policy == "asgd" and "clip" not in self.settings()["set"]:
            steps = {-float(value) for value in values}
            if len(steps) != 1 or not 0 <= min(steps) <= self._may:
                wrong.append(f"the lead has {sorted(steps)} of {self._may} steps")
        return wrong


class AttackedFeed(AttackedByPartner, AttackedStandby):
    """A standby whose primary is hostile at times, to it alone.

    What it has of the primary's state is never wrong. It may say that a folder is of no use any
    more, and is given another one then.
    """

    def __init__(self, plan: AttackPlan) -> None:
        self.line = _line(plan, "standby open")
        super().__init__(plan, self.line)
        self._were = dict[int, bytes]()  # by version: the parameters
        self._chance = Random(f"feed {plan.seed}")

    def settings(self) -> dict[str, Any]:
        """Return those of both."""
        return {**super().settings(), "snapshot_every": 2.0}

    async def trouble(self) -> list[str]:
        """Train; the standby may have to begin with an empty folder."""
        if self._chance.random() < 0.4:
            await self._empty()
        for _ in range(_STEPS):
            await asyncio.sleep(0.5)
            await super().step()
            store = self.machine.server.engine.defined_store
            self._were[store.version] = store.current.arena.data.tobytes()
        return self._wrong_state()

    def _wrong_state(self) -> list[str]:
        """Return whether the standby takes another state than its primary's for whole."""
        if not (self._standby.running and self._standby.standby.whole):
            return []
        found = self._state()
        if found is None or found[0] not in self._were or self._were[found[0]] == found[1]:
            return []
        return [f"the standby is wrong at version {found[0]}, without a word"]

    def _state(self) -> tuple[int, bytes] | None:
        """Return the standby's version and parameters, if it has any at present."""
        copy = self._standby.standby._copy
        server = None if copy is None else copy.server
        store = None if server is None else server.engine.store
        return None if store is None else (store.version, store.current.arena.data.tobytes())

    async def _empty(self) -> None:
        """Start the standby with an empty folder."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._standby.crash()
        self._standby.disk = VirtualDisk(loop)
        await self._standby.start()

    async def recover(self) -> list[str]:
        """Cut the line; the standby has to be what its primary is, if need be in a new folder."""
        self.line.rate = 0.0
        self.line.cut()
        why = await self._followed()
        if not why:
            return []
        if isinstance(why, AssertionError):
            return [str(why)]
        await self._empty()
        why = await self._followed()
        return [] if not why else [f"with an empty folder: {why}"]

    async def _followed(self) -> Exception | None:
        """Wait until the standby is what its primary is; return why it is not.

        An `AssertionError` is wrong, all else is what the standby has said.
        """
        machine = self._standby
        if not machine.running:
            error = machine.error
            if not isinstance(error, AiopsError):
                return AssertionError(f"the standby has ended: {error!r}")
            try:
                await machine.start()
            except AiopsError as error:
                return error
        store = self.machine.server.engine.defined_store
        for _ in range(int(_BACK)):
            if not machine.running:
                return await self._followed()
            if machine.standby.whole and self._state() == (
                store.version,
                store.current.arena.data.tobytes(),
            ):
                return None
            await asyncio.sleep(1.0)
        said = machine.standby._why
        return AiopsError(said) if said else AssertionError("it is not what its primary is")


PARTNERS: Mapping[str, Callable[[AttackPlan], AttackedByPartner]] = {
    "follower": AttackedLead,
    "filtering-follower": AttackedLead,
    "primary": AttackedFeed,
}
"""By variant: the hostile partner, and what it attacks."""
