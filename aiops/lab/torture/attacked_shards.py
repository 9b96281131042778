"""Attack a model on several servers: its lead and followers, and a follower without a lead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiops.algorithms import find
from aiops.errors import AiopsError
from aiops.lab.torture.attacked import WORKERS, Attacked, AttackedServer, AttackPlan
from aiops.lab.torture.message_line import MessageLine
from aiops.serving.embedded import config_of
from aiops.sim.virtual.server_machine import ServerMachine

_PORTS = (7181, 7182)
_PACED = 600.0  # virtual seconds: a lead may have ordered a budget of a byte per second
_RUN = "0123456789abcdef"  # of hostile leads


class AttackedShards(AttackedServer):
    """A lead and two followers; hostile workers connect to all of them, or to some.

    Parameters
    ----------
    plan, recorder
        As of `AttackedServer`.
    """

    def __init__(self, plan: AttackPlan, recorder: MessageLine | None = None) -> None:
        super().__init__(plan, recorder)
        self._followers = list[ServerMachine]()

    @property
    def machines(self) -> Sequence[ServerMachine]:
        """The lead, and its followers."""
        return [self.machine, *self._followers]

    def settings(self) -> dict[str, Any]:
        """Return those of all three; tables are spread over them."""
        return {**super().settings(), "shard_bytes": 1, "spread_tables": self.plan.tables}

    async def start(self) -> ServerMachine:
        """Start the followers, and then the lead."""
        enter, settings = self.stack.enter_async_context, self.settings()
        for number, port in enumerate(_PORTS, 1):
            made = ServerMachine(f"follower-{number}", port=port, follower=True, **settings)
            self._followers.append(await enter(made))
        named = [self.address(each) for each in self._followers]
        return await enter(ServerMachine(followers=named, **settings))

    async def begin(self) -> None:
        """Start all, and say how the followers are greeted."""
        await super().begin()
        facts = self.facts(self.machine.server.run)
        for each in self._followers:
            self.doors[each.host] = self.door(each, "shard_hello", **facts)
            self.doors[f"{each.host}, by a lead"] = self.door(each, "lead_hello", **facts)

    def facts(self, run: str) -> dict[str, Any]:
        """Return what a lead, or a client of a lead, says of itself."""
        settings = AttackedServer.settings(self)
        algorithm = find(settings["policy"]).make(config_of(settings).settings())
        said = {"run": run, "policy": algorithm.name, "settings": algorithm.settings()}
        return {**said, "standby": False}


class AttackedFollower(Attacked):
    """A follower without a lead: hostile peers say that they are one, and its workers.

    One without a state ends when its lead does. Then it is started again.
    """

    _machine: ServerMachine

    def __init__(self, plan: AttackPlan) -> None:
        super().__init__(plan)
        self._shards = AttackedShards(plan)

    async def begin(self) -> None:
        """Start the follower."""
        shards = self._shards
        made = ServerMachine("follower-1", port=_PORTS[0], follower=True, **shards.settings())
        self._machine = await self.stack.enter_async_context(made)
        self.doors = {"follower-1": shards.door(made, "lead_hello", **shards.facts(_RUN))}
        if shards.recording is not None:
            said = *WORKERS, "lead_hello"
            self.scripts = [shards.recording.script(*said, run=_RUN, door="follower-1")]

    async def step(self) -> str:
        """Start the follower again, if it has ended as it should."""
        machine = self._machine
        if machine.running:
            return ""
        error = machine.error
        await machine.start()
        if error is None or isinstance(error, AiopsError):
            return ""
        return f"the follower has ended: {error!r}"

    def held(self) -> list[str]:
        """Return what the follower holds for peers that are gone.

        Complete portions stay until their lead, or its next start, lets them go.
        """
        held = self._machine.server.connections.peers
        return [f"{len(held)} connections are not forgotten"] if held else []

    async def check(self) -> list[str]:
        """Return what the follower holds, and whether it has ended."""
        await asyncio.sleep(_PACED)
        wrong = self.held()
        if not self._machine.running:
            wrong.append(f"the follower has ended: {self._machine.error!r}")
        return wrong
