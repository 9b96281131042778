"""A server's kernels are made ready beside what it does: nobody waits for them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import kernels
from aiops.algorithms.fasgd import FASGD
from aiops.client import Client
from aiops.codecs import find
from aiops.engine.engine import Engine
from aiops.engine.events import Warm
from aiops.errors import UsageError
from aiops.kernels import backend
from aiops.serving.draining import Draining
from aiops.serving.effects import EffectRunner
from aiops.store.parameters import Store
from aiops.store.warmup import Warmup
from tests.peers import eventually
from tests.support import PATIENCE, ServerThread

pytestmark = pytest.mark.usefixtures("none_pending")


class TestPreparation:
    def test_until_it_is_done_numpy_works(self) -> None:
        preparation = Warmup(FASGD().rule(), "auto")
        assert kernels.current_backend("auto") == "numpy"
        *steps, last = preparation.steps()
        for step in steps:
            assert kernels.current_backend("auto") == "numpy"
            step()
        last()
        assert kernels.current_backend("auto") == "numba"

    def test_numpy_needs_none(self) -> None:
        preparation = Warmup(FASGD().rule(), "numpy")
        assert not kernels.numba_pending()
        assert preparation.steps() == []

    def test_one_that_is_left_undone_is_over(self) -> None:
        steps = Warmup(FASGD().rule(), "auto").steps()
        assert kernels.numba_pending()
        del steps
        assert not kernels.numba_pending()

    def test_numba_that_is_not_installed_is_refused_before_there_are_steps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "numba", None)
        with pytest.raises(UsageError, match=r"cannot be had: .*aiops-ps\[server\]"):
            Warmup(FASGD().rule(), "numba")
        assert not kernels.numba_pending()

    def test_numba_that_cannot_be_had_is_an_error_only_if_it_was_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend, "_obstacle", lambda: "it is broken")
        Warm(Warmup(FASGD().rule(), "auto", [find("int8")]).steps()).run()
        with pytest.raises(UsageError, match="it is broken"):
            Warm(Warmup(FASGD().rule(), "numba").steps()).run()
        assert not kernels.numba_pending()

    def test_the_loops_of_its_codecs_are_compiled(self) -> None:
        from aiops.codecs import half, int8, largest, lowrank, onebit, topk

        loops = (int8.loops, onebit.loops, lowrank.loops, topk.loops, largest.loops)
        for each in (*loops, half.loops):
            each.cache_clear()
        names = "fp16", "bf16", "int8", "onebit", "topk", "lowrank", "raw"
        steps = Warmup(FASGD().rule(), "auto", [find(name) for name in names]).steps()
        Warm(steps).run()
        assert [each.cache_info().currsize for each in loops] == [1] * len(loops)
        assert half.loops.cache_info().currsize == 2


def test_pushes_are_answered_while_kernels_are_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And to the same bits as when they are there."""
    gate, begun = threading.Event(), threading.Event()
    prepare, warm = Warmup.steps, Store.warming

    def wait() -> None:
        begun.set()
        assert gate.wait(PATIENCE)

    monkeypatch.setattr(Warmup, "steps", lambda self: [wait, *prepare(self)])
    monkeypatch.setattr(Store, "warming", lambda self: [wait, *warm(self)])
    random = np.random.default_rng(1)
    model = {"a": random.normal(size=2000).astype(np.float32), "b": np.ones(7, np.float64)}
    gradients = [
        {name: random.normal(size=a.shape).astype(a.dtype) for name, a in model.items()}
        for _ in range(4)
    ]
    found = []
    for late in (True, False):
        gate.clear() if late else gate.set()
        with ServerThread(policy="fasgd") as server:
            assert begun.wait(PATIENCE)
            with Client(server.url, role="worker") as client:
                client.define(model)
                for number, gradient in enumerate(gradients):
                    if number == 3:
                        gate.set()
                        eventually(lambda: client.stats()["kernels"] == "numba", "Numba")
                    elif late:
                        assert client.stats()["kernels"] in ("", "numpy")
                    client.push(client.fetch(), gradient)
                found.append({name: array.tobytes() for name, array in client.fetch().items()})
    assert found[0] == found[1]
    assert not kernels.numba_pending()


class Later:
    """A kernel runner that does what it was given when it is closed."""

    at_once = 0.0

    def __init__(self) -> None:
        self.given: list[Callable[[], object]] = []
        self.done: list[Callable[[None], object]] = []

    def submit(
        self, run: Callable[[], object], nbytes: int, done: Callable[[None], object]
    ) -> None:
        self.given.append(run)
        self.done.append(done)

    def close(self) -> None:
        for run in self.given:
            run()


class Timers:
    """An event loop of timers, which ring when the test has them ring."""

    def __init__(self) -> None:
        self.rings: list[Callable[[], object]] = []

    def call_later(self, seconds: float, ring: Callable[[], object]) -> Any:
        self.rings.append(ring)
        return SimpleNamespace(cancel=self.rings.clear)


def performer_of(
    later: Later | None, timers: Timers, now: Callable[[], float] = lambda: 0.0
) -> EffectRunner:
    here = SimpleNamespace(now=now, kernel_runner=lambda loop, failed: later or Later())
    given = timers, here, SimpleNamespace(peers={}), None, None, None
    return EffectRunner(*given)  # type: ignore[arg-type]


def test_who_waits_is_told_that_kernels_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """And nobody is where they are read from the cache, nor behind the end of the server."""
    caplog.set_level("INFO", "aiops.server")
    later, timers, now = Later(), Timers(), [7.0]
    performer = performer_of(later, timers, lambda: now[0])
    for number in range(2):
        performer.perform(Warm([lambda: None]))
        performer.perform(Warm([lambda: None]))
        assert len(timers.rings) == 1, "once for what is under way together"
        if number:
            timers.rings[0]()
            now[0] = 21.25
        for done in later.done:
            done(None)
        assert performer.warm
        assert not timers.rings
        later.done.clear()
    assert [record.getMessage() for record in caplog.records] == [
        "kernels are being compiled, once for this machine: NumPy updates until they are ready,"
        " which takes several times as long",
        "the kernels are ready, in 14.2 s",
    ]
    performer.perform(Warm([lambda: None]))
    performer.close()
    assert not timers.rings


def test_a_server_that_ends_leaves_undone_what_is_left() -> None:
    """It may take seconds."""
    done: list[int] = []
    performer = performer_of(None, Timers())
    performer.perform(Warm([lambda: done.append(1)]))
    performer.close()
    assert done == []


def test_a_server_that_ends_leaves_no_process_without_numba() -> None:
    """Nor does a step that fails; and not when the collector finds the promise, but at once."""
    warmup = Warmup(FASGD().rule(), "auto")
    performer = performer_of(None, Timers())
    performer.perform(Warm(warmup.steps(), warmup.over))
    assert kernels.numba_pending()
    performer.close()
    assert not kernels.numba_pending()

    failing = Warmup(FASGD().rule(), "auto")
    with pytest.raises(ZeroDivisionError):
        Warm([lambda: 1 // 0, *failing.steps()], failing.over).run()
    assert not kernels.numba_pending()


def test_a_server_that_cannot_listen_leaves_no_process_without_numba() -> None:
    engines = list[Any]()
    prepare = Engine.preparation

    def preparation(engine: Engine) -> Warm:
        engines.append(prepare(engine))
        return engines[-1]

    with ServerThread(policy="fasgd") as server, pytest.MonkeyPatch.context() as patch:
        eventually(lambda: not kernels.numba_pending(), "Numba")
        patch.setattr(Engine, "preparation", preparation)
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(UsageError), ServerThread(policy="fasgd", port=port):
            pass
        assert engines
        assert not kernels.numba_pending()


async def test_a_server_whose_closing_is_cancelled_leaves_no_process_without_numba(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its loop may be closed before the compiler could tell it that a step is done."""
    begun, gate, draining = threading.Event(), threading.Event(), asyncio.Event()
    prepare, warmups = Warmup.steps, list[Warmup]()

    def wait() -> None:
        begun.set()
        assert gate.wait(PATIENCE)

    def steps(warmup: Warmup) -> list[Callable[[], object]]:
        warmups.append(warmup)  # so that the collector ends no promise
        return [wait, *prepare(warmup)]

    async def drain(_draining: Draining) -> None:
        draining.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Warmup, "steps", steps)
    monkeypatch.setattr(Draining, "answered", drain)

    async def serve() -> None:
        async with aiops.serve(port=0, policy="fasgd"):
            assert await asyncio.to_thread(begun.wait, PATIENCE)

    serving = asyncio.ensure_future(serve())
    try:
        await asyncio.wait_for(draining.wait(), PATIENCE)
        assert kernels.numba_pending()
        while not serving.done():
            serving.cancel()
            await asyncio.wait([serving], timeout=0.01)
        assert not kernels.numba_pending()
    finally:
        gate.set()


def test_what_is_made_ready_lets_the_loop_have_the_interpreter() -> None:
    """Each system call of the loop would wait for it for 5 ms otherwise."""
    before, seen, later, now = sys.getswitchinterval(), list[float](), Later(), [7.0]
    performer = performer_of(later, Timers(), lambda: now[0])
    performer.perform(Warm([lambda: seen.append(sys.getswitchinterval())]))
    for now[0] in (7.9, 8.1):  # a compiler is at work by then
        for run in later.given:
            run()
    assert seen == [pytest.approx(50e-6), before]
    assert sys.getswitchinterval() == before
