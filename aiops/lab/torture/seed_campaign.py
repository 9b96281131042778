"""Many simulated trials, one after the other, and their report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aiops.errors import AiopsError
from aiops.lab import run_record
from aiops.lab.torture.cluster_plan import ClusterPlan, draw_cluster
from aiops.lab.torture.cluster_trial import ClusterTrial, SimulatedResult, quietly
from aiops.lab.torture.plan import VARIANTS
from aiops.lab.torture.states import StatesResult, examine


class SeedResult(Protocol):
    """The findings of a seed."""

    plan: ClusterPlan
    wrong: list[str]


@dataclass(slots=True)
class SeedCampaign:
    """Simulated trials until there are enough, or the time is over.

    Attributes
    ----------
    what
        ``states`` or ``clusters``.
    count
        Damaged states, or clusters, after which no trial begins; None: no bound.
    seconds
        Time after which none begins; None: no bound.
    seed
        That of the first trial; each next one has the next.
    names
        The variants to choose from.
    seeds
        A file to which seeds that fail are appended, for the tests; None: none.
    on_trial
        Is called after each trial.
    results
        Of the trials so far.
    """

    what: str
    count: int | None = None
    seconds: float | None = None
    seed: int = 0
    names: tuple[str, ...] = tuple(VARIANTS)
    seeds: Path | None = None
    on_trial: Callable[[SeedResult], None] | None = None
    results: list[SimulatedResult | StatesResult] = field(default_factory=list)
    stopped: bool = False
    _since: float = 0.0

    @property
    def tried(self) -> int:
        """The damaged states or clusters so far."""
        return sum(r.states if isinstance(r, StatesResult) else 1 for r in self.results)

    @property
    def failures(self) -> list[SimulatedResult | StatesResult]:
        """The trials that found something wrong."""
        return [result for result in self.results if result.wrong]

    @property
    def done(self) -> float:
        """The part that is done, from 0 to 1."""
        parts = [0.0]
        if self.count is not None:
            parts.append(self.tried / self.count)
        if self.seconds is not None:
            parts.append((time.monotonic() - self._since) / self.seconds)
        return min(1.0, max(parts))

    def stop(self) -> None:
        """Begin no other trial."""
        self.stopped = True

    def run(self) -> None:
        """Run the trials."""
        self._since = time.monotonic()
        with quietly():
            while not self.stopped and not (self.results and self.done >= 1.0):
                result = try_seed(self.what, self.seed + len(self.results), self.names)
                self.results.append(result)
                if result.wrong and self.seeds is not None:
                    with self.seeds.open("a", encoding="utf-8") as file:
                        file.write(f"{self.what} {result.plan.seed}  # {result.wrong[0]:.150}\n")
                if self.on_trial is not None:
                    self.on_trial(result)

    def again(self, result: SeedResult) -> str:
        """Return the command that repeats a trial."""
        only = "" if self.names == tuple(VARIANTS) else "".join(f" --only {n}" for n in self.names)
        return f"aiops torture {self.what} --seed {result.plan.seed} --count 1{only}"

    def report(self) -> dict[str, Any]:
        """Return the record of all trials."""
        options = {
            "count": self.count,
            "seconds": self.seconds,
            "seed": self.seed,
            "only": list(self.names),
        }
        policies, acks, faults = Counter[str](), Counter[str](), Counter[str]()
        for result in self.results:
            policies[result.plan.variant] += 1
            acks[result.plan.acks] += 1
            faults.update(fault.kind for fault in result.plan.faults)
        found: dict[str, Any] = {
            "seconds": round(time.monotonic() - self._since, 1),
            "trials": len(self.results),
            "tried": self.tried,
            "trials_by_policy": dict(sorted(policies.items())),
            "trials_by_acks": dict(sorted(acks.items())),
            "faults": dict(sorted(faults.items())),
            "seeds": [self.seed, self.seed + max(len(self.results), 1) - 1],
        }
        if self.what == "states":
            outcomes = Counter[str]()
            for result in self.results:
                if isinstance(result, StatesResult):
                    outcomes.update(result.outcomes)
            found["outcomes"] = dict(sorted(outcomes.items()))
        else:
            clusters = [result for result in self.results if isinstance(result, SimulatedResult)]
            for name in ("acknowledged", "lost", "starts"):
                found[name] = sum(getattr(result, name) for result in clusters)
            found["virtual_seconds"] = round(sum(result.virtual for result in clusters))
        found["failures"] = [
            {
                "seed": result.plan.seed,
                "again": self.again(result),
                "wrong": result.wrong,
                "plan": asdict(result.plan),
            }
            for result in self.failures
        ]
        return run_record.record("torture", self.what, options, found)

    def save(self, path: Path) -> None:
        """Write the report.

        Raises
        ------
        AiopsError
            When the file cannot be written.
        """
        try:
            run_record.write_rows(path, self.report())
        except OSError as error:
            raise AiopsError(f"{path}: {error.strerror}") from None


def try_seed(
    what: str, seed: int, names: tuple[str, ...] = tuple(VARIANTS)
) -> SimulatedResult | StatesResult:
    """Carry out the trial of a seed."""
    if what == "states":
        return examine(seed, names)
    return ClusterTrial(draw_cluster(seed, names)).run()
