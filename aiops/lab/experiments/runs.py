"""Finished runs: their results, found again by their settings, and the folder that keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from aiops.errors import UsageError
from aiops.lab.experiments import run_archive
from aiops.lab.experiments.planned_run import PlannedRun, Result
from aiops.lab.run_record import Versions, machine, versions, write_text

MARKER = "experiment.json"
RUNS = "runs"

_FORMAT = 1


@dataclass(frozen=True)
class FinishedRun:
    """A run and its result."""

    case: PlannedRun
    result: Result

    @property
    def diverged(self) -> bool:
        """True if it ended with a gradient that was not finite."""
        return bool(self.result.get("diverged"))

    @property
    def last(self) -> Mapping[str, Any]:
        """The last sample."""
        found: Mapping[str, Any] = self.result["curve"][-1]
        return found

    def end(self, name: str) -> float:
        """Return a figure of the last sample; infinity if it diverged, or that is no number."""
        found = self.last[name]  # None, as JSON has what is not finite
        number = math.nan if found is None else float(found)
        return number if math.isfinite(number) and not self.diverged else math.inf

    def series(self, name: str) -> list[float]:
        """Return one figure of each sample, in order; what is no number is nan."""
        values = (sample[name] for sample in self.result["curve"])
        return [math.nan if value is None else float(value) for value in values]

    def tail(self, name: str = "error", share: float = 0.1) -> float:
        """Return the mean of a figure over the last part of the run; of a diverged one, infinity.

        Parameters
        ----------
        name
            Of the figure.
        share
            How much of the iterations is the last part; the last sample always belongs to it.
        """
        if self.diverged:
            return math.inf
        since = (1 - share) * self.last["iteration"]
        values = [sample[name] for sample in self.result["curve"] if sample["iteration"] > since]
        values = values or [self.last[name]]  # of a run that computed nothing in its time
        return fmean(values) if None not in values else math.inf


class Runs:
    """The runs so far: those with a result, and those that failed.

    Parameters
    ----------
    results
        By the runs' keys.
    """

    def __init__(self, results: Mapping[str, Result] | None = None) -> None:
        self._results = dict(results or {})
        self.failed: dict[str, str] = {}

    def add(self, key: str, result: Result) -> None:
        """Note the result of the run with this key."""
        self._results[key] = result

    def find(self, case: PlannedRun) -> FinishedRun | None:
        """Return a run, if it is finished."""
        result = self._results.get(case.key)
        return None if result is None else FinishedRun(case, result)

    def of(self, cases: Iterable[PlannedRun]) -> list[FinishedRun]:
        """Return those runs that are finished, in order."""
        return [found for case in cases if (found := self.find(case)) is not None]

    def settled(self, cases: Iterable[PlannedRun]) -> bool:
        """Say whether there is nothing to wait for: each run is finished, or has failed."""
        return all(case.key in self.failed or self.find(case) is not None for case in cases)

    def tail(self, case: PlannedRun, name: str = "error") -> float:
        """Return `FinishedRun.tail` of a run; infinity if there is no such run."""
        found = self.find(case)
        return math.inf if found is None else found.tail(name)


Group: TypeAlias = Sequence[FinishedRun]
"""The finished runs of one curve, which differ in their seeds only."""


class RunGroups(dict[tuple[str, str], Group]):
    """The reported runs that are finished, by panel and curve, in the order of their cases.

    A curve of which no run is finished is not among the keys; its group is empty.

    Parameters
    ----------
    cases
        The runs of an experiment, those of pools included.
    runs
        All runs so far.

    Attributes
    ----------
    runs
        As given.
    """

    def __init__(self, cases: Iterable[PlannedRun], runs: Runs) -> None:
        self.runs = runs
        found: dict[tuple[str, str], dict[int, FinishedRun]] = {}
        for run in runs.of(case for case in cases if case.role == "reported"):
            found.setdefault((run.case.panel, run.case.curve), {})[run.case.seed] = run
        super().__init__({key: tuple(seeds.values()) for key, seeds in found.items()})

    def __missing__(self, key: tuple[str, str]) -> Group:
        return ()

    def panel(self, name: str) -> dict[str, Group]:
        """Return the groups of one panel, by curve."""
        return {curve: group for (panel, curve), group in self.items() if panel == name}


class RunFolder:
    """The folder in which an experiment keeps its runs, one file for each.

    Parameters
    ----------
    path
        Made if it is not there.
    name
        The experiment's.
    rerun
        Runs of other versions count as missing; their files stay until they are replaced.
    archives
        Of `run_archive`: files of runs that the folder lacks are taken from them, the first first.

    Attributes
    ----------
    versions, machines
        The versions with which each kept run was made, and the description of the machine on which
        it was (`aiops.lab.run_record.machine`), by its key.
    archived
        The keys of the runs in the archives.

    Raises
    ------
    UsageError
        When the folder holds something else, or cannot be written; or an archive is none.
    """

    def __init__(
        self, path: Path, name: str, *, rerun: bool = False, archives: Sequence[Path] = ()
    ) -> None:
        self.path, self.name, self._rerun = path, name, rerun
        taken = [row for archive in archives for row in run_archive.read(archive)]
        self._claim()
        self.archived = frozenset(key for key, _row in taken)
        for key, row in taken:
            if not self._file(key).exists():
                self._write(key, row)
        self.versions: dict[str, Versions] = {}
        self.machines: dict[str, Mapping[str, Any]] = {}
        self.runs = Runs(self._read())

    def read_again(self) -> None:
        """Read the folder again: an interruption may come between a run's file and its note."""
        for key, result in self._read().items():
            self.runs.add(key, result)

    def foreign(self, cases: Iterable[PlannedRun]) -> dict[str, int]:
        """Return what differs between kept runs and this program, and in how many of the cases.

        It is named as in "numpy 2.3.1, not 2.4.0".
        """
        ours = versions()
        found: dict[str, int] = {}
        for theirs in (self.versions[c.key] for c in unique(cases) if c.key in self.versions):
            for name in ours:
                if theirs.get(name) != ours[name]:
                    what = f"{name} {theirs.get(name)}, not {ours[name]}"
                    found[what] = found.get(what, 0) + 1
        return found

    def archive(self, path: Path, keys: Iterable[str]) -> None:
        """Write an archive of the runs with these keys."""
        run_archive.write(path, self.path / RUNS, set(keys))

    def _file(self, key: str) -> Path:
        return self.path / RUNS / f"{key}.json"

    def _write(self, key: str, row: Mapping[str, Any]) -> None:
        path = self._file(key)
        try:
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}", output=str(path)
            ) from None

    def _claim(self) -> None:
        marker = self.path / MARKER
        try:
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(f"--out {self.path} is a file: name a folder")
            if marker.exists():
                self._check(marker)
            elif self.path.is_dir() and any(self.path.iterdir()):
                raise UsageError(
                    f"--out {self.path} holds other files, and none of an experiment: name a new"
                    " folder"
                )
            else:
                (self.path / RUNS).mkdir(parents=True, exist_ok=True)
                write_text(marker, json.dumps({"experiment": self.name, "format": _FORMAT}) + "\n")
        except OSError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}") from None

    def _check(self, marker: Path) -> None:
        try:
            found = json.loads(marker.read_text(encoding="utf-8"))
            whose, form = found["experiment"], found["format"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{marker} is damaged: name another folder") from None
        if whose != self.name:
            raise UsageError(
                f"--out {self.path} holds the results of {whose}, not of {self.name}: name another"
                " folder"
            )
        if form != _FORMAT:
            raise UsageError(
                f"--out {self.path} holds results of another version of aiops: name another folder"
            )

    def _read(self) -> dict[str, Result]:
        found = {}
        for path in (self.path / RUNS).glob("*.json"):
            try:
                row = json.loads(path.read_text(encoding="utf-8"))
                result, made = row["result"], dict(row["versions"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path} is damaged ({error!r}): remove it") from None
            if not self._rerun or made == versions():
                found[path.stem] = result
                self.versions[path.stem] = made
                self.machines[path.stem] = row.get("machine", {})
        return found

    @cached_property
    def _machine(self) -> Mapping[str, Any]:
        return machine()

    def put(self, case: PlannedRun, result: Result) -> None:
        """Keep a result."""
        made = versions()
        row = {
            "name": case.name,
            "settings": case.settings,
            "versions": made,
            "machine": self._machine,
            "result": result,
        }
        self._write(case.key, row)
        self.versions[case.key], self.machines[case.key] = made, self._machine
        self.runs.add(case.key, result)


def unique(cases: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the cases without those whose work is in the list already."""
    found: dict[str, PlannedRun] = {}
    for case in cases:
        found.setdefault(case.key, case)
    return list(found.values())
