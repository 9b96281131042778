"""A trial of hostile processes that write in mailboxes, beside an honest worker that uses one.

All are real: the server, the worker, and the hostile processes, which write while the server reads
(`aiops.lab.torture.hostile_poster`). The server is in this process, so that a sanitizer sees what
it does. The honest worker is answered each time, what it is lent does not change, and when the
hostile processes are gone nothing of theirs is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from aiops.client import variables
from aiops.client.params import Leased
from aiops.client.sync.compiled_exchange import takes_mailboxes
from aiops.client.sync.worker import Worker
from aiops.errors import AiopsError, UsageError
from aiops.lab.processes import PipedProcess
from aiops.lab.torture.attack_trial import AttackResult, told
from aiops.lab.torture.attacked import AttackPlan, target_of
from aiops.lab.torture.hostile_poster import Deeds, post_on
from aiops.lab.torture.said import errors_noted, unraisable_noted
from aiops.net import unix_socket
from aiops.net.mailboxes import ROOM
from aiops.serving.embedded import serve
from aiops.serving.server import Server

MODELS = {"copied": 1024, "lent": 40_000}
"""By variant: the model's elements. Up to 64 KiB gradients and parameters are copied."""

_POLICIES = ("asgd", "sasgd", "fasgd", "schedule-free")
_MOST = 300  # exchanges of a hostile connection
_CONNECTIONS = 8  # of each hostile process
_PATIENCE = 60.0  # seconds for an answer
_COMPILES = 120.0  # seconds until kernels are compiled, without which no mailbox is opened
_OPENS = 10.0  # seconds until a hostile process has a mailbox
_SETTLES = 20.0  # seconds until what hostile processes had is given back
_LIMIT = 600.0  # seconds for a trial
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
    if not (takes_mailboxes() and unix_socket.wanted()):
        raise UsageError(
            "there are no mailboxes here: they take Linux, compiled code, and shared memory, which"
            " AIOPS_NO_SHM forbids"
        )
    if variables.TOKEN in os.environ:
        raise UsageError(f"{variables.TOKEN} is set, and hostile processes here know no token")


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
        """Carry it out. What hangs for ten minutes ends this process, and tells where."""
        began, wrong = time.monotonic(), self.result.wrong
        faulthandler.dump_traceback_later(_LIMIT, exit=True, file=sys.__stderr__ or 2)
        try:
            with (
                errors_noted(wrong),
                unraisable_noted(wrong),
                tempfile.TemporaryDirectory(prefix="torture-") as folder,
            ):
                asyncio.run(self._serve(Path(folder) / "state"))
        except AiopsError as error:
            wrong.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            wrong.append(f"the trial ended: {told(error)}")
        finally:
            faulthandler.cancel_dump_traceback_later()
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
        before = _resources() - of(_of_versions)
        with self._honest(server.url) as honest:
            self._have_hostile_peers(server.url, honest)
            self._wait(lambda: of(_peers) == 1, "hostile connections are left")
            self._wait(lambda: of(_buffers) == 0, "receive buffers are out")
            self._wait(lambda: honest.step() and of(_alive) <= 2, "versions are alive")
            served = of(_served)
            self._wait(
                lambda: honest.step() and of(_served) > served + 3,
                "the honest worker is not answered in its mailbox",
            )
        self._wait(lambda: of(_peers) == 0, "the honest worker is still there")
        self._wait(lambda: of(_room) == ROOM, "room for mailboxes is taken")
        self._wait(
            lambda: not (_resources() - of(_of_versions) - before),
            "hostile processes leave something",
        )

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
        each = plan.peers // plan.together
        deeds = dict[PipedProcess, Deeds]()
        try:
            with contextlib.ExitStack() as stack:
                for number in range(plan.together):
                    peer = stack.enter_context(PipedProcess("a hostile process", post_on))
                    peer.send((f"{number} of {plan.seed}", url, self._target, _OPENS, each, _MOST))
                    deeds[peer] = Deeds(Counter(), 0, 0, 0, 0)
                until = time.monotonic() + _LIMIT / 2
                while any(done.connections < each for done in deeds.values()):
                    honest.step()
                    for peer in deeds:
                        if peer.pipe.poll():
                            deeds[peer] = peer.receive()
                    if time.monotonic() > until:
                        result.wrong.append("hostile processes do not end")
                    if result.wrong:
                        break
        finally:
            for done in deeds.values():
                result.acts += done.acts
                result.sessions += done.connections
                result.compiled += done.answered
                result.sent += done.sent
        opened = sum(done.opened for done in deeds.values())
        if opened < plan.peers / 2 and not result.wrong:
            result.wrong.append(f"{opened} of {plan.peers} hostile connections had a mailbox")

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


def _room(server: Server) -> int:
    return server.connections.mailboxes.room


def _of_versions(server: Server) -> Counter[str]:
    """Return what the memory of versions has: a mapping each, and two descriptors."""
    store = server.engine.store
    count = 0 if store is None else store.alive + store.spare
    return Counter({"mappings": count, "descriptors of /memfd": 2 * count})


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
