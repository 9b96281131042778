"""The simulation benchmark: the speed of a simulation beside that of its gradients and updates.

    taskset -c 0 python -m benchmarks.simulation [--clients 16] [--batch-size 8] [--policy fasgd]
                              [--dataset mnist] [--rounds 15] [--iterations 400]
                              [--json out.json] [--plot out.png]

An iteration needs one gradient and one update. These are timed alone, each over the memory that a
simulation goes over (the parameters that its clients hold, in turn), then both together, and then
the simulation: validation left out. Rounds are interleaved, so that what the machine does meanwhile
meets all four; ratios are within a round. Every step is on one thread; keep it on one core.

``both`` is more than the sum of its parts where a gradient and an update drive each other out of
the processor's cache; ``simulation / both`` is what the simulator itself costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiops import kernels
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.run_record import machine, record
from aiops.lab.workloads import PerceptronTask
from aiops.model.arena import Arena
from aiops.model.layout import Array
from aiops.sim.turns.run import Run
from aiops.sim.turns.simulation import Simulation
from benchmarks import report
from benchmarks.compare import Cell

_WARM = 200  # iterations before the first round


@dataclass(frozen=True)
class Options:
    """The settings of a measurement."""

    policy: str = "fasgd"
    dataset: str = "mnist"
    hidden: int = 200
    clients: int = 16
    batch_size: int = 8
    rounds: int = 15
    iterations: int = 400


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: microseconds of an iteration, and ratios.

    Raises
    ------
    UsageError
        When an option makes no sense, or the policy does not take a step with every gradient.
    """
    if min(options.rounds, options.iterations) < 1:
        raise UsageError("rounds and iterations are positive")
    about, count = machine(), options.iterations
    simulation = Simulation(
        policy=options.policy,
        dataset=options.dataset,
        hidden=options.hidden,
        clients=options.clients,
        batch_size=options.batch_size,
        iterations=_WARM + options.rounds * count,
    )
    rounds: list[dict[str, float]] = []
    with Run(simulation, PerceptronTask(options.dataset, options.hidden)) as running:
        running.dispatcher.run(_WARM)
        if running.engine.version < _WARM:
            raise UsageError(
                f"{options.policy} takes fewer steps than it is given gradients, so an iteration"
                " has no update of its own to compare with: choose asgd, fasgd or sasgd"
            )
        parts = _Parts(running)
        works: Mapping[str, Callable[[], None]] = {
            "gradient": lambda: parts.gradients(count),
            "kernel": lambda: parts.updates(count),
            "both": lambda: parts.both(count),
            "simulation": lambda: running.dispatcher.run(count),
        }
        for number in range(options.rounds):
            rounds.append({name: _microseconds(work, count) for name, work in works.items()})
            shown = ", ".join(f"{name} {us:.0f}" for name, us in rounds[-1].items())
            log(f"round {number + 1}: {shown} us")
    figures = {name: report.spread([row[name] for row in rounds]) for name in rounds[0]}
    ratios = {
        "of_the_sum": [(row["gradient"] + row["kernel"]) / row["simulation"] for row in rounds],
        "of_both": [row["both"] / row["simulation"] for row in rounds],
    }
    return record(
        "benchmark",
        "simulation",
        options,
        {
            "microseconds": figures,
            "per_second": 1e6 / figures["simulation"]["median"],
            **{name: report.spread(values) for name, values in ratios.items()},
            "rounds": rounds,
        },
        about,
    )


def _microseconds(work: Callable[[], None], count: int) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) / count * 1e6


class _Parts:
    """A simulation's gradient and its update, by themselves."""

    def __init__(self, running: Run) -> None:
        dispatcher, store = running.dispatcher, running.engine.store
        assert store is not None
        self._task, self._batches = dispatcher.task, dispatcher.batches
        self._params = [worker.params for worker in dispatcher.workers]
        self._room = self._params[0].like()
        layout = store.layout
        self._kernels = [kernels.build(store.rule, s.dtype) for s in layout.sections]
        self._spans = [kernels.Spans(lo, hi, lo, np.full(len(lo), 1e-6)) for lo, hi in layout.whole]
        self._state: list[tuple[Array, ...]] = [
            tuple(array.copy() for array in arrays) for arrays in store.state
        ]
        self._arenas = [Arena(layout) for _ in range(len(self._params) + 1)]
        for arena in self._arenas:
            arena.data[:] = store.current.arena.data
        self._turns = 0  # over all rounds: examples come fresh from memory, as a simulation's do
        self._gradient(0)

    def gradients(self, count: int) -> None:
        for turn in self._next(count):
            self._gradient(turn)

    def updates(self, count: int) -> None:
        for turn in self._next(count):
            self._update(turn)

    def both(self, count: int) -> None:
        for turn in self._next(count):
            self._gradient(turn)
            self._update(turn)

    def _next(self, count: int) -> range:
        first, self._turns = self._turns, self._turns + count
        return range(first, self._turns)

    def _gradient(self, turn: int) -> None:
        params = self._params[turn % len(self._params)]
        self._task.gradient(params, self._batches.rows(turn), self._room)

    def _update(self, turn: int) -> None:
        base, target = (self._arenas[(turn + k) % len(self._arenas)] for k in range(2))
        for index, kernel in enumerate(self._kernels):
            grad = self._room.arena.sections[index]
            source, output = base.sections[index], target.sections[index]
            kernel(self._spans[index], 1.0, source, grad, output, self._state[index])


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report."""
    options, figures = result["options"], result["microseconds"]
    rows = [
        [name, *(f"{row[key]:,.0f}" for key in ("median", "min", "max"))]
        for name, row in figures.items()
    ]
    rows.append([])
    for name, key in (
        ("(gradient + kernel) / simulation", "of_the_sum"),
        ("both / simulation", "of_both"),
    ):
        rows.append([name, *(f"{result[key][which]:.2f}" for which in ("median", "min", "max"))])
    rows += [[], ["iterations a second", f"{result['per_second']:,.0f}", "", ""]]
    title = (
        f"{options['policy']}, {options['clients']} clients, batches of {options['batch_size']},"
        f" {options['dataset']}"
    )
    columns = ["µs per iteration", "median", "min", "max"]
    return report.table(title, columns, rows)


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: a simulation beside its two parts."""
    yield Cell.of("an iteration", "speed", result["of_both"], beside="gradient and kernel")


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw an iteration's time beside its parts', and what the simulation has of their speed."""
    rounds = result["rounds"]
    numbers = range(1, len(rounds) + 1)
    names = {"simulation": "simulation", "both": "gradient and update in turn"}
    names |= {"gradient": "gradient alone", "kernel": "update alone"}
    times = [
        Series(label, numbers, [[one[name] for one in rounds]]) for name, label in names.items()
    ]
    both = [one["both"] / one["simulation"] for one in rounds]
    added = [(one["gradient"] + one["kernel"]) / one["simulation"] for one in rounds]
    shares = [
        Series("beside both in turn", numbers, [both]),
        Series("beside both alone, added up", numbers, [added]),
    ]
    panels = [
        Panel("an iteration", "round", "microseconds", times, bottom=0),
        Panel(
            "the simulation's speed",
            "round",
            "share of its parts' speed",
            shares,
            bottom=0,
            top=1.05,
        ),
    ]
    options = result["options"]
    title = f"{options['policy']} simulated with {options['clients']} clients, on one core"
    return Figure(title, panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
