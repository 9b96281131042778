"""A trial of hostile processes that write in mailboxes, beside an honest worker that uses one.

All are real: the server, the worker, and the hostile processes, which write while the server reads
(`aiops.lab.torture.hostile_poster`). The server is in this process, so that a sanitizer sees what
it does. The honest worker is answered each time, what it is lent does not change, and when the
hostile processes are gone nothing of theirs is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from aiops.client.params import Leased
from aiops.client.sync.compiled_exchange import takes_mailboxes
from aiops.client.sync.worker import Worker
from aiops.errors import AiopsError, UsageError
from aiops.lab.processes import PipedProcess
from aiops.lab.torture.attack_trial import AttackResult, told
from aiops.lab.torture.attacked import AttackPlan, target_of
from aiops.lab.torture.hostile_poster import post_on
from aiops.lab.torture.said import errors_noted
from aiops.serving.embedded import serve
from aiops.serving.server import Server

MODELS = {"copied": 1024, "lent": 40_000}
"""By variant: the model's elements. Up to 64 KiB gradients and parameters are copied."""

_POLICIES = ("asgd", "sasgd", "fasgd", "schedule-free")
_MOST = 300  # exchanges of a hostile connection
_CONNECTIONS = 20  # of each hostile process
_PATIENCE = 60.0  # seconds for an answer
_COMPILES = 120.0  # seconds until kernels are compiled, without which no mailbox is opened
_SETTLES = 20.0  # seconds until what hostile processes had is given back
_MEMORY = "descriptors of /memfd"
_HOLDS = 0.002  # seconds that the honest worker looks at what it has been lent


def draw_mailboxes(seed: int, names: Sequence[str] = tuple(MODELS)) -> AttackPlan:
    """Return the plan of a seed."""
    rng = Random(f"mailboxes {seed}")
    together = rng.choice((1, 1, 2, 3))
    return AttackPlan(
        seed,
        variant=rng.choice(list(names)),
        policy=rng.choice(_POLICIES),
        peers=together * _CONNECTIONS,
        together=together,
        token=False,
        state=rng.random() < 0.25,
        tables=False,
    )


def need_mailboxes() -> None:
    """Raise `UsageError` where there are no mailboxes."""
    if not takes_mailboxes():
        raise UsageError("there are no mailboxes here: they take Linux, and compiled code")


class MailboxTrial:
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    """

    def __init__(self, plan: AttackPlan) -> None:
        self.plan, self.result = plan, AttackResult(plan)
        self._count = MODELS[plan.variant]
        self._target = target_of(False, model=(("w", "float32", (self._count,)),))

    def run(self) -> AttackResult:
        """Carry it out."""
        began, wrong = time.monotonic(), self.result.wrong
        with errors_noted(wrong), tempfile.TemporaryDirectory(prefix="torture-") as folder:
            try:
                asyncio.run(self._serve(Path(folder) / "state"))
            except AiopsError as error:
                wrong.append(f"{type(error).__name__}: {error}")
            except Exception as error:
                wrong.append(f"the trial ended: {told(error)}")
        self.result.seconds = time.monotonic() - began
        return self.result

    async def _serve(self, state: Path) -> None:
        plan = self.plan
        kernels = ("numpy", "auto")[plan.seed % 2]
        settings: dict[str, Any] = {"policy": plan.policy, "kernels": kernels}
        if plan.policy in ("asgd", "sasgd"):  # so that no gradient takes the model near to a limit
            settings["set"] = {"lr": 1e-20}
        if plan.state:
            settings |= {"state": str(state), "acks": "written"}
        async with serve(port=0, **settings) as server:
            await asyncio.to_thread(self._attack, server, asyncio.get_running_loop())

    def _attack(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        """Train while hostile processes do harm, and look at what is left of them."""

        def of(function: Callable[[Server], Any]) -> Any:
            async def ask() -> Any:
                return function(server)

            return asyncio.run_coroutine_threadsafe(ask(), loop).result(_PATIENCE)

        with self._honest(server.url) as honest:
            self._wait(
                lambda: honest.step() and of(_served) > 0, "no mailbox was opened", _COMPILES
            )
        self._wait(lambda: of(_peers) == 0, "the honest worker is still there")
        before = _resources()
        with self._honest(server.url) as honest:
            self._have_hostile_peers(server.url, honest)
            self.result.compiled = of(_served)
            self._wait(lambda: of(_peers) == 1, "hostile connections are left")
            self._wait(lambda: of(_buffers) == 0, "receive buffers are out")
            self._wait(lambda: honest.step() and of(_alive) <= 2, "versions are alive")
        self._wait(lambda: of(_peers) == 0, "the honest worker is still there")

        def left() -> Counter[str]:
            """Return what is there that was not, but for the memory of spare versions."""
            spare = Counter({_MEMORY: 2 * of(_spare), "mappings": of(_spare)})
            return _resources() - before - spare

        self._wait(lambda: not left(), "hostile processes leave something")
        if left():
            self.result.wrong.append(f"that is {dict(left())}")

    @contextlib.contextmanager
    def _honest(self, url: str) -> Iterator[_Honest]:
        """Have an honest worker train, by itself at the end."""
        model, views = {"w": np.zeros(self._count, np.float32)}, self.plan.variant == "lent"
        with Worker(url, model, name="honest", views=views, timeout=_PATIENCE) as worker:
            honest = _Honest(worker, self.result.wrong)
            yield honest
            for _ in range(5):
                honest.step()

    def _have_hostile_peers(self, url: str, honest: _Honest) -> None:
        """Have hostile processes come and go, and the honest worker train meanwhile."""
        plan, result = self.plan, self.result
        with contextlib.ExitStack() as stack:
            peers = list[PipedProcess]()
            for number in range(plan.together):
                peers.append(stack.enter_context(PipedProcess("a hostile process", post_on)))
                seed = f"poster {number} of {plan.seed}"
                peers[-1].send((seed, url, self._target, plan.peers // plan.together, _MOST))
            until = time.monotonic() + 10 * _PATIENCE
            while not all(peer.pipe.poll() for peer in peers) and not result.wrong:
                honest.step()
                if time.monotonic() > until:
                    result.wrong.append("hostile processes do not end")
            for peer in peers if not result.wrong else ():
                said, opened, sent = peer.receive()
                result.answers += said
                result.frames += said.total()
                result.sessions += opened
                result.sent += sent

    def _wait(
        self, holds: Callable[[], bool], otherwise: str, seconds: float | None = None
    ) -> None:
        """Wait until something holds; note what is so otherwise. By default for `_SETTLES`."""
        seconds = _SETTLES if seconds is None else seconds
        until = time.monotonic() + seconds
        while not self.result.wrong and not holds():
            gc.collect()
            time.sleep(0.002)
            if time.monotonic() > until:
                self.result.wrong.append(f"{otherwise} after {seconds:g} s")


class _Honest:
    """The honest worker.

    Parameters
    ----------
    worker
        It.
    wrong
        Where it notes what is.
    """

    def __init__(self, worker: Worker, wrong: list[str]) -> None:
        self._worker, self._wrong = worker, wrong
        self._gradient = {"w": np.ones_like(worker.params["w"])}
        self._version = -1
        self._holds = isinstance(worker.params, Leased)

    def step(self) -> bool:
        """Make a step; return whether all is right."""
        worker, wrong = self._worker, self._wrong
        receipt = worker.step(self._gradient)
        if not receipt.used:
            wrong.append("a push of the honest worker was not used")
        if receipt.version <= self._version:
            wrong.append(f"version {receipt.version} followed {self._version}")
        self._version = receipt.version
        found = worker.params["w"]
        if not np.isfinite(found).all():
            wrong.append(f"version {self._version} is not finite")
        if self._holds:
            kept = found.copy()
            until = time.monotonic() + _HOLDS
            while time.monotonic() < until:
                os.sched_yield()
            if not np.array_equal(kept, found):
                wrong.append(f"version {self._version} changed while it was lent")
        return not wrong


def _served(server: Server) -> int:
    return server.connections.mailboxes.served


def _peers(server: Server) -> int:
    return len(server.connections.peers)


def _buffers(server: Server) -> int:
    return sum(pool.out for pool in server.coordinator.pools)


def _alive(server: Server) -> int:
    store = server.engine.store
    return 0 if store is None else store.alive


def _spare(server: Server) -> int:
    store = server.engine.store
    return 0 if store is None else store.spare


def _resources() -> Counter[str]:
    """Return the descriptors that this process has, but for files, and its shared mappings."""
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            kind, *number = os.readlink(f"/proc/self/fd/{name}").split(":")
            found[f"descriptors of {kind}"] += bool(number)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found["mappings"] = sum("/memfd:" in row for row in maps)
    return found
