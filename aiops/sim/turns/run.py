"""A running simulation: it can be stopped, saved to a checkpoint, and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from aiops.common.closing import Closing
from aiops.errors import BadPush, UsageError
from aiops.sim.turns import checkpoint
from aiops.sim.turns.client_selection import Selection, resumed, selection
from aiops.sim.turns.dispatcher import Dispatcher
from aiops.sim.turns.memory_wire import MemoryLine
from aiops.sim.turns.result import SimulationResult, SimulationSample
from aiops.sim.turns.simulation import Simulation
from aiops.sim.turns.task import Batches, Task, check_task, validated
from aiops.wire.connection import SinkFor

_AT_ONCE = 100  # turns between two looks at the clock
_PROGRESS_EVERY = 0.1  # seconds


def one_blas_thread() -> contextlib.ExitStack:
    """Have matrix products use one thread, until the returned stack is closed.

    Sums in another order are other sums, so results that are to be the same need it.

    Raises
    ------
    UsageError
        When the package threadpoolctl is not installed.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise UsageError("simulations need threadpoolctl: pip install 'aiops-ps[cli]'") from None
    stack = contextlib.ExitStack()
    stack.enter_context(threadpool_limits(1))
    return stack


@dataclass
class Run(Closing):
    """A running simulation. Use it as ``with Run(simulation) as run``.

    Parameters
    ----------
    simulation
        The settings.
    task
        What is trained; see `aiops.lab.workloads.PerceptronTask` for the papers'.
    jobs
        Gradients that are computed at the same time; the results are the same.
    line
        As of `Dispatcher`; the results are the same.
    rule
        Selects the client of each turn; by default the simulation's (`Simulation.selection`).

    Attributes
    ----------
    curve, seconds
        Validations so far, and the seconds that it took without them.
    """

    simulation: Simulation
    task: Task
    jobs: int = 1
    line: Callable[[SinkFor], MemoryLine] = MemoryLine
    rule: InitVar[Selection | None] = None
    curve: list[SimulationSample] = field(default_factory=list, init=False)
    seconds: float = field(default=0.0, init=False)

    def __post_init__(self, rule: Selection | None) -> None:
        """Set everything up."""
        check_task(self.task)
        run = self.simulation
        self._stopping = False
        self._diverged: str | None = None
        self._limits = one_blas_thread()  # sums in another order would be other sums
        self.engine = run.engine()
        self.dispatcher = Dispatcher(
            self.engine,
            self.task,
            Batches(self.task.examples, run.batch_size, run.seed, run.order),
            rule or selection(run.selection, run.clients, run.seed),
            clients=run.clients,
            seed=run.seed,
            waits=run.waits,
            jobs=self.jobs,
            line=self.line,
        )

    def save(self, path: Path) -> None:
        """Write a checkpoint, from which `load` continues to the same result.

        Call it between turns. An older file stays until the new one is complete.

        Raises
        ------
        UsageError
            When it cannot be written.
        """
        checkpoint.save(path, self._kept())

    def check_kept(self) -> None:
        """See that a checkpoint can keep the policy, the selection rule and the codecs of this run.

        Raises
        ------
        UsageError
            When one of them has a state that cannot be written.
        """
        checkpoint.check(self._kept())

    def _kept(self) -> checkpoint.KeptRun:
        settings = dataclasses.asdict(self.simulation)
        return checkpoint.KeptRun(settings, self.task, self.dispatcher, self.curve, self.seconds)

    @classmethod
    def load(
        cls,
        path: Path,
        task: Task,
        simulation: Simulation | None = None,
        *,
        jobs: int = 1,
        line: Callable[[SinkFor], MemoryLine] = MemoryLine,
        rule: Selection | None = None,
    ) -> Run:
        """Return a run that continues from a checkpoint, in this process or another.

        Nothing in the file is executed. The results are the same to the last bit with the releases
        of aiops and NumPy that wrote it; others are told in a warning.

        Parameters
        ----------
        path
            The checkpoint.
        task
            What was trained: an equal one.
        simulation
            The settings that it must have, except `iterations` and `samples`, which may differ;
            None: those of the checkpoint.
        jobs, line, rule
            As for a new run.

        Raises
        ------
        UsageError
            When the file is of another simulation or task, or cannot be read.
        DamagedState
            When it is not as it was written.
        """
        with checkpoint.opened(path) as found:
            saved = Simulation.from_dict(found.simulation)
            wanted = simulation or saved
            changed = {name: getattr(saved, name) for name in ("iterations", "samples")}
            found.compare(dataclasses.asdict(dataclasses.replace(wanted, **changed)), task)
            rule = rule or resumed(wanted.selection, wanted.clients, wanted.seed)
            run = cls(wanted, task, jobs, line, rule)
            try:
                engine = wanted.engine()
                found.restore(run.dispatcher, engine)
                run.engine, run.curve, run.seconds = engine, found.curve(), found.seconds
            except BaseException:
                run.close()
                raise
        return run

    def stop(self) -> None:
        """Let `execute` return after this turn; may be called from a signal handler."""
        self._stopping = True

    @property
    def iteration(self) -> int:
        """The number of turns so far."""
        return self.dispatcher.iteration

    @property
    def complete(self) -> bool:
        """True once all turns have been taken."""
        return self.iteration >= self.simulation.iterations

    def execute(self, on_progress: Callable[[int], None] | None = None) -> SimulationResult:
        """Take the turns that are left, or those until `stop`; return the result so far.

        A run in which the server refuses a gradient because it is not finite ends there, and the
        result's ``diverged`` has the reason.

        Raises
        ------
        BadPush
            When a codec refuses what its own encoder wrote.

        Parameters
        ----------
        on_progress
            Called with the iterations so far, about ten times a second, between turns.
        """
        if not self.curve:
            self.curve.append(self._sample())
        try:
            for mark in self._ahead():
                self._run_to(mark, on_progress)
                if self._stopping:
                    break
                self.curve.append(self._sample())
        except BadPush as error:
            if "codec" in error.details:  # a payload's form is no matter of its values
                raise
            self._diverged = str(error)
        return self.outcome()

    def _run_to(self, mark: int, on_progress: Callable[[int], None] | None) -> None:
        dispatcher, reported_at = self.dispatcher, 0.0
        while dispatcher.iteration < mark and not self._stopping:
            began = time.perf_counter()
            dispatcher.run(min(mark - dispatcher.iteration, _AT_ONCE), lambda: self._stopping)
            now = time.perf_counter()
            self.seconds += now - began
            if on_progress is not None and now - reported_at > _PROGRESS_EVERY:
                reported_at = now
                on_progress(dispatcher.iteration)

    def _ahead(self) -> list[int]:
        """Return the iterations after which the model is validated, from here on."""
        run, steps = self.simulation, max(self.simulation.samples, 1)
        marks = {round(run.iterations * k / steps) for k in range(1, steps + 1)}
        return sorted(mark for mark in marks if mark > self.iteration)

    def outcome(self) -> SimulationResult:
        """Return the result so far."""
        curve = list(self.curve)
        if not curve or curve[-1].iteration != self.iteration:
            curve.append(self._sample())
        training = self.engine.training
        return SimulationResult(
            self.simulation,
            digest(self.dispatcher),
            curve,
            dict(training.updates.maker.staleness.bins) if training is not None else {},
            self.seconds,
            self.complete,
            self._diverged,
            tuple(self.engine.warnings.given),
        )

    def _sample(self) -> SimulationSample:
        cost, error = validated(self.task, self.dispatcher.evaluated)
        account, store = self.engine.membership.ledger(), self.dispatcher.store
        pushed, fetched = account["pushed"], account["fetched"]
        return SimulationSample(
            self.iteration,
            store.version,
            cost,
            error,
            pushed["with_payload"],
            fetched["with_payload"],
            pushed["bytes"],
            fetched["bytes"],
            store.vbar(),
        )

    def close(self) -> None:
        """End the threads."""
        self.dispatcher.close()
        self._limits.close()


def simulate(
    simulation: Simulation,
    task: Task,
    *,
    jobs: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Run a simulation to its end, and return the result.

    Parameters
    ----------
    simulation
        The settings.
    task
        The task that is trained; default: the simulation's perceptron on its data set.
    jobs
        Gradients that are computed at the same time; the results are the same.
    on_progress
        Called with the iterations so far, about ten times a second.
    """
    with Run(simulation, task, jobs) as run:
        return run.execute(on_progress)


def digest(dispatcher: Dispatcher) -> str:
    """Return the SHA-256 of the parameters, the versions and the ledger, in hexadecimal."""
    engine, store = dispatcher.engine, dispatcher.store
    found = hashlib.sha256(store.current.arena.data.data)
    found.update(store.version.to_bytes(8, "little"))
    found.update(store.current.tensor_versions.data)
    for worker in dispatcher.workers:
        found.update(worker.params.versions.data)
    found.update(json.dumps(engine.membership.ledger(), sort_keys=True).encode())
    return found.hexdigest()
