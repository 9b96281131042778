"""The result of a simulation in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiops.sim.turns.simulation import Simulation


@dataclass(frozen=True, slots=True)
class SimulationSample:
    """One validation of a simulation.

    Attributes
    ----------
    iteration, version
        Mini-batches computed, and updates applied.
    cost, error
        Mean negative log-likelihood in nats, and the share of wrong answers, both of the server's
        parameters on held-out examples.
    pushes, fetches
        Messages that carried a gradient, or parameters: a fetch whose client had the newest ones
        already is none.
    pushed, fetched
        Bytes of all messages to the server, and from it.
    vbar
        The mean of the algorithm's statistic over all parameters; None: it keeps none.
    """

    iteration: int
    version: int
    cost: float
    error: float
    pushes: int
    fetches: int
    pushed: int
    fetched: int
    vbar: float | None


@dataclass(slots=True)
class SimulationResult:
    """The result of a simulation.

    Attributes
    ----------
    simulation
        Its settings.
    digest
        SHA-256, hexadecimal, of the parameters, their versions (the server's, and those that
        clients hold), and the ledger of bytes.
    curve
        Validations on the way; the last is of the end.
    staleness
        The number of gradients by their staleness, in versions; from 1,024 up by powers of two.
    seconds
        That it took, without validation.
    complete
        Whether all iterations were run.
    diverged
        The server's refusal of the first gradient that was not finite, or otherwise invalid: the
        run ended there. None: it did not diverge.
    warnings
        Those that the server gave, in order.
    """

    simulation: Simulation
    digest: str
    curve: list[SimulationSample]
    staleness: Mapping[int, int]
    seconds: float
    complete: bool
    diverged: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def iterations_per_second(self) -> float:
        """Iterations per second."""
        return self.curve[-1].iteration / self.seconds if self.seconds else 0.0

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of all gradients used, in versions."""
        used = sum(self.staleness.values())
        return sum(tau * n for tau, n in self.staleness.items()) / max(used, 1)

    def report(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        last = self.curve[-1]
        return {
            "digest": self.digest,
            "validation_error": last.error,
            "validation_cost": last.cost,
            "fetches": last.fetches,
            "pushes": last.pushes,
            "bytes": last.pushed + last.fetched,
            "iterations_per_second": round(self.iterations_per_second, 1),
            "iterations": last.iteration,
            "version": last.version,
            "mean_staleness": self.mean_staleness,
            "complete": self.complete,
            "diverged": self.diverged,
            "warnings": [*self.warnings],
            "seconds": round(self.seconds, 3),
            "simulation": dataclasses.asdict(self.simulation),
            "staleness": {str(tau): n for tau, n in sorted(self.staleness.items())},
            "curve": [dataclasses.asdict(sample) for sample in self.curve],
        }
