"""FASGD's practical application: clients added as the gate closes, the traffic steady."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from aiops.client.params import Params
from aiops.lab.experiments.curves import curve
from aiops.lab.experiments.execution import perceptron
from aiops.lab.experiments.experiment import Experiment, Findings, Scale, Verdict
from aiops.lab.experiments.planned_run import OnProgress, PlannedRun, Result
from aiops.lab.experiments.runs import FinishedRun, Group, RunGroups, Runs
from aiops.lab.experiments.seed_statistics import percents, tails
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.workloads import PerceptronTask
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.run import one_blas_thread
from aiops.sim.turns.simulated_client import SimulatedClient
from aiops.sim.turns.simulation import Simulation
from aiops.sim.turns.task import Batches

_GROWTH = 1.25  # from one round to the next, at most
_NEW = 0.05  # weight of a round in the mean bytes of a turn: a gate is a matter of chance


@dataclass(frozen=True)
class ElasticClients:
    """Clients take turns, round by round; their number is fixed, or grows as traffic allows.

    In a round each client computes one mini-batch, in a newly drawn order: the clients are equally
    fast, and a round is a time. The traffic allowed is what the first clients need without a gate.

    Attributes
    ----------
    simulation
        What is trained; its ``clients`` are those of the beginning, its ``iterations`` the turns
        of a run that does not grow.
    most
        How many clients there may be.
    """

    simulation: Simulation
    most: int

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return self.simulation.iterations // self.simulation.clients

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it."""
        run = self.simulation
        with one_blas_thread():
            elastic = _ElasticRun(run, self.most)
            marks = {round(self.rounds * k / run.samples) for k in range(1, run.samples + 1)}
            curve = [elastic.sample(0)]
            for number in range(1, self.rounds + 1):
                elastic.round()
                if number in marks:
                    curve.append(elastic.sample(number))
                on_progress(number * run.clients)
            return {"digest": elastic.digest(), "diverged": None, "curve": curve}


class _ElasticRun:
    """A server, and clients that become more."""

    def __init__(self, run: Simulation, most: int) -> None:
        self._task: PerceptronTask = perceptron(run.dataset, run.hidden)
        self._engine = replace(run, clients=most).engine()
        self._server = MemoryServer(self._engine)
        self._initial = self._task.initial(run.seed)
        self._batches = Batches(self._task.examples, run.batch_size, run.seed, run.order)
        self._random = np.random.default_rng([run.seed, 5])
        self._most = most
        self._workers: list[SimulatedClient] = []
        self._turns = 0
        self._join(run.clients)
        self._store = store = self._engine.defined_store
        self._turn_bytes = 2.0 * store.current.arena.data.nbytes  # bytes of a turn, of late
        self._allowed = run.clients * self._turn_bytes
        self._sampled = 0, self._bytes()  # the round of the last sample, and the bytes by then
        self._gradients = self._workers[0].params.like()

    def _join(self, count: int) -> None:
        for _ in range(count):
            name = f"client-{len(self._workers)}"
            self._workers.append(SimulatedClient(self._server, name, self._initial))

    def round(self) -> None:
        """Have every client take a turn; then see how many more there can be."""
        before = self._bytes()
        for place in self._random.permutation(len(self._workers)):
            rows = self._batches.rows(self._turns)
            self._workers[place].step(lambda params, rows=rows: self._gradient(params, rows))
            self._turns += 1
        taken = (self._bytes() - before) / len(self._workers)
        self._turn_bytes += _NEW * (taken - self._turn_bytes)
        affordable = self._allowed / max(self._turn_bytes, 1.0)
        wanted = min(affordable, math.ceil(_GROWTH * len(self._workers)), self._most)
        self._join(max(int(wanted) - len(self._workers), 0))

    def _gradient(self, params: Params, rows: Any) -> Params:
        self._task.gradient(params, rows, self._gradients)
        return self._gradients

    def _bytes(self) -> int:
        account = self._engine.membership.ledger()
        return int(account["pushed"]["bytes"] + account["fetched"]["bytes"])

    def sample(self, number: int) -> dict[str, Any]:
        """Return how far it is."""
        store = self._store
        cost, error = self._task.validate(store.current.arena.shown)
        rounds, nbytes = number - self._sampled[0], self._bytes()
        each = (nbytes - self._sampled[1]) / max(rounds, 1)
        self._sampled = number, nbytes
        counts = {"clients": len(self._workers), "round_bytes": each, "bytes": nbytes}
        found = {"iteration": self._turns, "round": number, "error": error, "cost": cost}
        counts["allowed"] = self._allowed
        return {**found, **counts, "vbar": store.vbar(), "version": store.version}

    def digest(self) -> str:
        """Return the SHA-256 of the parameters."""
        return hashlib.sha256(self._store.current.arena.data.data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ElasticScale(Scale):
    """The number of clients: the base's at first, and the most."""

    most: int


QUICK = ElasticScale(
    base=Simulation(
        dataset="digits",
        hidden=32,
        lr=0.005,
        gate="bfasgd:c_push=0.03,c_fetch=0.125",
        clients=4,
        iterations=4000,
        samples=40,
    ),
    seeds=3,
    most=32,
)
FULL = ElasticScale(
    base=Simulation(
        dataset="mnist",
        lr=0.005,
        gate="bfasgd:c_push=0.03,c_fetch=0.06",
        clients=8,
        iterations=80_000,
        samples=100,
    ),
    seeds=3,
    most=64,
)

PANEL = "clients"
FIXED, GROWING = "fixed", "growing"


def cases(scale: ElasticScale, runs: Runs) -> Iterator[PlannedRun]:
    """Yield as many clients as at first, and as many as traffic allows."""
    for label, most in ((FIXED, scale.base.clients), (GROWING, scale.most)):
        for seed in range(scale.seeds):
            work = ElasticClients(replace(scale.base, seed=seed), most)
            yield PlannedRun(PANEL, label, seed, work)


def needed(run: FinishedRun, error: float) -> float | None:
    """Return the rounds after which an error is reached for good; None: it is not."""
    reached = None
    for sample in run.result["curve"]:
        if sample["error"] > error:
            reached = None
        elif reached is None:
            reached = float(sample["round"])
    return reached


def findings(scale: ElasticScale, groups: RunGroups) -> Findings:
    """Compare the rounds to an error, and see whether traffic is steady."""
    found = groups.panel(PANEL)
    table = []
    for label, group in found.items():
        rest = [s for run in group for s in run.result["curve"] if s["round"]]
        table.append(
            {
                "clients": label,
                "in the end": f"{fmean(run.last['clients'] for run in group):.0f}",
                "error %": percents(tails(group)),
                "bytes of a round, least to most": _range(rest),
                "gradients": f"{fmean(run.last['iteration'] for run in group):,.0f}",
            }
        )
    if len(found) < 2:
        return Findings(table, [Verdict(None, "not both have been run")])
    return Findings(table, [_steady(scale, found[GROWING]), _sooner(found)])


def _range(samples: Sequence[Mapping[str, Any]]) -> str:
    values = [sample["round_bytes"] for sample in samples]
    return f"{min(values):,.0f} to {max(values):,.0f}" if values else "–"


def _steady(scale: ElasticScale, group: Group) -> Verdict:
    """Say whether the traffic of the second half is within a fifth of what is allowed."""
    shares, full = [], []
    for run in group:
        curve = run.result["curve"]
        later = [s["round_bytes"] for s in curve[len(curve) // 2 :]]
        shares.append(fmean(later) / run.last["allowed"])
        full.append(run.last["clients"] == scale.most)
    text = f"growing: a round of the second half has {fmean(shares):.2f} times the bytes allowed,"
    text += f" with {fmean(run.last['clients'] for run in group):.0f} clients in the end"
    if all(full):
        return Verdict(None, f"{text}, the most there may be")
    return Verdict(all(0.8 <= share <= 1.2 for share in shares), text)


def _sooner(found: Mapping[str, Group]) -> Verdict:
    """Say whether more clients reach what fewer reach in the end, in fewer rounds."""
    error = fmean(tails(found[FIXED]))
    rounds = [needed(run, error) for run in found[GROWING]]
    last = fmean(run.last["round"] for run in found[FIXED])
    text = f"{100 * error:.2f} %, where fixed clients end after {last:,.0f} rounds,"
    reached = [value for value in rounds if value is not None]
    if len(reached) < len(rounds):
        text += f" growing ones reach and keep in {len(reached)} of {len(rounds)} runs"
        return Verdict(False if not reached else None, text)
    text = f"{text} growing ones reach after {fmean(reached):,.0f}"
    return Verdict(max(reached) < last, text)


def figure(scale: ElasticScale, groups: RunGroups) -> Figure:
    """Draw errors, clients and bytes by rounds."""
    found = groups.panel(PANEL)

    def lines(name: str, times: float = 1.0) -> list[Series]:
        return [curve(label, g, name, times, x="round") for label, g in found.items()]

    panels = [
        Panel("Learning", "rounds", "validation error (%)", lines("error", 100), log="y"),
        Panel("Clients", "rounds", "clients", lines("clients"), bottom=0),
        Panel("Traffic", "rounds", "bytes of a round (MB)", lines("round_bytes", 1e-6), bottom=0),
    ]
    return Figure("Clients added as the gate closes", panels, columns=3)


EXPERIMENT = Experiment(
    name="elastic-clients",
    title="Clients added as B-FASGD's gate closes, with steady traffic",
    source="Odena, Faster Asynchronous SGD (2016), section 4.2",
    claim="As the gate closes, more clients can be provisioned while training goes on, and"
    " bandwidth use stays steady.",
    quick=QUICK,
    full=FULL,
    cases=cases,
    findings=findings,
    figure=figure,
    note="In a round every client computes one mini-batch, so a round is a time. The traffic"
    " allowed is what the first clients need without a gate.",
)
