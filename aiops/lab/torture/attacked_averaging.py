"""Attack workers that average their models: their ports, a relay, and the server that they join."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from aiops.client.asyncio.averager import AsyncModelAverager
from aiops.lab.torture.attacked import TENSORS, TOKEN, Attacked, AttackPlan, Door, target_of
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.relay import Relay, RelaySettings
from aiops.sim.virtual.server_machine import ServerMachine

_WORKERS = 3
_RELAY_TOKEN = "of the relay"
_TRIES = 3
_SETTINGS = {"interval": 1000.0, "grace": 100.0, "stall": 5.0}


class AttackedAveraging(Attacked):
    """Three workers that average, and a relay; hostile peers know no token.

    So every round has to succeed. With an odd seed, workers reach each other through the relay
    alone.

    Parameters
    ----------
    plan
        The plan of the attack.
    """

    _relay: Relay
    _machine: ServerMachine

    def __init__(self, plan: AttackPlan) -> None:
        super().__init__(replace(plan, token=True))
        self._relayed = plan.seed % 2 == 1
        self._averagers = list[AsyncModelAverager]()
        self._ports = list[int]()

    async def begin(self) -> None:
        """Start the relay, the server and the workers."""
        env, target = CURRENT_ENVIRONMENT.get(), target_of(tables=False)
        sock = env.listening_socket("127.0.0.1")
        self._relay = Relay(sock, RelaySettings(token=_RELAY_TOKEN))
        relay_port = int(sock.getsockname()[1])
        task = asyncio.get_running_loop().create_task(self._relay.run())
        self.stack.push_async_callback(_ended, task)
        given: dict[str, Any] = {"relay": f"127.0.0.1:{relay_port}", "relay_token": _RELAY_TOKEN}
        given |= {"policy": "average", "kernels": "numpy", "token": TOKEN, "set": _SETTINGS}
        self._machine = machine = await self.stack.enter_async_context(ServerMachine(**given))

        def listening(host: str) -> Any:
            made = env.listening_socket(host)
            self._ports.append(int(made.getsockname()[1]))
            return made

        CURRENT_ENVIRONMENT.set(replace(env, listening_socket=listening))
        for number in range(_WORKERS):
            await self._join(number)
        CURRENT_ENVIRONMENT.set(env)
        ring, relay = (target._replace(opening=f"{what}_hello") for what in ("ring", "relay"))
        self.doors = {f"worker {port}": Door("127.0.0.1", port, ring) for port in self._ports}
        self.doors["relay"] = Door("127.0.0.1", relay_port, relay)
        self.doors["server"] = Door(
            *(machine.host, machine.port, target._replace(token=True)),
            lambda: machine.server.connections.accept(),
        )

    async def _join(self, number: int) -> None:
        """Have another worker join those that there are."""
        model = {name: np.full(shape, number, dtype) for name, dtype, shape in TENSORS}
        averager = AsyncModelAverager(self._machine.url, model, token=TOKEN, timeout=300.0)
        coming = asyncio.ensure_future(self.stack.enter_async_context(averager))
        await asyncio.sleep(0.5)
        await asyncio.gather(coming, *(other.average() for other in self._averagers))
        self._averagers.append(averager)

    async def step(self) -> str:
        """Have the workers average."""
        sizes = await asyncio.gather(*(averager.average() for averager in self._averagers))
        if sizes == [_WORKERS] * _WORKERS:
            return ""
        errors = {str(averager.stats.last_error) for averager in self._averagers}
        return f"a round was of {sizes} workers: {'; '.join(sorted(errors))}"

    def held(self) -> list[str]:
        """Return what the relay and the server hold for peers that are gone."""
        wrong = list[str]()
        if self._relay.waiting or self._relay.connections > 2 * _WORKERS:
            wrong.append(f"the relay has {self._relay.connections} connections")
        present = self._machine.server.engine.membership.present()
        if len(present) != _WORKERS:
            wrong.append(f"{len(present)} workers are present")
        return wrong

    async def check(self) -> list[str]:
        """Return what is held, and whether the server has ended or a round has failed."""
        wrong = self.held()
        if not self._machine.running:
            wrong.append(f"the server has ended: {self._machine.error!r}")
        failed = sum(averager.stats.failed for averager in self._averagers)
        return [*wrong, *([f"{failed} rounds have failed"] if failed else [])]


class AttackedRendezvous(AttackedAveraging):
    """Three workers that average; hostile peers have the token, and join rounds.

    They can void a round. When they are gone, the next rounds have to succeed.
    """

    async def begin(self) -> None:
        """Start all; let hostile peers have the token."""
        await super().begin()
        door = self.doors["server"]
        target = door.target._replace(knows=TOKEN, likely=("join_round", "settle_round"))
        self.doors = {"server": door._replace(target=target)}

    async def step(self) -> str:
        """Have the workers average, a few times if they do not succeed."""
        for _ in range(_TRIES):
            wrong = await super().step()
            if not wrong:
                return ""
        return wrong

    async def check(self) -> list[str]:
        """Return what is held, and whether the server has ended."""
        wrong = self.held()
        if not self._machine.running:
            wrong.append(f"the server has ended: {self._machine.error!r}")
        return wrong


async def _ended(task: asyncio.Task[None]) -> None:
    """End a task."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
