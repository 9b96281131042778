"""A server that hostile peers attack, in virtual time, and an honest worker that trains at it.

A trial asks it three things: that the honest worker makes its steps, what is held for peers that
are gone, and at the end whether all is as if hostile peers had never been.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from aiops.client.asyncio.worker import AsyncWorker
from aiops.errors import BadPush
from aiops.lab.torture.hostile_messages import Target
from aiops.model.layout import Layout
from aiops.model.tables import Table
from aiops.sim.virtual.server_machine import ServerMachine

TENSORS = (("w", "float32", (16, 4)), ("b", "float16", (5,)))
TABLE = Table(1000, 4, scale=0.1, seed=1)
TOKEN = "honest"

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "asgd": {"set": {"lr": 1}},
    "fasgd": {},
    "adam": {"policy": "asgd", "set": {"optimizer": "adam"}},
    "ssp": {"set": {"lr": 1, "s": 1 << 20}},
    "dcasgd": {},
    "gap-aware": {},
    "easgd": {"set": {"kappa": 0.05}},
    "ringmaster": {"set": {"lr": 1, "r": 1 << 20}},
    "coded": {"policy": "asgd", "push_codec": "topk:0.25", "fetch_codec": "int8"},
    "gated": {"policy": "fasgd", "gate": "bfasgd:c_push=0.08,skipped=reapply"},
}
"""By variant: the server's settings; the policy is the variant's name if they have none."""

TABLELESS = ("ringmaster", "dcasgd", "gap-aware", "easgd")


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """The plan of an attack, which its seed decides.

    Attributes
    ----------
    seed
        Of all that is random.
    variant
        A name of `SETTINGS`.
    peers
        Hostile connections; of a `FrameTrial`, mutated frames.
    together
        Those that are open at a time.
    token
        Whether the server has one, which hostile peers do not know.
    state
        Whether the server keeps a state.
    tables
        Whether the model has a table.
    """

    seed: int
    variant: str
    peers: int
    together: int
    token: bool
    state: bool
    tables: bool


class Door(NamedTuple):
    """One of the addresses at which hostile peers connect.

    Attributes
    ----------
    host, port
        The address in the simulated network.
    target
        The facts that a hostile peer knows, and the messages that it says there.
    accept
        Makes the protocol of a connection, without the network; None: there is none.
    """

    host: str
    port: int
    target: Target
    accept: Callable[[], asyncio.BufferedProtocol] | None = None


def target_of(tables: bool, token: bool = False) -> Target:
    """Return the facts of the model that is attacked."""
    layout = Layout(TENSORS)
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    ends = [(t.offset, t.offset + t.dtype.itemsize * t.size) for t in tensors.values()]
    return Target(
        tuple((t.name, t.dtype.name, t.shape) for t in tensors.values()),
        tuple(ends),
        layout.nbytes,
        (("t", *TABLE.described),) if tables else (),
        token,
    )


class AttackedServer:
    """One server with an honest worker; an async context manager.

    Parameters
    ----------
    plan
        The plan of the attack.

    Attributes
    ----------
    doors
        Where hostile peers connect.
    """

    doors: tuple[Door, ...]

    def __init__(self, plan: AttackPlan) -> None:
        self.plan = plan
        self._stack = AsyncExitStack()
        self._steps = 0

    async def __aenter__(self) -> AttackedServer:
        """Start the server, and have the worker make a step."""
        plan = self.plan
        token = TOKEN if plan.token else None
        settings = {"policy": plan.variant, **SETTINGS[plan.variant], "token": token}
        if plan.state:
            settings["state"] = "state"
        enter = self._stack.enter_async_context
        self._machine = machine = await enter(ServerMachine(kernels="numpy", **settings))
        zeros = {name: np.zeros(shape, dtype) for name, dtype, shape in TENSORS}
        self._worker = await enter(
            AsyncWorker(
                *(machine.url, zeros),
                tables={"t": TABLE} if plan.tables else None,
                token=token,
                name="honest",
                timeout=300.0,
            )
        )
        accept = machine.server.connections.accept
        self.doors = (Door(machine.host, machine.port, target_of(plan.tables, plan.token), accept),)
        await self.step()
        return self

    async def __aexit__(self, *error: object) -> None:
        """End the worker and the server."""
        await self._stack.aclose()

    async def step(self) -> str:
        """Have the honest worker make a step; return what was wrong with it, or an empty text.

        Hostile workers who train, as no token is asked for, may bring float16 so near to its limit
        that the honest gradient would make it infinite. Then that is refused.
        """
        self._steps += 1
        try:
            receipt = await self._worker.step({n: np.ones(s, d) for n, d, s in TENSORS})
        except BadPush:
            if self.plan.token:
                raise
            return ""
        return "" if receipt.used else "a step of the honest worker was not used"

    def held(self) -> list[str]:
        """Return what is still held, a sentence each; no hostile peer is connected."""
        engine, wrong = self._machine.server.engine, list[str]()
        held = sum(pool.out for pool in self._machine.server.coordinator.pools)
        if held:
            wrong.append(f"{held} bytes of receive buffers are not back")
        alive = engine.training.store.alive if engine.training is not None else 0
        if alive > 2:
            wrong.append(f"{alive} versions are held for peers that are gone")
        present = [member.name for member in engine.membership.present()]
        if present != ["honest"]:
            wrong.append(f"workers that are gone count as present: {present}")
        return wrong

    async def check(self) -> list[str]:
        """Return what is not as if hostile peers had never been, a sentence each."""
        wrong = self.held()
        if not self._machine.running:
            wrong.append(f"the server has ended: {self._machine.error!r}")
        memory = (await self._worker.stats())["memory"]
        if (memory["resident"] or 0) > memory["bound"]:
            wrong.append(f"the process has {memory['resident']} bytes, more than {memory['bound']}")
        for name, array in self._worker.params.items():
            if not np.isfinite(array).all():
                wrong.append(f"{name!r} is not finite")
            if self.plan.token and self.plan.variant == "asgd" and (array != -self._steps).any():
                wrong.append(f"{name!r} is not what {self._steps} steps make it")
        return wrong
