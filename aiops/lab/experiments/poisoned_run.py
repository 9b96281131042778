"""A run with hostile workers: what they push, and what comes of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from aiops.client.params import Params
from aiops.engine.engine import Engine
from aiops.errors import Refused
from aiops.lab.experiments.execution import PERCEPTRON, TorchSimulation, network_task
from aiops.lab.experiments.planned_run import OnProgress, Result
from aiops.model.layout import Array, Ints
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.run import one_blas_thread
from aiops.sim.turns.simulated_client import SimulatedClient
from aiops.sim.turns.task import Task

ATTACKS = ("none", "absent", "huge", "scaled", "flipped", "random", "labels", "colluding")
"""Hostile gradients: none at all, as with a perfect filter, and without their data; 2e17 in each
element; 100 times the gradient; minus the gradient; noise of its norm; the gradient of wrong labels
(9 − y); the same noise from all, at three times the norm."""

DIVERGED = 1e9
"""The cost, in nats, that is recorded for one that is larger or not finite."""

_SHARDS = 2  # of a worker with data of its own: about as many classes


@dataclass(frozen=True)
class PoisonedRun(TorchSimulation):
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
        Whether each worker has examples of about two classes, or two pieces of the text, instead of
        any.
    network
        As of `aiops.lab.experiments.execution.network_task`.
    """

    attack: str
    share: float
    filter: str
    own_data: bool
    network: str = PERCEPTRON

    @property
    def task(self) -> ClassifyingTask:
        """The network on its data, which all runs of a process share."""
        return cast("ClassifyingTask", network_task(self.network, self.simulation))

    def __call__(self, on_progress: OnProgress) -> Result:
        """Run it."""
        with one_blas_thread():
            return _Poisoned(self).run(on_progress)


class ClassifyingTask(Task, Protocol):
    """A task with classes that can be wrong, and examples that are more or less alike."""

    def alike(self) -> Ints:
        """Return the examples' numbers, int64: those that are alike beside each other."""

    def gradient(
        self, params: Mapping[str, Array], rows: Ints, out: Params, *, flipped: bool = False
    ) -> None:
        """Write the gradient of a mini-batch; ``flipped``: of wrong classes."""


class _Poisoned:
    """A server, honest workers and hostile ones."""

    def __init__(self, plan: PoisonedRun) -> None:
        self._plan, run = plan, plan.simulation
        self._task = plan.task
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
        pieces = np.array_split(self._task.alike(), _SHARDS * clients)
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
        training, store = self._engine.training, self._engine.defined_store
        assert training is not None, "the model is defined"
        with np.errstate(all="ignore"):
            cost, error = self._task.validate(training.evaluated().shown)
        cost = min(float(cost), DIVERGED) if np.isfinite(cost) else DIVERGED
        return {"iteration": turn, "error": error, "cost": cost, "version": store.version}
