"""How long runs will take is measured, and that takes no time worth mentioning."""

from __future__ import annotations

from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar, Self

import pytest

from aiops.lab.experiments import run_planning
from aiops.lab.experiments.planned_run import PlannedRun
from aiops.sim.turns.simulation import Simulation

CASE = PlannedRun("p", "a", 0, Simulation(dataset="digits", hidden=4, iterations=9), "reported")


class Probed:
    """Stands for a run: an iteration takes some seconds, and the first ones more."""

    made: ClassVar[list[int]] = []
    each, once = 0.0, 0.0

    def __init__(self, simulation: Simulation, task: object) -> None:
        self.iterations = simulation.iterations
        self.dispatcher = SimpleNamespace(model={})
        assert simulation.samples == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is held."""

    def execute(self) -> Any:
        took = self.each * self.iterations + (0 if self.made else self.once)
        self.made.append(self.iterations)
        return SimpleNamespace(seconds=took)


@pytest.mark.parametrize(
    ("each", "once", "made"),
    [
        (3.0, 10.0, [2, 2]),  # no more than two where they take long
        (0.0001, 0.0, [2, 150]),
        (0.011, 5.0, [2, 2, 28]),  # the first made ready
        (0.0, 0.0, [2, 150]),
        (0.2, 0.0, [2, 2]),
    ],
)
def test_a_speed_is_found_by_few_iterations(
    monkeypatch: pytest.MonkeyPatch, each: float, once: float, made: list[int]
) -> None:
    monkeypatch.setattr(run_planning, "Run", Probed)
    validated: list[object] = []
    task = SimpleNamespace(validate=validated.append)
    monkeypatch.setattr(run_planning, "task_of", lambda work: task)
    for name, value in (("made", []), ("each", each), ("once", once)):
        monkeypatch.setattr(Probed, name, value)
    speed = run_planning.probe(CASE)
    assert Probed.made == made
    assert speed.iteration == pytest.approx(each)
    assert validated == [{}]
