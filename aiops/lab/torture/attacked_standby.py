"""Attack a server with a standby: both, and the feed of the journal."""

from __future__ import annotations

from typing import Any

from aiops.lab.torture.attacked import AttackedServer
from aiops.sim.virtual.server_machine import ServerMachine


class AttackedStandby(AttackedServer):
    """A server, its standby, and hostile peers that say they are workers, or standbys."""

    _standby: ServerMachine

    def settings(self) -> dict[str, Any]:
        """Return those of both: they keep a state."""
        return {**super().settings(), "state": "state", "acks": _acks(self.plan.seed)}

    async def start(self) -> ServerMachine:
        """Start the server, and then the standby."""
        enter, settings = self.stack.enter_async_context, self.settings()
        machine = await enter(ServerMachine(**settings))
        primary = f"aiops://{self.address(machine)}"
        made = ServerMachine("standby", port=7272, standby=primary, **settings)
        self._standby = await enter(made)
        return machine

    async def begin(self) -> None:
        """Start both, and say how they are greeted."""
        await super().begin()
        server, standby = self.machine, self._standby
        run = server.server.run
        facts = {"run": run, "generation": server.server.run_state.generation, "row": 0}
        self.doors["server, by a standby"] = self.door(server, "standby_hello", **facts)
        self.doors["standby"] = self.door(standby)._replace(
            accept=lambda: standby.standby.connections.accept()
        )
        if self.recording is not None:
            self.scripts = [*self.scripts, self.recording.script("standby_hello", run=run)]

    async def check(self) -> list[str]:
        """Return what is wrong with both."""
        wrong = await super().check()
        if not self._standby.running or self._standby.serving:
            wrong.append(f"the standby is none any more: {self._standby.error!r}")
        fed = self.machine.server.run_state.report() or {}
        names = [line["name"] for line in fed.get("standbys", ())]
        if names != ["127.0.0.1:7272"]:
            wrong.append(f"standbys that are fed: {names}")
        return wrong


def _acks(seed: int) -> str:
    return ("written", "durable", "replicated")[seed % 3]
