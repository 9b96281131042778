"""Servers written for FRED, run with our order of turns, mini-batches and tasks.

FRED (Odena, "Faster Asynchronous SGD", 2016, section 3) asks its users for an object with two
methods. One makes it (here: it is made already), with ``params`` and ``timestamp``; the other is
``apply_update(grads, timestamp, client)``, which returns ``(params, timestamp, unblock)``. Such an
object is run as it stands, and `FredResult` is what the run gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiops.client.params import Params
from aiops.engine.receive import NOTHING_APPLIED, bad_value
from aiops.errors import BadPush, UsageError
from aiops.kernels.scan import survey
from aiops.model.layout import Array, Layout
from aiops.sim.turns.client_selection import selection as rule_named
from aiops.sim.turns.task import Batches, Task, check_task, compute, initial_parameters, validated

_PASSED = 64  # turns per client, all passed over, after which the run is taken to be stuck

Arrays: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""Arrays, or objects with ``get_value()`` (Theano's shared variables), in order or by name."""


class FredServer(Protocol):
    """A server that was written for FRED.

    Attributes
    ----------
    params
        The parameters to begin with: a list in the order of the task's, or by name.
    timestamp
        The number of updates of the parameters.
    """

    params: Any
    timestamp: int

    def apply_update(self, grads: Any, timestamp: int, client: int) -> tuple[Any, int, bool]:
        """Take the gradient of a client, computed at the parameters of a timestamp.

        ``grads`` are arrays like ``params``, the client's own. Returns the parameters, their
        timestamp, and whether clients that wait may go on; if not, this one waits as well.
        """


@dataclass(frozen=True, slots=True)
class FredSample:
    """One look at a server after some turns: its timestamp, and the task's cost and error."""

    iteration: int
    timestamp: int
    cost: float
    error: float


@dataclass(slots=True)
class FredResult:
    """The result of a run.

    Attributes
    ----------
    params
        Its parameters, by the task's names; copies.
    timestamp
        Its last.
    curve
        Looks on the way; the last is of the end.
    staleness
        The number of gradients by their staleness, in timestamps.
    digest
        SHA-256 of the parameters, the timestamp, and those that the clients hold.
    diverged
        The first gradient that was not finite, with which the run ended. None: all were.
    """

    params: dict[str, Array]
    timestamp: int
    curve: list[FredSample] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    digest: str = ""
    diverged: str | None = None

    @property
    def mean_staleness(self) -> float:
        """The mean over all gradients."""
        used = sum(self.staleness.values())
        return sum(tau * n for tau, n in self.staleness.items()) / max(used, 1)


def simulate_fred(
    server: FredServer,
    task: Task,
    *,
    clients: int,
    iterations: int,
    batch_size: int = 8,
    selection: str = "uniform",
    order: str = "random",
    samples: int = 20,
    seed: int = 0,
) -> FredResult:
    """Run a server that was written for FRED.

    Each turn a client computes the gradient of a mini-batch at the parameters it was last given,
    and passes it to ``apply_update``. If that does not unblock, the client waits, and its turns are
    passed over, until the update of another client does; all clients that waited are then given
    those parameters. A run ends with the first gradient that is not finite.

    Parameters
    ----------
    server
        With its initial parameters, float32 or float64, of the task's shapes. It may change them in
        place: clients are given copies.
    task
        The task that is trained.
    clients, iterations, batch_size, selection, order, samples, seed
        As in `aiops.sim.turns.simulation.Simulation`; FRED's own ``order`` is ``"sequential"``.

    Raises
    ------
    UsageError
        When the parameters are not the task's, all clients wait, or a number cannot work.
    """
    if min(clients, iterations) < 1:
        raise UsageError(f"{clients} clients and {iterations} iterations: give 1 or more of each")
    if min(samples, seed) < 0:
        raise UsageError(f"{samples} samples and seed {seed}: give 0 or more for each")
    check_task(task)
    return _FredRun(server, task, clients, selection, seed).run(
        Batches(task.examples, batch_size, seed, order), iterations, samples
    )


class _FredRun:
    """One run."""

    def __init__(
        self, server: FredServer, task: Task, clients: int, selection: str, seed: int
    ) -> None:
        self._server, self._task = server, task
        self._selection = rule_named(selection, clients, seed)
        initial = initial_parameters(task, seed)
        layout = Layout.of(initial)
        self._names = list(initial)  # in the order that FRED's lists have
        self._gradient = Params(layout)
        self._named = isinstance(server.params, Mapping)
        given = Params(layout)
        self._copy(server.params, given)
        self._held = [(given, server.timestamp)] * clients  # what each computes at
        self._waiting: set[int] = set()
        self._staleness: dict[int, int] = {}

    def run(self, batches: Batches, iterations: int, samples: int) -> FredResult:
        """Take all turns."""
        marks = {round(iterations * k / max(samples, 1)) for k in range(max(samples, 1) + 1)}
        curve, diverged = [self._point(0)], None
        for iteration in range(iterations):
            try:
                self._turn(self._next(), batches.rows(iteration))
            except BadPush as error:
                diverged = str(error).removesuffix(NOTHING_APPLIED)
                if curve[-1].iteration != iteration:
                    curve.append(self._point(iteration))
                break
            if iteration + 1 in marks:
                curve.append(self._point(iteration + 1))
        params = Params(self._gradient.layout)
        self._copy(self._server.params, params)
        found = hashlib.sha256(params.arena.data.data)
        for held, timestamp in [(params, self._server.timestamp), *self._held]:
            found.update(held.arena.data.data)
            found.update(int(timestamp).to_bytes(8, "little"))
        return FredResult(
            params.numpy(),
            int(self._server.timestamp),
            curve,
            self._staleness,
            found.hexdigest(),
            diverged,
        )

    def _next(self) -> int:
        """Return the next client that does not wait."""
        for _ in range(_PASSED * len(self._held)):
            client = next(self._selection)
            if client not in self._waiting:
                return client
        raise UsageError(
            f"{len(self._waiting)} of {len(self._held)} clients wait, and no other is selected:"
            " the server's apply_update must return True for unblock at some time"
        )

    def _turn(self, client: int, rows: Any) -> None:
        params, timestamp = self._held[client]
        compute(self._task, params, rows, self._gradient)
        self._check(self._gradient)
        copies = {name: self._gradient[name].copy() for name in self._names}
        stale = int(self._server.timestamp) - timestamp
        self._staleness[stale] = self._staleness.get(stale, 0) + 1
        grads: Arrays = copies if self._named else [copies[name] for name in self._names]
        given, now, unblock = self._server.apply_update(grads, timestamp, client)
        self._waiting.add(client)
        if not unblock:
            return
        fresh = Params(self._gradient.layout)
        self._copy(given, fresh)
        for waiting in self._waiting:
            self._held[waiting] = fresh, int(now)
        self._waiting.clear()

    def _check(self, gradient: Params) -> None:
        """Refuse a gradient as the engine's server does."""
        layout, arena = gradient.layout, gradient.arena
        for section, typed in zip(layout.sections, arena.sections, strict=True):
            bad = survey(typed)
            if bad >= 0:
                place = section.start + bad * typed.itemsize
                raise bad_value(layout, place, float(typed[bad]))

    def _point(self, iteration: int) -> FredSample:
        params = Params(self._gradient.layout)
        self._copy(self._server.params, params)
        return FredSample(iteration, int(self._server.timestamp), *validated(self._task, params))

    def _copy(self, arrays: Arrays, into: Params) -> None:
        """Copy a server's parameters, and check that they are the task's."""
        if isinstance(arrays, Mapping):
            given = {name: _value(array) for name, array in arrays.items()}
        else:
            given = {str(i): _value(array) for i, array in enumerate(arrays)}
            if len(given) == len(self._names):
                given = dict(zip(self._names, given.values(), strict=True))
        for name in (*self._names, *given):
            if name not in given or name not in into or given[name].shape != into[name].shape:
                theirs = {name: array.shape for name, array in given.items()}
                ours = {name: into[name].shape for name in self._names}
                raise UsageError(
                    f"the server's parameters have the shapes {theirs}, and the task's are {ours}:"
                    " give it the task's initial ones, in their order or by name"
                )
        for name, array in given.items():
            into[name][...] = array


def _value(array: Any) -> Array:
    read = getattr(array, "get_value", None)
    return np.asarray(array if read is None else read())
