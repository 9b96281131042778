"""The results file: one row per run, found again by its settings; and the same as tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiops.errors import UsageError
from aiops.lab.experiments.bandwidth.case import BandwidthCase
from aiops.lab.experiments.bandwidth.run import BandwidthOutcome
from aiops.lab.run_record import record, versions, write_rows

Row = dict[str, Any]

_COUNTS = ("reapplied", "skipped"), ("not_modified", "not_wanted")


def row_of(case: BandwidthCase, outcome: BandwidthOutcome) -> Row:
    """Return a run as plain values: its settings, what it came to, and its curve."""
    last, report = outcome.samples[-1], outcome.report
    account = report["ledger"]
    return {
        "name": case.name,
        "case": asdict(case),
        "seconds": round(outcome.seconds, 3),
        "error": last.error,
        "loss": last.loss,
        "version": last.version,
        "mean_staleness": report["mean_staleness"],
        "idle": round(outcome.idle, 4),
        "pushed": account["pushed"]["bytes"],
        "fetched": account["fetched"]["bytes"],
        "ledger": account,
        "workers": [report.account for report in outcome.workers],
        "versions": versions(),
        "budget": report.get("budget"),
        "link": outcome.link,
        "curve": [asdict(sample) for sample in outcome.samples],
    }


def total(row: Row) -> int:
    """Return the bytes that crossed, both ways."""
    return int(row["pushed"] + row["fetched"])


class BandwidthResults:
    """The rows of a file, which is rewritten after each run.

    Parameters
    ----------
    path
        Read if it is there; None: nothing is kept.

    Raises
    ------
    UsageError
        When the file is there and holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._rows: dict[str, Row] = {}
        if path is not None and path.is_file():
            try:
                for row in json.loads(path.read_text(encoding="utf-8"))["runs"]:
                    case = BandwidthCase.of(row["case"])
                    self._rows[case.key] = {**row, "name": case.name}
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{path} holds no results of this experiment ({error}): name another file, or"
                    " remove it"
                ) from None

    def find(self, case: BandwidthCase) -> Row | None:
        """Return the row of a case, if it has been run."""
        return self._rows.get(case.key)

    def put(self, case: BandwidthCase, row: Row) -> None:
        """Add a row, in the place of an older one; write the file."""
        self._rows[case.key] = row
        if self.path is None:
            return
        try:
            rows = list(self._rows.values())
            write_rows(self.path, record("experiment", "bandwidth", {}, {"runs": rows}))
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be written: {error.strerror}", output=str(self.path)
            ) from None

    def of(self, cases: Sequence[BandwidthCase]) -> list[Row]:
        """Return the rows of those cases that have been run, in their order."""
        return [row for case in cases if (row := self.find(case)) is not None]


def write_csv(rows: Sequence[Row], stem: Path) -> tuple[Path, Path]:
    """Write a line per run, and a line per sample of their curves; return the two files."""
    runs, curves = (stem.with_name(f"{stem.name}-{what}.csv") for what in ("runs", "curves"))
    stem.parent.mkdir(parents=True, exist_ok=True)
    for path, lines in ((runs, list(map(_run_line, rows))), (curves, list(_curve_lines(rows)))):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]) if lines else ["name"])
            writer.writeheader()
            writer.writerows(lines)
    return runs, curves


def _run_line(row: Row) -> Row:
    case = {key: _cell(value) for key, value in row["case"].items()}
    names = ("seconds", "error", "loss", "version", "mean_staleness", "idle", "pushed", "fetched")
    figures = {name: row[name] for name in names}
    for way, reasons in zip(("pushed", "fetched"), _COUNTS, strict=True):
        account = row["ledger"][way]
        figures[f"{way}_payload"], figures[f"{way}_raw"] = account["payload"], account["raw"]
        figures |= {reason: account[reason] for reason in reasons}
    return {"name": row["name"], **case, **figures}


def _curve_lines(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        for sample in row["curve"]:
            yield {"name": row["name"], "seed": row["case"]["seed"], **sample}


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
