"""Processes that run cases: parallel, mortal, and gone when they should be."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from aiops.errors import UsageError
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun, Result, RunWork
from aiops.lab.experiments.run_pool import RunPool
from aiops.lab.processes import ONE_THREAD
from aiops.sim.turns.simulation import Simulation
from tests.lab.experiments.small_experiment import TINY
from tests.support import PATIENCE

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Order:
    """The work of a process in this test."""

    what: str
    simulation: Simulation = TINY

    def __call__(self, on_progress: OnProgress) -> Result:
        raise NotImplementedError


def obey(work: RunWork, on_progress: OnProgress) -> Result:
    """Carry out an `Order`."""
    assert isinstance(work, Order)
    on_progress(1)
    if work.what == "refuse":
        raise UsageError("no, and this is why")
    if work.what == "break":
        raise ZeroDivisionError("one over nothing")
    if work.what == "die":
        os._exit(9)
    while work.what == "hang":
        time.sleep(600)  # until it is ended from outside
    return {"process": os.getpid(), "threads": [os.environ.get(name) for name in ONE_THREAD]}


def case(what: str, seed: int = 0) -> PlannedRun:
    return PlannedRun("panel", what, seed, Order(what, replace(TINY, seed=seed)))


class Notes:
    """A watcher that writes everything down."""

    def __init__(self, stop_at: str = "") -> None:
        self.results: dict[tuple[str, int], Result] = {}
        self.failures: dict[str, str] = {}
        self._stop_at = stop_at

    def at(self, case: PlannedRun, iterations: int) -> None:
        if case.curve == self._stop_at:
            raise KeyboardInterrupt

    def done(self, case: PlannedRun, result: Result) -> None:
        self.results[case.curve, case.seed] = result

    def failed(self, case: PlannedRun, why: str) -> None:
        self.failures[case.curve] = why


@pytest.fixture
def pool() -> Iterator[RunPool]:
    with RunPool(2, obey) as made:
        yield made


def test_failures_and_deaths_are_told_and_the_rest_is_done(pool: RunPool) -> None:
    notes = Notes()
    work = ["refuse", "do", "die", "break"]
    pool.run([*map(case, work), *(case("do", seed) for seed in range(1, 5))], notes)
    assert notes.failures == {
        "refuse": "no, and this is why",
        "break": "ZeroDivisionError: one over nothing",
        "die": "its process ended with status 9",
    }
    assert sorted(seed for _what, seed in notes.results) == [0, 1, 2, 3, 4]
    processes = {result["process"] for result in notes.results.values()}
    assert os.getpid() not in processes
    assert len(processes) <= 3, "two, and one in the place of the dead"
    assert all(result["threads"] == ["1"] * 4 for result in notes.results.values())


def test_interrupted_it_ends_at_once_and_leaves_nobody_behind(pool: RunPool) -> None:
    notes = Notes(stop_at="hang")
    with pytest.raises(KeyboardInterrupt):
        pool.run([case("do"), case("hang"), case("hang", 1)], notes)
    members = [member.process.popen for member in pool._members]
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < PATIENCE, "the case takes ten minutes"
    assert members
    assert all(process.returncode is not None for process in members)


def test_this_process_keeps_its_own_threads(pool: RunPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    notes = Notes()
    pool.run([case("do")], notes)
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "NUMBA_NUM_THREADS" not in os.environ
    assert notes.results["do", 0]["threads"] == ["1"] * 4


def test_what_needs_too_much_memory_together_is_run_apart() -> None:
    class Both(Notes):
        def at(self, case: PlannedRun, iterations: int) -> None:
            busy = [member for member in made._members if member.case]
            most.append(sum(member.memory for member in busy))

    most: list[int] = []
    with RunPool(2, obey, memory=100) as made:
        needs = {0: 60, 1: 60, 2: 30, 3: 500}
        notes = Both()
        made.run([case("do", seed) for seed in needs], notes, lambda c: needs[c.seed])
    assert len(notes.results) == 4
    assert {60 + 60, 500 + 60, 500 + 30}.isdisjoint(most)
    assert 500 in most, "too much for the machine, and tried alone"
