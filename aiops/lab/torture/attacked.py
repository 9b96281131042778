"""Servers that hostile peers attack, in virtual time, and an honest worker that trains at them.

A trial asks it three things: that the honest worker makes its steps, what is held for peers that
are gone, and at the end whether all is as if hostile peers had never been.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np

from aiops.client.asyncio.worker import AsyncWorker
from aiops.errors import BadPush, Refused
from aiops.lab.torture.hostile_messages import Target
from aiops.lab.torture.message_line import MessageLine
from aiops.lab.torture.recorded_sessions import RecordedFrame, SessionRecorder
from aiops.model.layout import Layout
from aiops.model.tables import Table
from aiops.net.memory_use import resident
from aiops.sim.virtual.server_machine import ServerMachine
from aiops.sim.virtual.world import World

Model: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype and shape of each tensor."""

TENSORS: Model = (("w", "float32", (16, 4)), ("b", "float16", (5,)))
TABLE = Table(1000, 4, scale=0.1, seed=1)
TOKEN = "honest"
WORKERS = "hello", "shard_hello"
"""The greetings of workers."""

_TRAINED = 6  # steps of a recording
_RECORDED = 1000.0  # virtual seconds that it may take

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
    "filtered": {"policy": "asgd", "filter": "robust"},
    "paced": {"policy": "fasgd", "bandwidth_budget": "2MB/s"},
    "gated": {"policy": "fasgd", "gate": "bfasgd:c_push=0.08,skipped=reapply"},
}
"""By name: the server's settings; the policy is the name if they have none."""

_OF_ALL = tuple(name for name in SETTINGS if name not in ("filtered", "paced"))
"""Those of all variants: a follower has neither a filter nor a budget of its own."""

FIXED: Mapping[str, tuple[str, ...]] = {
    "filtered-shards": ("filtered",),
    "filtering-follower": ("filtered",),
    "steady": ("asgd", "asgd", "fasgd", "adam"),
}
"""By name: the settings of a variant that is none of them, and cannot have all."""

TABLELESS = ("ringmaster", "dcasgd", "gap-aware", "easgd")


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """The plan of an attack, which its seed decides.

    Attributes
    ----------
    seed
        Of all that is random.
    variant
        What is attacked: a name of `SETTINGS`, for one server with these, or another.
    policy
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
    policy: str
    peers: int
    together: int
    token: bool
    state: bool
    tables: bool


def draw_attack(rng: Random, seed: int, names: Sequence[str]) -> AttackPlan:
    """Return a plan of one of the variants ``names``, but for its peers."""
    variant = rng.choice(names)
    policy = variant if variant in SETTINGS else rng.choice(FIXED.get(variant, _OF_ALL))
    return AttackPlan(
        *(seed, variant, policy),
        peers=0,
        together=1,
        token=rng.random() < 0.1,
        state=rng.random() < 0.25,
        tables=policy not in TABLELESS and rng.random() < 0.6,
    )


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
    answered
        Returns how many steady exchanges compiled code has answered on the connections there that
        are open; None: workers make none there.
    """

    host: str
    port: int
    target: Target
    accept: Callable[[], asyncio.BufferedProtocol] | None = None
    answered: Callable[[], int] | None = None


def target_of(tables: bool, token: bool = False, model: Model = TENSORS) -> Target:
    """Return the facts of the model that is attacked."""
    layout = Layout(model)
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    ends = [(t.offset, t.offset + t.dtype.itemsize * t.size) for t in tensors.values()]
    return Target(
        tuple((t.name, t.dtype.name, t.shape) for t in tensors.values()),
        tuple(ends),
        layout.nbytes,
        (("t", *TABLE.described),) if tables else (),
        token,
    )


class Script(NamedTuple):
    """Messages of an honest peer, for a hostile one that says it with changes.

    Attributes
    ----------
    frames
        The messages, on one connection or several.
    names
        Texts in them that are replaced by others as long; None: by one that is new each time.
    """

    frames: tuple[RecordedFrame, ...]
    names: Mapping[str, str | None]


class Attacked(ABC):
    """Servers that hostile peers attack; an async context manager.

    Parameters
    ----------
    plan
        The plan of the attack.

    Attributes
    ----------
    doors
        Where hostile peers connect, by name.
    scripts
        Sessions to be said again with changes, at these doors.
    """

    def __init__(self, plan: AttackPlan) -> None:
        self.plan = plan
        self.doors: dict[str, Door] = {}
        self.scripts: Sequence[Script] = ()
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> Attacked:
        """Start what is attacked."""
        await self.begin()
        return self

    async def __aexit__(self, *error: object) -> None:
        """End it."""
        await self.stack.aclose()

    @abstractmethod
    async def begin(self) -> None:
        """Start what is attacked, and say where its doors are."""

    @abstractmethod
    async def step(self) -> str:
        """Go on with honest work; return what was wrong with it, or an empty text."""

    @abstractmethod
    def held(self) -> list[str]:
        """Return what is still held, a sentence each; no hostile peer is connected."""

    @abstractmethod
    async def check(self) -> list[str]:
        """Return what is not as if hostile peers had never been, a sentence each."""


class AttackedServer(Attacked):
    """One server, or several that are one, with an honest worker.

    Parameters
    ----------
    plan
        The plan of the attack.
    recorder
        Keeps what is said to the servers; None: it is not kept, and was before (`Recording`).
    """

    machine: ServerMachine
    model: Model = TENSORS
    _worker: AsyncWorker
    _steps = 0

    def __init__(self, plan: AttackPlan, recorder: MessageLine | None = None) -> None:
        super().__init__(plan)
        self._before = resident() or 0  # of this process, which may do other things, too
        self._recorder = recorder
        self.recording: Recording | None = None
        if recorder is None and not plan.token:  # the proof of a token cannot be said again
            self.recording = Recording(type(self), plan)

    @property
    def machines(self) -> Sequence[ServerMachine]:
        """The servers."""
        return (self.machine,)

    def settings(self) -> dict[str, Any]:
        """Return those of the servers."""
        plan = self.plan
        found = {"policy": plan.policy, "kernels": "numpy", **SETTINGS[plan.policy]}
        if plan.token:
            found["token"] = TOKEN
        if plan.state:
            found["state"] = "state"
        return found

    async def begin(self) -> None:
        """Start the servers, and have the worker make a step."""
        self.machine = await self.start()
        self._worker = await self.stack.enter_async_context(self._honest())
        self.doors = {self.machine.host: self.door(self.machine)}
        if self.recording is not None:
            self.scripts = [self.recording.script(*WORKERS, run=self.machine.server.run)]
        await self.step()

    async def start(self) -> ServerMachine:
        """Start the servers; return the one for workers."""
        return await self.stack.enter_async_context(ServerMachine(**self.settings()))

    def address(self, machine: ServerMachine) -> str:
        """Return where those connect to a server that may be recorded: host and port."""
        if self._recorder is None:
            return f"{machine.host}:{machine.port}"
        return self._recorder.before(machine.host, machine.host, machine.port)

    def _honest(self) -> AsyncWorker:
        return AsyncWorker(
            f"aiops://{self.address(self.machine)}",
            {name: np.zeros(shape, dtype) for name, dtype, shape in self.model},
            tables={"t": TABLE} if self.plan.tables else None,
            token=TOKEN if self.plan.token else None,
            name="honest",
            timeout=300.0,
        )

    @property
    def exact(self) -> bool:
        """True if the model is to be what the honest worker alone makes it."""
        return self.plan.token

    async def train(self) -> None:
        """Do all that a worker does."""
        worker = self._worker
        for _ in range(_TRAINED):
            await worker.step(ones(self.model))
            if self.plan.tables:
                ids = np.arange(20)
                await worker.fetch_rows("t", ids)
                await worker.push_rows("t", ids, np.ones((20, 4), np.float32))
        await worker.stats()

    def door(self, machine: ServerMachine, opening: str = "hello", **facts: Any) -> Door:
        """Return the door of a server, with what hostile peers say of themselves."""
        target = target_of(self.plan.tables, self.plan.token, self.model)
        target = target._replace(opening=opening, facts=facts)
        door = Door(machine.host, machine.port, target, lambda: machine.server.connections.accept())
        if opening == "hello" and not (self.plan.token or "standby" in machine.settings):
            door = door._replace(answered=lambda: _answered(machine))
        return door

    async def step(self) -> str:
        """Have the honest worker make a step.

        Hostile workers who train, as no token is asked for, may bring float16 so near to its limit
        that the honest gradient would make it infinite. Then that is refused. A filter keeps out
        what differs from the gradients of many others, or is always the same.
        """
        self._steps += 1
        try:
            receipt = await self._worker.step(ones(self.model))
        except BadPush:
            if self.plan.token:
                raise
            return ""
        except Refused:  # it is quarantined: hostile peers have sent copies of its gradients
            if self.plan.policy != "filtered":
                raise
            return ""
        used = receipt.used or self.plan.policy == "filtered"
        return "" if used else "a step of the honest worker was not used"

    def held(self) -> list[str]:
        """Return what the servers hold that belongs to none of their clients."""
        wrong = list[str]()
        for machine in self.machines:
            held = sum(pool.out for pool in machine.server.coordinator.pools)
            if held:
                wrong.append(f"{held} bytes of {machine.host}'s receive buffers are not back")
            alive = _alive(machine)
            if alive > 2:
                wrong.append(f"{machine.host} holds {alive} versions for peers that are gone")
        engine = self.machine.server.engine
        present = [member.name for member in engine.membership.present()]
        if present != ["honest"]:
            wrong.append(f"workers that are gone count as present: {present}")
        return wrong

    async def check(self) -> list[str]:
        """Return what is wrong with the servers, the process's memory and the model."""
        wrong = self.held()
        for machine in self.machines:
            if not machine.running:
                wrong.append(f"{machine.host} has ended: {machine.error!r}")
        memory = (await self._worker.stats())["memory"]
        grown = (memory["resident"] or 0) - self._before
        if grown > memory["bound"]:
            wrong.append(f"the process has grown by {grown} bytes, more than {memory['bound']}")
        for name, array in self._worker.params.items():
            if not np.isfinite(array).all():
                wrong.append(f"{name!r} is not finite")
            if self.exact and self.plan.policy == "asgd" and (array != -self._steps).any():
                wrong.append(f"{name!r} is not what {self._steps} steps make it")
        return wrong


class AttackedWithChecksums(AttackedServer):
    """One server; hostile peers ask for checksums, and send right ones."""

    async def begin(self) -> None:
        """Start the server."""
        await super().begin()
        door = self.doors[self.machine.host]
        target = door.target._replace(checked=True)
        self.doors[self.machine.host] = door._replace(target=target, answered=None)
        self.scripts = []


class Recording:
    """All that honest peers said to servers of a plan, in a world of its own.

    Parameters
    ----------
    made
        Makes the servers.
    plan
        Theirs.
    """

    def __init__(self, made: Callable[..., AttackedServer], plan: AttackPlan) -> None:
        recorder, runs = SessionRecorder(), list[str]()

        async def record() -> None:
            async with made(plan, recorder) as attacked:
                assert isinstance(attacked, AttackedServer)
                runs.append(attacked.machine.server.run)
                await attacked.train()

        World(seed=plan.seed, limit=_RECORDED).run(record())
        self._frames, self._run = recorder.frames, runs[0]
        self._kinds = dict[int, str]()  # by connection: of its greeting
        clients = set[str]()
        for each in self._frames:
            if each.connection not in self._kinds:
                self._kinds[each.connection] = each.frame.kind
                clients.add(msgpack.unpackb(each.frame.header)["client"])
        self._clients = clients - {self._run}

    def script(self, *greetings: str, run: str, door: str = "") -> Script:
        """Return what those said who greet so, as peers of this run.

        ``door``: at this one only.
        """
        frames = (each for each in self._frames if self._kinds[each.connection] in greetings)
        there = tuple(each for each in frames if door in ("", each.door))
        return Script(there, {**dict.fromkeys(self._clients), self._run: run})


def ones(model: Model = TENSORS) -> dict[str, Any]:
    """Return the gradient of an honest worker."""
    return {name: np.ones(shape, dtype) for name, dtype, shape in model}


def _answered(machine: ServerMachine) -> int:
    """Return how many exchanges compiled code has answered on open connections."""
    peers = machine.server.connections.peers.values()
    ways = [peer.steady.compiled for peer in peers if peer.steady is not None]
    return sum(way.answered for way in ways if way is not None)


def _alive(machine: ServerMachine) -> int:
    """Return the versions of the parameters that a server holds."""
    coordinator: Any = machine.server.coordinator
    follower = machine.settings.get("follower")
    owner = coordinator.shard if follower else machine.server.engine.training
    return 0 if owner is None else int(owner.store.alive)
