"""Hostile sessions against a simulated server, of which an honest worker has to get its steps.

The server's own code runs in virtual time, with all of its deadlines. Hostile peers connect, some
at once, and send what `draw_session` draws. Then all must be as if they had never been: the server
runs and has logged no error, the honest worker has made its steps, no buffer and no version is
held for peers that are gone, and the model is finite. What the server has said is the wire, and its
errors have the codes that are documented. A server with a token takes nothing from peers that do
not know it: there the model is what the honest worker made it, to the last bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgpack
import numpy as np

from aiops.client.asyncio.worker import AsyncWorker
from aiops.errors import AiopsError, refusal
from aiops.lab.torture.hostile_messages import Target
from aiops.lab.torture.hostile_session import HostileSession, draw_session
from aiops.model.layout import Layout
from aiops.model.tables import Table
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.sim.virtual.server_machine import ServerMachine
from aiops.sim.virtual.world import World
from aiops.wire.state_machine import HANDSHAKE

FRAMES = 40
"""The most frames of a session."""

_TENSORS = (("w", "float32", (16, 4)), ("b", "float16", (5,)))
_TABLE = Table(1000, 4, scale=0.1, seed=1)
_HONEST = 5  # steps
_STAY = 100.0  # virtual seconds that a peer stays which is not dropped; longer than the deadlines
_LIMIT = 20_000.0  # virtual seconds
_TOKEN = "honest"

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

_TABLELESS = ("ringmaster", "dcasgd", "gap-aware", "easgd")


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """The plan of a trial, which its seed decides.

    Attributes
    ----------
    seed
        Of all that is random.
    variant
        A name of `SETTINGS`.
    peers
        Hostile connections.
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


def draw_sessions(seed: int, names: tuple[str, ...] = tuple(SETTINGS)) -> SessionPlan:
    """Return the plan of a seed."""
    rng = Random(f"sessions {seed}")
    variant = rng.choice(names)
    return SessionPlan(
        seed,
        variant,
        peers=rng.choice((10, 30, 100)),
        together=rng.choice((1, 4, 20)),
        token=rng.random() < 0.15,
        state=rng.random() < 0.3,
        tables=variant not in _TABLELESS and rng.random() < 0.6,
    )


@dataclass(slots=True)
class SessionResult:
    """The findings of a trial.

    Attributes
    ----------
    plan
        The trial's.
    frames, sent
        The frames that were sent to a server that had not closed the connection, and their bytes.
    answers
        By kind, and for errors by code: what the server said.
    wrong
        What contradicts the promise, one sentence each.
    seconds
        The time that it took.
    """

    plan: SessionPlan
    frames: int = 0
    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class SessionTrial:
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    """

    def __init__(self, plan: SessionPlan) -> None:
        self.plan, self.result = plan, SessionResult(plan)
        self._rng = Random(f"peers {plan.seed}")
        self._world = World(seed=plan.seed, limit=_LIMIT, pieces=self._rng.choice((None, 7, 100)))
        layout = Layout(_TENSORS)
        tensors = {tensor.name: tensor for tensor in layout.tensors}
        ends = [(t.offset, t.offset + t.dtype.itemsize * t.size) for t in tensors.values()]
        rows = ("t", *_TABLE.described) if plan.tables else ()
        self._steps = 0  # of the honest worker
        self._target = Target(
            tuple((t.name, t.dtype.name, t.shape) for t in tensors.values()),
            tuple(ends),
            layout.nbytes,
            (rows,) if rows else (),
        )

    def run(self) -> SessionResult:
        """Carry it out."""
        began = time.monotonic()
        with errors_noted(self.result.wrong):
            try:
                self._world.run(self._all())
            except AiopsError as error:
                self.result.wrong.append(f"{type(error).__name__}: {error}")
            except Exception as error:
                self.result.wrong.append(f"the simulation ended: {_told(error)}")
        self.result.seconds = time.monotonic() - began
        return self.result

    async def _all(self) -> None:
        plan, wrong = self.plan, self.result.wrong
        settings = {"policy": plan.variant, **SETTINGS[plan.variant]}
        if plan.token:
            settings["token"] = _TOKEN
        if plan.state:
            settings["state"] = "state"
        async with ServerMachine(kernels="numpy", **settings) as machine:
            self.machine = machine
            tables = {"t": _TABLE} if plan.tables else None
            zeros = {name: np.zeros(shape, dtype) for name, dtype, shape in _TENSORS}
            token = _TOKEN if plan.token else None
            async with AsyncWorker(
                machine.url, zeros, tables=tables, token=token, name="honest", timeout=300.0
            ) as worker:
                self._worker = worker
                await self._step()
                for left in range(plan.peers, 0, -plan.together):
                    peers = [self._peer() for _ in range(min(left, plan.together))]
                    async with asyncio.TaskGroup() as group:
                        for peer in peers:
                            group.create_task(peer)
                        group.create_task(self._step())
                await asyncio.sleep(1.0)
                for _ in range(_HONEST):
                    await self._step()
                if not machine.running:
                    wrong.append(f"the server has ended: {machine.error!r}")
                await self._check(worker)

    async def _step(self) -> None:
        """Have the honest worker make a step."""
        self._steps += 1
        receipt = await self._worker.step({n: np.ones(s, d) for n, d, s in _TENSORS})
        if not receipt.used:
            self.result.wrong.append("a step of the honest worker was not used")

    async def _check(self, worker: AsyncWorker) -> None:
        wrong, report = self.result.wrong, await worker.stats()
        if any(report[name] for name in ("receive_bytes", "rows_bytes")):
            wrong.append(f"{report['receive_bytes']} bytes of receive buffers are not back")
        if report["versions_alive"] > 2:
            wrong.append(f"{report['versions_alive']} versions are held for peers that are gone")
        present = [line["name"] for line in report["workers"] if line["present"]]
        if present != ["honest"]:
            wrong.append(f"workers that are gone count as present: {present}")
        for name, array in worker.params.items():
            if not np.isfinite(array).all():
                wrong.append(f"{name!r} is not finite")
            if self.plan.token and self.plan.variant == "asgd" and (array != -self._steps).any():
                wrong.append(f"{name!r} is not what {self._steps} steps make it")

    # -------------------------------------------------------------- hostile peers

    async def _peer(self) -> None:
        session = draw_session(self._rng, self._target, FRAMES)
        env = CURRENT_ENVIRONMENT.get()
        peer = _HostilePeer(session.reads)
        with contextlib.suppress(OSError):
            transport, _protocol = await env.dial(
                lambda: peer, self.machine.host, self.machine.port
            )
            await self._say(session, transport, peer)
        for text in peer.answers_in(self.result.answers):
            self.result.wrong.append(text)

    async def _say(
        self, session: HostileSession, transport: asyncio.Transport, peer: _HostilePeer
    ) -> None:
        for piece in session.pieces:
            if peer.lost.is_set():
                return
            transport.write(piece.data)
            self.result.sent += len(piece.data)
            self.result.frames += piece.frames
            await asyncio.sleep(piece.pause)
        match session.ending:
            case "close":
                transport.close()
            case "abort":
                transport.abort()
            case "eof":
                transport.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STAY):
                await peer.lost.wait()
        transport.abort()


class _HostilePeer(asyncio.Protocol):
    """The end of a hostile connection: it keeps what the server says.

    Parameters
    ----------
    reads
        Whether it reads.
    """

    def __init__(self, reads: bool) -> None:
        self.lost = asyncio.Event()
        self._reads, self._data = reads, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stop reading, if it does not read."""
        if not self._reads:
            transport.pause_reading()  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        self._data += data

    def connection_lost(self, error: Exception | None) -> None:
        """Note it."""
        self.lost.set()

    def answers_in(self, counts: Counter[str]) -> Iterator[str]:
        """Count the whole messages that came, and say what is wrong with them."""
        data, at = self._data, 0
        while at + 5 <= len(data):
            if data[at] != 0xCE:
                yield f"the server said byte {data[at]:#x} where a message begins"
                return
            end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
            if end > len(data):
                return
            header = msgpack.unpackb(bytes(data[at + 5 : end]))
            kind = header["kind"]
            if kind not in _ANSWERS:
                yield f"the server said {kind!r}"
            counts[f"error {header['code']}" if kind == "error" else kind] += 1
            if kind == "error" and not _documented(header["code"]):
                yield f"the server said an error with code {header['code']!r}"
            at = end
            for part in header.get("parts", ()):
                at += 5 + part[3]


_ANSWERS = {kind for state in HANDSHAKE.values() for kind in state.get("server", ())}


def _documented(code: str) -> bool:
    return code == "protocol" or refusal(code, "").code == code


def _told(error: BaseException) -> str:
    """Return an exception, the first of a group, and the line that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"


@contextlib.contextmanager
def errors_noted(wrong: list[str]) -> Iterator[None]:
    """Note what is logged as an error, by a server or asyncio; log nothing else."""
    before, root = logging.root.manager.disable, logging.root
    handler = _Noting(wrong)
    logging.disable(logging.WARNING)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        logging.disable(before)


class _Noting(logging.Handler):
    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self._wrong.append(f"logged: {self.format(record)}")
