"""ElasticDL's motivation: what synchronous SGD refuses and blocks, beside asynchronous SGD."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from aiops.lab.experiments.cluster_simulation import ClusterSimulation
from aiops.lab.experiments.curves import across, curve
from aiops.lab.experiments.execution import perceptron
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun, Result
from aiops.lab.experiments.runs import FinishedRun, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents
from aiops.lab.figures import Figure, Panel
from aiops.sim.turns.client_selection import Selection
from aiops.sim.turns.run import Run, digest
from aiops.sim.turns.simulation import Simulation


class _Counting:
    """A selection, and how often it has been asked."""

    def __init__(self, selection: Selection) -> None:
        self._selection, self.asked = selection, 0

    def __next__(self) -> int:
        self.asked += 1
        return next(self._selection)


@dataclass(frozen=True)
class CountedTurns:
    """A simulation of which each turn is counted: used, refused, or passed over.

    A turn is a mini-batch's time of one worker. A worker that waits when its turn comes is passed
    over: that time it was blocked. A gradient that is refused is computed again, in another turn.
    It ends when the simulation's ``iterations`` have been taken, those passed over included.
    """

    simulation: Simulation

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it."""
        run = self.simulation
        task = perceptron(run.dataset, run.hidden)
        curve: list[dict[str, float]] = []
        with Run(run, task) as initialized:
            dispatcher = initialized.dispatcher
            counting = dispatcher.selection = _Counting(dispatcher.selection)
            for mark in (run.iterations * k // run.samples for k in range(1, run.samples + 1)):
                while counting.asked < mark:
                    dispatcher.turn()
                _cost, error = task.validate(dispatcher.model)
                refused = sum(worker.recomputed for worker in dispatcher.workers)
                turns = {"turns": counting.asked, "blocked": counting.asked - initialized.iteration}
                sample = {"iteration": initialized.iteration, **turns, "refused": refused}
                curve.append({**sample, "error": error})
                on_progress(counting.asked)
            return {"digest": digest(dispatcher), "diverged": None, "curve": curve}


_UNEVEN = 0.25  # sigma of mini-batches' times in virtual time

RULES = {
    "sync, reject": ("hardsync", ("admission=reject",)),
    "sync, wait": ("hardsync", ("admission=wait",)),
    "async": ("asgd", ()),
}


@dataclass(frozen=True, kw_only=True)
class WasteScale(Scale):
    """The number of workers in each panel, and their learning rates.

    Attributes
    ----------
    workers
        In each panel.
    rates
        Of synchronous and of asynchronous SGD.
    """

    workers: tuple[int, ...]
    rates: tuple[float, float] = (0.2, 0.02)


QUICK = WasteScale(
    base=Simulation(dataset="digits", hidden=32, batch_size=8, iterations=3000, samples=20),
    seeds=3,
    workers=(4, 16),
)
FULL = WasteScale(
    base=Simulation(dataset="mnist", batch_size=32, iterations=50_000, samples=50),
    seeds=3,
    workers=(4, 16, 64),
)


def cases(scale: WasteScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each rule for each number of workers."""
    for workers in scale.workers:
        for label, (policy, settings) in RULES.items():
            rate = scale.rates[policy == "asgd"]
            for seed in range(scale.seeds):
                simulation = replace(
                    scale.base, policy=policy, set=settings, lr=rate, clients=workers, seed=seed
                )
                yield PlannedRun(in_turns(workers), label, seed, CountedTurns(simulation))
                yield PlannedRun(
                    in_time(workers), label, seed, ClusterSimulation(simulation, sigma=_UNEVEN)
                )


def in_turns(workers: int) -> str:
    """Return the panel of an order of turns."""
    return f"{workers} workers"


def in_time(workers: int) -> str:
    """Return the panel of a cluster in virtual time."""
    return f"{workers} workers, in time"


def shares(run: FinishedRun) -> dict[str, float]:
    """Return what became of the workers' time, as shares of 1."""
    last = run.last
    if "idle" in run.result:
        idle, refused = run.result["idle"], run.result["refused"]
        refused *= 1 - idle
        return {"refused": refused, "blocked": idle, "used": 1 - idle - refused}
    return {
        "refused": last["refused"] / last["turns"],
        "blocked": last["blocked"] / last["turns"],
        "used": (last["iteration"] - last["refused"]) / last["turns"],
    }


def wasted(run: FinishedRun) -> float:
    """Return the share of the workers' time that was refused or blocked."""
    return 1 - shares(run)["used"]


def findings(scale: WasteScale, found: RunGroups) -> Findings:
    """Count the turns."""
    table, verdicts = [], []
    for (panel, label), group in found.items():
        row = {"workers": panel, "rule": label}
        row |= {f"{k} %": percents([shares(run)[k] for run in group]) for k in shares(group[0])}
        table.append(row | {"error %": percents([run.tail() for run in group])})
    for panel in (name(n) for name in (in_turns, in_time) for n in scale.workers):
        rules = found.panel(panel)
        lost = {rule: fmean(map(wasted, group)) for rule, group in rules.items()}
        if len(lost) < len(RULES):
            verdicts.append(Verdict(None, f"{panel}: not all has been run"))
            continue
        text = ", ".join(f"{share:.1%} ({label})" for label, share in lost.items())
        agrees = lost["async"] == 0 < min(lost["sync, reject"], lost["sync, wait"])
        verdicts.append(Verdict(agrees, f"{panel}: of the workers' time is lost: {text}"))
    return Findings(table, verdicts)


def figure(scale: WasteScale, found: RunGroups) -> Figure:
    """Draw the shares by workers, and the errors by turns."""
    counts = [str(workers) for workers in scale.workers]
    panels = []
    for name, heading in ((in_turns, "Lost, in turns"), (in_time, "Lost, in virtual time")):
        bars = []
        for label in RULES:
            groups = [found[name(workers), label] for workers in scale.workers]
            places = range(len(groups))
            bars.append(across(label, places, groups, lambda run: 100 * wasted(run), "bars"))
        panels.append(Panel(heading, "workers", "of their time (%)", bars, bottom=0, ticks=counts))
    for workers in scale.workers:
        title = in_turns(workers)
        lines = [curve(rule, found[title, rule], "error", 100, x="turns") for rule in RULES]
        panels.append(Panel(title, "turns of all workers", "validation error (%)", lines, log="y"))
    return Figure("What synchronous SGD wastes", panels, columns=2)


EXPERIMENT = Experiment(
    name="sync-waste",
    title="Gradients refused and time blocked by synchronous SGD, beside asynchronous SGD",
    source="ElasticDL, Design doc: asynchronous SGD, motivation",
    claim="Synchronous SGD wastes computation (outdated gradients are refused, and computed again)"
    " or blocks it; asynchronous SGD avoids both.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    note="In turns: a turn is one worker's time for a mini-batch, and turns come in uniform order."
    " In time: a cluster in virtual time, a quarter of whose mini-batches take 18 % longer than"
    " the median or more. Errors there are of the test part.",
)
