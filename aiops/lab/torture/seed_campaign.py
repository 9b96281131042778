"""Campaigns of simulated trials, in several processes."""

from __future__ import annotations

import contextlib
import gc
import json
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from aiops.lab.processes import PipedProcess
from aiops.lab.torture.cluster_plan import ClusterPlan, draw_cluster
from aiops.lab.torture.cluster_trial import ClusterTrial, SimulatedResult, quietly
from aiops.lab.torture.states import MOMENTS, StatesResult, examine
from aiops.lab.torture.trial_series import TrialSeries

SeedResult: TypeAlias = SimulatedResult | StatesResult


@dataclass(slots=True)
class SeedCampaign(TrialSeries[SeedResult, PipedProcess | None]):
    """Simulated trials until there are enough, or the time is over.

    ``what``: ``states`` or ``clusters``; damaged states or clusters are counted. Several jobs are
    as many processes; one is this process.

    Attributes
    ----------
    failed
        A file to which plans that fail are appended, for the tests; None: none.
    """

    failed: Path | None = None

    @property
    def counted(self) -> int:
        """The damaged states or clusters so far."""
        if self.what == "clusters":
            return len(self.results)
        return sum(r.states for r in self.results if isinstance(r, StatesResult))

    @property
    def least(self) -> int:
        """The least that a trial counts."""
        return 1 if self.what == "clusters" else MOMENTS

    @property
    def progress(self) -> str:
        """A few words about what is done so far."""
        return f"{self.counted:,} {self.what}, {len(self.failures)} failures"

    def run(self) -> None:
        """Run the trials."""
        with quietly():
            TrialSeries.run(self)

    def helper(self) -> AbstractContextManager[PipedProcess | None]:
        """Return the process of a job; None if it is this one."""
        if self.jobs == 1:
            return contextlib.nullcontext()
        return PipedProcess("a job", partial(_serve, self.what, self.names))

    def try_seed(self, seed: int, helper: PipedProcess | None) -> SeedResult:
        """Carry out the trial of a seed; note it if it failed."""
        if helper is None:
            result = try_plan(self.what, draw_cluster(seed, self.names))
        else:
            helper.send(seed)
            result = helper.receive()
        if result.wrong and self.failed is not None:
            plan = asdict(draw_cluster(seed, self.names))
            record = {"what": self.what, "wrong": result.wrong[0], "plan": plan}
            with self.failed.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(record)}\n")
        return result

    def findings(self, results: list[SeedResult]) -> dict[str, Any]:
        """Return what the report says of results."""
        policies, acks, faults = Counter[str](), Counter[str](), Counter[str]()
        outcomes = Counter[str]()
        for result in results:
            policies[result.plan.variant] += 1
            acks[result.plan.acks] += 1
            faults.update(fault.kind for fault in result.plan.faults)
            if isinstance(result, StatesResult):
                outcomes.update(result.outcomes)
        found: dict[str, Any] = {
            "tried": self.counted,
            "trials_by_policy": dict(sorted(policies.items())),
            "trials_by_acks": dict(sorted(acks.items())),
            "faults": dict(sorted(faults.items())),
        }
        if self.what == "states":
            return {**found, "outcomes": dict(sorted(outcomes.items()))}
        clusters = [result for result in results if isinstance(result, SimulatedResult)]
        for name in ("acknowledged", "lost", "starts", "promotions"):
            found[name] = sum(getattr(result, name) for result in clusters)
        return {**found, "virtual_seconds": round(sum(result.virtual for result in clusters))}


def try_plan(what: str, plan: ClusterPlan) -> SeedResult:
    """Carry out the trial of a plan."""
    return examine(plan) if what == "states" else ClusterTrial(plan).run()


def _serve(what: str, names: tuple[str, ...], pipe: Connection) -> None:
    """Carry out the trials of the seeds that come, until the pipe ends."""
    gc.freeze()  # what was imported stays
    with quietly():
        while (seed := _received(pipe)) is not None:
            result = try_plan(what, draw_cluster(seed, names))
            with contextlib.suppress(OSError):
                pipe.send(result)


def _received(pipe: Connection) -> int | None:
    try:
        seed: int = pipe.recv()
    except (EOFError, OSError):
        return None
    return seed
