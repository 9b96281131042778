"""Hostile workers, with filters and without: which attacks they keep out, and which not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from aiops.client.params import Params
from aiops.engine.engine import Engine
from aiops.errors import Refused
from aiops.lab.experiments.curves import curve
from aiops.lab.experiments.execution import perceptron
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun, Result
from aiops.lab.experiments.runs import RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents, tails
from aiops.lab.figures import Figure, Panel
from aiops.lab.workloads import PerceptronTask
from aiops.model.layout import Ints
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.simulated_client import SimulatedClient
from aiops.sim.turns.simulation import Simulation

ATTACKS = ("none", "absent", "huge", "scaled", "flipped", "random", "labels", "colluding")
"""Hostile gradients: none at all, as with a perfect filter, and without their data; 2e17 in each
element; 100 times the gradient; minus the gradient; noise of its norm; the gradient of wrong labels
(9 − y); the same noise from all, at three times the norm."""

POLICIES: Mapping[str, float] = {
    "asgd": 0.05,
    "fasgd": 0.005,
    "softsync": 0.1,
    "hardsync": 0.2,
    "fedbuff": 1.0,
}
FILTER = "robust"
TRIMMED = "trim"
"""No filter, and hardsync's setting: a step has a gradient of each worker, so the share holds."""

_TRIM = 1 / 3
_SHARDS = 2  # of a worker with data of its own: about as many classes


@dataclass(frozen=True)
class PoisonedRun:
    """Workers take turns at random; the first ``share`` of them are hostile.

    Attributes
    ----------
    simulation
        What is trained.
    attack
        One of `ATTACKS`.
    share
        Of the workers, from 0 to 1.
    filter
        As ``--filter``.
    own_data
        Whether each worker has examples of about two classes, instead of any.
    """

    simulation: Simulation
    attack: str
    share: float
    filter: str
    own_data: bool

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it."""
        with threadpool_limits(1):
            return _Poisoned(self).run(on_progress)


class _Poisoned:
    """A server, honest workers and hostile ones."""

    def __init__(self, plan: PoisonedRun) -> None:
        self._plan, run = plan, plan.simulation
        self._task: PerceptronTask = perceptron(run.dataset, run.hidden)
        self._hostile = round(plan.share * run.clients)
        self._random = np.random.default_rng([run.seed, 7])
        self._rows = self._shares()
        clients = run.clients
        if plan.attack == "absent":
            clients -= self._hostile
            self._rows = self._rows[self._hostile :]
        usual = replace(run, clients=clients).engine()
        self._engine = Engine(usual.algorithm, replace(usual.options, filter=plan.filter))
        self._server = MemoryServer(self._engine)
        initial = self._task.initial(run.seed)
        names = [f"client-{number}" for number in range(clients)]
        self._workers = [SimulatedClient(self._server, name, initial) for name in names]
        self._gradients = self._workers[0].params.like()
        self._away: set[int] = set()  # quarantined

    def _shares(self) -> list[Ints]:
        """Return the examples of each worker."""
        examples, clients = self._task.examples, self._plan.simulation.clients
        if not self._plan.own_data:
            return [np.arange(examples)] * clients
        sorted_ = np.argsort(self._task.labels, kind="stable")
        pieces = np.array_split(sorted_, _SHARDS * clients)
        order = np.random.default_rng(11).permutation(len(pieces))
        return [
            np.concatenate([pieces[at] for at in order[_SHARDS * k : _SHARDS * (k + 1)]])
            for k in range(clients)
        ]

    def run(self, on_progress: OnProgress) -> Result:
        """Take all turns."""
        run = self._plan.simulation
        marks = {round(run.iterations * k / run.samples) for k in range(1, run.samples + 1)}
        found = [self._sample(0)]
        for turn in range(1, run.iterations + 1):
            ready = [
                place
                for place, worker in enumerate(self._workers)
                if place not in self._away and not worker.waits
            ]
            if not ready:
                break
            self._turn(int(self._random.choice(ready)))
            if turn in marks:
                found.append(self._sample(turn))
            on_progress(turn)
        model = self._engine.defined_store.current.arena.data.data
        digest = hashlib.sha256(model).hexdigest()
        return {
            "digest": digest,
            "diverged": None,
            "curve": found,
            "filtered": self._engine.report()["filter"],
        }

    def _turn(self, place: int) -> None:
        try:
            self._workers[place].step(lambda params: self._gradient(params, place))
        except Refused as error:
            if "quarantined" in str(error):
                self._away.add(place)

    def _gradient(self, params: Params, place: int) -> Params:
        run, out, attack = self._plan.simulation, self._gradients, self._plan.attack
        rows = self._random.choice(self._rows[place], run.batch_size)
        hostile = place < self._hostile and attack != "absent"
        if hostile and attack == "labels":
            self._task.gradient(params, rows, out, flipped=True)
            return out
        self._task.gradient(params, rows, out)
        if not hostile or attack == "none":
            return out
        common = np.random.default_rng([run.seed, 13])
        for array in out.arena.sections:
            if attack == "huge":
                array[:] = 2e17
            elif attack == "scaled":
                array *= 100
            elif attack == "flipped":
                array *= -1
            else:
                draw = common if attack == "colluding" else self._random
                noise = draw.standard_normal(array.size).astype(array.dtype)
                norm = float(np.linalg.norm(array)) * (3 if attack == "colluding" else 1)
                array[:] = noise * (norm / float(np.linalg.norm(noise)))
        return out

    def _sample(self, turn: int) -> dict[str, Any]:
        store = self._engine.defined_store
        with np.errstate(all="ignore"):
            cost, error = self._task.validate(store.current.arena.shown)
        cost = float(cost) if np.isfinite(cost) else 1e9
        return {"iteration": turn, "error": error, "cost": cost, "version": store.version}


@dataclass(frozen=True, kw_only=True)
class PoisonScale(Scale):
    """The shares of hostile workers that are tried, and the attacks beside the policies' table."""

    shares: tuple[float, ...]


_BASE = Simulation(
    dataset="digits", hidden=32, policy="asgd", clients=12, iterations=3000, samples=12
)
QUICK = PoisonScale(base=_BASE, seeds=1, shares=(0.1, 0.2, 1 / 3))
FULL = PoisonScale(
    base=replace(_BASE, dataset="mnist", hidden=64, iterations=8000, samples=16),
    seeds=2,
    shares=(0.1, 0.2, 1 / 3),
)


def cases(scale: PoisonScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield each policy under each attack, with the filters and without, on both kinds of data.

    All of a seed come before those of the next, so that a part of the runs has a table, too.
    """
    for seed in range(scale.seeds):
        for policy, lr in POLICIES.items():
            for own_data, (attack, share) in product((False, True), _attacks(scale)):
                for text in ("off",) if attack == "absent" else _defences(policy):
                    base = replace(scale.base, policy=policy, lr=lr, seed=seed)
                    if text == TRIMMED:
                        base = replace(base, set=(f"trim={_TRIM}",))
                    used = "off" if text == TRIMMED else text
                    work = PoisonedRun(base, attack, share, used, own_data)
                    panel = f"{policy}, {_data(own_data)}"
                    yield PlannedRun(panel, _label(attack, share, text), seed, work)


def _attacks(scale: PoisonScale) -> list[tuple[str, float]]:
    """Return the attacks, each with the shares of the workers that carry it out."""
    shares = _shares(scale)
    return [(a, share) for a in ATTACKS for share in ((0.0,) if a == "none" else shares)]


def _shares(scale: PoisonScale) -> list[float]:
    """Return the shares that the knob leaves."""
    chosen = scale.knobs.get("hostile", "all")
    return [share for share in scale.shares if chosen in ("all", f"{share:.0%}")]


def _defences(policy: str) -> tuple[str, ...]:
    return ("off", FILTER, TRIMMED) if policy == "hardsync" else ("off", FILTER)


def _data(own_data: bool) -> str:
    return "own data" if own_data else "same data"


def _label(attack: str, share: float, text: str) -> str:
    who = "no attack" if attack == "none" else f"{attack} {share:.0%}"
    return f"{who}, {text}"


def findings(scale: PoisonScale, groups: RunGroups) -> Findings:
    """Tabulate the errors in the end, over the seeds, and judge their means by attack."""
    table, worst = [], dict[tuple[bool, str], list[float]]()
    for policy, own_data in product(POLICIES, (False, True)):
        found = groups.panel(f"{policy}, {_data(own_data)}")
        errors = {label: tails(group) for label, group in found.items()}
        clean = errors.get(_label("none", 0.0, "off"), [])
        for attack, share in _attacks(scale):
            off, on = (errors.get(_label(attack, share, text), []) for text in ("off", FILTER))
            if not off or not on:
                continue
            absent = errors.get(_label("absent", share, "off"), [])
            others = [fmean(each) for each in (clean, absent) if each]
            if others:
                away = 100 * (fmean(on) - max(others))
                worst.setdefault((own_data, attack), []).append(away)
            row = {"policy": policy, "data": _data(own_data), "attack": attack}
            row |= {"hostile": f"{share:.0%}", "off": percents(off, 1), FILTER: percents(on, 1)}
            row[TRIMMED] = percents(errors.get(_label(attack, share, TRIMMED), []), 1)
            table.append(row | {"no attack": percents(clean, 1), "absent": percents(absent, 1)})
    verdicts = [
        Verdict(
            max(worse) <= 1.0,
            f"{attack}, {_data(own_data)}: with the filters at most {max(worse):.1f} points worse"
            f" than without an attack, or without the hostile workers; {fmean(worse):.1f} in the"
            " mean",
        )
        for (own_data, attack), worse in worst.items()
    ]
    return Findings(table, verdicts or [Verdict(None, "nothing has been run")])


def figure(scale: PoisonScale, groups: RunGroups) -> Figure:
    """Draw errors on the way, at the largest share."""
    most, panels = max(_shares(scale)), []
    for policy in POLICIES:
        found = groups.panel(f"{policy}, same data")
        wanted = [_label("none", 0.0, "off")]
        wanted += [_label(attack, most, FILTER) for attack in ATTACKS[2:]]
        lines = [curve(label, found[label], "error", 100) for label in wanted if label in found]
        panels.append(Panel(policy, "mini-batches", "validation error (%)", lines, bottom=0))
    return Figure("Hostile workers, with --filter robust", panels, columns=3)


EXPERIMENT = Experiment(
    name="poison",
    title="Hostile workers, with --filter robust and without",
    source="Damaskinos et al., Asynchronous Byzantine machine learning (2018), on other filters",
    claim="With a third of the workers hostile, the final error is at most 1 point worse with the"
    " filter on than without an attack.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    knobs={"hostile": ("all", "10%", "20%", "33%")},
    note="Twelve workers take turns at random. absent: the hostile ones are not there; huge: 2e17"
    " in each element; scaled: 100 times the gradient; flipped: minus the gradient; random: noise"
    " of its norm; labels: 9 − y; colluding: one noise from all, at three times the norm. Own"
    " data: about two classes a worker. trim: a third of the values of each coordinate is left out"
    " at each end, and no filter is on.",
)
