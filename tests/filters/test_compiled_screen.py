"""All filters in one loop: the same decisions as the filters' own, and the same bits afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.filters import compiled_screen
from aiops.filters.screen import LEARNT, SEEDING, PushScreen
from aiops.model.arena import Arena
from aiops.model.layout import Cover, Layout
from aiops.store.snapshots import Version

pytest.importorskip("numba")

TENSORS: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "one": [("w", "float32", (30,))],
    "large": [("w", "float32", (90, 100)), ("b", "float32", (70,))],
    "mixed": [
        ("exact", "float64", (7, 3)),
        ("wide", "float32", (100, 90)),
        ("none", "float32", (0,)),
        ("odd", "float32", (5,)),
        ("bits", "bfloat16", (33,)),
        ("half", "float16", (50, 50)),
    ],
    "many": [(f"w{number}", "float32", (1 + number % 40,)) for number in range(520)],
}


class World:
    """Pushes of honest workers, and of hostile ones, to several screens at once."""

    def __init__(self, model: str, workers: int, *texts: tuple[str, bool], seed: int = 1) -> None:
        self.layout = Layout(TENSORS[model])
        self.screens = [PushScreen(text, self.layout) for text, _compiled in texts]
        for screen, (_text, compiled) in zip(self.screens, texts, strict=True):
            if compiled:
                screen.warm()
        self.draw = np.random.default_rng(seed)
        self.workers = workers
        self.optimum = self.draw.standard_normal(self.layout.parameters)
        self.theta = self.draw.standard_normal(self.layout.parameters)
        self.number = self.turns = 0
        self.every = 1  # pushes for a version: with more, most meet the one they were computed on
        self.seen = [(0, self.theta)] * workers  # by worker, the version and its values

    def arena(self, values: Any) -> Arena:
        """Return a model with these values."""
        arena, first = Arena(self.layout), 0
        for section in arena.sections:
            section[:] = values[first : first + section.size]
            first += section.size
        return arena

    def gradient(self, worker: int) -> tuple[Arena, int]:
        """Return a worker's next gradient, and the version that it was computed on."""
        number, theta = self.seen[worker]
        noise = 0.3 * self.draw.standard_normal(self.layout.parameters)
        found = theta - self.optimum + noise
        if worker == 0:
            found = -found
        if self.draw.random() < 0.03:
            found = np.clip(1000 * found, -6e4, 6e4)
        return self.arena(found), number

    def step(
        self, worker: int, judge: Callable[[PushScreen, Arena, int, Version], Any]
    ) -> list[Any]:
        """Have a worker push; return what the screens decide, which is the same."""
        gradient, base = self.gradient(worker)
        tensors = len(self.layout.tensors)
        current = Version(
            self.number, self.arena(self.theta), np.full(tensors, self.number), self.number
        )
        found = [judge(screen, gradient, base, current) for screen in self.screens]
        self.turns += 1
        if found[0] is None and self.turns % self.every == 0:
            moved = np.concatenate([each.astype(float) for each in gradient.sections])
            self.theta = self.theta - 0.1 * moved
            self.number += 1
        self.seen[worker] = (self.number, self.theta)
        return found


def packed(value: Any) -> Any:
    """Return a state to the last bit, so that two can be compared."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {name: packed(each) for name, each in value.items()}
    return [packed(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("model", TENSORS)
@pytest.mark.parametrize("text", ["robust", "norm:5", "curvature", "agreement+norm", "norm+kardam"])
def test_it_decides_and_notes_what_the_filters_do(model: str, text: str) -> None:
    """Of whole pushes, of some tensors, and of values that are given; with a state kept."""
    world = World(model, 11, (text, False), (text, True))
    whole = Cover(world.layout.all, world.layout.starts, True, None, None)
    passed = 0
    for turn in range(200):
        worker = int(world.draw.integers(world.workers))
        kind = turn % 9

        def judge(
            screen: PushScreen,
            gradient: Arena,
            base: int,
            current: Version,
            worker: int = worker,
            kind: int = kind,
        ) -> str | None:
            cover, data, values = whole._replace(level=base), gradient.data, None
            largest = max(float(np.abs(s.astype(float)).max(initial=0)) for s in gradient.sections)
            if kind == 3:
                values = screen.measure(data, cover)
            elif kind == 7:
                first = world.layout.all[:1]
                cover = Cover(first, np.zeros(1, np.int64), False, None, np.array([base]))
                data = data[: world.layout.nbytes_each[0]]
            return screen.judge(worker, data, cover, largest, values, current)

        one, other = world.step(worker, judge)
        assert one == other, turn
        if turn % 20 == 19:
            assert packed(world.screens[0].state()) == packed(world.screens[1].state()), turn
        passed += one is None
        if turn == 100:
            again = PushScreen(text, world.layout)
            again.warm()
            again.restore(world.screens[1].state())
            world.screens[1] = again
    assert passed > 40
    assert world.screens[0].refused or text == "curvature"


def test_what_does_not_pass_in_one_call_changes_nothing() -> None:
    world = World("mixed", 8, ("robust", True))
    screen = world.screens[0]
    answers: list[bool] = []
    for _turn in range(400):
        worker = int(world.draw.integers(world.workers))

        def judge(
            screen: PushScreen, gradient: Arena, base: int, current: Version, worker: int = worker
        ) -> str | None:
            largest = max(float(np.abs(s.astype(float)).max(initial=0)) for s in gradient.sections)
            before = packed(screen.state())
            if screen.fault(worker) is not None:
                return "its pushes come no further"
            if screen.admits(worker, gradient.data, base, largest, current):
                answers.append(True)
                assert packed(screen.state()) != before
                return None
            answers.append(False)
            assert packed(screen.state()) == before
            cover = Cover(world.layout.all, world.layout.starts, True, base, None)
            why = screen.judge(worker, gradient.data, cover, largest, None, current)
            known = len(answers) > SEEDING + LEARNT + 2 * world.workers
            assert why is not None or not known
            return why

        world.step(worker, judge)
    assert sum(answers) > 250
    assert screen.refused > 20


def test_a_barrier() -> None:
    """All workers push for each version, so that nothing moves while a gradient is computed."""
    world = World("mixed", 5, ("robust", False), ("robust", True))
    world.every = 5
    cover = Cover(world.layout.all, world.layout.starts, True, None, None)
    passed = 0
    for turn in range(300):
        worker = turn % 5

        def judge(
            screen: PushScreen, gradient: Arena, base: int, current: Version, worker: int = worker
        ) -> str | None:
            here = cover._replace(level=current.number)
            return screen.judge(worker, gradient.data, here, 1.0, None, current)

        one, other = world.step(worker, judge)
        assert one == other, turn
        passed += one is None
        if turn % 20 == 19:
            assert packed(world.screens[0].state()) == packed(world.screens[1].state()), turn
    assert passed > 150


def test_parameters_whose_squares_overflow() -> None:
    """A float64 has room for them: they are not compared, and nothing turns into NaN."""
    world = World("mixed", 4, ("robust", False), ("robust", True))
    cover = Cover(world.layout.all, world.layout.starts, True, None, None)
    small = world.theta
    for turn in range(120):
        worker = turn % 4

        def judge(
            screen: PushScreen, gradient: Arena, base: int, current: Version, worker: int = worker
        ) -> str | None:
            here = cover._replace(level=base)
            return screen.judge(worker, gradient.data, here, 1.0, None, current)

        gradient = world.arena(world.draw.standard_normal(len(small))), world.seen[worker][0]
        world.gradient = lambda worker, found=gradient: found  # type: ignore[misc,method-assign]
        one, other = world.step(worker, judge)
        assert one == other, turn
        world.theta = world.theta.copy()
        huge = turn % 40 in (20, 21, 30)
        world.theta[:21] = world.draw.uniform(0.5, 1.0, 21) * (1e200 if huge else 1.0)
        states = [screen.state() for screen in world.screens]
        assert packed(states[0]) == packed(states[1]), turn
        for kept in states[0]["filters"]:
            if "sums" in kept:
                assert not np.isnan(kept["sums"]).any(), turn


@pytest.mark.parametrize("workers", [3, 150])
def test_many_workers_are_compared_less_often_and_alike(workers: int) -> None:
    world = World("one", workers, ("robust", False), ("robust", True))
    cover = Cover(world.layout.all, world.layout.starts, True, None, None)
    for turn in range(9 * workers):
        worker = turn % workers

        def judge(
            screen: PushScreen, gradient: Arena, base: int, current: Version, worker: int = worker
        ) -> str | None:
            here = cover._replace(level=base)
            return screen.judge(worker, gradient.data, here, 1.0, None, current)

        one, other = world.step(worker, judge)
        assert one == other, turn
    assert packed(world.screens[0].state()) == packed(world.screens[1].state())


@pytest.mark.parametrize(("text", "there"), [("robust", True), ("off", False), ("kardam", False)])
def test_it_is_compiled_before_there_is_a_model(
    text: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes seconds, during which clients would be answered late."""
    compiled: list[bool] = []
    monkeypatch.setattr(compiled_screen, "_compiled", lambda: compiled.append(True))
    engine = Engine(find("asgd").make({}), Options(filter=text))
    engine.preparation().steps[-1]()
    assert bool(compiled) is there
