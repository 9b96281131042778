"""Finished runs: what they came to, found again by their settings; and the folder they are in."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import aiops
from aiops.errors import UsageError
from aiops.lab.experiments.case import Case, Result

MARKER = "experiment.json"
RUNS = "runs"

_FORMAT = 1

Versions: TypeAlias = Mapping[str, str | None]
"""Of what a result depends on, down to the last bit, by name."""


@dataclass(frozen=True)
class Finished:
    """A run and its result."""

    case: Case
    result: Result

    @property
    def diverged(self) -> bool:
        """Whether it ended with a gradient that was not finite."""
        return bool(self.result.get("diverged"))

    @property
    def last(self) -> Mapping[str, Any]:
        """The last sample."""
        found: Mapping[str, Any] = self.result["curve"][-1]
        return found

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

    def add(self, case: Case, result: Result) -> None:
        """Note a result."""
        self._results[case.key] = result

    def find(self, case: Case) -> Finished | None:
        """Return a run, if it is finished."""
        result = self._results.get(case.key)
        return None if result is None else Finished(case, result)

    def of(self, cases: Iterable[Case]) -> list[Finished]:
        """Return those runs that are finished, in order."""
        return [found for case in cases if (found := self.find(case)) is not None]

    def settled(self, cases: Iterable[Case]) -> bool:
        """Say whether there is nothing to wait for: each run is finished, or has failed."""
        return all(case.key in self.failed or self.find(case) is not None for case in cases)

    def tail(self, case: Case, name: str = "error") -> float:
        """Return `Finished.tail` of a run; infinity if there is no such run."""
        found = self.find(case)
        return math.inf if found is None else found.tail(name)


class Folder:
    """Where an experiment keeps its runs, one file for each.

    Parameters
    ----------
    path
        Made if it is not there.
    name
        The experiment's.
    anew
        Runs of other versions count as missing; their files stay until they are replaced.

    Attributes
    ----------
    versions
        Those with which each kept run was made, by its key.

    Raises
    ------
    UsageError
        When the folder holds something else, or cannot be written.
    """

    def __init__(self, path: Path, name: str, *, anew: bool = False) -> None:
        self.path, self.name = path, name
        self._claim()
        self.versions: dict[str, Versions] = {}
        self.runs = Runs(self._read(anew))

    def foreign(self, cases: Iterable[Case]) -> dict[str, int]:
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
                write(marker, json.dumps({"experiment": self.name, "format": _FORMAT}) + "\n")
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

    def _read(self, anew: bool) -> dict[str, Result]:
        found = {}
        for path in (self.path / RUNS).glob("*.json"):
            try:
                row = json.loads(path.read_text(encoding="utf-8"))
                result, made = row["result"], dict(row["versions"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path} is damaged ({error!r}): remove it") from None
            if not anew or made == versions():
                found[path.stem] = result
                self.versions[path.stem] = made
        return found

    def put(self, case: Case, result: Result) -> None:
        """Keep a result."""
        made = versions()
        row = {
            "name": case.name,
            "settings": case.settings,
            "versions": made,
            "result": result,
        }
        path = self.path / RUNS / f"{case.key}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            write(path, json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
        self.versions[case.key] = made
        self.runs.add(case, result)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@functools.cache
def versions() -> Versions:
    """Return the versions on which the last bit of a result depends, aiops' sources among them."""
    found: dict[str, str | None] = {
        "aiops": aiops.__version__,
        "sources": sources(Path(aiops.__file__).parent),
        "python": platform.python_version(),
    }
    for package in ("numpy", "numba", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def sources(package: Path) -> str:
    """Return a digest of a package's modules: between two releases, its version says little."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]


def unique(cases: Iterable[Case]) -> list[Case]:
    """Return the cases without those whose work is in the list already."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(case.key, case)
    return list(found.values())


def gathered(finished: Sequence[Finished]) -> dict[tuple[str, str], list[Finished]]:
    """Return the runs that differ in their seeds only together, by panel and curve."""
    found: dict[tuple[str, str], list[Finished]] = {}
    for run in finished:
        found.setdefault((run.case.panel, run.case.curve), []).append(run)
    return found
