"""Two reports of one benchmark beside each other: ``aiops bench --compare OLD.json NEW.json``.

Two folders are compared file by file.

Machines differ, and one machine differs from itself an hour ago. So what is compared is what was
measured beside something else in the same run (raw sockets, a peer, a copy of memory, one request
in flight), wherever there is such a measure: the ratio to it is a property of the code much more
than of the day. Other figures are compared as they are, and judged only if both runs were on a
machine with the same processor and as many cores.

A cell *regressed* when its worst round in the old run is better than its best round in the new one:
beyond both spreads, not only beyond their medians. It *improved* when it is the other way round.
Figures that have no rounds count as uncertain by a tenth either way (`UNCERTAIN`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from rich.console import Console
from rich.table import Table

from aiops.errors import UsageError
from benchmarks import report

UNCERTAIN = 0.1
"""How far a figure that was taken once may be off, either way, of itself."""

Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class Cell:
    """One figure of a report, to be compared with that of another.

    Attributes
    ----------
    where
        What was measured, with which sizes and settings.
    what
        The figure's name and unit.
    median, low, high
        Over the rounds.
    beside
        What it is a multiple of, measured in the same run; empty: it is a figure as it stands.
    less
        Whether less is better.
    """

    where: str
    what: str
    median: float
    low: float
    high: float
    beside: str = ""
    less: bool = False

    @classmethod
    def of(
        cls,
        where: str,
        what: str,
        spread: Mapping[str, float],
        *,
        beside: str = "",
        less: bool = False,
    ) -> Self:
        """Make one of a `report.spread`."""
        return cls(where, what, spread["median"], spread["min"], spread["max"], beside, less)

    @classmethod
    def once(
        cls, where: str, what: str, value: float, *, beside: str = "", less: bool = False
    ) -> Self:
        """Make one of a figure without rounds."""
        off = UNCERTAIN * abs(value)
        return cls(where, what, value, value - off, value + off, beside, less)

    @property
    def key(self) -> Key:
        """The key by which two cells are the same."""
        return self.where, self.what, self.beside

    def worse_than(self, other: Cell) -> bool:
        """Tell whether all of it is worse than all of another."""
        return self.low > other.high if self.less else self.high < other.low


@dataclass(frozen=True)
class Pair:
    """A cell of both runs."""

    old: Cell
    new: Cell
    judged: bool

    @property
    def ratio(self) -> float:
        """The new median by the old one."""
        return self.new.median / self.old.median if self.old.median else float("nan")

    @property
    def verdict(self) -> str:
        """``regressed``, ``improved``, ``not judged``, or nothing."""
        if not self.judged:
            return "not judged"
        if self.new.worse_than(self.old):
            return "regressed"
        return "improved" if self.old.worse_than(self.new) else ""


def read(path: Path) -> dict[str, Any]:
    """Read a report; UsageError when the file is none."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(
            f"{path} is not JSON: give files that a benchmark's --json wrote"
        ) from None
    if not (isinstance(found, dict) and {"benchmark", "machine"} <= found.keys()):
        raise UsageError(
            f"{path} is not a benchmark's report: give files that a benchmark's --json wrote"
        )
    return found


def benchmark(result: Mapping[str, Any], path: Path) -> Any:
    """Return the module that made a report; UsageError when there is none of its name."""
    name = str(result["benchmark"])
    if not (name.isidentifier() and importlib.util.find_spec(f"benchmarks.{name}")):
        raise UsageError(f"{path} is a report of {name!r}, which is no benchmark of ours")
    return importlib.import_module(f"benchmarks.{name}")


def cells(result: Mapping[str, Any], path: Path) -> dict[Key, Cell]:
    """Return the cells of a report, as its benchmark reads them.

    Raises
    ------
    UsageError
        When there is no such benchmark, it measures no speed, or the file lacks something.
    """
    read_cells, name = getattr(benchmark(result, path), "cells", None), result["benchmark"]
    if read_cells is None:
        raise UsageError(f"{path} is a report of {name}, which has no figures that could regress")
    try:
        return {cell.key: cell for cell in read_cells(result)}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path} is not a whole report of {name}: {error!r}") from None


def compare(old: Path, new: Path) -> list[Pair]:
    """Return the cells that two reports have in common.

    Raises
    ------
    UsageError
        When a file cannot be read, they are of two benchmarks, or have no cell in common.
    """
    before, after = read(old), read(new)
    if before["benchmark"] != after["benchmark"]:
        raise UsageError(
            f"{old} is of the benchmark {before['benchmark']} and {new} of {after['benchmark']}:"
            " only reports of one benchmark can be compared"
        )
    cells_before, cells_after = cells(before, old), cells(after, new)
    common = [key for key in cells_before if key in cells_after]
    if not common:
        raise UsageError(
            f"{old} and {new} have measured nothing in common: run the benchmark with the same"
            " sizes, workers and peers"
        )
    same = _machine(before) == _machine(after)
    return [
        Pair(cells_before[key], cells_after[key], same or bool(cells_before[key].beside))
        for key in common
    ]


def _machine(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(result["machine"].get(key) for key in ("cpu", "usable_cores"))


_STYLES = {"regressed": "bold red", "improved": "green", "not judged": "dim"}


def table(pairs: Sequence[Pair], title: str) -> Table:
    """Lay the cells out, those that regressed in red."""
    made = report.table(title, _COLUMNS, (), text_columns=3)
    for pair in pairs:
        row = [
            *(pair.old.where, pair.old.what, pair.old.beside and f"x {pair.old.beside}"),
            *(_figure(pair.old.median), _range(pair.old)),
            *(_figure(pair.new.median), _range(pair.new)),
            *(f"{pair.ratio:.2f}", pair.verdict),
        ]
        made.add_row(*row, style=_STYLES.get(pair.verdict))
    return made


_COLUMNS = ("cell", "figure", "beside", "old", "min-max", "new", "min-max", "new ÷ old", "")


def _range(cell: Cell) -> str:
    return f"{_figure(cell.low)}-{_figure(cell.high)}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting, version and fact of the machine in which two runs differ."""
    facts = ("revision", "compiled", "cpu", "usable_cores", "system", "python")

    def known(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield "setting", result.get("options", {})
        yield "skipped", result.get("skipped", {})
        yield "version", result["machine"].get("packages", {})
        yield "", {fact: result["machine"].get(fact) for fact in facts}

    for (kind, old), (_kind, new) in zip(known(before), known(after), strict=True):
        for key in dict.fromkeys((*old, *new)):
            if old.get(key) != new.get(key):
                yield f"{kind} {key}: {old.get(key)} → {new.get(key)}".lstrip()


def main(old: Path, new: Path, console: Console | None = None) -> int:
    """Print how two reports, or two folders of them, compare; return 1 when something regressed.

    Raises
    ------
    UsageError
        When they cannot be compared; of two folders: when none of their files can.
    """
    if old.is_dir() and new.is_dir():
        return _folders(old, new, console)
    return _files(old, new, console)


def _folders(old: Path, new: Path, console: Console | None) -> int:
    """Compare the files that two folders have in common, and report which cannot be, and why."""
    before, after = ({path.name for path in folder.glob("*.json")} for folder in (old, new))
    statuses, left_out = dict[str, int](), dict[str, str]()
    for name in sorted(before | after):
        if name not in before or name not in after:
            left_out[name] = f"only in {old if name in before else new}"
            continue
        try:
            statuses[name] = _files(old / name, new / name, console)
        except UsageError as error:
            left_out[name] = str(error)
        else:
            print()
    if not statuses:
        raise UsageError(
            f"{old} and {new} have no report in common that could be compared: give folders that"
            " `aiops bench all --out` wrote"
        )
    for name, why in left_out.items():
        print(f"left out {name}: {why}")
    worse = [name for name, status in statuses.items() if status]
    print(f"{len(statuses)} reports in common; regressed: {', '.join(worse) or 'none'}")
    return 1 if worse else 0


def _files(old: Path, new: Path, console: Console | None) -> int:
    pairs = compare(old, new)
    before, after = read(old), read(new)
    console = console or Console()
    report.show_table(table(pairs, f"{before['benchmark']}: {old} → {new}"), console)
    for line in differences(before, after):
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    regressed = sum(pair.verdict == "regressed" for pair in pairs)
    improved = sum(pair.verdict == "improved" for pair in pairs)
    many = "cell" + "s" * (len(pairs) != 1)
    print(f"{len(pairs)} {many} in common: {regressed} regressed, {improved} improved")
    return 1 if regressed else 0
