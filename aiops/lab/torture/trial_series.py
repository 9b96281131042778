"""Many trials, several at a time, until there are enough; and their report.

A trial's seed decides all of it. `Campaign` kills processes, and `SeedCampaign` simulates.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from aiops.errors import AiopsError, UsageError
from aiops.lab import run_record
from aiops.lab.torture.plan import VARIANTS


class SeededPlan(Protocol):
    """The plan of a trial, which its seed decides; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seed(self) -> int:
        """The seed."""

    @property
    def variant(self) -> str:
        """A name of `VARIANTS`."""


class TrialFindings(Protocol):
    """The findings of a trial, as a campaign needs them."""

    @property
    def plan(self) -> SeededPlan:
        """The plan that was carried out."""

    @property
    def wrong(self) -> list[str]:
        """All that contradicts the promises, one sentence each."""


_OFTEN = 60.0  # seconds between two reports
_KINDS = "kills", "tried"
_COUNTS = "ended_at", "answers", "acts", "faults", "outcomes"
"""The keys of a report with what is counted, and with counts by a name, beside those ``_by_``."""

F = TypeVar("F", bound=TrialFindings)
H = TypeVar("H")


@dataclass(slots=True)
class TrialSeries(ABC, Generic[F, H]):
    """Trials until enough is counted, or the time is over.

    A subclass says what a trial is, what of it is counted, and what its report has. Each job is a
    thread with a helper of its own, in which or with which the trials are carried out.

    Attributes
    ----------
    what
        What it tortures; the name of its command.
    count
        The count after which no trial begins; None: no bound.
    seconds
        Time after which none begins; None: no bound.
    seed
        That of the first trial; each next one has the next.
    jobs
        Trials at a time.
    names
        The variants to choose from.
    on_trial
        Is called after each trial, in its thread.
    file
        Where the report is written each minute, so that an interrupted run can be continued; None:
        nowhere.
    earlier
        The report of a run that this one continues; empty: it is the first.
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
    on_trial: Callable[[F], None] | None = None
    file: Path | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)
    results: list[F] = field(default_factory=list)
    stopped: bool = False
    _begun: int = 0
    _since: float = 0.0
    _saved: float = 0.0
    _error: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    @abstractmethod
    def counted(self) -> int:
        """The number of things counted so far, in earlier runs too, up to ``count``."""

    @property
    def least(self) -> int:
        """The least that a trial counts, so that none begins in vain."""
        return 0

    @property
    @abstractmethod
    def progress(self) -> str:
        """A few words about what is done so far."""

    @property
    def variants(self) -> tuple[str, ...]:
        """All variants that there are to choose from."""
        return tuple(VARIANTS)

    @abstractmethod
    def helper(self) -> AbstractContextManager[H]:
        """Return what the trials of one job need, one after the other."""

    @abstractmethod
    def try_seed(self, seed: int, helper: H) -> F:
        """Carry out the trial of a seed."""

    @abstractmethod
    def findings(self, results: list[F]) -> dict[str, Any]:
        """Return what the report says of results, which are in the order of their seeds."""

    @property
    def failures(self) -> list[F]:
        """The trials that found something wrong."""
        return [result for result in self.results if result.wrong]

    @property
    def done(self) -> float:
        """The part that is done, from 0 to 1."""
        parts = [0.0]
        if self.count is not None:
            parts.append(self.counted / self.count)
        if self.seconds is not None:
            parts.append((time.monotonic() - self._since) / self.seconds)
        return min(1.0, max(parts))

    def stop(self) -> None:
        """Begin no other trial."""
        self.stopped = True

    def run(self) -> None:
        """Run the trials."""
        self._since = self._saved = time.monotonic()
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
            with self.helper() as helper:
                while (seed := self._next()) is not None:
                    result = self.try_seed(seed, helper)
                    with self._lock:
                        self.results.append(result)
                        if self.file is not None and time.monotonic() > self._saved + _OFTEN:
                            self.save(self.file)
                            self._saved = time.monotonic()
                    if self.on_trial is not None:
                        self.on_trial(result)
        except BaseException as error:
            self._error, self.stopped = error, True

    def _next(self) -> int | None:
        with self._lock:
            running = self._begun - len(self.results)
            enough = self.count is not None and (self.counted + running * self.least >= self.count)
            if self.stopped or (self._begun > 0 and (enough or self.done >= 1.0)):
                return None
            self._begun += 1
            return self.seed + self._begun - 1

    def again(self, result: F) -> str:
        """Return the command that repeats a trial's plan."""
        only = "" if self.names == self.variants else "".join(f" --only {n}" for n in self.names)
        return f"aiops torture {self.what} --seed {result.plan.seed} --count 1{only}"

    def resume(self, path: Path) -> None:
        """Continue the run of a report.

        Raises
        ------
        UsageError
            When the file is no such report, or is one of other variants.
        """
        self.earlier = read_earlier(self.what, path, self.names)
        self.seed = self.earlier["seeds"][1] + 1

    def report(self) -> dict[str, Any]:
        """Return the record of all trials, with those of the earlier runs."""
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
            **self.findings(results),
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
        found = run_record.record("torture", self.what, options, found)
        run = {name: found.get(name) for name in ("seconds", "trials", *_KINDS, "seeds")}
        run = {name: value for name, value in run.items() if value is not None}
        found["runs"] = [{"revision": found["machine"]["revision"], **run}]
        return merged(self.earlier, found) if self.earlier else found

    def save(self, path: Path) -> None:
        """Write the report.

        Raises
        ------
        AiopsError
            When the file cannot be written.
        """
        try:
            new = path.with_name(f"{path.name}.new")
            run_record.write_rows(new, self.report())
            new.replace(path)
        except OSError as error:
            raise AiopsError(f"{path}: {error.strerror}") from None


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of two runs, of which the later one continues the earlier one."""
    found = dict(later)
    for name, value in later.items():
        before: Any = earlier.get(name, 0)
        if name in ("seconds", "failures", "runs"):
            found[name] = before + value
        elif name == "slowest_ending":
            found[name] = max(before, value)
        elif name == "seeds":
            found[name] = [before[0], value[1]]
        elif isinstance(value, int):
            found[name] = before + value
        elif isinstance(value, dict) and (name in _COUNTS or "s_by_" in name):
            found[name] = dict(sorted((Counter(before) + Counter(value)).items()))
    found["seconds"] = round(found["seconds"], 1)
    return found


def read_earlier(what: str, path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the report of an earlier run, to be continued.

    Raises
    ------
    UsageError
        When the file is no such report, or is one of other policies.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fits = found["torture"] == what and found["options"]["only"] == list(names)
        fits = fits and "runs" in found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--resume {path}: it is no report ({error})") from None
    if not fits:
        raise UsageError(
            f"--resume {path}: it is no report of aiops torture {what} with the same --only"
        )
    return found
