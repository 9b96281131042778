"""Many trials, several at a time, and their report."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiops.errors import AiopsError
from aiops.lab import run_record
from aiops.lab.torture.plan import VARIANTS, TrialPlan, draw_servers, draw_workers
from aiops.lab.torture.spawner import Spawner, run_server
from aiops.lab.torture.trial import RunServer, Trial, TrialResult

DRAW: dict[str, Callable[[int, tuple[str, ...]], TrialPlan]] = {
    "workers": draw_workers,
    "servers": draw_servers,
}
"""What is killed, and the function that draws a plan."""

_KEPT = 20  # failed trials whose folders are kept


@dataclass(slots=True)
class Campaign:
    """Trials until enough processes have been killed, or the time is over.

    Attributes
    ----------
    what
        ``workers`` or ``servers``: the processes that are killed.
    count
        Kills after which no trial begins; None: no bound.
    seconds
        Time after which none begins; None: no bound.
    seed
        That of the first trial; each next one has the next.
    jobs
        Trials at a time.
    names
        The variants to choose from.
    folder
        Where trials are kept that failed; None: a temporary folder.
    run_server
        Runs a server.
    on_trial
        Is called after each trial, in its thread.
    results
        Of the trials so far.
    stopped
        Whether `stop` was called.
    """

    what: str
    count: int | None = None
    seconds: float | None = None
    seed: int = 0
    jobs: int = 1
    names: tuple[str, ...] = tuple(VARIANTS)
    folder: Path | None = None
    run_server: RunServer = run_server
    on_trial: Callable[[TrialResult], None] | None = None
    results: list[TrialResult] = field(default_factory=list)
    stopped: bool = False
    _begun: int = 0
    _since: float = 0.0
    _error: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def kills(self) -> int:
        """The processes killed so far."""
        return sum(result.kills for result in self.results)

    @property
    def failures(self) -> list[TrialResult]:
        """The trials that found something wrong."""
        return [result for result in self.results if result.wrong]

    @property
    def done(self) -> float:
        """The part that is done, from 0 to 1."""
        parts = [0.0]
        if self.count is not None:
            parts.append(self.kills / self.count)
        if self.seconds is not None:
            parts.append((time.monotonic() - self._since) / self.seconds)
        return min(1.0, max(parts))

    def stop(self) -> None:
        """Begin no other trial."""
        self.stopped = True

    def run(self) -> None:
        """Run the trials."""
        self._since = time.monotonic()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # so that Ctrl-C is seen meanwhile
                thread.join(0.2)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            with Spawner() as spawner:
                while (seed := self._next()) is not None:
                    self._try(seed, spawner)
        except BaseException as error:
            self._error, self.stopped = error, True

    def _next(self) -> int | None:
        with self._lock:
            over = self._begun > 0 and (
                (self.count is not None and self.kills >= self.count)
                or (self.seconds is not None and time.monotonic() >= self._since + self.seconds)
            )
            if over or self.stopped:
                return None
            self._begun += 1
            return self.seed + self._begun - 1

    def _try(self, seed: int, spawner: Spawner) -> None:
        plan = DRAW[self.what](seed, self.names)
        folder = Path(tempfile.mkdtemp(prefix=f"torture-{seed}-", dir=self.folder))
        trial = Trial(plan, folder, spawner, self.run_server)
        result = trial.kill_servers() if self.what == "servers" else trial.kill_workers()
        if result.wrong and len(self.failures) < _KEPT:
            result.wrong.append(f"its files are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self.results.append(result)
        if self.on_trial is not None:
            self.on_trial(result)

    def again(self, result: TrialResult) -> str:
        """Return the command that repeats a trial's plan."""
        only = "" if self.names == tuple(VARIANTS) else "".join(f" --only {n}" for n in self.names)
        return f"aiops torture {self.what} --seed {result.plan.seed} --count 1{only}"

    def report(self) -> dict[str, Any]:
        """Return the record of all trials."""
        results = sorted(self.results, key=lambda result: result.plan.seed)
        options = {
            "count": self.count,
            "seconds": self.seconds,
            "seed": self.seed,
            "jobs": self.jobs,
            "only": list(self.names),
        }
        found = {
            "seconds": round(time.monotonic() - self._since, 1),
            "trials": len(results),
            "kills": self.kills,
            "before_ready": sum(result.early for result in results),
            "acknowledged": sum(result.acknowledged for result in results),
            "uncertain": sum(result.uncertain for result in results),
            "uncertain_applied": sum(result.applied for result in results),
            "kills_by_policy": _by(results, lambda plan: plan.variant),
            "kills_by_transport": _by(results, lambda p: "shared memory" if p.near else "TCP"),
            "kills_by_acks": _by(results, lambda plan: plan.acks or "no state"),
            "seeds": [self.seed, self.seed + max(self._begun, 1) - 1],
            "failures": [
                {
                    "seed": result.plan.seed,
                    "again": self.again(result),
                    "wrong": result.wrong,
                    "plan": asdict(result.plan),
                }
                for result in results
                if result.wrong
            ],
        }
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


def _by(results: list[TrialResult], key: Callable[[TrialPlan], str]) -> dict[str, int]:
    """Return the kills by a property of the plan."""
    counts: Counter[str] = Counter()
    for result in results:
        counts[key(result.plan)] += result.kills
    return dict(sorted(counts.items()))
