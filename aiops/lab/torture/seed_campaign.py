"""Campaigns of trials that a seed decides, in several processes; most are simulated."""

from __future__ import annotations

import contextlib
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from aiops.lab.processes import PipedProcess
from aiops.lab.torture.attack_trial import AttackResult
from aiops.lab.torture.attack_variants import OF_FRAMES
from aiops.lab.torture.attack_variants import VARIANTS as ATTACKS
from aiops.lab.torture.attacked_lines import PARTNERS
from aiops.lab.torture.cluster_plan import ClusterPlan, draw_cluster
from aiops.lab.torture.cluster_trial import ClusterTrial, SimulatedResult, quietly
from aiops.lab.torture.frame_trial import FrameTrial, draw_frames
from aiops.lab.torture.line_trial import LineTrial, draw_lines
from aiops.lab.torture.mailbox_trial import MODELS, MailboxTrial, draw_mailboxes, need_mailboxes
from aiops.lab.torture.plan import VARIANTS
from aiops.lab.torture.session_trial import SessionTrial, draw_sessions
from aiops.lab.torture.states import MOMENTS, StatesResult, examine
from aiops.lab.torture.trial_series import TrialSeries

SeedResult: TypeAlias = SimulatedResult | StatesResult | AttackResult
R = TypeVar("R", SimulatedResult, StatesResult, AttackResult)


@dataclass(frozen=True, slots=True)
class SeedKind(Generic[R]):
    """One kind of simulated trials.

    Attributes
    ----------
    names
        The variants that there are.
    draw
        Returns the plan of a seed, of one of the variants given.
    carry_out
        Carries a plan out.
    counted
        What a result counts.
    least
        The least that a result counts.
    findings
        Returns what the report says of results, beside what it says of all kinds.
    needs
        Raises `UsageError` where there is not all that a trial takes.
    """

    names: tuple[str, ...]
    draw: Callable[[int, tuple[str, ...]], Any]
    carry_out: Callable[[Any], R]
    counted: Callable[[R], int]
    least: int
    findings: Callable[[list[R]], dict[str, Any]]
    needs: Callable[[], None] = lambda: None


def _of_clusters(results: list[SimulatedResult]) -> dict[str, Any]:
    names = "acknowledged", "lost", "starts", "promotions", "places"
    found: dict[str, Any] = {name: sum(getattr(r, name) for r in results) for name in names}
    virtual = round(sum(result.virtual for result in results))
    return {**_of_plans(results), **found, "virtual_seconds": virtual}


def _of_states(results: list[StatesResult]) -> dict[str, Any]:
    return {**_of_plans(results), "outcomes": _total(result.outcomes for result in results)}


def _of_plans(results: Sequence[SimulatedResult | StatesResult]) -> dict[str, Any]:
    faults = (fault.kind for result in results for fault in result.plan.faults)
    return {
        "trials_by_acks": _total([Counter(result.plan.acks for result in results)]),
        "faults": _total([Counter(faults)]),
    }


def _of_attacks(results: list[AttackResult]) -> dict[str, Any]:
    return {
        "sessions": sum(result.sessions for result in results),
        "refused": sum(result.refused for result in results),
        "bytes": sum(result.sent for result in results),
        "compiled": sum(result.compiled for result in results),
        "answers": _total(result.answers for result in results),
    }


def _of_lines(results: list[AttackResult]) -> dict[str, Any]:
    return {**_of_attacks(results), "frames": sum(result.frames for result in results)}


def _of_mailboxes(results: list[AttackResult]) -> dict[str, Any]:
    return {
        "sessions": sum(result.sessions for result in results),
        "bytes": sum(result.sent for result in results),
        "compiled": sum(result.compiled for result in results),
        "acts": _total(result.acts for result in results),
    }


def _total(counts: Iterable[Counter[str]]) -> dict[str, int]:
    return dict(sorted(sum(counts, Counter[str]()).items()))


KINDS: Mapping[str, SeedKind[Any]] = {
    "clusters": SeedKind(
        *(tuple(VARIANTS), draw_cluster, lambda plan: ClusterTrial(plan).run()),
        *(lambda result: 1, 1, _of_clusters),
    ),
    "states": SeedKind(
        *(tuple(VARIANTS), draw_cluster, examine, lambda result: result.states, MOMENTS),
        _of_states,
    ),
    "sessions": SeedKind(
        *(ATTACKS, draw_sessions, lambda plan: SessionTrial(plan).run()),
        *(lambda result: result.frames, 1, _of_attacks),
    ),
    "frames": SeedKind(
        *(OF_FRAMES, draw_frames, lambda plan: FrameTrial(plan).run()),
        *(lambda result: result.frames, 1, _of_attacks),
    ),
    "lines": SeedKind(
        *(tuple(PARTNERS), draw_lines, lambda plan: LineTrial(plan).run()),
        *(lambda result: 1, 1, _of_lines),
    ),
    "mailboxes": SeedKind(
        *(tuple(MODELS), draw_mailboxes, lambda plan: MailboxTrial(plan).run()),
        *(lambda result: max(1, result.acts.total()), 1, _of_mailboxes),
        needs=need_mailboxes,
    ),
}
"""By what they torture; the name of the command."""

_COUNTED = {"sessions": "frames", "mailboxes": "acts"}


def unit_of(what: str) -> str:
    """Return the word for what a campaign counts."""
    return _COUNTED.get(what, what)


@dataclass(slots=True)
class SeedCampaign(TrialSeries[SeedResult, PipedProcess | None]):
    """Simulated trials until there are enough, or the time is over.

    ``what``: a name of `KINDS`. Several jobs are as many processes; one is this process.

    Attributes
    ----------
    failed
        A file to which plans that fail are appended, for the tests; None: none.
    """

    failed: Path | None = None

    @property
    def kind(self) -> SeedKind[Any]:
        """The kind of its trials."""
        return KINDS[self.what]

    @property
    def counted(self) -> int:
        """The clusters, damaged states or hostile frames and acts so far, in earlier runs too."""
        return int(self.earlier.get("tried", 0)) + self._tried

    @property
    def _tried(self) -> int:
        return sum(self.kind.counted(result) for result in self.results)

    @property
    def least(self) -> int:
        """The least that a trial counts."""
        return self.kind.least

    @property
    def progress(self) -> str:
        """A few words about what is done so far."""
        return f"{self.counted:,} {self.unit}, {len(self.failures)} failures"

    @property
    def unit(self) -> str:
        """The word for what is counted."""
        return unit_of(self.what)

    @property
    def variants(self) -> tuple[str, ...]:
        """All variants that there are to choose from."""
        return self.kind.names

    def run(self) -> None:
        """Run the trials; raises `UsageError` where there is not all that they take."""
        self.kind.needs()
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
            result: SeedResult = self.kind.carry_out(self.kind.draw(seed, self.names))
        else:
            helper.send(seed)
            result = helper.receive()
        if result.wrong and self.failed is not None:
            plan = asdict(self.kind.draw(seed, self.names))  # a trial may have carried out less
            record = {"what": self.what, "wrong": result.wrong[0], "plan": plan}
            with self.failed.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(record)}\n")
        return result

    def findings(self, results: list[SeedResult]) -> dict[str, Any]:
        """Return what the report says of results."""
        variants = Counter(result.plan.variant for result in results)
        return {
            "tried": self._tried,
            "trials_by_policy": dict(sorted(variants.items())),
            **self.kind.findings(results),
        }


def try_plan(what: str, plan: ClusterPlan) -> SeedResult:
    """Carry out the trial of a plan."""
    found: SeedResult = KINDS[what].carry_out(plan)
    return found


def _serve(what: str, names: tuple[str, ...], pipe: Connection) -> None:
    """Carry out the trials of the seeds that come, until the pipe ends."""
    gc.freeze()  # what was imported stays
    kind = KINDS[what]
    with quietly():
        while (seed := _received(pipe)) is not None:
            result = kind.carry_out(kind.draw(seed, names))
            with contextlib.suppress(OSError):
                pipe.send(result)


def _received(pipe: Connection) -> int | None:
    try:
        seed: int = pipe.recv()
    except (EOFError, OSError):
        return None
    return seed
